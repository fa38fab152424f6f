"""A training state that another layout can load: Megatron's sharded checkpoint.

Weights, optimizer, schedule and the run's own counters, written by every rank at once. The
folder appears whole or not at all, and `latest` names the newest whole one.
"""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.optimizer import distrib_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megarl.actor.engine import MegatronEngine
from megarl.errors import CheckpointError
from megarl.parallel import data_parallel_group_with_cp

logger = logging.getLogger(__name__)

_LATEST = "latest"
_COUNTERS = "counters.json"


def save_state(engine: MegatronEngine, root: Path, step: int, counters: dict[str, Any]) -> None:
    """Write `root/step_N` and point `root/latest` at it; older ones go. Collective.

    Args:
      counters: JSON values of rank 0 that `load_state` gives back.
    """
    folder = root / f"step_{step}"
    partial = root / f"step_{step}.partial"
    if engine.mesh.rank == 0:
        for stale in (folder, partial):
            shutil.rmtree(stale, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier(group=engine.mesh.cpu_group)
    metadata = _metadata()
    state = _sharded_state(engine, metadata, is_loading=False)
    described = {key: x for key, x in metadata.items() if key != "dp_cp_group"}
    dist_checkpointing.save(state, str(partial), content_metadata=described)
    if engine.mesh.rank == 0:
        (partial / _COUNTERS).write_text(json.dumps({**counters, "step": step}))
        partial.rename(folder)
        pointer = root / f"{_LATEST}.partial"
        pointer.write_text(folder.name)
        pointer.rename(root / _LATEST)
        for old in root.glob("step_*"):
            if old != folder:
                shutil.rmtree(old, ignore_errors=True)
    dist.barrier(group=engine.mesh.cpu_group)


def latest_state(root: Path) -> Path | None:
    """The newest whole state under `root`, None if there is none.

    Raises:
      CheckpointError: `latest` names a folder that is not there.
    """
    pointer = root / _LATEST
    if not pointer.is_file():
        return None
    folder = root / pointer.read_text().strip()
    if not (folder / _COUNTERS).is_file():
        raise CheckpointError(f"{pointer} names {folder}, which is not a whole checkpoint")
    return folder


def load_state(engine: MegatronEngine, folder: Path) -> dict[str, Any]:
    """Put what `save_state` wrote into `engine`, at any layout. Collective.

    Returns:
      the counters given to `save_state`, and `step`.
    """
    counters: dict[str, Any] = json.loads((folder / _COUNTERS).read_text())
    state = dist_checkpointing.load(
        _sharded_state(engine, _metadata(), is_loading=True), str(folder)
    )
    for i, chunk in enumerate(engine.chunks):
        chunk.load_state_dict(state[f"model{i}"])
    if engine.optimizer is not None:
        engine.optimizer.load_state_dict(_fitted(engine.optimizer, state["optimizer"]))
        _unshare_steps(engine.optimizer)
        # It adds the saved steps to those already counted.
        engine.scheduler.num_steps = 0
        engine.scheduler.load_state_dict(state["scheduler"])
    engine.version = counters["step"]
    return counters


def _metadata() -> dict[str, Any]:
    return {
        # The form that a world of another size can load.
        "distrib_optim_sharding_type": "fully_reshardable",
        "dp_cp_group": data_parallel_group_with_cp(),
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
    }


def _sharded_state(
    engine: MegatronEngine, metadata: dict[str, Any], *, is_loading: bool
) -> dict[str, Any]:
    state: dict[str, Any] = {
        f"model{i}": chunk.sharded_state_dict(metadata=metadata)
        for i, chunk in enumerate(engine.chunks)
    }
    if engine.optimizer is not None:
        if not distrib_optimizer.HAVE_APEX_OR_TE:
            _repair_torch_adam()
            _fill_empty_state(engine.optimizer)
        models = dict(state)
        state["optimizer"] = engine.optimizer.sharded_state_dict(
            models, is_loading=is_loading, metadata=metadata
        )
        state["scheduler"] = engine.scheduler.state_dict()
    return state


def _fitted(optimizer: Any, loaded: dict[Any, Any]) -> dict[Any, Any]:
    """The loaded optimizer state in the form of `optimizer`.

    With ep > 1 the experts have an optimizer of their own, and Megatron numbers the two; the
    tensors are named after their parameters and fit any layout, the options of the parameter
    groups have to be moved.
    """
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    numbered = [loaded[key] for key in sorted(key for key in loaded if isinstance(key, int))]
    saved = numbered if numbered and "optimizer" in numbered[0] else [loaded]
    if len(saved) == len(parts):
        return {i: loaded[i] for i in range(len(parts))} if len(parts) > 1 else loaded
    common = {key: x for key, x in saved[0].items() if not isinstance(key, int)}
    groups = [group for part in saved for group in part["optimizer"]["param_groups"]]

    def moved(part: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        mine = []
        for own in part.optimizer.param_groups:
            same = (g for g in groups if all(g[key] == own[key] for key in ("wd_mult", "lr_mult")))
            mine.append({**next(same), "is_expert_parallel": own["is_expert_parallel"]})
        return {**common, **tensors, "optimizer": {"param_groups": mine}}

    if len(parts) == 1:
        return moved(parts[0], {"param_state": loaded["param_state"]})
    return {i: moved(part, loaded[i]) for i, part in enumerate(parts)}


# Megatron-Core 0.16.1 with torch's AdamW (no TransformerEngine, no Apex) cannot load what it
# saved. Three symptoms, three repairs.


def _repair_torch_adam() -> None:
    """KeyError 'step': loading looks for AdamW's step among the sharded tensors."""

    def set_states(self: Any, model_param: torch.Tensor, tensors: dict[str, torch.Tensor]) -> None:
        group, order = self.model_param_group_index_map[model_param]
        main_param = self.optimizer.param_groups[group]["params"][order]
        for key, target in {"param": main_param, **self.optimizer.state[main_param]}.items():
            if key in tensors:
                target.copy_(tensors[key])

    DistributedOptimizer._set_main_param_and_optimizer_states = set_states


def _inner_optimizers(optimizer: Any) -> list[torch.optim.Optimizer]:
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part.optimizer for part in parts if part.optimizer is not None]


def _fill_empty_state(optimizer: Any) -> None:
    """AssertionError len(steps) == 1: an optimizer that has not stepped has no `step`."""
    for inner in _inner_optimizers(optimizer):
        if isinstance(inner, torch.optim.SGD) or inner.state:
            continue
        for group in inner.param_groups:
            for parameter in group["params"]:
                inner.state[parameter] = {
                    "step": torch.tensor(0.0),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }


def _unshare_steps(optimizer: Any) -> None:
    """Silently wrong second step: after a load all parameters share one `step` tensor."""
    for inner in _inner_optimizers(optimizer):
        for state in inner.state.values():
            if torch.is_tensor(state.get("step")):
                state["step"] = state["step"].clone()

"""A training state that another layout can load: Megatron's sharded checkpoint.

Weights, optimizer, schedule and the run's own counters, written by every rank at once. The
folder appears whole or not at all, and `latest` names the newest whole one.
"""

import json
import logging
import random
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.optimizer import distrib_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from megarl.actor.engine import MegatronEngine
from megarl.errors import CheckpointError
from megarl.parallel import data_parallel_group_with_cp
from megarl.platform import is_cuda

logger = logging.getLogger(__name__)

_LATEST = "latest"
COUNTERS = "counters.json"
_POOL = "pool.pt"
_RNG = "rng_{}.pt"


class StateWriter:
    """Writes training states under `root`. Every method is collective.

    Args:
      in_background: a forked process of each rank writes the tensors while training goes on;
        needs host memory for what changes meanwhile, at most one copy of the state.
    """

    def __init__(self, engine: MegatronEngine, root: Path, *, in_background: bool = False) -> None:
        self.engine, self.root = engine, root
        self._queue = AsyncCallsQueue() if in_background else None

    def save(self, step: int, counters: dict[str, Any], pool: Any = None) -> None:
        """Write `root/step_N` and point `root/latest` at it; older ones go.

        Args:
          counters: JSON values of rank 0 that `load_state` gives back.
          pool: plain values and tensors of rank 0 that `load_pool` gives back.
        """
        self.wait()
        rank, group = self.engine.mesh.rank, self.engine.mesh.cpu_group
        partial = self.root / f"step_{step}.partial"
        if rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        dist.barrier(group=group)
        metadata = content_metadata()
        state = _sharded_state(self.engine, metadata, is_loading=False)
        described = {key: x for key, x in metadata.items() if key != "dp_cp_group"}
        request = dist_checkpointing.save(
            state,
            str(partial),
            content_metadata=described,
            async_sharded_save=self._queue is not None,
        )
        torch.save(_generators(), partial / _RNG.format(rank))
        if rank == 0:
            (partial / COUNTERS).write_text(json.dumps({**counters, "step": step}))
            torch.save(pool, partial / _POOL)
        dist.barrier(group=group)
        if self._queue is None:
            self._publish(step)
        else:
            request.add_finalize_fn(lambda: self._publish(step))
            self._queue.schedule_async_request(request)

    def _publish(self, step: int) -> None:
        """The state is whole: rank 0 gives it its name."""
        if self.engine.mesh.rank == 0:
            folder = self.root / f"step_{step}"
            shutil.rmtree(folder, ignore_errors=True)
            folder.with_name(f"{folder.name}.partial").rename(folder)
            pointer = self.root / f"{_LATEST}.partial"
            pointer.write_text(folder.name)
            pointer.rename(self.root / _LATEST)
            for old in self.root.glob("step_*"):
                if old != folder:
                    shutil.rmtree(old, ignore_errors=True)
        dist.barrier(group=self.engine.mesh.cpu_group)

    def poll(self) -> None:
        """Publish a state whose writing has ended meanwhile."""
        if self._queue is not None:
            self._queue.maybe_finalize_async_calls(blocking=False)

    def wait(self) -> None:
        """Return when nothing is being written."""
        if self._queue is not None:
            self._queue.maybe_finalize_async_calls(blocking=True)


def latest_state(root: Path) -> Path | None:
    """The newest whole state under `root`, None if there is none.

    Raises:
      CheckpointError: `latest` names a folder that is not there.
    """
    pointer = root / _LATEST
    if not pointer.is_file():
        return None
    folder = root / pointer.read_text().strip()
    if not (folder / COUNTERS).is_file():
        raise CheckpointError(f"{pointer} names {folder}, which is not a whole checkpoint")
    return folder


def load_state(engine: MegatronEngine, folder: Path) -> dict[str, Any]:
    """Put what a StateWriter wrote into `engine`, at any layout. Collective.

    Returns:
      the counters given to `StateWriter.save`, and `step`.
    """
    counters: dict[str, Any] = json.loads((folder / COUNTERS).read_text())
    state = dist_checkpointing.load(
        _sharded_state(engine, content_metadata(), is_loading=True), str(folder)
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
    _restore_generators(engine, folder)
    return counters


def load_pool(folder: Path) -> Any:
    """The `pool` given to `StateWriter.save`."""
    return torch.load(folder / _POOL, weights_only=True)


def _generators() -> dict[str, Any]:
    """The states of this rank's random generators, which the user's code may draw from."""
    version, internal, gauss = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if is_cuda() else None,
        "megatron": dict(get_cuda_rng_tracker().get_states()),
        "python": (version, list(internal), gauss),
    }


def _restore_generators(engine: MegatronEngine, folder: Path) -> None:
    """Where the world has another size, a rank has no earlier self: its seed's state stays."""
    mesh = engine.mesh
    if len(list(folder.glob(_RNG.format("*")))) != mesh.world_size:
        return
    states = torch.load(folder / _RNG.format(mesh.rank), weights_only=True)
    torch.set_rng_state(states["torch"])
    if states["cuda"] is not None and is_cuda():
        torch.cuda.set_rng_state(states["cuda"])
    get_cuda_rng_tracker().set_states(states["megatron"])
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))


def content_metadata() -> dict[str, Any]:
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

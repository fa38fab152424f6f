"""The model's weights alone as a training state, and out of one: no optimizer, no schedule.

The format is that of `megarl.actor.state`, so a layout writes what any other layout reads.
"""

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import apply_factories

from megarl.actor.engine import MegatronEngine
from megarl.actor.state import COUNTERS, content_metadata
from megarl.errors import CheckpointError

OWN_FILES = (COUNTERS, "metadata.json", ".metadata")
"""Of a state; what else has such a suffix in its folder belongs to the model."""
_OPTIMIZER = ("optimizer.", "chained_")
"""Prefixes of its tensors in a whole state."""
_MAX_TP = 64
"""Tensor parallelism that a state may have been written with."""
_FIRST_WEIGHT = "embedding.word_embeddings.weight"


def save_weights(engine: MegatronEngine, folder: Path) -> None:
    """Write the engine's weights into `folder`, which exists and is empty. Collective."""
    metadata = content_metadata()
    state = _weights_of(engine, metadata)
    described = {key: x for key, x in metadata.items() if key != "dp_cp_group"}
    dist_checkpointing.save(state, str(folder), content_metadata=described)
    if engine.mesh.rank == 0:
        (folder / COUNTERS).write_text(json.dumps({"step": 0}))
    dist.barrier(group=engine.mesh.cpu_group)


def load_weights(engine: MegatronEngine, folder: Path) -> None:
    """Fill the engine's weights from the state in `folder`, written at any layout. Collective.

    What else the state holds (optimizer, schedule) is not read. The dtype of the state must be
    the engine's.

    Raises:
      CheckpointError: the state lacks a weight, or is of another model.
    """
    _check_same_model(engine, folder)
    state = dist_checkpointing.load(_weights_of(engine, content_metadata()), str(folder))
    for i, chunk in enumerate(engine.chunks):
        chunk.load_state_dict(state[f"model{i}"])


def stored_dtype(folder: Path) -> torch.dtype:
    """The dtype of the weights of the state in `folder`.

    Raises:
      CheckpointError: it is no state of a language model.
    """
    found = dist_checkpointing.load_tensors_metadata(str(folder))
    if _FIRST_WEIGHT not in found:
        raise CheckpointError(f"{folder}: the state has no {_FIRST_WEIGHT}")
    dtype: torch.dtype = found[_FIRST_WEIGHT].dtype
    return dtype


def _weights_of(engine: MegatronEngine, metadata: dict[str, Any]) -> dict[str, Any]:
    """Under the same names as in a whole state, where the optimizer's have their own prefix."""
    return {
        f"model{i}": chunk.sharded_state_dict(metadata=metadata)
        for i, chunk in enumerate(engine.chunks)
    }


def _check_same_model(engine: MegatronEngine, folder: Path) -> None:
    """CheckpointError on all ranks unless the state has the model's weights, and no others."""
    stored = {
        key: tuple(tensor.global_shape)
        for key, tensor in dist_checkpointing.load_tensors_metadata(str(folder)).items()
        if not key.startswith(_OPTIMIZER)
    }
    weights = _weights_of(engine, content_metadata())
    apply_factories(weights)
    mine = {
        x.key: (tuple(x.global_shape), x.allow_shape_mismatch)
        for x in nested_values(weights)
        if isinstance(x, ShardedTensor)
    }
    parts: list[dict[str, Any]] = [{} for _ in range(engine.mesh.world_size)]
    dist.all_gather_object(parts, mine, group=engine.mesh.cpu_group)
    wanted = {key: shape for part in parts for key, shape in part.items()}
    for key, (shape, is_vocabulary) in wanted.items():
        if key not in stored:
            raise CheckpointError(f"{folder}: the state has no {key}")
        found = stored[key]
        if is_vocabulary:
            # Both are padded, each to a multiple of its own tp.
            padding = found[0] - engine.spec.vocab_size
            shape = found if 0 <= padding < _MAX_TP and found[1:] == shape[1:] else shape
        if found != shape:
            raise CheckpointError(f"{folder}: {key} is {found}, config.json says {shape}")
    if others := stored.keys() - wanted.keys():
        raise CheckpointError(f"{folder}: config.json has no place for {min(others)}")

"""What a workflow returned, in the form of megarl.trajectory.

Scripts write trajectories as torch makes them: int64 tokens, masks of ones, no versions. What
says the same in our dtypes is taken; anything else is named.
"""

import functools
import logging
from collections.abc import Mapping
from typing import Any

import torch

from megarl.trajectory import Trajectory

logger = logging.getLogger(__name__)

_DTYPES = {
    "input_ids": torch.int32,
    "attention_mask": torch.bool,
    "loss_mask": torch.int32,
    "logprobs": torch.float32,
    "versions": torch.int32,
    "rewards": torch.float32,
}


def conform(trajectory: Mapping[str, Any], version: int) -> Trajectory:
    """A workflow's result as a trajectory of megarl.trajectory, its values unchanged.

    Columns of another dtype are cast where that keeps every value (floats are rounded to
    float32). A missing `versions` is filled, `reward` stands for a missing `rewards`. A reward
    that is no finite number would end the run where it is trained on.

    Args:
      version: of the weights when the episode started: no token is older.

    Raises:
      ValueError: names what is missing, of the wrong shape, cannot be cast, or not finite.
    """
    columns = dict(trajectory)
    if "rewards" not in columns and "reward" in columns:
        _warn_of_reward()
        columns["rewards"] = columns.pop("reward")
    for name in _DTYPES:
        if name not in columns and name != "versions":
            raise ValueError(f"the trajectory has no {name!r}")
    for name, column in columns.items():
        if not isinstance(column, torch.Tensor):
            raise ValueError(f"{name} must be a tensor, got {type(column).__name__}")
        if name in _DTYPES:
            columns[name] = _cast(name, column, _DTYPES[name])
    if "versions" not in columns:
        generated = columns["loss_mask"].bool()
        columns["versions"] = torch.where(generated, version, -1).to(torch.int32)
    shape = columns["input_ids"].shape
    if len(shape) != 2:
        raise ValueError(f"input_ids must be [B, S], got {tuple(shape)}")
    for name in _DTYPES:
        want = shape[:1] if name == "rewards" else shape
        if columns[name].shape != want:
            raise ValueError(f"{name} must be {tuple(want)}, got {tuple(columns[name].shape)}")
    if not columns["rewards"].isfinite().all():
        raise ValueError(f"rewards must be finite, got {columns['rewards'].tolist()}")
    return columns


def _cast(name: str, column: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if column.dtype == dtype:
        return column
    if column.is_complex():
        raise ValueError(f"{name} must be {dtype}, got {column.dtype}")
    cast = column.to(dtype)
    is_rounding = dtype.is_floating_point and column.is_floating_point()
    if not is_rounding and not torch.equal(cast.to(column.dtype), column):
        changed = column[cast.to(column.dtype) != column].flatten()[0].item()
        raise ValueError(f"{name} must be {dtype}, got {column.dtype} with the value {changed}")
    return cast


@functools.cache
def _warn_of_reward() -> None:
    """Once a process."""
    logger.warning("a trajectory's column 'reward' is deprecated: name it 'rewards'")

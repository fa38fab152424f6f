"""The trajectory dict: what an episode produces and a training step consumes.

B  sequences     S  padded length, padding on the right

    input_ids       [B, S] int32    prompt and response
    attention_mask  [B, S] bool     False on padding
    loss_mask       [B, S] int32    1 on generated tokens
    logprobs        [B, S] float32  of each generated token when it was sampled, nats; else 0
    versions        [B, S] int32    weights that sampled it; -1 on tokens that were given
    rewards         [B]    float32
    group_ids       [B]    int64    samples of one episode share it
    no_eos          [B]    bool     cut by the length limit

A workflow may add columns of [B] or [B, S, ...]; all of the latter are padded alike.
"""

from collections.abc import Mapping, Sequence
from functools import reduce

import torch
from torch import Tensor

Trajectory = dict[str, Tensor]

_PADDING = {"versions": -1}


def sequence_lengths(batch: Mapping[str, Tensor]) -> Tensor:
    """[B] int64, tokens of each sequence without padding."""
    return batch["attention_mask"].sum(dim=1, dtype=torch.int64)


def select(batch: Mapping[str, Tensor], rows: Tensor) -> Trajectory:
    """The rows `rows` ([n] int64) of every column."""
    return {key: column[rows] for key, column in batch.items()}


def concat_padded(parts: Sequence[Mapping[str, Tensor]]) -> Trajectory:
    """One batch of all rows of `parts`, in order, padded to the longest. Of one part: its tensors.

    Raises:
      ValueError: nothing is given, the parts' columns differ in name or in what follows
        [B, S], or one is neither [B] nor [B, S, ...] of its part's input_ids.
    """
    if not parts:
        raise ValueError("no trajectory to concatenate")
    names = parts[0].keys()
    for part in parts:
        if part.keys() != names:
            raise ValueError(
                f"trajectories differ in their columns: {', '.join(sorted(part.keys() ^ names))}"
            )
        size = part["input_ids"].shape
        for key, column in part.items():
            shape = column.shape
            if not shape or shape[:2] != size[: len(shape)]:
                raise ValueError(f"column {key} is {tuple(shape)} beside input_ids {tuple(size)}")
            first = parts[0][key].shape
            if len(shape) != len(first) or shape[2:] != first[2:]:
                raise ValueError(f"column {key} is {tuple(shape)} beside {tuple(first)}")
    if len(parts) == 1:
        return dict(parts[0])
    width = max(part["input_ids"].shape[1] for part in parts)
    out = {}
    for key in names:
        columns = [part[key] for part in parts]
        is_even = columns[0].ndim < 2 or all(column.shape[1] == width for column in columns)
        value = _PADDING.get(key, 0)
        out[key] = torch.cat(columns) if is_even else _padded(columns, width, value)
    return out


def _padded(columns: list[Tensor], width: int, value: int) -> Tensor:
    """Each is copied once, to where it stays: half the time of padding it first."""
    rows = sum(column.shape[0] for column in columns)
    dtype = reduce(torch.promote_types, {column.dtype for column in columns})
    out = torch.full((rows, width, *columns[0].shape[2:]), value, dtype=dtype)
    row = 0
    for column in columns:
        out[row : row + column.shape[0], : column.shape[1]] = column
        row += column.shape[0]
    return out

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
    """One batch of all rows of `parts`, in order, padded to the longest.

    Raises:
      ValueError: nothing is given, the parts' columns differ, or one is neither [B] nor
        [B, S, ...] of its part's input_ids.
    """
    if not parts:
        raise ValueError("no trajectory to concatenate")
    for part in parts:
        odd = sorted(set(part) ^ set(parts[0]))
        if odd:
            raise ValueError(f"trajectories differ in their columns: {', '.join(odd)}")
        size = part["input_ids"].shape
        for key, column in part.items():
            if not column.ndim or column.shape[:2] != size[: column.ndim]:
                raise ValueError(
                    f"column {key} is {tuple(column.shape)} beside input_ids {tuple(size)}"
                )
    width = max(part["input_ids"].shape[1] for part in parts)
    out = {}
    for key in parts[0]:
        columns = [part[key] for part in parts]
        if columns[0].ndim >= 2:
            columns = [_pad(column, width, _PADDING.get(key, 0)) for column in columns]
        out[key] = torch.cat(columns)
    return out


def _pad(column: Tensor, width: int, value: int) -> Tensor:
    missing = width - column.shape[1]
    if not missing:
        return column
    padding = column.new_full((column.shape[0], missing, *column.shape[2:]), value)
    return torch.cat([column, padding], dim=1)

"""Padded trajectories -> packed micro-batches, and per-token results back.

B  sequences     S  padded length     T  tokens of one micro-batch, back to back

Every column of the batch that is [B, S] becomes [T]; index t of a sequence is token t, whose
label is token t + 1. The last token of a sequence has no label: whatever is computed there
must be masked, and the mask columns (already shifted) do so.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.config.schema import MicroBatchSpec
from megarl.data.packing import pack
from megarl.model.attention import PackedSequences, packed_sequences
from megarl.parallel import Mesh
from megarl.trajectory import sequence_lengths

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class MicroBatch:
    rows: Tensor
    """[n] int64, the sequences' rows in the batch, in packed order."""
    input_ids: Tensor
    """[1, T] int64. T is padded to a multiple of tp by one sequence of its own."""
    position_ids: Tensor
    """[1, T] int64, from 0 in each sequence."""
    labels: Tensor
    """[T] int64, the next token of the sequence, 0 where there is none."""
    num_tokens: int
    """Tokens before the padding."""
    packed: PackedSequences
    cu_seqlens: Tensor
    """[n + 1] int64, boundaries of the real sequences."""
    columns: Batch
    """[num_tokens] each."""


def assign(lengths: list[int], spec: MicroBatchSpec, mesh: Mesh) -> list[list[int]]:
    """Rows of each micro-batch; the same number of micro-batches on every dp rank.

    Raises:
      ValueError: a sequence alone is longer than max_tokens_per_mb.
    """
    bins = _pack(lengths, spec, spec.n_mbs)
    most = torch.tensor([len(bins)], device=mesh.device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=mesh.dp_group)
    if int(most) > len(bins):
        bins = _pack(lengths, spec, int(most))
    assert len(bins) == int(most), f"{len(lengths)} sequences cannot fill {int(most)} micro-batches"
    return bins


def _pack(lengths: list[int], spec: MicroBatchSpec, min_bins: int) -> list[list[int]]:
    return pack(
        lengths,
        max_tokens=spec.max_tokens_per_mb,
        min_bins=min_bins,
        divisor=spec.n_mbs_divisor,
        method=spec.packing,
    )


def build(
    batch: Batch, bins: Iterable[list[int]], keys: Iterable[str], mesh: Mesh
) -> list[MicroBatch]:
    """The micro-batches of `bins`, with the [B, S] columns `keys`."""
    lengths = sequence_lengths(batch)
    keys = list(keys)
    return [_build_one(batch, torch.tensor(rows), lengths, keys, mesh) for rows in bins]


def _build_one(
    batch: Batch, rows: Tensor, lengths: Tensor, keys: list[str], mesh: Mesh
) -> MicroBatch:
    row_lengths = lengths[rows]
    valid = torch.arange(batch["input_ids"].shape[1]) < row_lengths[:, None]

    def flat(column: Tensor) -> Tensor:
        return column[rows][valid]

    tokens = flat(batch["input_ids"]).long()
    positions = torch.arange(valid.shape[1]).expand_as(valid)[valid]
    labels = tokens.roll(-1)
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), row_lengths.cumsum(0)])
    labels[cu_seqlens[1:] - 1] = 0

    num_tokens = tokens.numel()
    padding = -num_tokens % mesh.parallel.tp
    segments = row_lengths.tolist() + ([padding] if padding else [])

    def padded(column: Tensor) -> Tensor:
        return torch.cat([column, column.new_zeros(padding)]).to(mesh.device)

    pad_positions = torch.cat([positions, torch.arange(padding)]).to(mesh.device)
    return MicroBatch(
        rows=rows,
        input_ids=padded(tokens)[None],
        position_ids=pad_positions[None],
        labels=padded(labels),
        num_tokens=num_tokens,
        packed=packed_sequences(segments, mesh.device),
        cu_seqlens=cu_seqlens.to(mesh.device),
        columns={key: flat(batch[key]).to(mesh.device) for key in keys},
    )


def unpack(micro_batches: list[MicroBatch], values: list[Tensor], like: Tensor) -> Tensor:
    """Per-token results [num_tokens] of each micro-batch -> [B, S] float32, 0 on padding."""
    out = torch.zeros(like.shape, dtype=torch.float32)
    for micro_batch, value in zip(micro_batches, values, strict=True):
        lengths = micro_batch.cu_seqlens.diff().cpu()
        valid = torch.arange(like.shape[1]) < lengths[:, None]
        rows = torch.zeros(valid.shape, dtype=torch.float32)
        rows[valid] = value.float().cpu()
        out[micro_batch.rows] = rows
    return out

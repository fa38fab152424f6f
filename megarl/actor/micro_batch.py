"""Padded trajectories -> packed micro-batches, and per-token results back.

B  sequences     S  padded length     T  tokens of one micro-batch, back to back

Every column of the batch that is [B, S] becomes [T]; index t of a sequence is token t, whose
label is token t + 1. The last token of a sequence has no label: whatever is computed there
must be masked, and the mask columns (already shifted) do so.

The model of a context-parallel rank runs T'/cp tokens, T' being T and what pads each sequence
to a multiple of 2 cp; columns and results are whole again, on each cp rank the same.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.config.schema import MicroBatchSpec
from megarl.data.packing import pack
from megarl.model.attention import PackedSequences, context_shard, packed_sequences
from megarl.parallel import Mesh
from megarl.trajectory import sequence_lengths

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class MicroBatch:
    rows: Tensor
    """[n] int64, the sequences' rows in the batch, in packed order."""
    input_ids: Tensor
    """[1, T'/cp] int64. T' is padded for tp by one sequence of its own."""
    position_ids: Tensor
    """[1, T'/cp] int64, from 0 in each sequence."""
    labels: Tensor
    """[T'/cp] int64, the next token of the sequence, 0 where there is none."""
    num_tokens: int
    """T, tokens before the padding."""
    places: Tensor
    """[T] int64, where each token stands in the results of the cp ranks back to back."""
    packed: PackedSequences
    cu_seqlens: Tensor
    """[n + 1] int64, boundaries of the real sequences."""
    columns: Batch
    """[num_tokens] each."""


def _padded(length: int, cp: int) -> int:
    """Each cp rank takes two chunks of a sequence."""
    return length if cp == 1 else -(-length // (2 * cp)) * 2 * cp


def assign(lengths: list[int], spec: MicroBatchSpec, mesh: Mesh) -> list[list[int]]:
    """Rows of each micro-batch; the same number of micro-batches on every dp rank.

    Raises:
      ValueError: a sequence alone is longer than max_tokens_per_mb.
    """
    lengths = [_padded(length, mesh.parallel.cp) for length in lengths]
    if mesh.parallel.virtual_stages:
        # Interleaved stages take micro-batches in rounds of pp.
        spec = replace(spec, n_mbs_divisor=math.lcm(spec.n_mbs_divisor, mesh.parallel.pp))
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
    batch: Batch,
    bins: Iterable[list[int]],
    keys: Iterable[str],
    mesh: Mesh,
    *,
    one_length: bool = False,
) -> list[MicroBatch]:
    """The micro-batches of `bins`, with the [B, S] columns `keys`.

    Args:
      one_length: pad all of them, on all ranks of the world, to the longest one. Collective.
    """
    lengths = sequence_lengths(batch)
    keys, bins = list(keys), list(bins)
    totals = [_total_tokens(lengths[rows].tolist(), mesh) for rows in bins]
    if one_length:
        longest = torch.tensor([max(totals)], device=mesh.device)
        dist.all_reduce(longest, op=dist.ReduceOp.MAX)
        totals = [int(longest)] * len(bins)
    return [
        _build_one(batch, torch.tensor(rows), lengths, keys, total, mesh)
        for rows, total in zip(bins, totals, strict=True)
    ]


def _total_tokens(lengths: list[int], mesh: Mesh) -> int:
    """T': sequence-parallel ranks share a cp rank's tokens evenly."""
    cp, tp = mesh.parallel.cp, mesh.parallel.tp
    unit = math.lcm(2 * cp, cp * tp) if cp > 1 else tp
    return -(-sum(_padded(length, cp) for length in lengths) // unit) * unit


def _build_one(
    batch: Batch, rows: Tensor, lengths: Tensor, keys: list[str], total: int, mesh: Mesh
) -> MicroBatch:
    cp = mesh.parallel.cp
    row_lengths = lengths[rows]
    steps = torch.arange(batch["input_ids"].shape[1])
    valid = steps < row_lengths[:, None]

    def flat(column: Tensor) -> Tensor:
        return column[rows][valid]

    tokens = flat(batch["input_ids"]).long()
    labels = tokens.roll(-1)
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), row_lengths.cumsum(0)])
    labels[cu_seqlens[1:] - 1] = 0

    segments = [_padded(length, cp) for length in row_lengths.tolist()]
    tail = total - sum(segments)
    starts = torch.tensor([0, *segments[:-1]]).cumsum(0)
    place_in_pack = (starts[:, None] + steps)[valid]
    segments += [tail] if tail else []
    mine = context_shard(segments, cp, mesh.place.cp)
    gathered = torch.cat([context_shard(segments, cp, rank) for rank in range(cp)])

    def on_this_rank(column: Tensor) -> Tensor:
        whole = column.new_zeros(total)
        whole[place_in_pack] = column
        return whole[mine].to(mesh.device)

    positions = torch.cat([torch.arange(length) for length in segments])
    return MicroBatch(
        rows=rows,
        input_ids=on_this_rank(tokens)[None],
        position_ids=positions[mine].to(mesh.device)[None],
        labels=on_this_rank(labels),
        num_tokens=tokens.numel(),
        places=gathered.argsort()[place_in_pack].to(mesh.device),
        packed=packed_sequences(
            segments, mesh.device, cp=cp, cp_rank=mesh.place.cp, cp_group=mesh.cp_group
        ),
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

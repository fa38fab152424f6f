"""Which slices of which HF tensors a rank's Megatron parameter is made of.

A parameter of one rank is a concatenation, along one dimension, of slices of HF tensors:

    linear_qkv, KV group g:   q[g r d : (g+1) r d]   k[g d : (g+1) d]   v[g d : (g+1) d]
    linear_fc1, rank i of n:  gate[i F/n : (i+1) F/n]   up[i F/n : (i+1) F/n]

`pieces` says this once. Loading reads the slices, exporting writes them back, and neither
knows what a parameter means. d: head dim, r: query heads a KV group, F: intermediate size.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Split = Literal["replicated", "rows", "columns", "vocab", "qkv", "gate_up"]
"""How tensor-parallel ranks share a parameter. rows and vocab cut dimension 0, columns cuts
dimension 1, qkv and gate_up interleave several HF tensors along dimension 0."""


@dataclass(frozen=True)
class Sizes:
    """The numbers that place a slice."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class Rule:
    """One Megatron parameter: how it is split and the HF tensors it is made of."""

    split: Split
    hf_names: tuple[str, ...]
    is_expert: bool = False
    """Split over the ranks of expert tensor parallelism, not of tp."""


class Piece(NamedTuple):
    """`length` rows (dim 0) or columns (dim 1) that are the same in both places."""

    hf_name: str
    dim: int
    hf_start: int
    local_start: int
    length: int


def pieces(
    rule: Rule, hf_sizes: tuple[int, ...], sizes: Sizes, tp: int, tp_rank: int
) -> list[Piece]:
    """The slices that rank `tp_rank` of `tp` holds, in their local order; etp for an expert.

    Args:
      hf_sizes: size, in the split dimension, of each of `rule.hf_names`.

    Raises:
      ValueError: a tensor does not divide by `tp`.
    """
    if rule.split == "replicated":
        return [Piece(rule.hf_names[0], 0, 0, 0, hf_sizes[0])]
    if rule.split == "vocab":
        # The last ranks' rows past the vocabulary are padding: no piece covers them.
        width = -(-hf_sizes[0] // tp)
        start = min(tp_rank * width, hf_sizes[0])
        stop = min(start + width, hf_sizes[0])
        return [Piece(rule.hf_names[0], 0, start, 0, stop - start)] if stop > start else []
    if rule.split == "qkv":
        return _qkv_pieces(rule, sizes, tp, tp_rank)
    dim = 1 if rule.split == "columns" else 0
    out, local = [], 0
    for name, size in zip(rule.hf_names, hf_sizes, strict=True):
        if size % tp:
            raise ValueError(f"{name}: dimension {dim} of {size} does not divide by tp {tp}")
        length = size // tp
        out.append(Piece(name, dim, tp_rank * length, local, length))
        local += length
    return out


def _qkv_pieces(rule: Rule, sizes: Sizes, tp: int, tp_rank: int) -> list[Piece]:
    groups = sizes.num_kv_heads
    if groups % tp:
        raise ValueError(f"{rule.hf_names[1]}: {groups} KV heads do not divide by tp {tp}")
    q_rows = sizes.num_heads // groups * sizes.head_dim
    widths = (q_rows, sizes.head_dim, sizes.head_dim)
    out, local = [], 0
    for group in range(tp_rank * groups // tp, (tp_rank + 1) * groups // tp):
        for name, width in zip(rule.hf_names, widths, strict=True):
            out.append(Piece(name, 0, group * width, local, width))
            local += width
    return out


def chunk_of_layer(layer: int, num_layers: int, num_chunks: int) -> int:
    """The model chunk of a layer: as many layers a chunk, or one more in the earlier of some."""
    return layer * num_chunks // num_layers


def fill(local: Tensor, parts: Iterable[Piece], read: Callable[[Piece], Tensor]) -> None:
    """Write `read(piece)` into `local` for each piece; the rest (padding) becomes 0."""
    covered = 0
    with torch.no_grad():
        for piece in parts:
            target = local.narrow(piece.dim, piece.local_start, piece.length)
            source = read(piece)
            if source.shape != target.shape:
                raise ValueError(
                    f"{piece.hf_name}: slice of {tuple(source.shape)}, "
                    f"the model holds {tuple(target.shape)}"
                )
            target.copy_(source)
            covered += target.numel()
        if covered < local.numel():
            _zero_uncovered(local, list(parts))


def _zero_uncovered(local: Tensor, parts: list[Piece]) -> None:
    # Only a padded vocabulary has uncovered rows, and they are its last ones.
    end = max((p.local_start + p.length for p in parts), default=0)
    local[end:].zero_()

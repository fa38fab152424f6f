"""Core attention over packed sequences, for layers built without TransformerEngine.

T  packed tokens (sequences back to back, boundaries in cu_seqlens)     N  heads     D  head dim

On a GPU this is torch's variable-length flash attention; on a CPU the sequences are grouped
by length, each group padded and given to scaled_dot_product_attention in one call. A padded
key comes after every real query of its sequence, so the causal mask alone hides it.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn


@dataclass
class PackedSequences(PackedSeqParams):
    """Megatron's description of a packed micro-batch, plus the CPU's grouping of it."""

    length_groups: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """(index [n, L] of each token in the pack, valid [n, L] bool) a group."""
    place_in_groups: Tensor | None = None
    """[T] where each token stands when the groups' tokens are put back to back."""


def packed_sequences(lengths: list[int], device: torch.device) -> PackedSequences:
    """Boundaries of sequences of `lengths` tokens that stand back to back."""
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    cu_seqlens = bounds.to(device=device, dtype=torch.int32)
    longest = max(lengths)
    packed = PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
    if device.type == "cpu":
        packed.length_groups = _length_groups(lengths, bounds)
        order = torch.cat([index[valid] for index, valid in packed.length_groups])
        packed.place_in_groups = order.argsort()
    return packed


def _length_groups(lengths: list[int], bounds: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Sequences whose lengths are within a factor of two share a group."""
    members: dict[int, list[int]] = {}
    for i, length in enumerate(lengths):
        members.setdefault(length.bit_length(), []).append(i)
    groups = []
    for rows in members.values():
        steps = torch.arange(max(lengths[i] for i in rows))
        valid = steps < torch.tensor([lengths[i] for i in rows])[:, None]
        index = bounds[rows][:, None] + steps
        groups.append((torch.where(valid, index, 0), valid))
    return groups


class PackedAttention(nn.Module):
    """Causal attention inside each packed sequence; Megatron's core_attention interface."""

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.config = config
        self.scale = kwargs.get("softmax_scale")

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSequences | None = None,
    ) -> Tensor:
        """query [T, N, D], key and value [T, N/groups, D] -> [T, N * D]."""
        assert packed_seq_params is not None, "every micro-batch is packed"
        assert attention_mask is None
        assert attention_bias is None
        if query.is_cuda:
            out = self._varlen(query, key, value, packed_seq_params)
        else:
            out = self._grouped(query, key, value, packed_seq_params)
        return out.reshape(query.shape[0], -1)

    def _varlen(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        return varlen_attn(
            query,
            key,
            value,
            packed.cu_seqlens_q,
            packed.cu_seqlens_kv,
            packed.max_seqlen_q,
            packed.max_seqlen_kv,
            scale=self.scale,
            window_size=(-1, 0),
            enable_gqa=query.shape[1] != key.shape[1],
        )

    def _grouped(
        self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences
    ) -> Tensor:
        outputs = []
        for index, valid in packed.length_groups:
            # [n, L, N, D] -> [n, N, L, D]
            q, k, v = (x[index].transpose(1, 2) for x in (query, key, value))
            group = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=self.scale, enable_gqa=q.shape[1] != k.shape[1]
            )
            outputs.append(group.transpose(1, 2)[valid])
        return torch.cat(outputs)[packed.place_in_groups]

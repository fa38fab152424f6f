"""Core attention over packed sequences, for layers built without TransformerEngine.

T  packed tokens (sequences back to back, boundaries in cu_seqlens)     N  heads
D  head dim of queries and keys, Dv of values

On a GPU this is torch's variable-length flash attention; on a CPU the sequences are grouped
by length, each group padded and given to scaled_dot_product_attention in one call. A padded
key comes after every real query of its sequence, so the causal mask alone hides it.

With context parallelism a sequence of 2 cp chunks gives chunks r and 2 cp - 1 - r to rank r
(TransformerEngine's split, even under the causal mask). Keys and values of all ranks are
gathered, and a chunk of queries looks at the keys from its sequence's start to its own end.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn


@dataclass(frozen=True)
class LengthGroup:
    """Segments of queries whose lengths are close, and their keys. n segments."""

    q_index: Tensor
    """[n, Lq] place of each query among the rank's tokens; 0 where there is none."""
    q_valid: Tensor
    """[n, Lq] bool."""
    k_index: Tensor
    """[n, Lk] place of each key among the (gathered) tokens; 0 where there is none."""
    mask: Tensor | None
    """[n, 1, Lq, Lk] bool, which keys a query sees; None is causal with Lq = Lk."""


@dataclass
class PackedSequences(PackedSeqParams):
    """Megatron's description of a packed micro-batch, plus what PackedAttention needs."""

    cu_queries: Tensor | None = None
    """[m + 1] int32 boundaries of the segments of queries on this rank."""
    cu_keys: Tensor | None = None
    """[m + 1] int32 boundaries of their keys, in the order of `key_index`."""
    longest_queries: int = 0
    longest_keys: int = 0
    key_index: Tensor | None = None
    """Places of the segments' keys among the gathered tokens; None: keys are the rank's own."""
    key_group: dist.ProcessGroup | None = None
    """Ranks whose keys are gathered."""
    length_groups: list[LengthGroup] = field(default_factory=list)
    """On a CPU only."""
    place_in_groups: Tensor | None = None
    """[T] where each token stands when the groups' queries are put back to back."""


def context_shard(lengths: list[int], cp: int, cp_rank: int) -> Tensor:
    """Places, in the whole pack, of the tokens of rank `cp_rank`.

    With cp > 1 each length divides by 2 cp.
    """
    if cp == 1:
        return torch.arange(sum(lengths))
    parts, start = [], 0
    for length in lengths:
        chunk = length // (2 * cp)
        for which in (cp_rank, 2 * cp - 1 - cp_rank):
            parts.append(torch.arange(start + which * chunk, start + (which + 1) * chunk))
        start += length
    return torch.cat(parts)


def packed_sequences(
    lengths: list[int],
    device: torch.device,
    *,
    cp: int = 1,
    cp_rank: int = 0,
    cp_group: dist.ProcessGroup | None = None,
) -> PackedSequences:
    """Boundaries of sequences of `lengths` tokens that stand back to back."""
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    cu_seqlens = bounds.to(device=device, dtype=torch.int32)
    packed = PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
    )
    if cp == 1:
        queries = keys = lengths
        key_index = None
    else:
        chunks = (cp_rank, 2 * cp - 1 - cp_rank)
        queries = [length // (2 * cp) for length in lengths for _ in chunks]
        keys = [length // (2 * cp) * (chunk + 1) for length in lengths for chunk in chunks]
        gathered = torch.cat([context_shard(lengths, cp, rank) for rank in range(cp)])
        place = gathered.argsort()
        starts = [start for start in bounds[:-1].tolist() for _ in chunks]
        key_index = torch.cat(
            [place[start : start + count] for start, count in zip(starts, keys, strict=True)]
        )
        packed.key_group = cp_group
    packed.longest_queries, packed.longest_keys = max(queries), max(keys)
    packed.cu_queries, packed.cu_keys = (
        torch.tensor([0, *sizes]).cumsum(0).to(device=device, dtype=torch.int32)
        for sizes in (queries, keys)
    )
    if device.type == "cpu":
        packed.length_groups = _length_groups(queries, keys, key_index)
        order = torch.cat([group.q_index[group.q_valid] for group in packed.length_groups])
        packed.place_in_groups = order.argsort()
    packed.key_index = None if key_index is None else key_index.to(device)
    return packed


def _length_groups(
    queries: list[int], keys: list[int], key_index: Tensor | None
) -> list[LengthGroup]:
    """Segments whose numbers of keys are within a factor of two share a group."""
    members: dict[int, list[int]] = {}
    for i, count in enumerate(keys):
        members.setdefault(count.bit_length(), []).append(i)
    q_starts = torch.tensor([0, *queries]).cumsum(0)
    k_starts = torch.tensor([0, *keys]).cumsum(0)
    groups = []
    for rows in members.values():
        q_counts = torch.tensor([queries[i] for i in rows])
        q_index, q_valid = _ragged(q_starts[rows], q_counts)
        if key_index is None:
            groups.append(LengthGroup(q_index, q_valid, q_index, None))
            continue
        k_counts = torch.tensor([keys[i] for i in rows])
        k_index, _ = _ragged(k_starts[rows], k_counts)
        # The queries are the last ones of their keys.
        q_position = (k_counts - q_counts)[:, None] + torch.arange(q_index.shape[1])
        mask = torch.arange(k_index.shape[1]) <= q_position[:, :, None]
        groups.append(LengthGroup(q_index, q_valid, key_index[k_index], mask[:, None]))
    return groups


def _ragged(starts: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Ranges as the rows of a matrix: (index, 0 where there is none; valid)."""
    steps = torch.arange(int(counts.max()))
    valid = steps < counts[:, None]
    return torch.where(valid, starts[:, None] + steps, 0), valid


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
        """query [T, N, D], key [T, N/groups, D], value [T, N/groups, Dv] -> [T, N * Dv].

        T: this rank's tokens.
        """
        packed = packed_seq_params
        assert packed is not None, "every micro-batch is packed"
        assert attention_mask is None
        assert attention_bias is None
        if packed.key_group is not None:
            key, value = (
                gather_from_sequence_parallel_region(x.contiguous(), group=packed.key_group)
                for x in (key, value)
            )
        attend = self._varlen if query.is_cuda else self._grouped
        return attend(query, key, value, packed).reshape(query.shape[0], -1)

    def _varlen(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        if packed.key_index is not None:
            key, value = key[packed.key_index], value[packed.key_index]
        # Flash attention has one head dim for all; latent attention's values are narrower.
        width = value.shape[-1]
        value = F.pad(value, (0, query.shape[-1] - width))
        output: Tensor = varlen_attn(
            query,
            key,
            value,
            packed.cu_queries,
            packed.cu_keys,
            packed.longest_queries,
            packed.longest_keys,
            scale=self.scale,
            # Causal, aligned to the last key.
            window_size=(-1, 0),
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return output[..., :width]

    def _grouped(
        self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences
    ) -> Tensor:
        outputs = []
        for group in packed.length_groups:
            # [n, L, N, D] -> [n, N, L, D]
            q = query[group.q_index].transpose(1, 2)
            k, v = (x[group.k_index].transpose(1, 2) for x in (key, value))
            out = F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=group.mask,
                is_causal=group.mask is None,
                scale=self.scale,
                enable_gqa=q.shape[1] != k.shape[1],
            )
            outputs.append(out.transpose(1, 2)[group.q_valid])
        return torch.cat(outputs)[packed.place_in_groups]

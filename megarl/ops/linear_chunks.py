"""What the two ways of megarl.ops.linear_logprob share: arguments and products of chunks.

T  packed tokens     H  hidden size     V  vocabulary     V/tp  rows of this rank's weight
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.ops.library import op
from megarl.ops.logprob import Shard


@dataclass(frozen=True, kw_only=True)
class LinearHead:
    """What a call is besides its two matrices."""

    labels: Tensor
    inverse_temperature: Tensor
    mask: Tensor | None
    vocab_size: int
    tp_group: dist.ProcessGroup | None
    sequence_parallel: bool
    chunk_tokens: int
    with_entropy: bool
    logits_dtype: torch.dtype
    into_main_grad: bool

    @property
    def tp(self) -> int:
        return dist.get_world_size(self.tp_group) if self.tp_group is not None else 1

    def chunks(self) -> list[slice]:
        """Rows of each chunk, about as many in each."""
        num_rows = self.labels.numel()
        if num_rows == 0:
            return []
        step = -(-num_rows // -(-num_rows // self.chunk_tokens))
        return [slice(i, min(i + step, num_rows)) for i in range(0, num_rows, step)]

    def shard(self, logits: Tensor, rows: slice) -> Shard:
        inverse, mask = self.inverse_temperature, self.mask
        return Shard(
            logits,
            self.labels[rows],
            inverse if inverse.numel() == 1 else inverse[rows],
            None if mask is None else mask[rows],
            None,
            self.vocab_size,
            self.tp_group,
        )

    def gather(self, hidden: Tensor) -> Tensor:
        """[T, H]."""
        if not self.sequence_parallel or self.tp == 1:
            return hidden.contiguous()
        whole = hidden.new_empty((self.tp * hidden.shape[0], hidden.shape[1]))
        dist.all_gather_into_tensor(whole, hidden.contiguous(), group=self.tp_group)
        return whole

    def sum_over_ranks(self, grad: Tensor) -> Tensor:
        """Each shard of the vocabulary's gradient [T, H] -> that of the hidden states given."""
        if self.tp == 1:
            return grad
        if not self.sequence_parallel:
            dist.all_reduce(grad, group=self.tp_group)
            return grad
        mine = grad.new_empty((grad.shape[0] // self.tp, grad.shape[1]))
        dist.reduce_scatter_tensor(mine, grad, group=self.tp_group)
        return mine

    def combine(self, parts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """logp [T], entropy [T], log_z [T, 2] of parts [tp, T, 4] whose own is filled."""
        if self.tp > 1:
            mine = parts[dist.get_rank(self.tp_group)].clone()
            dist.all_gather_into_tensor(parts.view(-1, 4), mine, group=self.tp_group)
        num_rows = parts.shape[1]
        logp, entropy = parts.new_empty(num_rows), parts.new_empty(num_rows)
        log_z = parts.new_empty((num_rows, 2))
        op("logprob_combine")(parts, self.mask, self.with_entropy, logp, entropy, log_z)
        return logp, entropy, log_z


class Products:
    """The three matrix products of each chunk of rows.

    Args:
      hidden: [T, H], gathered.
      weight_grad: float32 [V/tp, H] that chunks are added to; None where it is not wanted.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        head: LinearHead,
        *,
        wants_hidden: bool = False,
        weight_grad: Tensor | None = None,
    ) -> None:
        self.hidden, self.weight, self.weight_grad = hidden, weight, weight_grad
        self.hidden_grad = torch.empty_like(hidden) if wants_hidden else None
        longest = max((rows.stop - rows.start for rows in head.chunks()), default=0)
        # One buffer for all chunks: a second one never comes to be beside it.
        self.buffer = hidden.new_empty((longest, weight.shape[0]), dtype=head.logits_dtype)
        self.operands = hidden, weight
        if head.logits_dtype != hidden.dtype and not hidden.is_cuda:
            # Only CUDA has products of bfloat16 that are not rounded to it.
            self.operands = hidden.float(), weight.float()

    def logits(self, rows: slice) -> Tensor:
        """[rows, V/tp] in the buffer, until the next call."""
        hidden, weight = self.operands
        out = self.buffer[: rows.stop - rows.start]
        if hidden.dtype == out.dtype:
            return torch.mm(hidden[rows], weight.t(), out=out)
        return torch.mm(hidden[rows], weight.t(), out_dtype=out.dtype, out=out)

    def backward(self, rows: slice, grad_logits: Tensor) -> None:
        """hidden_grad[rows] = grad weight; weight_grad += grad^T hidden[rows]."""
        grad = grad_logits.to(self.weight.dtype)
        if self.hidden_grad is not None:
            torch.mm(grad, self.weight, out=self.hidden_grad[rows])
        total, hidden = self.weight_grad, self.hidden[rows]
        if total is None:
            return
        if grad.dtype == total.dtype:
            total.addmm_(grad.t(), hidden)
        elif grad.is_cuda:
            torch.addmm(total, grad.t(), hidden, out_dtype=total.dtype, out=total)
        else:
            total.addmm_(grad.t().float(), hidden.float())


def added_to_main_grad(weight: Tensor) -> Tensor:
    """What autograd gets as the gradient of a weight whose own is in main_grad.

    The hook of Megatron's DDP wants a tensor there. It ignores its values, unless
    zero_out_wgrad says that it adds them: then autograd has summed the embedding's gradient
    into it.
    """
    parameter: Any = weight
    parameter.grad_added_to_main_grad = True
    if getattr(weight, "zero_out_wgrad", False):
        return torch.zeros_like(weight)
    return torch.empty_like(weight)


def check_arguments(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    vocab_size: int,
    temperature: float | Tensor,
    mask: Tensor | None,
    tp_group: dist.ProcessGroup | None,
    sequence_parallel: bool,
    chunk_tokens: int,
    with_entropy: bool,
    logits_dtype: torch.dtype | None,
    into_main_grad: bool,
) -> LinearHead:
    """The checked arguments of a call."""
    split = 1
    if sequence_parallel and tp_group is not None:
        split = dist.get_world_size(tp_group)
    _check_matrices(hidden, weight, labels, split)
    if vocab_size < 1:
        raise ValueError(f"vocab_size must be >= 1, got {vocab_size}")
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens must be >= 1, got {chunk_tokens}")
    if mask is not None and (mask.shape != labels.shape or mask.dtype != torch.bool):
        raise ValueError(
            f"mask must be {tuple(labels.shape)} torch.bool, got {tuple(mask.shape)} {mask.dtype}"
        )
    logits_dtype = logits_dtype or hidden.dtype
    if logits_dtype not in (hidden.dtype, torch.float32):
        raise ValueError(
            f"logits_dtype must be {hidden.dtype} or torch.float32, got {logits_dtype}"
        )
    if isinstance(temperature, Tensor):
        if temperature.shape != labels.shape or temperature.dtype != torch.float32:
            raise ValueError(
                f"temperature must be a number or {tuple(labels.shape)} torch.float32, got "
                f"{tuple(temperature.shape)} {temperature.dtype}"
            )
        inverse = temperature.reciprocal()
    elif temperature <= 0:
        raise ValueError(f"temperature must be > 0, got {temperature}")
    else:
        inverse = torch.full((1,), 1.0 / temperature, device=hidden.device)
    devices = {x.device for x in (hidden, weight, labels, inverse, mask) if x is not None}
    if len(devices) > 1:
        raise ValueError(f"one device is needed, got {sorted(map(str, devices))}")
    if into_main_grad and torch.is_grad_enabled() and weight.requires_grad:
        main_grad = getattr(weight, "main_grad", None)
        if main_grad is None or (main_grad.shape, main_grad.dtype) != (weight.shape, torch.float32):
            raise ValueError(
                f"into_main_grad needs a float32 weight.main_grad {tuple(weight.shape)}, got "
                f"{None if main_grad is None else (tuple(main_grad.shape), main_grad.dtype)}"
            )
    return LinearHead(
        labels=labels.contiguous(),
        inverse_temperature=inverse,
        mask=None if mask is None else mask.contiguous(),
        vocab_size=vocab_size,
        tp_group=tp_group,
        sequence_parallel=sequence_parallel,
        chunk_tokens=chunk_tokens,
        with_entropy=with_entropy,
        logits_dtype=logits_dtype,
        into_main_grad=into_main_grad,
    )


def _check_matrices(hidden: Tensor, weight: Tensor, labels: Tensor, split: int) -> None:
    shapes = f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)}, labels "
    shapes += f"{tuple(labels.shape)}"
    if (
        hidden.ndim != 2
        or weight.ndim != 2
        or labels.ndim != 1
        or hidden.shape[1] != weight.shape[1]
        or hidden.shape[0] * split != labels.shape[0]
    ):
        rows = "T" if split == 1 else f"T/{split}"
        raise ValueError(f"need hidden [{rows}, H], weight [V/tp, H], labels [T], got {shapes}")
    if hidden.dtype not in (torch.float32, torch.bfloat16) or weight.dtype != hidden.dtype:
        raise ValueError(
            f"need hidden and weight float32 or both bfloat16, got {hidden.dtype} and "
            f"{weight.dtype}"
        )
    if labels.dtype != torch.int64:
        raise ValueError(f"need int64 labels, got {labels.dtype}")

"""Output layer, token logprobs and entropies in one: no [T, V] tensor exists at any time.

T  packed tokens     H  hidden size     V  vocabulary     V/tp  rows of this rank's weight

    logits = hidden weight^T,   then logp and entropy as in megarl.ops.logprob

The rows are taken in chunks of at most C = `chunk_tokens`. Of the logits only one chunk is in
memory, C V/tp elements, over which its gradient is written. Two ways, by what is known of the
loss, with their matrix products counted as multiplications and additions:

    linear_logprob_entropy   any loss. The backward pass computes each chunk's logits again:
                             2 forward, 2 + 4 backward, 8 T H V/tp in all.
    linear_logprob_loss      a loss that is a sum over tokens. The gradient is made while the
                             chunk's logits are there: 6 T H V/tp, as many as unfused. From then
                             to the backward pass weight's gradient is held in float32.
                             (FusedLinearCrossEntropy of arXiv:2410.10989, for any such loss.)

Products of bfloat16 are accumulated in float32. Weight's gradient is summed over all chunks in
float32; hidden's is rounded once to hidden's dtype, then summed over tp ranks.

With sequence parallelism the hidden states are gathered, and their gradient reduce-scattered,
once a call: [T, H] is in memory while it runs, in return for one collective in each pass instead
of one a chunk, whose rows would all be of one rank's part. Kept from pass to pass is [T/tp, H].
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.ops.library import op
from megarl.ops.linear_chunks import LinearHead, Products, added_to_main_grad, check_arguments

TokenLoss = Callable[[Tensor, Tensor, slice], tuple[Tensor, Tensor, Tensor | None]]
"""(logp [n], entropy [n], rows) -> loss [] of these rows, dloss/dlogp [n], dloss/dentropy [n].

All float32; None where the loss has no entropy in it. Rows count from 0 to T."""


def linear_logprob_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    vocab_size: int,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,
    tp_group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = False,
    chunk_tokens: int = 2048,
    with_entropy: bool = True,
    logits_dtype: torch.dtype | None = None,
    into_main_grad: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each label and entropy of each row; the gradient recomputes the logits.

    Equal to token_logprob_entropy(hidden @ weight.T, ...), whose text has the formulas.

    Args:
      hidden: [T, H] float32 or bfloat16, the same on every tp rank; with `sequence_parallel`
        this rank's [T/tp, H] of it.
      weight: [V/tp, H] of hidden's dtype, this rank's rows; rows at or past `vocab_size` of the
        whole are padding.
      labels: [T] int64, in [0, vocab_size), the same on every tp rank.
      vocab_size: V without padding.
      temperature: > 0, or [T] float32 of such.
      mask: [T] bool. Rows under False give logp, entropy and gradient 0.
      tp_group: ranks that hold the other rows of the weight; None is one shard.
      chunk_tokens: C, rows whose logits are in memory at one time. Costs C V/tp bytes times 2 in
        bfloat16; times 4 in float32, and 2 more in the backward pass of bfloat16 weights.
      with_entropy: False skips the entropy, whose result is then zeros.
      logits_dtype: of the logits; None is hidden's. float32 logits of bfloat16 inputs are not
        rounded; their gradient is, to bfloat16, before the products. Without CUDA those inputs
        are first copied to float32.
      into_main_grad: add weight's gradient to the float32 `weight.main_grad` of Megatron's DDP,
        and say so in `weight.grad_added_to_main_grad`, as its gradient accumulation fusion does.

    Returns:
      logp [T] float32 in nats, entropy [T] float32 in nats; equal on every tp rank.

    Raises:
      ValueError: shapes, dtypes or devices do not fit.
    """
    head = check_arguments(
        *(hidden, weight, labels, vocab_size, temperature, mask, tp_group),
        *(sequence_parallel, chunk_tokens, with_entropy, logits_dtype, into_main_grad),
    )
    apply: Callable[..., tuple[Tensor, Tensor]] = _Recomputing.apply
    return apply(hidden, weight, head)


def linear_logprob_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    token_loss: TokenLoss,
    *,
    vocab_size: int,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,
    tp_group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = False,
    chunk_tokens: int = 2048,
    with_entropy: bool = True,
    logits_dtype: torch.dtype | None = None,
    into_main_grad: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """A sum over tokens of a loss of their logp and entropy, its gradient made in the forward.

    Args:
      token_loss: see TokenLoss; called once a chunk, in order, without autograd. What it says of
        rows under a False mask is not used, except in its loss.
      The others: see linear_logprob_entropy.

    Returns:
      loss [] float32, the sum over chunks; logp [T], entropy [T] float32 that have no gradient.

    Raises:
      ValueError: shapes, dtypes or devices do not fit, of arguments or of `token_loss`.
    """
    head = check_arguments(
        *(hidden, weight, labels, vocab_size, temperature, mask, tp_group),
        *(sequence_parallel, chunk_tokens, with_entropy, logits_dtype, into_main_grad),
    )
    wants = tuple(torch.is_grad_enabled() and x.requires_grad for x in (hidden, weight))
    apply: Callable[..., tuple[Tensor, Tensor, Tensor]] = _GradientInForward.apply
    return apply(hidden, weight, head, token_loss, wants)


# ---------------------------------------------------------------- recomputing


class _Recomputing(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, head: LinearHead
    ) -> tuple[Tensor, Tensor]:
        products = Products(head.gather(hidden), weight, head)
        parts = torch.zeros((head.tp, head.labels.numel(), 4), device=hidden.device)
        mine = parts[dist.get_rank(head.tp_group) if head.tp_group is not None else 0]
        for rows in head.chunks():
            logits = products.logits(rows)
            shard = head.shard(logits, rows)
            op("logprob_stats")(*shard.arguments(logits), head.with_entropy, mine[rows])
        # One all-gather for all chunks.
        logp, entropy, log_z = head.combine(parts)
        ctx.save_for_backward(hidden, weight, log_z, entropy)
        ctx.head = head
        return logp, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_logp: Tensor, grad_entropy: Tensor) -> tuple[Any, ...]:
        hidden, weight, log_z, entropy = ctx.saved_tensors
        head: LinearHead = ctx.head
        wants_hidden, wants_weight, _ = ctx.needs_input_grad
        weight_grad = None
        if wants_weight and head.into_main_grad:
            weight_grad = weight.main_grad
        elif wants_weight:
            weight_grad = torch.zeros_like(weight, dtype=torch.float32)
        products = Products(
            *(head.gather(hidden), weight, head),
            wants_hidden=wants_hidden,
            weight_grad=weight_grad,
        )
        grad_logp, grad_entropy = grad_logp.float().contiguous(), grad_entropy.float().contiguous()
        for rows in head.chunks():
            logits = products.logits(rows)
            op("logprob_grad")(
                *head.shard(logits, rows).arguments(logits),
                *(log_z[rows], entropy[rows], grad_logp[rows]),
                grad_entropy[rows] if head.with_entropy else None,
                logits,
            )
            products.backward(rows, logits)
        made = products.hidden_grad
        grad_hidden = None if made is None else head.sum_over_ranks(made)
        if weight_grad is not None:
            weight_grad = (
                added_to_main_grad(weight) if head.into_main_grad else weight_grad.to(weight.dtype)
            )
        return grad_hidden, weight_grad, None


# ---------------------------------------------------------------- gradient in the forward


class _GradientInForward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        head: LinearHead,
        token_loss: TokenLoss,
        wants: tuple[bool, bool],
    ) -> tuple[Tensor, Tensor, Tensor]:
        wants_hidden, wants_weight = wants
        products = Products(
            *(head.gather(hidden), weight, head),
            wants_hidden=wants_hidden,
            weight_grad=torch.zeros_like(weight, dtype=torch.float32) if wants_weight else None,
        )
        logp = torch.empty(head.labels.shape, device=hidden.device)
        entropy, losses = torch.empty_like(logp), [logp.new_zeros(())]
        for rows in head.chunks():
            logits = products.logits(rows)
            shard = head.shard(logits, rows)
            logp[rows], entropy[rows], log_z = shard.forward(logits, head.with_entropy)
            made = token_loss(logp[rows], entropy[rows], rows)
            loss, grad_logp, grad_entropy = _check_loss(made, logp[rows], head)
            losses.append(loss)
            if wants_hidden or wants_weight:
                op("logprob_grad")(
                    *shard.arguments(logits),
                    *(log_z, entropy[rows], grad_logp, grad_entropy, logits),
                )
                products.backward(rows, logits)
        grad = products.hidden_grad
        ctx.hidden_grad = None if grad is None else head.sum_over_ranks(grad)
        ctx.weight_grad, ctx.head = products.weight_grad, head
        ctx.save_for_backward(weight)
        ctx.mark_non_differentiable(logp, entropy)
        return torch.stack(losses).double().sum().float(), logp, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, scale: Tensor, *_: Tensor) -> tuple[Any, ...]:
        (weight,) = ctx.saved_tensors
        scale = scale.float()
        grad_hidden = None if ctx.hidden_grad is None else ctx.hidden_grad * scale
        grad_weight = None
        if ctx.weight_grad is not None and ctx.head.into_main_grad:
            weight.main_grad.addcmul_(ctx.weight_grad, scale)
            grad_weight = added_to_main_grad(weight)
        elif ctx.weight_grad is not None:
            grad_weight = (ctx.weight_grad * scale).to(weight.dtype)
        return grad_hidden, grad_weight, None, None, None


def _check_loss(
    made: tuple[Tensor, Tensor, Tensor | None], logp: Tensor, head: LinearHead
) -> tuple[Tensor, Tensor, Tensor | None]:
    """What token_loss returned, contiguous."""
    loss, grad_logp, grad_entropy = made
    for name, x, shape in (
        ("loss", loss, torch.Size()),
        ("dloss/dlogp", grad_logp, logp.shape),
        ("dloss/dentropy", grad_entropy, logp.shape),
    ):
        if x is not None and (x.shape, x.dtype, x.device) != (shape, logp.dtype, logp.device):
            raise ValueError(
                f"token_loss: {name} must be {tuple(shape)} {logp.dtype} on {logp.device}, got "
                f"{tuple(x.shape)} {x.dtype} on {x.device}"
            )
    if grad_entropy is not None and not head.with_entropy:
        raise ValueError("token_loss: a gradient of the entropy, which with_entropy=False skips")
    contiguous = None if grad_entropy is None else grad_entropy.contiguous()
    return loss, grad_logp.contiguous(), contiguous

"""The policy loss and its gradient from one read of the logits, where nothing is sharded.

T  packed tokens          V  vocabulary, whole on this rank

A loss that is a sum over tokens has a gradient dL_t/dlogp_t that is known as soon as logp_t is,
and with it the gradient to the logits, dL_t/dlogp_t (1[v = label_t] - p_tv) / temperature. So the
logits are read once and their gradient is written once, over them: 4 bytes a bfloat16 logit in
all, where logprobs and gradient apart move 6. On sm_90 and later a cluster of blocks holds a row
in its shared memory meanwhile; older GPUs read it again, mostly from their L2 cache.
"""

from typing import Any, cast

import torch
from torch import Tensor

from megarl.algorithms import losses
from megarl.algorithms.kl import Estimator
from megarl.algorithms.losses import Correction, LossOutput, Objective
from megarl.ops.library import define, op
from megarl.ops.logprob import (
    Shard,
    check_logits,
    inverse_of,
    reference_combine,
    reference_grad,
    reference_stats,
    token_logprob_entropy,
)
from megarl.ops.policy_loss import policy_loss

_KL_KINDS: tuple[Estimator, ...] = ("k1", "k2", "k3")
_OBJECTIVES: tuple[Objective, ...] = ("ppo", "cispo")


def logprob_policy_loss(
    logits: Tensor,
    labels: Tensor,
    prox_logp: Tensor,
    behaviour_logp: Tensor,
    advantages: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    *,
    vocab_size: int,
    num_tokens: Tensor,
    eps_clip_low: float,
    eps_clip_high: float,
    objective: Objective = "ppo",
    c_clip: float | None = None,
    decoupled: bool = True,
    correction: Correction | None = None,
    ref_logp: Tensor | None = None,
    kl_coef: float = 0.0,
    kl_estimator: Estimator = "k3",
    temperature: float | Tensor = 1.0,
    keep: Tensor | None = None,
    cluster: int = 0,
) -> LossOutput:
    """policy_loss of token_logprob_entropy(logits, labels), whose texts have the formulas.

    The gradient is written over the logits in this call, so nothing may read them afterwards,
    and there is one backward. Ratios are those of tokens; corrections may be of sequences.

    Args:
      logits: [T, V] float32 or bfloat16, columns side by side.
      labels: [T] int64.
      prox_logp ... num_tokens, and the settings: see megarl.algorithms.losses.policy_loss. Rows
        under a False mask are not read.
      vocab_size, temperature, keep: see token_logprob_entropy.
      cluster: CUDA: blocks that share a row, a power of 2 up to 8; 1 reads a row twice; 0 is
        what fits the device.

    Returns:
      loss and metrics, `entropy` among them.

    Raises:
      ValueError: shapes, dtypes or settings do not fit.
    """
    check_logits(logits, labels, mask, keep)
    settings = {
        "num_tokens": num_tokens,
        "eps_clip_low": eps_clip_low,
        "eps_clip_high": eps_clip_high,
        "objective": objective,
        "c_clip": c_clip,
        "decoupled": decoupled,
        "correction": correction,
        "ref_logp": ref_logp,
        "kl_coef": kl_coef,
        "kl_estimator": kl_estimator,
    }
    columns = (prox_logp, behaviour_logp, advantages, mask, cu_seqlens)
    if not (torch.is_grad_enabled() and logits.requires_grad):
        logp, entropy = token_logprob_entropy(
            logits, labels, vocab_size=vocab_size, temperature=temperature, mask=mask, keep=keep
        )
        return policy_loss(logp, *columns, entropy=entropy, **settings)
    shard = Shard(logits, labels, inverse_of(temperature, logits), mask, keep, vocab_size, None)
    logp, entropy = torch.empty_like(advantages), torch.empty_like(advantages)
    weight = None
    if decoupled:
        weight = losses.behaviour_weight(prox_logp, behaviour_logp, mask, cu_seqlens, correction)
    grad = logits.detach()
    op("logprob_loss")(
        *(*shard.arguments(grad)[:5], shard.num_valid),
        *(prox_logp.float().contiguous(), advantages.float().contiguous(), weight),
        ref_logp.float().contiguous() if ref_logp is not None and kl_coef > 0 else None,
        num_tokens.float().reshape(1),
        *(1 - eps_clip_low, 1 + eps_clip_high, c_clip or 0.0, kl_coef),
        *(1 + _KL_KINDS.index(kl_estimator), _OBJECTIVES.index(objective), cluster),
        *(logp, entropy, grad),
    )
    result = policy_loss(logp, *columns, entropy=entropy, **settings)
    return result._replace(loss=cast(Tensor, _Known.apply(logits, result.loss, grad)))


class _Known(torch.autograd.Function):
    """A loss whose gradient by the logits is there already."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, loss: Tensor, grad: Tensor) -> Tensor:
        ctx.grad = grad
        return loss.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Any, ...]:
        grad, ctx.grad = ctx.grad, None
        if grad is None:
            raise RuntimeError("logprob_policy_loss has one backward: its gradient is used up")
        op("scale_unless_one")(scale.float().reshape(1), grad)
        return grad, None, None


def _logprob_loss(
    logits: Tensor,
    labels: Tensor,
    inverse_temperature: Tensor,
    mask: Tensor | None,
    keep: Tensor | None,
    num_valid: int,
    prox: Tensor,
    advantages: Tensor,
    weight: Tensor | None,
    ref: Tensor | None,
    num_tokens: Tensor,
    ratio_low: float,
    ratio_high: float,
    c_clip: float,
    kl_coef: float,
    kl_kind: int,
    objective: int,
    cluster: int,
    logp: Tensor,
    entropy: Tensor,
    grad: Tensor,
) -> None:
    """The torch reference: the ops of megarl.ops.logprob around the loss under autograd."""
    counts = torch.ones_like(labels, dtype=torch.bool) if mask is None else mask
    shard = (logits, labels, inverse_temperature, mask, keep, 0, num_valid)
    parts = logits.new_zeros((1, *labels.shape, 4), dtype=torch.float32)
    log_z = parts.new_empty((*labels.shape, 2))
    reference_stats(*shard, True, parts[0])
    reference_combine(parts, mask, True, logp, entropy, log_z)
    with torch.enable_grad():
        leaf = logp.detach().requires_grad_()
        # Each objective is linear in the advantage, so the weight may be taken into it.
        weighted = advantages if weight is None else advantages * weight
        ends = torch.tensor([0, labels.numel()], device=labels.device)
        loss = losses.policy_loss(
            *(leaf, prox, prox, weighted, counts, ends),
            num_tokens=num_tokens.reshape(()),
            eps_clip_low=1 - ratio_low,
            eps_clip_high=ratio_high - 1,
            objective=_OBJECTIVES[objective],
            c_clip=c_clip or None,
            decoupled=False,
            ref_logp=ref,
            kl_coef=kl_coef,
            kl_estimator=_KL_KINDS[kl_kind - 1],
        ).loss
        (of_logp,) = torch.autograd.grad(loss, leaf)
    reference_grad(*shard, log_z, entropy, of_logp, None, grad)


def _scale_unless_one(scale: Tensor, x: Tensor) -> None:
    x.mul_(scale)


define(
    "logprob_loss(Tensor logits, Tensor labels, Tensor inverse_temperature, Tensor? mask, "
    "Tensor? keep, int num_valid, Tensor prox, Tensor advantages, Tensor? weight, Tensor? ref, "
    "Tensor num_tokens, float ratio_low, float ratio_high, float c_clip, float kl_coef, "
    "int kl_kind, int objective, int cluster, Tensor(a!) logp, Tensor(b!) entropy, "
    "Tensor(c!) grad) -> ()",
    _logprob_loss,
)
define("scale_unless_one(Tensor scale, Tensor(a!) x) -> ()", _scale_unless_one)

"""The policy loss of packed sequences with its gradient and all metrics, in one kernel.

T  tokens in one packed micro-batch          n  sequences in it

The definition, with formulas and papers, is megarl.algorithms.losses.policy_loss; in torch it is
some 40 kernels forward, as many backward, and a wait of the host for each sequence-level part.
Here dloss/dlogp [T] is made with the loss, and the backward pass multiplies it.
"""

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from megarl.algorithms import losses
from megarl.algorithms.kl import Estimator
from megarl.algorithms.losses import Correction, LossOutput, Objective
from megarl.ops.library import define, op

_METRICS = (
    *("importance_weight", "clip_ratio", "clip_high_ratio", "dual_clip_ratio", "kl"),
    *("behave_weight", "behave_weight_sq", "behave_kl", "behave_masked", "ref_kl", "entropy"),
)
"""As csrc/include/megarl/policy_loss.h has them."""
_OF_DECOUPLED = ("behave_weight", "behave_weight_sq", "behave_kl", "behave_masked")
_WORKSPACE = 1 + 1024 * (len(_METRICS) + 1)
"""Words of 8 bytes: a counter, and the sums of at most so many blocks: 7 for each processor of
an H100, which runs 3 or 4 at once."""
_workspaces: dict[tuple[torch.device, int], Tensor] = {}

_OBJECTIVES: tuple[Objective, ...] = ("ppo", "cispo")
_WEIGHT_METRICS: tuple[Literal["ratio", "k1", "k2", "k3"], ...] = ("ratio", "k1", "k2", "k3")
_AGGREGATES: tuple[Literal["mean", "sum", "max"], ...] = ("mean", "sum", "max")
_ESTIMATORS: tuple[Estimator, ...] = ("k1", "k2", "k3")


class _Settings(NamedTuple):
    """The scalars of the schema, in its order."""

    eps_low: float
    eps_high: float
    objective: int
    c_clip: float
    """0: none."""
    sequence_ratio: bool
    decoupled: bool
    bounds_of_sequence: bool
    bounds_clamp: bool
    bounds_metric: int
    bounds_agg: int
    lower: float
    upper: float
    kl_coef: float
    kl_kind: int
    """1, 2, 3."""


def policy_loss(
    logp: Tensor,
    prox_logp: Tensor,
    behaviour_logp: Tensor,
    advantages: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    *,
    num_tokens: Tensor,
    eps_clip_low: float,
    eps_clip_high: float,
    objective: Objective = "ppo",
    c_clip: float | None = None,
    level: Literal["token", "sequence"] = "token",
    decoupled: bool = True,
    correction: Correction | None = None,
    ref_logp: Tensor | None = None,
    kl_coef: float = 0.0,
    kl_estimator: Estimator = "k3",
    entropy: Tensor | None = None,
) -> LossOutput:
    """megarl.algorithms.losses.policy_loss: the same arguments, formulas and results.

    Sums are taken in float64. The gradient flows into `logp` only, once.

    Args:
      logp, prox_logp, behaviour_logp, advantages, ref_logp, entropy: [T] float; computed with
        as float32.
      mask: [T] bool. Values under False are not used, and their gradient is exactly 0.
      cu_seqlens: [n + 1] int64, from 0 to T. Where it is not, the loss of a setting with a
        sequence's part is nan on a GPU, which is not waited for.
      num_tokens: [] N, of any dtype; float32 needs no conversion.

    Raises:
      ValueError: as there, or dtypes or devices do not fit.
    """
    columns = (logp, prox_logp, behaviour_logp, advantages)
    optional = tuple(x for x in (ref_logp, entropy) if x is not None)
    losses.check_tokens(*columns, *optional, mask)
    losses.check_settings(
        eps_clip_low, eps_clip_high, objective, c_clip, level, kl_coef, ref_logp is not None
    )
    _check(columns + optional, mask, cu_seqlens, num_tokens)
    if kl_estimator not in _ESTIMATORS:
        raise ValueError(f"kl_estimator must be one of {_ESTIMATORS}, got {kl_estimator!r}")
    bounds = correction or Correction(upper=torch.inf)
    settings = _Settings(
        eps_clip_low,
        eps_clip_high,
        _OBJECTIVES.index(objective),
        c_clip or 0.0,
        level == "sequence",
        decoupled,
        bounds.level == "sequence",
        bounds.action == "clamp",
        _WEIGHT_METRICS.index(bounds.metric),
        _AGGREGATES.index(bounds.agg),
        -torch.inf if bounds.lower is None else bounds.lower,
        bounds.upper,
        kl_coef,
        1 + _ESTIMATORS.index(kl_estimator),
    )
    has_ref = kl_coef > 0 and ref_logp is not None
    rest = (
        *(_column(x) for x in columns[1:]),
        _column(ref_logp) if has_ref and ref_logp is not None else None,
        _column(entropy) if entropy is not None else None,
        mask.contiguous(),
        cu_seqlens.contiguous(),
        num_tokens.detach().float(),
    )
    loss, sums = _PolicyLoss.apply(logp.float().contiguous(), rest, settings)
    skipped = {
        *(() if decoupled else _OF_DECOUPLED),
        *(() if has_ref else ("ref_kl",)),
        *(() if entropy is not None else ("entropy",)),
    }
    metrics = dict(zip(_METRICS, sums.unbind(), strict=True))
    return LossOutput(loss, {name: x for name, x in metrics.items() if name not in skipped})


class _PolicyLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logp: Tensor, rest: tuple[Tensor | None, ...], settings: _Settings
    ) -> tuple[Tensor, Tensor]:
        dlogp, sums = torch.empty_like(logp), logp.new_empty(len(_METRICS))
        loss = logp.new_empty(())
        op("policy_loss")(logp, *rest, *settings, _workspace(logp.device), dlogp, sums, loss)
        ctx.save_for_backward(dlogp)
        ctx.mark_non_differentiable(sums)
        return loss, sums

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, _: Tensor) -> tuple[Any, ...]:
        (dlogp,) = ctx.saved_tensors
        return grad_loss * dlogp, None, None


def _column(x: Tensor) -> Tensor:
    return x.detach().float().contiguous()


def _workspace(device: torch.device) -> Tensor:
    """[_WORKSPACE] float64, zeros where no kernel has been; every call leaves its counter at 0.

    Kept for each stream, in whose order calls take turns with it.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return torch.zeros(_WORKSPACE, dtype=torch.float64, device=device)  # the graph's own
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    key = (device, stream)
    if key not in _workspaces:
        _workspaces[key] = torch.zeros(_WORKSPACE, dtype=torch.float64, device=device)
    return _workspaces[key]


def _check(
    columns: tuple[Tensor, ...], mask: Tensor, cu_seqlens: Tensor, num_tokens: Tensor
) -> None:
    if any(not x.is_floating_point() for x in columns):
        raise ValueError(f"per-token tensors must be floats, got {[str(x.dtype) for x in columns]}")
    if cu_seqlens.ndim != 1 or cu_seqlens.numel() == 0 or cu_seqlens.dtype != torch.int64:
        raise ValueError(
            f"cu_seqlens must be [n + 1] int64, got {tuple(cu_seqlens.shape)} {cu_seqlens.dtype}"
        )
    if num_tokens.ndim != 0:
        raise ValueError(f"num_tokens must be [], got {tuple(num_tokens.shape)}")
    devices = {x.device for x in (*columns, mask, cu_seqlens, num_tokens)}
    if len(devices) > 1:
        raise ValueError(f"one device is needed, got {sorted(map(str, devices))}")
    if cu_seqlens.device.type == "cpu":
        ends, size = (int(cu_seqlens[0]), int(cu_seqlens[-1])), mask.numel()
        if ends != (0, size):
            raise ValueError(f"cu_seqlens must go from 0 to {size} tokens, got {ends}")


# ---------------------------------------------------------------- torch reference


def _policy_loss(
    logp: Tensor,
    prox: Tensor,
    behaviour: Tensor,
    advantages: Tensor,
    ref: Tensor | None,
    entropy: Tensor | None,
    mask: Tensor,
    cu_seqlens: Tensor,
    num_tokens: Tensor,
    *rest: Any,
) -> None:
    """dlogp [T], metrics, loss [] from the definition under autograd."""
    s, (_, dlogp, metrics, loss) = _Settings(*rest[:-4]), rest[-4:]
    bounds = Correction(
        level="sequence" if s.bounds_of_sequence else "token",
        action="clamp" if s.bounds_clamp else "mask",
        metric=_WEIGHT_METRICS[s.bounds_metric],
        agg=_AGGREGATES[s.bounds_agg],
        upper=s.upper,
        lower=s.lower,
    )
    with torch.enable_grad():
        leaf = logp.detach().requires_grad_()
        made = losses.policy_loss(
            leaf,
            prox,
            behaviour,
            advantages,
            mask,
            cu_seqlens,
            num_tokens=num_tokens,
            eps_clip_low=s.eps_low,
            eps_clip_high=s.eps_high,
            objective=_OBJECTIVES[s.objective],
            c_clip=s.c_clip or None,
            level="sequence" if s.sequence_ratio else "token",
            decoupled=s.decoupled,
            correction=bounds,
            ref_logp=ref,
            kl_coef=s.kl_coef,
            kl_estimator=_ESTIMATORS[s.kl_kind - 1],
            entropy=entropy,
        )
        (grad,) = torch.autograd.grad(made.loss, leaf)
    # Under the mask alone: 0 times 1 / 0 is nan.
    dlogp.copy_(torch.where(mask, grad, 0.0))
    none = torch.zeros_like(made.loss)
    metrics.copy_(torch.stack([made.metrics.get(name, none) for name in _METRICS]))
    loss.copy_(made.loss)


define(
    "policy_loss(Tensor logp, Tensor prox, Tensor behaviour, Tensor advantages, Tensor? ref, "
    "Tensor? entropy, Tensor mask, Tensor cu_seqlens, Tensor num_tokens, float eps_low, "
    "float eps_high, int objective, float c_clip, bool sequence_ratio, bool decoupled, "
    "bool bounds_of_sequence, bool bounds_clamp, int bounds_metric, int bounds_agg, float lower, "
    "float upper, float kl_coef, int kl_kind, Tensor(a!) workspace, Tensor(b!) dlogp, "
    "Tensor(c!) metrics, Tensor(d!) loss) -> ()",
    _policy_loss,
)

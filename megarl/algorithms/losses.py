"""Policy losses: pure functions of per-token tensors.

T  tokens in one packed micro-batch (no padding, no batch axis)

Every loss here returns `sum over its tokens / num_tokens`, where `num_tokens` is the count
over ALL micro-batches and ALL data-parallel replicas of the step. Adding micro-batches and
summing gradients over ranks is then exact: no later rescaling. Values under a False mask are
never used, so they may be nan. Nothing here reads a config, a process group or a clock.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from megarl.algorithms.kl import Estimator, kl_estimate


class LossOutput(NamedTuple):
    loss: Tensor  # [] float32, differentiable
    metrics: dict[str, Tensor]  # [] float32 each, already / num_tokens: reduce with SUM


Objective = Literal["ppo", "cispo"]


@dataclass(frozen=True)
class Correction:
    """Bounds on the behaviour weight w = exp(proximal - behaviour).

    Source: truncated (clamp) and masked importance sampling as in Yao et al. 2025; the
      sequence level's geometric mean as in GSPO, arXiv:2507.18071.
    """

    level: Literal["token", "sequence"] = "token"
    action: Literal["mask", "clamp"] = "mask"
    metric: Literal["ratio", "k1", "k2", "k3"] = "ratio"
    """What is compared with the bounds: w itself, or an estimate of KL(behaviour || proximal)."""
    agg: Literal["mean", "sum", "max"] = "mean"
    """How a sequence's metric is made of its tokens'; for a ratio, of its log ratios."""
    upper: float = 5.0
    lower: float | None = None

    def __post_init__(self) -> None:
        if self.action == "clamp" and self.metric != "ratio":
            raise ValueError(f"clamp bounds the ratio itself, not metric {self.metric!r}")


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
    r"""A clipped objective around a proximal policy, weighted back to the behaviour policy.

        r_t = exp(logp_t - prox_t)                     sequence level: exp(mean over the sequence)
        ppo:                 L_t = max( -A_t r_t, -A_t clip(r_t, 1 - eps_low, 1 + eps_high) )
        dual clip, A_t < 0:  L_t = min( L_t, -c A_t )
        cispo:               L_t = -sg( clip(r_t, 1 - eps_low, 1 + eps_high) ) A_t logp_t
        decoupled:           L_t = w_t L_t,  w_t = exp(prox_t - behaviour_t), bounded
        L = (1/N) sum_t m_t ( L_t + kl_coef KL_t )

    The gradient flows into `logp` only. w always multiplies a decoupled loss; `correction`
    only bounds it: a masked token adds nothing but still counts in N. Not decoupled, the
    proximal policy is the anchor and `behaviour_logp` is not used. A sequence-level ratio
    uses A's mean over the sequence's masked tokens. r is not clamped in silence: a gap over
    88 nats overflows it, and the caller's finite check stops the run. cispo clips what a
    token's gradient weighs (sg: not differentiated), so every token keeps one; with eps_low = 1
    the weight has no lower bound.

    Args:
      logp: [T] float, nats. Policy being trained.
      prox_logp: [T] float, nats. The trainer's weights before the step.
      behaviour_logp: [T] float, nats. The servers' weights that sampled the token.
      advantages: [T] float.
      mask: [T] bool. True on response tokens that count.
      cu_seqlens: [n + 1] int64, boundaries of the n sequences in T.
      num_tokens: [] N, the GLOBAL number of True in `mask`.
      eps_clip_low: in [0, 1), or [0, 1] for cispo. eps_clip_high: >= 0.
      c_clip: > 1, or None; None for cispo.
      level: "token" for cispo.
      ref_logp: [T] float, nats; needed if kl_coef > 0.
      entropy: [T] float, nats, for its mean alone.

    Returns:
      loss, and metrics: `importance_weight` (mean r), `clip_ratio` and `dual_clip_ratio` (share
      of tokens whose gradient the clip removed; cispo: whose weight it changed),
      `clip_high_ratio` (the part of clip_ratio with r over its upper bound), `kl` (k3 from the
      policy that sampled to the current one); decoupled also `behave_weight` and
      `behave_weight_sq` (mean w and w^2 after bounds: the effective sample size is
      N behave_weight^2 / behave_weight_sq), `behave_kl`, and `behave_masked` (share of tokens
      dropped); `ref_kl` if kl_coef > 0; `entropy` if it is given.

    Raises:
      ValueError: shapes differ, a clip is out of range, kl_coef < 0 or > 0 without ref_logp, or
        cispo with a dual clip or a sequence's ratio.

    Source: Schulman et al. 2017, arXiv:1707.06347 eq. 7; clip-higher Yu et al. 2025,
      arXiv:2503.14476; dual clip Ye et al. 2020, arXiv:1912.09729 eq. 5; decoupled Hilton et
      al. 2022, arXiv:2110.00641 and Fu et al. 2025, arXiv:2505.24298 eq. 2; sequence ratio
      Zheng et al. 2025, arXiv:2507.18071 eq. 7; cispo MiniMax 2025, arXiv:2506.13585 eq. 4 and
      5. Differs from all: N is global.
    """
    optional = [x for x in (ref_logp, entropy) if x is not None]
    check_tokens(logp, prox_logp, behaviour_logp, advantages, *optional, mask)
    check_settings(
        eps_clip_low, eps_clip_high, objective, c_clip, level, kl_coef, ref_logp is not None
    )
    sequences = _Sequences(cu_seqlens, mask)
    # where(), not a product with the mask: 0 * nan is nan.
    logp = torch.where(mask, logp.float(), 0.0)
    prox = torch.where(mask, prox_logp.detach().float(), 0.0)
    advantages = torch.where(mask, advantages.detach().float(), 0.0)

    log_ratio = logp - prox
    if level == "sequence":
        log_ratio = torch.where(mask, sequences.mean(log_ratio), 0.0)
        advantages = torch.where(mask, sequences.mean(advantages), 0.0)
    ratio = log_ratio.exp()
    if objective == "cispo":
        bounded = ratio.detach().clamp(1 - eps_clip_low, 1 + eps_clip_high)
        per_token, is_clipped = -advantages * bounded * logp, bounded != ratio
        is_dual_clipped = torch.zeros_like(is_clipped)
    else:
        per_token, is_clipped, is_dual_clipped = _clipped_surrogate(
            ratio, advantages, eps_clip_low, eps_clip_high, c_clip
        )
    behaviour = torch.where(mask, behaviour_logp.detach().float(), 0.0)
    sampler = behaviour if decoupled else prox

    def mean(x: Tensor) -> Tensor:
        return torch.where(mask, x.detach().float(), 0.0).sum() / num_tokens

    metrics = {
        "importance_weight": mean(ratio),
        "clip_ratio": mean(is_clipped),
        "clip_high_ratio": mean(is_clipped & (ratio > 1 + eps_clip_high)),
        "dual_clip_ratio": mean(is_dual_clipped),
        "kl": mean(kl_estimate(sampler, logp.detach(), "k3")),
    }
    if decoupled:
        weight = _behaviour_weight(prox - behaviour, mask, sequences, correction)
        per_token = per_token * weight
        metrics["behave_weight"] = mean(weight)
        metrics["behave_weight_sq"] = mean(weight.square())
        metrics["behave_kl"] = mean(kl_estimate(behaviour, prox, "k3"))
        metrics["behave_masked"] = mean(weight == 0)
    if kl_coef > 0:
        assert ref_logp is not None, "checked above"
        ref_kl = kl_estimate(logp, torch.where(mask, ref_logp.detach().float(), 0.0), kl_estimator)
        per_token = per_token + kl_coef * ref_kl
        metrics["ref_kl"] = mean(ref_kl)
    if entropy is not None:
        metrics["entropy"] = mean(entropy)
    return LossOutput(torch.where(mask, per_token, 0.0).sum() / num_tokens, metrics)


def sft_loss(logp: Tensor, mask: Tensor, *, num_tokens: Tensor) -> LossOutput:
    """Mean negative logprob: -(1/N) sum_t m_t logp_t.

    Args:
      logp: [T] float, nats.
      mask: [T] bool.
      num_tokens: [] N, the GLOBAL number of True in `mask`.
    """
    check_tokens(logp, mask)
    return LossOutput(-torch.where(mask, logp.float(), 0.0).sum() / num_tokens, {})


def _clipped_surrogate(
    ratio: Tensor, advantages: Tensor, eps_low: float, eps_high: float, c_clip: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """L_t, and where the clip and the dual clip took its gradient; each [T]."""
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - eps_low, 1 + eps_high)
    per_token, is_clipped = torch.maximum(plain, clipped), clipped > plain
    if c_clip is None:
        return per_token, is_clipped, torch.zeros_like(is_clipped)
    ceiling = -c_clip * advantages
    is_dual_clipped = (advantages < 0) & (per_token > ceiling)
    per_token = torch.where(is_dual_clipped, ceiling, per_token)
    return per_token, is_clipped & ~is_dual_clipped, is_dual_clipped


class _Sequences:
    """Sums over the masked tokens of each packed sequence, spread back to its tokens."""

    def __init__(self, cu_seqlens: Tensor, mask: Tensor) -> None:
        self._num = cu_seqlens.numel() - 1
        # Not repeat_interleave of lengths, for whose size the host waits.
        ends = cu_seqlens[1:].to(mask.device)
        tokens = torch.arange(mask.numel(), device=mask.device)
        self._index = torch.searchsorted(ends, tokens, right=True)
        self._mask = mask
        self._count = self.sum(torch.ones(mask.shape, device=mask.device)).clamp(min=1)

    def sum(self, x: Tensor) -> Tensor:
        """[T] -> [T]: at each token, the sum over its sequence's masked tokens."""
        totals = x.new_zeros(self._num).index_add(0, self._index, torch.where(self._mask, x, 0.0))
        return totals[self._index]

    def mean(self, x: Tensor) -> Tensor:
        return self.sum(x) / self._count

    def max(self, x: Tensor) -> Tensor:
        lowest = x.new_full((self._num,), -torch.inf)
        masked = torch.where(self._mask, x, -torch.inf)
        return lowest.scatter_reduce(0, self._index, masked, "amax")[self._index]


def behaviour_weight(
    prox_logp: Tensor,
    behaviour_logp: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    correction: Correction | None,
) -> Tensor:
    """[T] float32 w of policy_loss after its bounds: 0 where a token is dropped or masked.

    Args:
      As policy_loss.
    """
    prox = torch.where(mask, prox_logp.detach().float(), 0.0)
    behaviour = torch.where(mask, behaviour_logp.detach().float(), 0.0)
    weight = _behaviour_weight(prox - behaviour, mask, _Sequences(cu_seqlens, mask), correction)
    return torch.where(mask, weight, 0.0)


def _behaviour_weight(
    log_weight: Tensor, mask: Tensor, sequences: _Sequences, correction: Correction | None
) -> Tensor:
    """[T] w after bounds; 0 where a token is dropped."""
    # A logprob of -inf on both sides (a token outside top-p) says nothing about the weight.
    log_weight = torch.nan_to_num(log_weight, nan=0.0, posinf=0.0, neginf=0.0)
    if correction is None:
        return log_weight.exp()
    aggregate = {"mean": sequences.mean, "sum": sequences.sum, "max": sequences.max}
    if correction.metric == "ratio":
        if correction.level == "sequence":
            # One weight for the whole sequence: its mean is the geometric mean of ratios.
            log_weight = torch.where(mask, aggregate[correction.agg](log_weight), 0.0)
        measured = log_weight.exp()
    else:
        # Sampled from the behaviour policy: d = behaviour - proximal = -log w.
        zero = torch.zeros_like(log_weight)
        measured = kl_estimate(zero, log_weight, correction.metric)
        if correction.level == "sequence":
            measured = torch.where(mask, aggregate[correction.agg](measured), 0.0)
    weight = log_weight.exp()
    lower = -torch.inf if correction.lower is None else correction.lower
    if correction.action == "clamp":
        return weight.clamp(max(lower, 0.0), correction.upper)
    return torch.where((measured >= lower) & (measured <= correction.upper), weight, 0.0)


def check_tokens(first: Tensor, *others: Tensor) -> None:
    """Raises ValueError unless all are [T] and the last, the mask, is bool."""
    shapes = [tuple(x.shape) for x in (first, *others)]
    if first.ndim != 1 or len(set(shapes)) != 1:
        raise ValueError(f"per-token tensors must all be [T], got {shapes}")
    if others[-1].dtype != torch.bool:
        raise ValueError(f"mask must be bool, got {others[-1].dtype}")


def check_settings(
    eps_clip_low: float,
    eps_clip_high: float,
    objective: Objective,
    c_clip: float | None,
    level: str,
    kl_coef: float,
    has_ref: bool,
) -> None:
    """Raises ValueError where policy_loss has no meaning for these."""
    is_cispo = objective == "cispo"
    if not (objective in ("ppo", "cispo") and level in ("token", "sequence")):
        raise ValueError(
            f"objective must be ppo or cispo and level token or sequence, got {objective!r} and "
            f"{level!r}"
        )
    if not (
        (0 <= eps_clip_low < 1 or (is_cispo and eps_clip_low == 1))
        and eps_clip_high >= 0
        and (c_clip is None or c_clip > 1)
    ):
        raise ValueError(
            f"need 0 <= eps_clip_low < 1 (cispo: <= 1), eps_clip_high >= 0 and c_clip > 1, got "
            f"{eps_clip_low}, {eps_clip_high}, {c_clip}"
        )
    if is_cispo and (c_clip is not None or level != "token"):
        raise ValueError(
            f"cispo has no dual clip and no sequence's ratio, got c_clip {c_clip} and level "
            f"{level!r}"
        )
    if kl_coef < 0 or (kl_coef > 0 and not has_ref):
        raise ValueError(f"kl_coef {kl_coef} must be >= 0, and needs ref_logp if > 0")

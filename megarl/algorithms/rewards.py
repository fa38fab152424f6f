"""From an episode's reward to a reward at each token.

B  sequences     S  padded length

Columns are shifted: index t belongs to the prediction of token t + 1, so the last True of a
row's mask is where its last token was chosen.
"""

import torch
from torch import Tensor

from megarl.algorithms.kl import Estimator, kl_estimate


def shape_rewards(
    rewards: Tensor,
    response_tokens: Tensor,
    *,
    max_response_tokens: int,
    scaling: float = 1.0,
    bias: float = 0.0,
    clip: float = 20.0,
    overlong_tokens: int | None = None,
    overlong_penalty_factor: float | None = None,
) -> Tensor:
    r"""clip((r + overlong + bias) * scaling, -clip, clip).

        overlong = min( -(n - (L - o)) / o * f, 0 )

    Args:
      rewards: [B] float.
      response_tokens: [B] int, n.
      max_response_tokens: L, the length limit of a response.
      overlong_tokens: o, the soft zone before the limit; None is no penalty.
      overlong_penalty_factor: f, the penalty at the limit.

    Returns:
      [B] float32.

    Raises:
      ValueError: shapes differ, or only one of the overlong numbers is given.

    Source: the soft overlong punishment is DAPO's, arXiv:2503.14476 eq. 13.
    """
    if rewards.shape != response_tokens.shape:
        raise ValueError(
            f"rewards {tuple(rewards.shape)} and response_tokens "
            f"{tuple(response_tokens.shape)} must have one shape"
        )
    if (overlong_tokens is None) != (overlong_penalty_factor is None):
        raise ValueError(
            f"overlong_tokens {overlong_tokens} and overlong_penalty_factor "
            f"{overlong_penalty_factor} go together"
        )
    shaped = rewards.float()
    if overlong_tokens is not None and overlong_penalty_factor is not None:
        excess = response_tokens.float() - (max_response_tokens - overlong_tokens)
        shaped = shaped - (excess / overlong_tokens * overlong_penalty_factor).clamp(min=0)
    return ((shaped + bias) * scaling).clamp(-clip, clip)


def token_rewards(
    rewards: Tensor,
    mask: Tensor,
    no_eos: Tensor,
    *,
    logp: Tensor,
    ref_logp: Tensor | None,
    kl_ctl: float = 0.0,
    kl_estimator: Estimator = "k1",
    mask_no_eos_with_zero: bool = False,
) -> Tensor:
    r"""r_t = -kl_ctl KL_t + [t is the last masked index of the row] reward.

    Args:
      rewards: [B] float, of whole episodes.
      mask: [B, S] bool, shifted; True where a generated token was predicted.
      no_eos: [B] bool, cut by the length limit.
      logp, ref_logp: [B, S] float, shifted, nats. Values under False are never used.
        ref_logp may be None if kl_ctl is 0.
      mask_no_eos_with_zero: an episode that was cut gets no outcome reward.

    Returns:
      [B, S] float32, 0 outside the mask. A row without a True gets no reward at all.

    Raises:
      ValueError: kl_ctl > 0 without ref_logp.

    Source: Ouyang et al. 2022, arXiv:2203.02155 eq. 2.
    """
    out = torch.zeros(mask.shape, device=mask.device)
    if kl_ctl > 0:
        if ref_logp is None:
            raise ValueError(f"kl_ctl {kl_ctl} needs ref_logp")
        kl = kl_estimate(
            torch.where(mask, logp, 0.0), torch.where(mask, ref_logp, 0.0), kl_estimator
        )
        out = torch.where(mask, -kl_ctl * kl, 0.0)
    outcome = rewards.float()
    if mask_no_eos_with_zero:
        outcome = torch.where(no_eos, 0.0, outcome)
    steps = torch.arange(mask.shape[1], device=mask.device)
    last = torch.where(mask, steps, -1).amax(dim=1)
    rows = (last >= 0).nonzero()[:, 0]
    out[rows, last[rows]] += outcome[rows]
    return out

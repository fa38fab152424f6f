"""Generalised advantage estimation over masked tokens."""

import torch
from torch import Tensor


def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    no_eos: Tensor,
    *,
    gamma: float,
    lam: float,
) -> tuple[Tensor, Tensor]:
    r"""Advantages and returns, backwards over each row's masked tokens.

        delta_t = r_t + gamma V_{t'} - V_t
        A_t     = delta_t + gamma lam A_{t'}          returns_t = A_t + V_t

    t' is the next masked index of the row: what was not generated (a tool's answer, the next
    user turn) takes no time step. After the last masked index V is 0, or, where the row was
    cut by the length limit, the value one index later (the state it was cut in).

    Args:
      rewards, values: [B, S] float, shifted. Values under False are used only as the bootstrap.
      mask: [B, S] bool, shifted.
      no_eos: [B] bool.
      gamma, lam: in [0, 1].

    Returns:
      advantages and returns, [B, S] float32, 0 outside the mask.

    Raises:
      ValueError: shapes differ.

    Source: Schulman et al. 2016, arXiv:1506.02438 eq. 16.
    """
    if not rewards.shape == values.shape == mask.shape or no_eos.shape != mask.shape[:1]:
        raise ValueError(
            f"rewards {tuple(rewards.shape)}, values {tuple(values.shape)} and mask "
            f"{tuple(mask.shape)} must be [B, S], no_eos {tuple(no_eos.shape)} [B]"
        )
    num_rows, width = mask.shape
    rewards, values = rewards.float(), values.float()
    last = torch.where(mask, torch.arange(width, device=mask.device), -1).amax(dim=1)
    cut_state = (last + 1).clamp(max=width - 1)
    bootstrap = values.gather(1, cut_state[:, None])[:, 0]
    next_value = torch.where(no_eos & (last + 1 < width), bootstrap, 0.0)
    next_advantage = rewards.new_zeros(num_rows)
    advantages = torch.zeros_like(rewards)
    for t in reversed(range(width)):
        counts = mask[:, t]
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        here = delta + gamma * lam * next_advantage
        advantages[:, t] = torch.where(counts, here, 0.0)
        next_advantage = torch.where(counts, here, next_advantage)
        next_value = torch.where(counts, values[:, t], next_value)
    return advantages, torch.where(mask, advantages + values, 0.0)

"""Estimators of KL(p || q) from one sample of p a token.

With d = log p(x) - log q(x), x drawn from p (Schulman 2020, "Approximating KL divergence"):

    k1 = d                  unbiased, may be negative
    k2 = d^2 / 2            biased, never negative
    k3 = exp(-d) - 1 + d    unbiased, never negative

As a LOSS, differentiated through log p: k1's gradient is that of log p(x), whose expectation
is 0 (it only adds noise); k2's is an unbiased gradient of KL(p || q); k3's is that of
KL(q || p). As a REWARD, undifferentiated, k1 and k3 are unbiased. Where the clamp below
holds, every gradient is 0.
"""

from typing import Literal

import torch
from torch import Tensor

Estimator = Literal["k1", "k2", "k3"]

_BOUND = 10.0


def kl_estimate(logp: Tensor, base_logp: Tensor, kind: Estimator) -> Tensor:
    """Per-token estimate of KL(p || base), clamped to [-10, 10] nats.

    Args:
      logp, base_logp: one shape, float, nats; of tokens sampled from p.

    Raises:
      ValueError: shapes differ, or `kind` is unknown.

    Source: joschu.net/blog/kl-approx.html; the clamp is AReaL's, against one token of
      probability near 0 deciding the batch.
    """
    if logp.shape != base_logp.shape:
        raise ValueError(f"logp {tuple(logp.shape)} and base {tuple(base_logp.shape)} differ")
    gap = logp.float() - base_logp.float()
    if kind == "k1":
        value = gap
    elif kind == "k2":
        value = gap.square() / 2
    elif kind == "k3":
        # Past the clamp at 10 already; exp of more overflows, and 0 * inf in backward is nan.
        gap = gap.clamp(min=-2 * _BOUND)
        value = torch.expm1(-gap) + gap
    else:
        raise ValueError(f"kind must be k1, k2 or k3, got {kind!r}")
    return value.clamp(-_BOUND, _BOUND)

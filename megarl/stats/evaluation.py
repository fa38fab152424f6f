"""What held-out samples say of a model: mean@n, pass@k, and how sure that is.

P  prompts     n  samples asked of each     c_p  of these that succeed (reward >= threshold)

    mean@n   mean over prompts of the mean reward of a prompt's n samples
    pass@k   mean over prompts of 1 - C(n - c_p, k) / C(n, k): the chance that of k samples of a
             prompt at least one succeeds, without bias (Chen et al., arXiv:2107.03374 eq. 1)

Samples of one prompt resemble each other, prompts are drawn independently: so a prompt is one
observation x_p, and the standard error is that of a mean of P observations,

    se = sqrt( sum_p (x_p - mean)^2 / (P (P - 1)) )                                           (1)

For clusters of one size this is the clustered error of Miller, arXiv:2411.00640 eq. 4, times
sqrt(P / (P - 1)).

A sample without a score (its request or its reward failed) counts as reward 0 and as no success:
it stays in the denominator, so that a model cannot gain by failing. `num_failed` tells how many.
Everything is float64 and on one process; imports no torch.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any

FAILED_REWARD = 0.0
"""Of a sample without a score."""
CONFIDENCE = 0.95
_Z = NormalDist().inv_cdf(0.5 + CONFIDENCE / 2)


@dataclass(frozen=True)
class Estimate:
    """A mean over prompts with its 95% interval; all but `value` are nan for a single prompt."""

    value: float
    se: float
    low: float
    high: float


@dataclass(frozen=True)
class PromptScores:
    """The scored samples of one prompt, a place each in every list."""

    row_id: Any
    rewards: list[float]
    response_tokens: list[int]
    no_eos: list[bool]
    """Cut by the length limit."""


@dataclass(frozen=True)
class Evaluation:
    """Held-out samples under one version."""

    prompts: list[PromptScores]
    """Every prompt that was asked; one whose episode failed has no rewards."""
    n_samples: int
    """n, asked of each prompt."""
    success_threshold: float

    @property
    def mean(self) -> Estimate:
        """mean@n."""
        return mean_estimate(self.prompt_means())

    @property
    def reward(self) -> float:
        """mean@n without its error."""
        return self.mean.value

    @property
    def pass_at(self) -> dict[int, Estimate]:
        """pass@k for k = 1, 2, 4, ... <= n.

        None at all if a prompt has more rows than n: which of a workflow's rows make up one
        sample is not known.
        """
        if any(len(prompt.rewards) > self.n_samples for prompt in self.prompts):
            return {}
        ks = [1 << i for i in range(self.n_samples.bit_length())]
        return {k: share_estimate(self.prompt_passes(k)) for k in ks}

    def prompt_means(self) -> list[float]:
        """[P], the mean reward of each prompt."""
        return [
            (math.fsum(x.rewards) + self._missing(x) * FAILED_REWARD)
            / (len(x.rewards) + self._missing(x))
            for x in self.prompts
        ]

    def prompt_passes(self, k: int) -> list[float]:
        """[P], pass@k of each prompt."""
        limit = self.success_threshold
        successes = [sum(reward >= limit for reward in x.rewards) for x in self.prompts]
        return [pass_at_k(self.n_samples, c, k) for c in successes]

    def _missing(self, prompt: PromptScores) -> int:
        return max(0, self.n_samples - len(prompt.rewards))

    @property
    def num_episodes(self) -> int:
        """Samples with a score."""
        return sum(len(prompt.rewards) for prompt in self.prompts)

    @property
    def num_failed(self) -> int:
        """Samples that were asked and have no score."""
        return sum(self._missing(prompt) for prompt in self.prompts)

    @property
    def response_tokens(self) -> float:
        """Mean length of a scored response."""
        return _mean([float(n) for prompt in self.prompts for n in prompt.response_tokens])

    @property
    def no_eos_ratio(self) -> float:
        """Share of the scored responses that the length limit cut."""
        return _mean([float(cut) for prompt in self.prompts for cut in prompt.no_eos])

    def metrics(self) -> dict[str, float]:
        """As a row of metrics.jsonl has it."""
        mean = self.mean
        row = {
            "eval/reward": mean.value,
            "eval/reward_se": mean.se,
            "eval/response_tokens": self.response_tokens,
            "eval/no_eos_ratio": self.no_eos_ratio,
            "eval/num_prompts": len(self.prompts),
            "eval/num_episodes": self.num_episodes,
            "eval/failed": self.num_failed,
            "eval-rollout/reward": mean.value,
        }
        for k, share in self.pass_at.items():
            row[f"eval/pass@{k}"] = share.value
            row[f"eval/pass@{k}_low"], row[f"eval/pass@{k}_high"] = share.low, share.high
        return row


def pass_at_k(n: int, c: int, k: int) -> float:
    """The chance that k of n samples, of which c succeed, hold a success.

    Raises:
      ValueError: not 1 <= k <= n, or not 0 <= c <= n.
    """
    if not (1 <= k <= n and 0 <= c <= n):
        raise ValueError(f"need 1 <= k <= n and 0 <= c <= n, got n {n}, c {c}, k {k}")
    # Integers of any size: no rounding before the division.
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def mean_estimate(values: Sequence[float]) -> Estimate:
    """The mean of one value a prompt, (1), and mean +- 1.96 se.

    That is the central limit theorem's interval: right for some hundred prompts, too narrow for
    a few dozen.

    Raises:
      ValueError: there are no values.
    """
    mean, se = _mean_and_se(values)
    return Estimate(mean, se, mean - _Z * se, mean + _Z * se)


def share_estimate(values: Sequence[float]) -> Estimate:
    """As `mean_estimate`, for values in [0, 1]; the interval is in [0, 1] too.

    Wilson's score interval for the sample size m that would give this error to independent
    trials, m = mean (1 - mean) / se^2. pass@k is often near 0 or 1, where mean +- 1.96 se is too
    narrow or, if all prompts agree, has no width; then m = P, which is the least it can be. For
    shares within a few prompts of 0 or 1 it holds the truth 90% to 99% of the time.

    Source: Franco et al. 2019, J. Surv. Stat. Methodol. 7(3), sec. 2 (intervals of shares under
    clustering, by effective sample size); for model evaluations arXiv:2503.01747.
    """
    mean, se = _mean_and_se(values)
    if math.isnan(se):
        return Estimate(mean, se, math.nan, math.nan)
    m = mean * (1 - mean) / se**2 if se > 0 else float(len(values))
    centre = (mean + _Z**2 / (2 * m)) / (1 + _Z**2 / m)
    half = _Z * math.sqrt(mean * (1 - mean) / m + _Z**2 / (4 * m**2)) / (1 + _Z**2 / m)
    # Wilson's holds the mean, but for the last bit of centre - half.
    low, high = min(mean, centre - half), max(mean, centre + half)
    return Estimate(mean, se, max(0.0, low), min(1.0, high))


def compare(before: Evaluation, after: Evaluation) -> tuple[int, dict[str, Estimate]]:
    """after - before, prompt by prompt: what is hard for both then adds nothing to the error.

    Success is by the threshold of `after`, in both.

    Returns:
      the number of prompts that both have, and the differences by name: mean@n, pass@k.

    Raises:
      ValueError: no prompt is in both, or a row_id stands for two.
    """
    old, new = _by_row_id(before), _by_row_id(after)
    shared = [row_id for row_id in new if row_id in old]
    if not shared:
        raise ValueError("the two evaluations have no row_id in common")
    before = replace(
        before,
        prompts=[old[row_id] for row_id in shared],
        success_threshold=after.success_threshold,
    )
    after = replace(after, prompts=[new[row_id] for row_id in shared])
    pairs = {mean_name(before, after): (before.prompt_means(), after.prompt_means())}
    for k in before.pass_at.keys() & after.pass_at.keys():
        pairs[f"pass@{k}"] = before.prompt_passes(k), after.prompt_passes(k)
    differences = {
        name: mean_estimate([y - x for x, y in zip(*both, strict=True)])
        for name, both in sorted(pairs.items(), key=_by_k)
    }
    return len(shared), differences


def mean_name(*evaluations: Evaluation) -> str:
    """`mean@4`; `mean@1, mean@4` of two that differ."""
    return ", ".join(dict.fromkeys(f"mean@{x.n_samples}" for x in evaluations))


def _by_k(item: tuple[str, Any]) -> tuple[bool, int]:
    kind, _, k = item[0].rpartition("@")
    return kind == "pass", int(k)


def _by_row_id(evaluation: Evaluation) -> dict[Any, PromptScores]:
    found = {prompt.row_id: prompt for prompt in evaluation.prompts}
    if len(found) < len(evaluation.prompts):
        raise ValueError(
            f"{len(evaluation.prompts)} prompts have {len(found)} row_ids: they cannot be paired"
        )
    return found


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan


def _mean_and_se(values: Sequence[float]) -> tuple[float, float]:
    if not values:
        raise ValueError("an evaluation without prompts has no mean")
    mean, count = _mean(values), len(values)
    if count == 1:
        return mean, math.nan
    return mean, math.sqrt(math.fsum((x - mean) ** 2 for x in values) / (count * (count - 1)))

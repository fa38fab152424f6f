"""Rewards, GAE and normalisation against slow float64 loops."""

import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.algorithms.advantages import gae
from megarl.algorithms.normalization import normalize
from megarl.algorithms.rewards import shape_rewards, token_rewards


def make_rows(seed=0, rows=6, width=15):
    g = torch.Generator().manual_seed(seed)
    mask = torch.rand(rows, width, generator=g) < 0.6  # gaps: a tool answered in between
    mask[0] = False
    mask[1, -1] = True
    rewards = torch.randn(rows, width, generator=g) * mask
    values = torch.randn(rows, width, generator=g)
    no_eos = torch.rand(rows, generator=g) < 0.5
    return rewards, values, mask, no_eos


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.8), (1.0, 0.0)])
def test_gae_matches_the_sum_of_eq_16(seed, gamma, lam):
    """A_t = sum_l (gamma lam)^l delta_{t + l}, over the row's masked tokens only."""
    rewards, values, mask, no_eos = make_rows(seed)
    advantages, returns = gae(rewards, values, mask, no_eos, gamma=gamma, lam=lam)
    for row in range(mask.shape[0]):
        steps = mask[row].nonzero()[:, 0].tolist()
        bootstrap = 0.0
        if steps and no_eos[row] and steps[-1] + 1 < mask.shape[1]:
            bootstrap = values[row, steps[-1] + 1].item()
        after = [values[row, t].item() for t in steps[1:]] + [bootstrap]
        deltas = (
            [
                rewards[row, t].item() + gamma * v - values[row, t].item()
                for t, v in zip(steps, after, strict=bool(steps))
            ]
            if steps
            else []
        )
        for k, t in enumerate(steps):
            want = sum((gamma * lam) ** j * d for j, d in enumerate(deltas[k:]))
            # float32, a backward sum of at most 15 terms
            assert advantages[row, t].item() == pytest.approx(want, rel=1e-4, abs=1e-5)
            total = want + values[row, t].item()
            assert returns[row, t].item() == pytest.approx(total, rel=1e-4, abs=1e-5)
    assert not advantages[~mask].any()
    assert not returns[~mask].any()


def test_without_a_critic_the_outcome_reaches_every_token():
    mask = torch.tensor([[False, True, True, False, True]])
    rewards = token_rewards(
        torch.tensor([2.0]),
        mask,
        torch.tensor([False]),
        logp=torch.zeros(1, 5),
        ref_logp=None,
    )
    assert rewards.tolist() == [[0, 0, 0, 0, 2]]
    advantages, _ = gae(rewards, torch.zeros(1, 5), mask, torch.tensor([False]), gamma=1.0, lam=1.0)
    assert advantages.tolist() == [[0, 2, 2, 0, 2]]


def test_kl_reward_and_cut_episodes():
    mask = torch.tensor([[True, True, False], [True, False, False], [False, False, False]])
    logp = torch.tensor([[-1.0, -2.0, torch.nan]] * 3)
    ref = torch.tensor([[-1.5, -1.0, torch.nan]] * 3)
    got = token_rewards(
        torch.tensor([1.0, 1.0, 1.0]),
        mask,
        torch.tensor([True, False, False]),
        logp=logp,
        ref_logp=ref,
        kl_ctl=0.1,
        kl_estimator="k1",
        mask_no_eos_with_zero=True,
    )
    want = torch.tensor([[-0.05, 0.1, 0.0], [-0.05 + 1.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    torch.testing.assert_close(got, want)
    with pytest.raises(ValueError, match="needs ref_logp"):
        token_rewards(
            torch.ones(3), mask, torch.zeros(3).bool(), logp=logp, ref_logp=None, kl_ctl=0.1
        )


def test_shaped_rewards_by_hand():
    got = shape_rewards(
        torch.tensor([1.0, 1.0, 1.0, 100.0]),
        torch.tensor([50, 90, 100, 10]),
        max_response_tokens=100,
        scaling=10.0,
        bias=-0.5,
        clip=20.0,
        overlong_tokens=20,
        overlong_penalty_factor=1.0,
    )
    # 0, a half, and all of the penalty; then the clip.
    torch.testing.assert_close(got, torch.tensor([5.0, 0.0, -5.0, 20.0]))
    with pytest.raises(ValueError, match="go together"):
        shape_rewards(torch.ones(1), torch.ones(1), max_response_tokens=4, overlong_tokens=2)


# ---------------------------------------------------------------- normalisation

OPTIONS = [
    {"mean_level": mean, "mean_leave1out": leave, "std_level": std, "std_unbiased": unbiased}
    for mean in ("batch", "group", "none")
    for leave in (False, True)
    for std in ("batch", "group", "none")
    for unbiased in (False, True)
]


def spread(values, mean, unbiased):
    squares = sum((v - mean) ** 2 for v in values)
    return math.sqrt(squares / max(1, len(values) - int(unbiased)))


def slow_normalize(x, mask, groups, *, mean_level, mean_leave1out, std_level, std_unbiased, eps):
    out = []
    for i in range(len(x)):
        if not mask[i]:
            out.append(0.0)
            continue

        def peers(level, i=i):
            return [
                j for j in range(len(x)) if mask[j] and (level == "batch" or groups[j] == groups[i])
            ]

        mean = 0.0
        if mean_level != "none":
            others = [x[j] for j in peers(mean_level) if not (mean_leave1out and j == i)]
            mean = statistics.fmean(others) if others else 0.0
        value = x[i] - mean
        if std_level != "none":
            values = [x[j] for j in peers(std_level)]
            value /= spread(values, statistics.fmean(values), std_unbiased) + eps
        out.append(value)
    return out


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(map(str, o.values())))
@given(seed=st.integers(0, 50), cut=st.integers(0, 20))
def test_normalize_matches_a_loop_for_any_split_over_replicas(options, seed, cut):
    g = torch.Generator().manual_seed(seed)
    num, num_groups = 20, 5
    x = torch.randn(num, generator=g)
    mask = torch.rand(num, generator=g) < 0.8
    groups = torch.randint(0, num_groups, (num,), generator=g)
    want = slow_normalize(x.tolist(), mask.tolist(), groups.tolist(), eps=1e-5, **options)
    # Two replicas in one process: each call to all_reduce gives the other's sums as well.
    shares = [slice(0, cut), slice(cut, num)]
    other_sums: list[list[torch.Tensor]] = [[], []]
    for replica, share in enumerate(shares):
        normalize(
            x[share],
            mask[share],
            groups[share],
            num_groups,
            eps=1e-5,
            **options,
            all_reduce=lambda s, r=replica: other_sums[r].append(s.clone()) or s,
        )
    # Squared deviations need the global mean, so replay with the first sums exchanged.
    got = []
    for replica, share in enumerate(shares):
        calls = iter(range(2))

        def exchange(sums, r=replica, calls=calls):
            if next(calls) == 0:
                return sums + other_sums[1 - r][0]
            return sums + squares_of(shares[1 - r], sums.shape)

        def squares_of(share, shape):
            first = other_sums[0][0] + other_sums[1][0]
            counts, totals = first
            level = options["std_level"]
            ids = groups[share]
            means = totals / counts.clamp(min=1) if level == "group" else None
            centre = means[ids] if level == "group" else totals.sum() / counts.sum().clamp(min=1)
            squares = torch.where(mask[share], (x[share].double() - centre) ** 2, 0.0)
            return torch.zeros(shape, dtype=torch.float64).index_add(0, ids, squares)

        got += normalize(
            x[share],
            mask[share],
            groups[share],
            num_groups,
            eps=1e-5,
            **options,
            all_reduce=exchange,
        ).tolist()
    # float32 results of float64 sums; a group of nearly equal values divides by about eps.
    assert got == pytest.approx(want, rel=1e-4, abs=1e-4)


def test_equal_rewards_give_exactly_zero():
    x = torch.full((8,), 0.1)
    got = normalize(
        x,
        torch.ones(8, dtype=torch.bool),
        torch.arange(8) // 4,
        2,
        mean_level="group",
        mean_leave1out=False,
        std_level="group",
        std_unbiased=True,
        eps=1e-5,
    )
    assert torch.equal(got, torch.zeros(8))


def test_shapes_are_checked():
    with pytest.raises(ValueError, match="must have one shape"):
        normalize(
            torch.zeros(3),
            torch.ones(2).bool(),
            torch.zeros(3).long(),
            1,
            mean_level="batch",
            mean_leave1out=False,
            std_level="batch",
            std_unbiased=True,
            eps=1e-5,
        )
    with pytest.raises(ValueError, match=r"must be \[B, S\]"):
        gae(
            torch.zeros(2, 3),
            torch.zeros(2, 3),
            torch.ones(2, 4).bool(),
            torch.ones(2).bool(),
            gamma=1.0,
            lam=1.0,
        )

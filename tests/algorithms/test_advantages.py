"""Rewards, GAE and normalisation against slow float64 loops."""

import concurrent.futures
import math
import statistics
import threading
from functools import partial

import pytest
import torch
from hypothesis import given, settings
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
            std = spread(values, statistics.fmean(values), std_unbiased)
            value /= std + eps if std else 1.0
        out.append(value)
    return out


class Replicas:
    """Data-parallel replicas as threads; their all_reduce waits for all of them."""

    def __init__(self, num):
        self.num, self.slots = num, [None] * num
        self.barrier = threading.Barrier(num, timeout=60)

    def run(self, function):
        """[function(replica, all_reduce)] of every replica."""
        with concurrent.futures.ThreadPoolExecutor(self.num) as pool:
            return list(pool.map(lambda r: function(r, partial(self._sum, r)), range(self.num)))

    def _sum(self, replica, x):
        self.slots[replica] = x.clone()
        self.barrier.wait()
        total = sum(self.slots)
        self.barrier.wait()
        return total


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(map(str, o.values())))
@settings(max_examples=25)
@given(seed=st.integers(0, 1000))
def test_normalize_matches_a_loop_for_any_split_over_replicas(options, seed):
    g = torch.Generator().manual_seed(seed)
    num, num_groups = 20, 7  # groups lose members, some are alone, some are gone
    x = torch.randn(num, generator=g).round(decimals=1)
    mask = torch.rand(num, generator=g) < 0.7
    groups = torch.randint(0, num_groups, (num,), generator=g)
    home = torch.randint(0, 3, (num,), generator=g)
    want = slow_normalize(x.tolist(), mask.tolist(), groups.tolist(), eps=1e-5, **options)
    holes = torch.where(mask, x, torch.nan)

    def share(replica, all_reduce):
        rows = home == replica
        return normalize(
            holes[rows],
            mask[rows],
            groups[rows],
            num_groups,
            eps=1e-5,
            **options,
            all_reduce=all_reduce,
        )

    got = torch.zeros(num)
    for replica, part in enumerate(Replicas(3).run(share)):
        got[home == replica] = part
    # One rounding to float32 at the end.
    assert got.tolist() == pytest.approx(want, rel=1e-5, abs=1e-6)


GRPO = {"mean_level": "group", "mean_leave1out": False, "std_level": "group", "std_unbiased": True}


@pytest.mark.parametrize("leave1out", [False, True])
@pytest.mark.parametrize("std_level", ["batch", "group", "none"])
@given(value=st.floats(-100, 100, width=32), sizes=st.lists(st.integers(2, 9), min_size=1))
def test_equal_rewards_give_exactly_zero(value, sizes, leave1out, std_level):
    groups = torch.repeat_interleave(torch.tensor(sizes))
    x = torch.full(groups.shape, value)
    options = GRPO | {"mean_leave1out": leave1out, "std_level": std_level}
    got = normalize(x, torch.ones_like(x).bool(), groups, len(sizes), eps=1e-5, **options)
    assert torch.equal(got, torch.zeros(got.shape))


@pytest.mark.parametrize(
    ("options", "want"),
    [({}, 0.0), ({"mean_leave1out": True}, 0.7), ({"mean_level": "none"}, 0.7)],
)
def test_a_member_alone_is_not_divided_by_eps(options, want):
    got = normalize(
        torch.tensor([0.7]),
        torch.tensor([True]),
        torch.tensor([0]),
        1,
        eps=1e-5,
        **(GRPO | options),
    )
    assert got.item() == pytest.approx(want)


def test_results_stay_on_the_device_of_the_arguments():
    """A tensor made on the default device instead would be a meta tensor, and raise."""
    rewards, values, mask, no_eos = make_rows()
    groups = torch.arange(len(mask))[:, None].expand(mask.shape) // 2
    with torch.device("meta"):
        made = [
            *gae(rewards, values, mask, no_eos, gamma=1.0, lam=1.0),
            normalize(values, mask, groups, 3, eps=1e-5, **GRPO),
            token_rewards(no_eos.float(), mask, no_eos, logp=values, ref_logp=values, kl_ctl=0.1),
            token_rewards(no_eos.float(), mask, no_eos, logp=values, ref_logp=None),
        ]
    assert {x.device.type for x in made} == {"cpu"}


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

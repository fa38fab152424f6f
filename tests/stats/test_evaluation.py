"""mean@n and pass@k against enumeration, their intervals against simulation, paired differences."""

import itertools
import math
import random
import statistics

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from megarl.stats.evaluation import (
    Evaluation,
    PromptScores,
    compare,
    mean_estimate,
    pass_at_k,
    share_estimate,
)


def evaluation(*rewards, n_samples=None, threshold=1.0, ids=None):
    """One list of rewards a prompt; each response has 4 tokens, and is cut if its reward is 0."""
    prompts = [
        PromptScores(row_id, list(of_one), [4] * len(of_one), [r == 0 for r in of_one])
        for row_id, of_one in zip(ids or range(len(rewards)), rewards, strict=True)
    ]
    return Evaluation(prompts, n_samples or max(map(len, rewards)), threshold)


@given(st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))))
def test_pass_at_k_is_the_share_of_all_subsets_that_hold_a_success(n_and_c):
    n, c = n_and_c
    for k in range(1, n + 1):
        subsets = list(itertools.combinations([True] * c + [False] * (n - c), k))
        assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-15)


def test_pass_at_k_of_many_samples_does_not_overflow():
    assert pass_at_k(5000, 1, 2500) == 0.5
    assert pass_at_k(5000, 2501, 2500) == 1.0


@pytest.mark.parametrize(("n", "c", "k"), [(3, 1, 0), (3, 1, 4), (3, 4, 1), (3, -1, 1)])
def test_what_pass_at_k_is_not_defined_for_is_refused(n, c, k):
    with pytest.raises(ValueError, match=f"got n {n}, c {c}, k {k}"):
        pass_at_k(n, c, k)


def test_the_ks_are_the_powers_of_two_that_the_samples_allow():
    for n, ks in ((1, [1]), (4, [1, 2, 4]), (7, [1, 2, 4]), (8, [1, 2, 4, 8])):
        assert list(evaluation([0.0] * n, [1.0] * n).pass_at) == ks


def test_a_success_is_a_reward_that_reaches_the_threshold():
    graded = [[0.2, 0.5], [0.7, 0.1]]
    assert evaluation(*graded, threshold=0.5).pass_at[1].value == 0.5
    assert evaluation(*graded, threshold=0.6).pass_at[1].value == 0.25
    assert evaluation(*graded, threshold=0.6).pass_at[2].value == 0.5


@given(st.lists(st.lists(st.floats(-2, 2), min_size=3, max_size=3), min_size=2, max_size=8))
def test_the_error_is_that_of_clustered_samples(rewards):
    """Miller, eq. 4, as the sum over all pairs of samples of one prompt."""
    got = evaluation(*rewards).mean
    samples = [r for of_one in rewards for r in of_one]
    mean, count = statistics.fmean(samples), len(samples)
    pairs = sum((x - mean) * (y - mean) for of_one in rewards for x in of_one for y in of_one)
    clusters = len(rewards)
    want = math.sqrt(max(0.0, pairs)) / count * math.sqrt(clusters / (clusters - 1))
    assert got.value == pytest.approx(mean, abs=1e-12)
    assert got.se == pytest.approx(want, abs=1e-7)


def test_copies_of_a_sample_add_no_certainty():
    once = evaluation([0.0], [1.0], [1.0], [0.0], [1.0]).mean
    eight_times = evaluation(*([r] * 8 for r in (0.0, 1.0, 1.0, 0.0, 1.0))).mean
    assert eight_times.value == once.value
    assert eight_times.se == pytest.approx(once.se, rel=1e-12)


def coverage(estimate, num_prompts, num_samples, k, a, b, truth):
    """Share of 2,000 simulated evaluations whose interval holds the truth."""
    rng = random.Random(3)
    hits = 0
    for _ in range(2000):
        values = []
        for _ in range(num_prompts):
            chance = rng.betavariate(a, b)
            successes = sum(rng.random() < chance for _ in range(num_samples))
            values.append(pass_at_k(num_samples, successes, k))
        found = estimate(values)
        hits += found.low <= truth <= found.high
    return hits / 2000


def truth_of(a, b, k):
    """1 - E[(1 - p)^k] of p ~ Beta(a, b)."""
    return 1 - math.prod((b + i) / (a + b + i) for i in range(k))


@pytest.mark.parametrize(
    ("num_prompts", "num_samples", "k", "a", "b"),
    [(64, 4, 1, 0.5, 0.5), (64, 4, 4, 0.5, 0.5), (200, 4, 1, 0.2, 6), (256, 8, 8, 2, 0.3)],
)
def test_a_shares_interval_holds_the_truth_as_often_as_it_says(num_prompts, num_samples, k, a, b):
    """2,000 trials: one standard error is 0.005."""
    share = coverage(share_estimate, num_prompts, num_samples, k, a, b, truth_of(a, b, k))
    assert 0.93 <= share <= 0.985


def test_mean_plus_minus_two_errors_fails_near_1_where_wilsons_does_not():
    """Why pass@k has the other interval."""
    case = (256, 8, 8, 2, 0.3, truth_of(2, 0.3, 8))
    assert coverage(mean_estimate, *case) < 0.8 < 0.93 < coverage(share_estimate, *case)


def test_the_means_interval_holds_the_truth_as_often_as_it_says():
    assert 0.93 <= coverage(mean_estimate, 200, 4, 1, 1.0, 2.0, truth_of(1.0, 2.0, 1)) <= 0.97


@given(st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=2, max_size=40))
@example([0.0] * 5)
def test_a_shares_interval_stays_in_0_to_1_and_has_a_width(values):
    found = share_estimate(values)
    assert 0.0 <= found.low <= found.value <= found.high <= 1.0
    assert found.high - found.low > 0.01


def test_one_prompt_has_no_error():
    found = evaluation([1.0, 0.0])
    assert found.reward == 0.5
    assert math.isnan(found.mean.se)
    assert math.isnan(found.pass_at[2].low)


def test_samples_without_a_score_stay_in_the_denominator():
    """One prompt failed as a whole, of another one sample did."""
    found = evaluation([1.0, 1.0], [1.0], [], n_samples=2)
    assert found.num_failed == 3
    assert found.num_episodes == 3
    assert found.reward == pytest.approx((1.0 + 0.5 + 0.0) / 3)
    assert found.pass_at[1].value == pytest.approx((1.0 + 0.5 + 0.0) / 3)
    assert found.pass_at[2].value == pytest.approx(2 / 3)
    row = found.metrics()
    assert (row["eval/failed"], row["eval/num_prompts"], row["eval/num_episodes"]) == (3, 3, 3)


def test_lengths_are_those_of_the_scored_responses():
    found = evaluation([0.0, 1.0], [], n_samples=2)
    assert found.response_tokens == 4.0
    assert found.no_eos_ratio == 0.5


def test_more_rows_than_samples_are_turns_and_have_no_pass_at_k():
    found = evaluation([1.0, 1.0, 0.0], [1.0], n_samples=1)
    assert found.pass_at == {}
    assert found.num_failed == 0
    assert found.reward == pytest.approx((2 / 3 + 1) / 2)


def test_a_difference_is_paired_by_row_id():
    """Each prompt gains 0.5: what the prompts differ in is no error of the difference."""
    before = evaluation([0.0], [0.5], [0.25], [0.9], ids=[3, 1, 2, 7])
    after = evaluation([1.0], [0.5], [0.75], [0.0], ids=[1, 3, 2, 8])
    num_pairs, differences = compare(before, after)
    assert num_pairs == 3
    gain = differences["mean@1"]
    assert (gain.value, gain.se, gain.low, gain.high) == (0.5, 0.0, 0.5, 0.5)
    assert list(differences) == ["mean@1", "pass@1"]
    assert differences["pass@1"].value == pytest.approx(1 / 3)


def test_evaluations_of_other_numbers_of_samples_share_what_both_have():
    before = evaluation([0.0, 1.0], [1.0, 1.0])
    after = evaluation([1.0] * 4, [0.0] * 4)
    _, differences = compare(before, after)
    assert list(differences) == ["mean@2, mean@4", "pass@1", "pass@2"]
    assert differences["pass@2"].value == -0.5


def test_what_cannot_be_paired_is_refused():
    with pytest.raises(ValueError, match="no row_id in common"):
        compare(evaluation([1.0], ids=[1]), evaluation([1.0], ids=[2]))
    with pytest.raises(ValueError, match="2 prompts have 1 row_ids"):
        compare(evaluation([1.0]), evaluation([1.0], [0.0], ids=[4, 4]))

"""Planners of data/packing.py: every index once, bounds kept, even shares."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.data.packing import pack, partition, split_batch

lengths_strategy = st.lists(st.integers(0, 50), min_size=1, max_size=60)


def flat(bins):
    return sorted(i for rows in bins for i in rows)


@given(
    lengths=lengths_strategy,
    max_tokens=st.none() | st.integers(50, 120),
    min_bins=st.integers(1, 6),
    divisor=st.integers(1, 4),
    method=st.sampled_from(["ffd", "kk"]),
)
def test_pack_keeps_every_bound(lengths, max_tokens, min_bins, divisor, method):
    options = {"max_tokens": max_tokens, "min_bins": min_bins, "divisor": divisor}
    fewest = -(-max(min_bins, len(pack(lengths, max_tokens=max_tokens))) // divisor) * divisor
    if fewest > len(lengths):
        with pytest.raises(ValueError, match="cannot fill"):
            pack(lengths, **options, method=method)
        return
    bins = pack(lengths, **options, method=method)
    assert flat(bins) == list(range(len(lengths)))
    assert all(bins)
    assert len(bins) == fewest
    if max_tokens is not None:
        assert all(sum(lengths[i] for i in rows) <= max_tokens for rows in bins)


@given(lengths=st.lists(st.integers(1, 50), min_size=1, max_size=60), bound=st.integers(50, 200))
def test_first_fit_decreasing_leaves_at_most_one_bin_half_empty(lengths, bound):
    bins = pack(lengths, max_tokens=bound)
    half_empty = [rows for rows in bins if sum(lengths[i] for i in rows) * 2 <= bound]
    assert len(half_empty) <= 1


def test_first_fit_decreasing_is_first_fit():
    # 60 opens bin 0, 50 opens bin 1, 40 fits bin 0, 30 and 20 fit bin 1.
    assert pack([50, 20, 60, 30, 40], max_tokens=100) == [[2, 4], [0, 3, 1]]


@given(lengths=lengths_strategy, num_bins=st.integers(1, 8))
def test_partition_is_even(lengths, num_bins):
    bins = partition(lengths, num_bins)
    assert flat(bins) == list(range(len(lengths)))
    assert len(bins) == num_bins
    assert all(bins) or len(lengths) < num_bins
    sums = [sum(lengths[i] for i in rows) for rows in bins]
    assert max(sums) - min(sums) <= max(lengths)


@pytest.mark.parametrize(
    ("lengths", "want"),
    [  # largest-first to the lighter bin gives 13 and 17, and 15 and 17
        ([8, 7, 6, 5, 4], [14, 16]),
        ([4, 5, 6, 7, 8, 2], [16, 16]),
    ],
)
def test_partition_is_more_even_than_greedy(lengths, want):
    assert sorted(sum(lengths[i] for i in rows) for rows in partition(lengths, 2)) == want


def test_kk_packs_evenly_and_as_ffd_where_that_overflows():
    lengths = [40, 30, 30, 20, 20, 10]
    sums = [sum(lengths[i] for i in rows) for rows in pack(lengths, max_tokens=90, method="kk")]
    assert sums == [80, 70]
    # Differencing gives 14 and 16; 15 and 15 is first-fit's.
    tight = [8, 7, 6, 5, 4]
    assert pack(tight, max_tokens=15, method="kk") == pack(tight, max_tokens=15)


@given(
    lengths=st.lists(st.integers(1, 50), min_size=24, max_size=60),
    dp=st.integers(1, 4),
    n_minibatches=st.integers(1, 6),
    seed=st.integers(0, 3),
)
def test_minibatches_do_not_depend_on_the_number_of_replicas(lengths, dp, n_minibatches, seed):
    split = split_batch(lengths, dp=dp, n_minibatches=n_minibatches, seed=seed)
    alone = split_batch(lengths, dp=1, n_minibatches=n_minibatches, seed=seed)[0]
    for i in range(n_minibatches):
        assert sorted(row for replica in split for row in replica[i]) == alone[i]
        assert all(replica[i] for replica in split)
    assert flat(alone) == list(range(len(lengths)))
    sizes = [len(rows) for rows in alone]
    assert max(sizes) - min(sizes) <= 1


@given(
    rows=st.lists(st.tuples(*[st.integers(0, 50)] * 4), min_size=12, max_size=30),
    granularity=st.integers(1, 4),
    dp=st.integers(1, 4),
    n_minibatches=st.integers(1, 3),
    seed=st.integers(0, 3),
)
def test_groups_are_never_torn(rows, granularity, dp, n_minibatches, seed):
    """Groups of unequal rows go where their sums would go as single rows."""
    lengths = [length for group in rows for length in group[:granularity]]
    sums = [sum(group[:granularity]) for group in rows]
    options = {"dp": dp, "n_minibatches": n_minibatches, "seed": seed}
    split = split_batch(lengths, granularity=granularity, **options)
    groups = [
        [[rows[i : i + granularity] for i in range(0, len(rows), granularity)] for rows in replica]
        for replica in split
    ]
    for group in (group for replica in groups for minibatch in replica for group in minibatch):
        assert group == list(range(group[0], group[0] + granularity))
        assert group[0] % granularity == 0
    assert flat(rows for replica in split for rows in replica) == list(range(len(lengths)))
    heads = [[[g[0] // granularity for g in m] for m in replica] for replica in groups]
    assert heads == split_batch(sums, **options)
    for i in range(n_minibatches):
        weights = [sum(lengths[row] for row in replica[i]) for replica in split]
        drawn = [sums[head] for replica in heads for head in replica[i]]
        assert max(weights) - min(weights) <= max(drawn)


@given(
    lengths=st.lists(st.integers(0, 50), min_size=12, max_size=60),
    dp=st.integers(1, 4),
    n_minibatches=st.integers(1, 3),
    seed=st.integers(0, 3),
)
def test_without_granularity_rows_go_where_they_always_went(lengths, dp, n_minibatches, seed):
    order = list(range(len(lengths)))
    if n_minibatches > 1:
        random.Random(seed).shuffle(order)
    got = split_batch(lengths, dp=dp, n_minibatches=n_minibatches, seed=seed)
    for i in range(n_minibatches):
        rows = sorted(order[i::n_minibatches])
        shares = partition([lengths[row] for row in rows], dp)
        assert [replica[i] for replica in got] == [[rows[j] for j in share] for share in shares]


def test_what_cannot_be_packed_is_named():
    with pytest.raises(ValueError, match=r"sequence 1 has 12 tokens, more than .* 10"):
        pack([3, 12], max_tokens=10)
    with pytest.raises(ValueError, match="2 sequences cannot fill 3"):
        pack([3, 3], max_tokens=10, min_bins=3)
    with pytest.raises(ValueError, match="minibatch 0 has 1 sequences for 2 replicas"):
        split_batch([1, 1], dp=2, n_minibatches=2, seed=0)
    with pytest.raises(ValueError, match="5 sequences are not a multiple of granularity 2"):
        split_batch([1] * 5, dp=1, n_minibatches=1, seed=0, granularity=2)
    with pytest.raises(ValueError, match="0 has 1 groups of 4 sequences for 2 replicas"):
        split_batch([1] * 4, dp=2, n_minibatches=1, seed=0, granularity=4)
    with pytest.raises(ValueError, match="granularity 0"):
        split_batch([1], dp=1, n_minibatches=1, seed=0, granularity=0)

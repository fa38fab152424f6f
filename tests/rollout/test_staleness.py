"""The admission formula, and what it promises: no batch holds an episode that is too old."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.rollout.staleness import RolloutCounts, StalenessManager


def test_capacity_by_hand():
    manager = StalenessManager(max_concurrent_rollouts=10, consumer_batch_size=4, max_staleness=1)
    assert manager.capacity(0) == 8  # (1 + 0 + 1) * 4
    for _ in range(8):
        manager.on_submitted()
        manager.on_started(0)
    assert manager.capacity(0) == 0
    assert manager.capacity(1) == 2  # 4 more by version, 2 more by concurrency
    manager.on_accepted(0)
    assert manager.capacity(0) == 0  # accepted ones stay in the sum
    manager.on_rejected(0)
    assert manager.capacity(0) == 1  # rejected ones leave it
    assert manager.counts == RolloutCounts(submitted=8, running=6, accepted=1, rejected=1)
    assert manager.pending_limit == 8


def test_recovery_counts_consumed_batches_as_accepted():
    manager = StalenessManager(100, 4, 0)
    manager.on_version_recovered(5)
    assert manager.capacity(5) == 4


def test_the_bound_counts_from_the_version_at_which_the_pool_begins():
    manager = StalenessManager(100, 4, 1)
    manager.on_version(99)
    manager.on_submitted()
    manager.on_version(100)
    assert manager.capacity(100) == 8
    manager.on_started(100)
    manager.on_version(101)
    assert manager.capacity(101) == 12 - 1
    manager.on_version_recovered(5)
    manager.on_version(5)
    assert manager.capacity(5) == 8 - 1  # that one still runs


@settings(max_examples=400)
@given(data=st.data(), is_dynamic=st.booleans())
def test_no_episode_is_older_than_the_bound_when_it_is_trained_on(data, is_dynamic):
    """A trainer and a pool that interleave in any order; of fixed batches, and of dynamic ones."""
    eta = data.draw(st.integers(0, 3))
    batch = data.draw(st.integers(1, 4))
    manager = StalenessManager(data.draw(st.integers(1, 12)), batch, eta)
    version, running, finished = 0, [], []
    for version in data.draw(st.sampled_from([[0], [0, 1, 2], [100]])):
        manager.on_version(version)  # of steps that were none of this pool's
    for _ in range(data.draw(st.integers(1, 80))):
        choice = data.draw(st.sampled_from(["start", "finish", "reject", "train"]))
        if choice == "start" and manager.capacity(version) > 0:
            manager.on_started(version)
            running.append(version)
        elif choice in ("finish", "reject") and running:
            born = running.pop(data.draw(st.integers(0, len(running) - 1)))
            if choice == "finish":
                manager.on_accepted(born)
            else:
                manager.on_rejected(born, is_spent=is_dynamic)
            if choice == "finish" or is_dynamic:
                finished.append(born)
        elif choice == "train" and len(finished) >= batch and not manager.overdue(version):
            taken, finished = sorted(finished)[:batch], sorted(finished)[batch:]
            # The weights being trained are `version`; the oldest sample is from `born`.
            assert all(version - born <= eta for born in taken)
            version += 1
            manager.on_version(version)
        assert len(running) <= manager.max_concurrent_rollouts
        # The pool never waits for nothing: what runs can end, what ended can be trained on.
        assert running or len(finished) >= batch or manager.capacity(version) > 0
        unused = sum(started <= version - eta for started in running + finished)
        assert unused <= batch


def test_a_step_waits_for_the_episode_that_was_overtaken():
    manager = StalenessManager(max_concurrent_rollouts=8, consumer_batch_size=1, max_staleness=1)
    manager.on_started(0)
    manager.on_started(0)
    manager.on_accepted(0)
    assert manager.overdue(0) == 0  # step 0 may take the first; the second is good for step 1
    manager.on_started(1)
    manager.on_accepted(1)
    assert manager.overdue(1) == 1  # step 1 must not take the younger one instead
    manager.on_accepted(0)
    assert manager.overdue(1) == 0


def test_a_step_waits_for_what_later_steps_have_no_room_for():
    """Two that step 3 would have to take, with a batch of one: step 2 waits for the first."""
    manager = StalenessManager(max_concurrent_rollouts=3, consumer_batch_size=1, max_staleness=3)
    for _ in range(2):
        manager.on_started(0)
    manager.on_started(1)
    manager.on_accepted(1)
    assert [manager.overdue(version) for version in range(4)] == [0, 0, 1, 2]
    manager.on_accepted(0)
    assert [manager.overdue(version) for version in range(4)] == [0, 0, 0, 1]


def test_a_rejected_episode_keeps_its_place_in_a_dynamic_batch():
    manager = StalenessManager(max_concurrent_rollouts=10, consumer_batch_size=4, max_staleness=0)
    for _ in range(4):
        manager.on_started(0)
    manager.on_rejected(0, is_spent=True)
    assert (manager.capacity(0), manager.capacity(1), manager.spent) == (0, 4, 1)
    manager.on_freed(1)
    assert (manager.capacity(0), manager.capacity(1), manager.spent) == (1, 5, 0)
    manager.on_version_recovered(3, submitted=20, rejected=5, spent=5)
    manager.on_restored(is_rejected=True)
    # What runs does not survive a restart; that of this manager was never told to have ended.
    assert (manager.counts.accepted, manager.spent, manager.capacity(3)) == (7, 6, 4 - 1 - 3)


@pytest.mark.parametrize("arguments", [(0, 1, 0), (1, 0, 0), (1, 1, -1)])
def test_wrong_numbers_are_named(arguments):
    with pytest.raises(ValueError, match="max_staleness >= 0, got"):
        StalenessManager(*arguments)

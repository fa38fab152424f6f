"""When a pool is given up: if training episodes do nothing but fail."""

import pytest

from megarl.rollout.failures import MAX_CONSECUTIVE_FAILURES, Failures


def failed(failures, count, *, is_eval=False):
    for _ in range(count):
        failures.on_error(KeyError("x"), is_eval=is_eval)


@pytest.mark.parametrize("num_at_once", [1, 100])
def test_so_many_in_a_row_as_may_run_at_one_time(num_at_once):
    failures = Failures(num_at_once)
    limit = max(MAX_CONSECUTIVE_FAILURES, num_at_once)
    failed(failures, limit - 1)
    assert failures.take_error() is None
    failed(failures, 1)
    error = failures.take_error()
    assert f"the last {limit} episodes all failed, the last with KeyError" in str(error)
    assert isinstance(error.__cause__, KeyError)
    assert failures.take_error() is None
    assert failures.reasons == {"KeyError": limit}


def test_a_success_takes_the_error_back():
    """A burst of failures may come while nobody waits for episodes."""
    failures = Failures(1)
    failed(failures, MAX_CONSECUTIVE_FAILURES)
    failures.on_success()
    assert failures.take_error() is None
    failed(failures, MAX_CONSECUTIVE_FAILURES - 1)
    assert failures.take_error() is None


def test_an_evaluation_is_counted_and_ends_nothing():
    failures = Failures(1)
    failed(failures, 2 * MAX_CONSECUTIVE_FAILURES, is_eval=True)
    assert failures.take_error() is None
    assert failures.reasons == {"KeyError": 2 * MAX_CONSECUTIVE_FAILURES}


def test_the_cause_is_inside_of_a_group():
    failures = Failures(1)
    failures.on_error(ExceptionGroup("tasks", [ExceptionGroup("x", [OSError()])]), is_eval=False)
    assert failures.reasons == {"OSError": 1}

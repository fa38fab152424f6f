"""StatsTracker in one process; over ranks: tests/dist/test_stats_over_ranks.py."""

import pytest
import torch

from megarl.stats import tracker
from megarl.stats.tracker import StatsTracker


def test_scalars_are_averaged_under_their_scope():
    stats = StatsTracker()
    stats.scalar(loss=1.0)
    stats.scalar(loss=2.0, reward=5.0)
    with stats.scope("actor"), stats.scope("optimizer"):
        stats.scalar(lr=0.5)

    @stats.scope_func_wrapper("wrapped")
    def record(value):
        stats.scalar(x=value)
        return value

    assert record(3.0) == 3.0
    assert stats.export() == {
        "loss": 1.5,
        "reward": 5.0,
        "actor/optimizer/lr": 0.5,
        "wrapped/x": 3.0,
    }
    assert stats.export() == {}


def test_tensor_statistics_are_over_their_denominator():
    stats = StatsTracker()
    lengths = torch.tensor([1.0, 2.0, 30.0, torch.nan])
    correct = torch.tensor([True, True, False, False])
    stats.denominator(correct=correct, wrong=torch.tensor([False, False, True, False]))
    stats.stat("correct", length=lengths)
    stats.stat("wrong", reduce="avg", wrong_length=lengths)
    stats.stat("wrong", reduce="sum", total=lengths)
    assert stats.export() == {
        "correct": 2.0,
        "wrong": 1.0,
        "length/avg": 1.5,
        "length/min": 1.0,
        "length/max": 2.0,
        "wrong_length": 30.0,
        "total": 30.0,
    }


def test_a_denominator_of_nothing_leaves_no_average():
    stats = StatsTracker()
    stats.denominator(none=torch.zeros(3, dtype=torch.bool))
    stats.stat("none", x=torch.ones(3))
    assert stats.export() == {"none": 0.0}


def test_times_add_up_under_one_key(monkeypatch):
    clock = iter([1.0, 3.5, 10.0, 10.25])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    stats = StatsTracker()
    for _ in range(2):
        with stats.scope("ignored"), stats.record_timing("train_step"):
            pass
    assert stats.export() == {"timeperf/train_step": 2.75}


def test_values_of_several_calls_become_one():
    stats = StatsTracker()
    for values in ([1.0, 5.0], [3.0]):
        tensor = torch.tensor(values)
        stats.denominator(all=torch.ones(len(values), dtype=torch.bool))
        for kind in ("avg", "sum", "min", "max"):
            stats.stat("all", reduce=kind, **{kind: tensor})
    assert stats.export() == {"all": 3.0, "avg": 3.0, "sum": 9.0, "min": 1.0, "max": 5.0}


def test_export_inside_a_scope_keeps_the_scope():
    stats = StatsTracker()
    with stats.scope("outer"):
        stats.scalar(x=1.0)
        assert stats.export() == {"outer/x": 1.0}
        stats.scalar(x=2.0)
    assert stats.export() == {"outer/x": 2.0}


def test_wrong_arguments_are_named():
    stats = StatsTracker()
    with pytest.raises(ValueError, match="must be bool"):
        stats.denominator(x=torch.ones(2))
    with pytest.raises(ValueError, match="no denominator 'missing'"):
        stats.stat("missing", x=torch.ones(2))
    stats.denominator(mask=torch.ones(2, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"x \(3,\) and its denominator mask \(2,\)"):
        stats.stat("mask", x=torch.ones(3))
    with pytest.raises(ValueError, match="mask was recorded as sum before, now as avg"):
        stats.scalar(mask=1.0)


def test_the_module_has_a_tracker_of_its_own():
    with tracker.scope("a"):
        tracker.scalar(x=1.0)
    assert tracker.export() == {"a/x": 1.0}

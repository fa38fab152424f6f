"""Averages are over all elements of all ranks; a rank without a key adds nothing."""

import time

import torch
import torch.distributed as dist

from megarl.stats.tracker import StatsTracker


def record():
    rank = dist.get_rank()
    stats = StatsTracker()
    stats.scalar(both=float(rank))
    if rank == 1:
        stats.scalar(only_one=7.0)
    mask = torch.tensor([True, rank == 1, rank == 1])
    stats.denominator(tokens=mask)
    stats.stat("tokens", x=torch.tensor([1.0, 2.0, 9.0]))
    return stats.export(dist.group.WORLD)


def test_export_over_two_ranks(ranks):
    want = {
        "both": 0.5,
        "only_one": 7.0,
        "tokens": 4.0,
        "x/avg": 13 / 4,
        "x/min": 1.0,
        "x/max": 9.0,
    }
    assert ranks(2).run(record) == [want, want]


def record_time():
    clock = iter([0.0, 1.0 + 2 * dist.get_rank()])
    real, time.perf_counter = time.perf_counter, lambda: next(clock)
    stats = StatsTracker()
    try:
        with stats.record_timing("train_step"):
            pass
    finally:
        time.perf_counter = real
    return stats.export(dist.group.WORLD)


def test_times_are_the_slowest_ranks(ranks):
    assert ranks(2).run(record_time) == [{"timeperf/train_step": 3.0}] * 2


def record_as_different_kinds():
    stats = StatsTracker()
    if dist.get_rank() == 0:
        stats.scalar(x=1.0)
    else:
        stats.denominator(x=torch.ones(2, dtype=torch.bool))
    try:
        stats.export(dist.group.WORLD)
    except ValueError as error:
        return str(error)


def test_ranks_that_disagree_on_a_key_are_told(ranks):
    want = "x is avg on one rank and sum on another"
    assert ranks(2).run(record_as_different_kinds) == [want, want]

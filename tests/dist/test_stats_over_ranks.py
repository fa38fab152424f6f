"""Averages are over all elements of all ranks; a rank without a key adds nothing."""

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

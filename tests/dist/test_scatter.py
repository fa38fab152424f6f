"""scatter_batch: every row reaches exactly one replica, whole, and all ranks of it."""

import torch

from megarl import parallel as mesh_module
from megarl.actor.scatter import MINIBATCH, scatter_batch
from megarl.config.schema import ParallelConfig

ROWS = 13


def make_batch():
    lengths = torch.randint(3, 40, (ROWS,), generator=torch.Generator().manual_seed(0))
    valid = torch.arange(40) < lengths[:, None]
    ids = torch.arange(ROWS)[:, None] * 100 + torch.arange(40)
    return {
        "input_ids": torch.where(valid, ids, 0).int(),
        "attention_mask": valid,
        "logprobs": torch.where(valid, ids * 0.5, 0.0),
        "rewards": torch.arange(ROWS, dtype=torch.float32),
        "group_ids": torch.arange(ROWS) // 3,
    }


def scatter(parallel, n_minibatches):
    mesh = mesh_module.initialize(parallel, seed=1)
    try:
        batch = make_batch() if mesh.rank == 0 else None
        return mesh.place.dp, scatter_batch(batch, mesh, n_minibatches=n_minibatches, seed=5)
    finally:
        mesh_module.destroy()


def test_rows_are_split_over_replicas_and_shared_inside_one(ranks):
    results = ranks(4).run(scatter, ParallelConfig(tp=2), 3)
    by_replica = {}
    for replica, part in results:
        other = by_replica.setdefault(replica, part)
        assert all(torch.equal(part[key], other[key]) for key in other)
    assert len(by_replica) == 2

    whole, seen = make_batch(), []
    for part in by_replica.values():
        rows = part["rewards"].long()
        seen += rows.tolist()
        width = part["input_ids"].shape[1]
        assert width == part["attention_mask"].sum(1).max()
        for key, column in whole.items():
            want = column[rows][:, :width] if column.ndim == 2 else column[rows]
            assert torch.equal(part[key], want), key
            assert part[key].dtype == column.dtype
    assert sorted(seen) == list(range(ROWS))


def test_minibatches_hold_the_same_rows_for_any_number_of_replicas(ranks):
    def minibatches(results):
        found = [set() for _ in range(3)]
        for _, part in results:
            for row, which in zip(part["rewards"].tolist(), part[MINIBATCH].tolist(), strict=True):
                found[which].add(row)
        return found

    one = minibatches(ranks(1).run(scatter, ParallelConfig(), 3))
    two = minibatches(ranks(2).run(scatter, ParallelConfig(), 3))
    assert one == two
    assert sorted(map(len, one)) == [4, 4, 5]

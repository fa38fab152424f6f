"""`bridge/transport.py`: random plans over real gloo connections, the ranks as threads."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from test_group import open_threads
from test_plan import problems

from megarl.bridge import transport
from megarl.bridge.plan import Plan, make_plan

DTYPES = {1: "uint8", 2: "bfloat16", 4: "float32"}


def contents(tensors):
    """A tensor of random bytes for each."""
    g = torch.Generator().manual_seed(0)
    return {
        name: torch.randint(0, 256, (t.rows, t.columns * t.itemsize), generator=g).to(torch.uint8)
        for name, t in tensors.items()
    }


def push(problem, groups, pool):
    """[name -> uint8 rows of the whole tensor as it arrived] of each worker."""
    tensors, trainer, workers, sizes = problem
    plan, values = make_plan(tensors, trainer, workers, **sizes), contents(tensors)
    named = {name: (DTYPES[t.itemsize], (t.rows, t.columns)) for name, t in tensors.items()}

    def pack(name, box, buffer):
        size = tensors[name].itemsize
        part = values[name][box.row : box.row_end, box.column * size : box.column_end * size]
        buffer.copy_(part.reshape(-1))

    def run(group):
        if group.rank < plan.num_sources:
            return transport.send_all(group, plan, pack, "cpu")
        mine = Plan.from_bytes(plan.part_of_worker(group.rank - plan.num_sources))
        assembly, done = transport.Assembly(mine, named, "cpu"), {}
        for name, box, data in transport.receive_all(group, mine, "cpu"):
            whole = assembly.add(name, box, data)
            if whole is not None:
                done[name] = whole.view(torch.uint8).view(whole.shape[0], -1)
        assert not assembly.incomplete()
        return done

    results = list(pool.map(run, groups))
    sent, got = results[: plan.num_sources], results[plan.num_sources :]
    assert sent == plan.bytes_out_of_sources().tolist()
    return values, got


@settings(max_examples=12)
@given(problems())
def test_every_worker_gets_what_it_needs(problem):
    tensors, _, workers, sizes = problem
    world = sizes["num_sources"] + sizes["num_workers"]
    with ThreadPoolExecutor(world) as pool:
        groups = open_threads(pool, world)
        for _ in range(2):  # the group is used again
            values, got = push(problem, groups, pool)
        for group in groups:
            group.leave()
    for rank, done in enumerate(got):
        needed = set()
        for name, held in workers.items():
            size = tensors[name].itemsize
            for box, holders in zip(held.boxes, held.holders, strict=True):
                if rank not in holders:
                    continue
                needed.add(name)
                part = (
                    slice(box.row, box.row_end),
                    slice(box.column * size, box.column_end * size),
                )
                assert torch.equal(done[name][part], values[name][part])
        assert set(done) == needed


def two_ranks_and_a_tensor():
    from megarl.bridge.boxes import Box, Held, Tensor2D

    whole = Held((Box(0, 8, 0, 8),), ((0,),))
    sizes = {"num_sources": 1, "num_workers": 1, "bucket_bytes": 64}
    return {"w": Tensor2D(8, 8, 1)}, {"w": whole}, {"w": whole}, sizes


def test_a_damaged_message_is_named(monkeypatch):
    seal = transport._seal

    def seal_and_damage(buffer):
        seal(buffer)
        buffer[3] ^= 1

    monkeypatch.setattr(transport, "_seal", seal_and_damage)
    with ThreadPoolExecutor(2) as pool:
        groups = open_threads(pool, 2)
        with pytest.raises(transport.CorruptionError, match="rank 0 to worker 0, beginning with w"):
            push(two_ranks_and_a_tensor(), groups, pool)


def test_a_rank_that_does_not_take_part_is_named():
    with ThreadPoolExecutor(2) as pool:
        groups = open_threads(pool, 2)
        groups[1].timeout_s = 1.0
        tensors, trainer, workers, sizes = two_ranks_and_a_tensor()
        plan = make_plan(tensors, trainer, workers, **sizes)
        mine = Plan.from_bytes(plan.part_of_worker(0))
        with pytest.raises(TimeoutError, match=r"round 0: rank 0 of the weight group did not"):
            list(transport.receive_all(groups[1], mine, "cpu"))

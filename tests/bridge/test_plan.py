"""`bridge/plan.py` on random layouts: everything arrives, once, from who has it, evenly."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.bridge.boxes import Box, Held, Tensor2D, tensor_2d
from megarl.bridge.plan import Plan, make_plan


@st.composite
def cut(draw, size, most):
    """Edges of a cut of [0, size) into at most `most` parts."""
    inner = draw(st.sets(st.integers(1, max(1, size - 1)), max_size=most - 1))
    return sorted({0, size} | {edge for edge in inner if edge < size})


@st.composite
def held(draw, tensor, ranks):
    """A tensor cut by rows and columns at random, each part held by one rank or more."""
    boxes = tuple(
        Box(row, row_end, column, column_end)
        for row, row_end in itertools.pairwise(draw(cut(tensor.rows, 4)))
        for column, column_end in itertools.pairwise(draw(cut(tensor.columns, 3)))
    )
    some = st.sets(st.integers(0, ranks - 1), min_size=1).map(lambda s: tuple(sorted(s)))
    return Held(boxes, tuple(draw(some) for _ in boxes))


@st.composite
def problems(draw):
    num_sources, num_workers = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    size = st.integers(1, 40)
    tensors = {
        f"t{i}": Tensor2D(draw(size), draw(size), draw(st.sampled_from([1, 2, 4])))
        for i in range(draw(st.integers(0, 6)))
    }
    trainer = {name: draw(held(t, num_sources)) for name, t in tensors.items()}
    workers = {}
    for name, t in tensors.items():
        target = draw(held(t, num_workers))
        # Two servers that cut it differently: their boxes overlap.
        other = draw(st.none() | held(t, num_workers))
        if other:
            target = Held(target.boxes + other.boxes, target.holders + other.holders)
        if draw(st.booleans()):
            keep = draw(st.integers(1, len(target.boxes)))
            target = Held(target.boxes[:keep], target.holders[:keep])
        workers[name] = target
    sizes = {"num_sources": num_sources, "num_workers": num_workers}
    sizes["bucket_bytes"] = draw(st.integers(4, 5000))
    sizes["piece_bytes"] = draw(st.integers(4, 2000))
    return tensors, trainer, workers, sizes


def painted(tensor, layout, rank):
    """[rows, columns] bool: what `rank` has or needs of a tensor."""
    canvas = np.zeros((tensor.rows, tensor.columns), dtype=bool)
    for box, holders in zip(layout.boxes, layout.holders, strict=True):
        if rank in holders:
            canvas[box.row : box.row_end, box.column : box.column_end] = True
    return canvas


@given(problems())
def test_each_needed_element_arrives_once_from_a_rank_that_has_it(problem):
    tensors, trainer, workers, sizes = problem
    plan = make_plan(tensors, trainer, workers, **sizes)
    got = {
        (name, rank): np.zeros((t.rows, t.columns), dtype=int)
        for name, t in tensors.items()
        for rank in range(sizes["num_workers"])
    }
    left = {name: np.zeros((t.rows, t.columns), dtype=int) for name, t in tensors.items()}
    for transfer in plan:
        box, name = transfer.box, transfer.name
        part = np.s_[box.row : box.row_end, box.column : box.column_end]
        assert painted(tensors[name], trainer[name], transfer.source)[part].all()
        assert transfer.num_bytes == box.elements * tensors[name].itemsize
        left[name][part] += 1
        for rank in (transfer.entry, *transfer.others):
            got[name, rank][part] += 1
    for (name, rank), count in got.items():
        assert np.array_equal(count, painted(tensors[name], workers[name], rank)), (name, rank)
    assert all(count.max() <= 1 for count in left.values())  # leaves the trainer once


@given(problems())
def test_a_round_fits_into_a_bucket_and_rounds_do_not_decrease(problem):
    tensors, trainer, workers, sizes = problem
    plan = make_plan(tensors, trainer, workers, **sizes)
    out, into = {}, {}
    rounds = [t.round for t in plan]
    assert rounds == sorted(rounds)
    assert plan.num_rounds == (rounds[-1] + 1 if rounds else 0)
    for t in plan:
        out[t.round, t.source] = out.get((t.round, t.source), 0) + t.num_bytes
        for rank in (t.entry, *t.others):
            into[t.round, rank] = into.get((t.round, rank), 0) + t.num_bytes
    assert all(used <= sizes["bucket_bytes"] for used in [*out.values(), *into.values()])


@given(problems())
def test_sums_are_those_of_the_transfers(problem):
    tensors, trainer, workers, sizes = problem
    plan = make_plan(tensors, trainer, workers, **sizes)
    out, entry = [0] * sizes["num_sources"], [0] * sizes["num_workers"]
    passed, into = list(entry), list(entry)
    for t in plan:
        out[t.source] += t.num_bytes
        entry[t.entry] += t.num_bytes
        passed[t.entry] += t.num_bytes * len(t.others)
        for rank in (t.entry, *t.others):
            into[rank] += t.num_bytes
    assert plan.bytes_out_of_sources().tolist() == out
    assert plan.bytes_into_entries().tolist() == entry
    assert plan.bytes_out_of_workers().tolist() == passed
    assert plan.bytes_into_workers().tolist() == into
    by_rank = [t for rank in range(sizes["num_sources"]) for t in plan.of_source(rank)]
    assert sorted(by_rank) == sorted(plan)
    for rank in range(sizes["num_workers"]):
        mine = [t for t in plan if rank in (t.entry, *t.others)]
        assert list(plan.of_worker(rank)) == mine


def symmetric(num_tensors, tp, dp, replicas, engine_tp, seed):
    """Tensors of unequal sizes, each cut over tp and copied over dp; servers of engine_tp."""
    random = np.random.default_rng(seed)
    tensors, trainer, workers = {}, {}, {}
    for i in range(num_tensors):
        t = Tensor2D(int(random.integers(1, 40)) * 16, int(random.integers(8, 400)), 2)
        tensors[f"t{i}"] = t

        def rows(parts, copies, size=t.rows, columns=t.columns):
            boxes = tuple(
                Box(k * size // parts, (k + 1) * size // parts, 0, columns) for k in range(parts)
            )
            return Held(boxes, tuple(tuple(c * parts + k for c in copies) for k in range(parts)))

        trainer[f"t{i}"] = rows(tp, range(dp))
        workers[f"t{i}"] = rows(engine_tp, range(replicas))
    return tensors, trainer, workers


@given(
    st.sampled_from([1, 2, 4]),
    st.integers(1, 4),
    st.integers(1, 4),
    st.sampled_from([1, 2, 4]),
    st.integers(0, 1000),
)
def test_ranks_have_the_same_to_do(tp, dp, replicas, engine_tp, seed):
    """Within 10% of the mean, where every rank holds as much as the others."""
    problem = symmetric(12, tp, dp, replicas, engine_tp, seed)
    num_sources, num_workers = tp * dp, replicas * engine_tp
    plan = make_plan(
        *problem,
        num_sources=num_sources,
        num_workers=num_workers,
        bucket_bytes=1 << 20,
        piece_bytes=1 << 12,
    )
    for loads in (plan.bytes_out_of_sources(), plan.bytes_into_entries()):
        assert np.abs(loads - loads.mean()).max() <= 0.1 * loads.mean()
    # The optimum: the model's bytes leave the trainer, a worker's share enters a worker.
    total = sum(t.num_bytes for t in problem[0].values())
    assert plan.bytes_out_of_sources().sum() == total
    assert plan.bytes_into_workers().tolist() == [total // engine_tp] * num_workers
    # Rounds are as many as the busiest rank needs, and some for pieces that did not fit.
    busiest = max(total // engine_tp, int(plan.bytes_out_of_sources().max()))
    assert plan.num_rounds <= 1 + busiest / ((1 << 20) - (1 << 13)) * 1.1


@pytest.mark.parametrize("replicas", [2, 8, 32])
def test_what_all_workers_need_is_no_ones_burden(replicas):
    """Workers pass on as much as each other: tensors that all need, and tensors that are cut.

    One piece of what all need is 63 times what it weighs to the worker that passes it on.
    """
    tp, size = 2, Tensor2D(512, 1024, 2)
    tensors = {f"{kind}{i}": size for kind in ("cut", "whole") for i in range(16)}
    halves = (Box(0, 256, 0, 1024), Box(256, 512, 0, 1024))
    cut = Held(halves, tuple(tuple(range(k, tp * replicas, tp)) for k in range(tp)))
    whole = Held((size.box,), (tuple(range(tp * replicas)),))
    workers = {name: cut if name.startswith("cut") else whole for name in tensors}
    plan = make_plan(
        tensors,
        dict.fromkeys(tensors, Held((size.box,), ((0, 1),))),
        workers,
        num_sources=2,
        num_workers=tp * replicas,
        bucket_bytes=1 << 22,
    )
    passed = plan.bytes_out_of_workers()
    assert passed.max() <= 1.1 * passed.mean()
    assert set(plan.bytes_into_workers().tolist()) == {16 * (size.num_bytes // 2 + size.num_bytes)}


def test_the_stages_of_a_pipeline_send_at_the_same_time():
    """One after the other, four stages would need four times the rounds."""
    tensors = {f"layer{i}": Tensor2D(64, 64, 2) for i in range(32)}
    whole = (Box(0, 64, 0, 64),)
    trainer = {f"layer{i}": Held(whole, ((i // 8,),)) for i in range(32)}
    quarters = tuple(Box(16 * k, 16 * k + 16, 0, 64) for k in range(4))
    workers = dict.fromkeys(tensors, Held(quarters, tuple((k,) for k in range(4))))
    plan = make_plan(
        tensors, trainer, workers, num_sources=4, num_workers=4, bucket_bytes=8192, piece_bytes=2048
    )
    assert plan.num_rounds == 8  # 64 KiB out of each, 8 KiB at a time


@given(problems())
def test_the_same_plan_every_time(problem):
    tensors, trainer, workers, sizes = problem
    first, second = (make_plan(tensors, trainer, workers, **sizes) for _ in range(2))
    assert np.array_equal(first.table, second.table)
    assert first.boxes == second.boxes


@given(problems())
def test_a_worker_is_told_its_part(problem):
    tensors, trainer, workers, sizes = problem
    plan = make_plan(tensors, trainer, workers, **sizes)
    for rank in range(sizes["num_workers"]):
        part = Plan.from_bytes(plan.part_of_worker(rank))
        assert list(part) == list(plan.of_worker(rank))
        assert part.num_sources == sizes["num_sources"]
        assert all(part.tensors[name] == tensors[name] for name in part.tensors)


def test_what_the_trainer_lacks_is_named():
    half, whole = Box(0, 4, 0, 8), Box(0, 8, 0, 8)
    tensors = {"a": Tensor2D(8, 8, 2)}
    sizes = {"num_sources": 1, "num_workers": 1, "bucket_bytes": 64}
    need = {"a": Held((whole,), ((0,),))}
    with pytest.raises(ValueError, match=r"a: .* the trainer holds 32 elements"):
        make_plan(tensors, {"a": Held((half,), ((0,),))}, need, **sizes)
    with pytest.raises(ValueError, match="unknown to the trainer: \\['a'\\]"):
        make_plan(tensors, {}, need, **sizes)


def test_tensors_as_two_dimensions():
    assert tensor_2d((3, 4, 5), 2) == Tensor2D(12, 5, 2)
    assert tensor_2d((7,), 4) == Tensor2D(1, 7, 4)
    assert tensor_2d((), 4).num_bytes == 4

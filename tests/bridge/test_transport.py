"""`bridge/transport.py`: random plans over real gloo connections, the ranks as threads."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_group import open_threads
from test_plan import problems

from megarl.bridge import transport
from megarl.bridge.boxes import Box, Held, Tensor2D
from megarl.bridge.partial import PartialTensor
from megarl.bridge.plan import Plan, make_plan
from megarl.bridge.rounds import DIGEST_BYTES, CorruptionError, rounds_of
from megarl.ops.pack import Box as PackBox

DTYPES = {1: torch.uint8, 2: torch.bfloat16, 4: torch.float32}


def contents(tensors, seed=0):
    """[rows, columns] of random bytes for each."""
    g = torch.Generator().manual_seed(seed)
    return {
        name: torch.randint(0, 256, (t.rows, t.columns * t.itemsize), generator=g)
        .to(torch.uint8)
        .view(DTYPES[t.itemsize])
        for name, t in tensors.items()
    }


def whole_rows(values):
    """Every box is one part of a tensor that this rank has in whole."""

    def sources(name, box):
        return [PackBox(values[name], (box.row, box.row_end), (box.column, box.column_end))]

    return sources


def named_of(tensors):
    return {
        name: (str(DTYPES[t.itemsize]).removeprefix("torch."), (t.rows, t.columns))
        for name, t in tensors.items()
    }


def bits(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8)


def assemble(assembly, boxes):
    done = {}
    for name, box, data in boxes:
        whole = assembly.add(name, box, data)
        if whole is not None:
            done[name] = whole
    assert not assembly.incomplete()
    return done


def receive(group, plan, named):
    """All tensors as they arrived, by each of the ways to take them."""
    worker = group.rank - plan.num_sources
    mine = Plan.from_bytes(plan.part_of_worker(worker))
    kept = list(transport.receive_all(group, mine, "cpu"))
    found = [assemble(transport.Assembly(mine, named, "cpu"), kept)]
    incoming = transport.Incoming(mine, worker, "cpu")
    for keeps in (False, True):
        rounds = transport.receive_rounds(group, incoming)
        if keeps:
            rounds = [arrived.on("cpu") for arrived in rounds]
        boxes = (box for arrived in rounds for box in arrived.boxes())
        found.append(assemble(transport.Assembly(mine, named, "cpu"), boxes))
    assert incoming.num_bytes == plan.bytes_into_workers()[worker]
    return found


PUSHES = 3


def push(problem, groups, pool):
    """The values that were sent, and [the tensors of each push] of each worker."""
    tensors, trainer, workers, sizes = problem
    plan, values = make_plan(tensors, trainer, workers, **sizes), contents(tensors)

    def run(group):
        if group.rank >= plan.num_sources:
            return receive(group, plan, named_of(tensors))
        outgoing = transport.Outgoing(plan, group.rank, whole_rows(values), "cpu")
        return [transport.send_all(group, plan, outgoing) for _ in range(PUSHES)]

    results = list(pool.map(run, groups))
    for rank, sent in enumerate(results[: plan.num_sources]):
        assert sent == [plan.bytes_out_of_sources()[rank]] * PUSHES
    return values, results[plan.num_sources :]


@settings(max_examples=12)
@given(problems())
def test_every_worker_gets_what_it_needs(problem):
    _, _, workers, sizes = problem
    world = sizes["num_sources"] + sizes["num_workers"]
    with ThreadPoolExecutor(world) as pool:
        groups = open_threads(pool, world)
        values, got = push(problem, groups, pool)
        for group in groups:
            group.leave()
    for rank, pushes in enumerate(got):
        needed = {
            (name, box)
            for name, held in workers.items()
            for box, holders in zip(held.boxes, held.holders, strict=True)
            if rank in holders
        }
        for done in pushes:
            assert set(done) == {name for name, _ in needed}
            for name, box in needed:
                part = (slice(box.row, box.row_end), slice(box.column, box.column_end))
                assert torch.equal(bits(done[name][part]), bits(values[name][part]))


@given(problems())
def test_messages_are_the_plans_bytes_without_gaps(problem):
    tensors, trainer, workers, sizes = problem
    plan = make_plan(tensors, trainer, workers, **sizes)
    for rank in range(plan.num_sources):
        total = 0
        for round_ in rounds_of(plan.of_source(rank)):
            end = 0
            for message, start in zip(round_.messages, round_.starts, strict=True):
                assert start % 16 == 0
                assert start >= end
                at = 0
                for item in message.items:
                    assert item.start == at
                    assert item.num_bytes == item.box.elements * tensors[item.name].itemsize
                    # Where a copy can be as wide as the box allows.
                    assert (start + at) % min(16, item.num_bytes & -item.num_bytes) == 0
                    at += item.num_bytes
                assert message.num_bytes == at
                end = start + at + DIGEST_BYTES
                total += at
            assert round_.num_bytes >= end
        assert total == plan.bytes_out_of_sources()[rank]


def one_tensor(rows=8, columns=8, itemsize=1, **sizes):
    whole = Held((Box(0, rows, 0, columns),), ((0,),))
    sizes = {"num_sources": 1, "num_workers": 1, "bucket_bytes": 64, **sizes}
    return {"w": Tensor2D(rows, columns, itemsize)}, {"w": whole}, {"w": whole}, sizes


def make_one_plan(**sizes):
    tensors, trainer, workers, sizes = one_tensor(**sizes)
    return make_plan(tensors, trainer, workers, **sizes)


def round_trip(plan, groups, pool, outgoing):
    """The bytes of every round as the only worker got them."""
    sent = pool.submit(transport.send_all, groups[0], plan, outgoing)
    boxes = list(transport.receive_all(groups[1], plan, "cpu"))
    assert sent.result() == outgoing.num_bytes
    return torch.cat([data for _, _, data in boxes])


def test_a_box_of_several_parts_and_casts():
    """As the queries of two KV groups, with other rows between, and parameters of float32."""
    plan = make_one_plan(columns=3, itemsize=2, bucket_bytes=4096)
    parameter = torch.nn.Parameter(torch.arange(60.0).view(20, 3) / 7)

    def sources(name, box):
        assert box == Box(0, 8, 0, 3)
        return [PackBox(parameter, rows=rows, dtype=torch.bfloat16) for rows in ((0, 5), (9, 12))]

    with ThreadPoolExecutor(2) as pool:
        groups = open_threads(pool, 2)
        outgoing = transport.Outgoing(plan, 0, sources, "cpu")
        got = round_trip(plan, groups, pool, outgoing)
        want = torch.cat([parameter[:5], parameter[9:12]]).to(torch.bfloat16)
        assert torch.equal(got, bits(want.detach()))


def test_new_weights_and_new_memory_are_sent():
    """A table has addresses: the values behind them change, and the optimiser may move them."""
    plan = make_one_plan(itemsize=4, bucket_bytes=100, piece_bytes=32)
    assert plan.num_rounds >= 3
    parameter = torch.nn.Parameter(torch.ones(8, 8))
    with ThreadPoolExecutor(2) as pool:
        groups = open_threads(pool, 2)
        outgoing = transport.Outgoing(plan, 0, whole_rows({"w": parameter}), "cpu")
        buckets = set()
        for value in (1.0, 2.0, 3.0):
            if value == 3.0:
                parameter.data = torch.zeros(8, 8)
            parameter.data.fill_(value)
            got = round_trip(plan, groups, pool, outgoing).view(torch.float32)
            assert torch.equal(got, torch.full((64,), value))
            buckets |= {b.data_ptr() for b in outgoing.buckets._two}
        assert len(buckets) == 2


def test_a_box_that_is_not_all_there():
    plan = make_one_plan()
    values = torch.zeros(8, 8, dtype=torch.uint8)

    def sources(name, box):
        return [PackBox(values, rows=(box.row, box.row_end - 1))]

    with pytest.raises(ValueError, match=r"w: 56 of 64 bytes of Box\(.*\) are on this rank"):
        transport.Outgoing(plan, 0, sources, "cpu")


def test_a_damaged_message_is_named(monkeypatch):
    seal = transport.seal

    def seal_and_damage(part):
        seal(part)
        part[3] ^= 1

    monkeypatch.setattr(transport, "seal", seal_and_damage)
    with ThreadPoolExecutor(2) as pool:
        groups = open_threads(pool, 2)
        values, plan = {"w": torch.zeros(8, 8, dtype=torch.uint8)}, make_one_plan()
        outgoing = transport.Outgoing(plan, 0, whole_rows(values), "cpu")
        with pytest.raises(
            CorruptionError, match="round 0 from trainer rank 0 to worker 0, beginning with w"
        ):
            round_trip(plan, groups, pool, outgoing)


def test_a_rank_that_does_not_take_part_is_named():
    with ThreadPoolExecutor(2) as pool:
        groups = open_threads(pool, 2)
        groups[1].timeout_s = 1.0
        with pytest.raises(TimeoutError, match=r"round 0: rank 0 of the weight group did not"):
            list(transport.receive_all(groups[1], make_one_plan(), "cpu"))


@pytest.mark.parametrize("end", ["sender", "receiver"])
def test_memory_that_a_failed_push_may_still_touch_is_not_used_again(end):
    plan, values = make_one_plan(), {"w": torch.zeros(8, 8, dtype=torch.uint8)}
    with ThreadPoolExecutor(2) as pool:
        groups = open_threads(pool, 2)
        if end == "sender":
            used = transport.Outgoing(plan, 0, whole_rows(values), "cpu")
            run = lambda: transport.send_all(groups[0], plan, used)  # noqa: E731
            groups[0].timeout_s = 1.0
        else:
            used = transport.Incoming(plan, 0, "cpu")
            run = lambda: list(transport.receive_rounds(groups[1], used))  # noqa: E731
            groups[1].timeout_s = 1.0
        bucket = used.buckets.of(0, 64)
        groups[0 if end == "receiver" else 1].leave()
        with pytest.raises((TimeoutError, RuntimeError)):
            run()
        assert used.buckets.of(0, 64).data_ptr() != bucket.data_ptr()


# ---------------------------------------------------------------- large tensors at a worker


@pytest.mark.parametrize(
    ("shape", "needed", "num_there"),
    [
        ((100, 8), [Box(20, 40, 0, 8)], 20 * 8),
        ((100, 8), [Box(20, 30, 0, 8), Box(30, 40, 0, 8)], 20 * 8),
        ((100, 8), [Box(0, 100, 0, 2)], None),  # columns are everywhere
        ((5, 20, 8), [Box(20, 40, 0, 8)], 20 * 8),
        ((800,), [Box(0, 1, 100, 300)], 200),
        ((100, 8), [Box(0, 98, 0, 8)], None),  # nearly all
    ],
)
def test_what_is_not_needed_of_a_large_tensor_is_not_in_memory(
    monkeypatch, shape, needed, num_there
):
    monkeypatch.setattr(transport, "_PARTIAL_BYTES", 256)
    size = Tensor2D(1, 800, 4) if len(shape) == 1 else Tensor2D(100, 8, 4)
    held = Held(tuple(needed), ((0,),) * len(needed))
    whole = Held((size.box,), ((0,),))
    sizes = {"num_sources": 1, "num_workers": 1, "bucket_bytes": 4096}
    plan = make_plan({"w": size}, {"w": whole}, {"w": held}, **sizes)
    values = torch.arange(800.0).view(shape)
    assembly = transport.Assembly(plan, {"w": ("float32", shape)}, "cpu")
    for t in plan:
        flat = values.view(size.rows, size.columns)
        part = flat[t.box.row : t.box.row_end, t.box.column : t.box.column_end]
        made = assembly.add("w", t.box, bits(part))
    assert made.shape == shape
    assert made.dtype == torch.float32
    assert isinstance(made, PartialTensor) == (num_there is not None)
    if num_there is not None:
        assert made._data.numel() == num_there
    for box in needed:
        row, column = slice(box.row, box.row_end), slice(box.column, box.column_end)
        got = made.view(size.rows, size.columns)[row, column]
        loaded = torch.zeros(got.shape).copy_(got)
        assert torch.equal(loaded, values.view(size.rows, size.columns)[row, column])


READS = [
    lambda w: w[2:5],
    lambda w: w.narrow(0, 3, 2).t(),
    lambda w: w.narrow(0, 3, 2).narrow(1, 1, 2).contiguous(),
    lambda w: w.chunk(4)[1].to(torch.bfloat16).float(),
    lambda w: torch.cat([w[4:5], w[2:3]]),
    lambda w: w.view(torch.int16)[3],
    lambda w: w.view(4, 2, 4)[1, 1],
    lambda w: w.detach().split(2)[2] * 2,
    lambda w: w[4, 1],
    lambda w: w[2:2],
]


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("made_inside", [True, False])
@pytest.mark.parametrize("used_inside", [True, False])
def test_a_partial_tensor_reads_as_the_whole(read, made_inside, used_inside):
    """In and out of inference mode, as engines load in both."""
    whole = torch.arange(32.0).view(8, 4)
    with torch.inference_mode(made_inside):
        partial = PartialTensor.make((8, 4), 8, whole[2:6].reshape(-1).clone())
    with torch.inference_mode(used_inside), torch.no_grad():
        got, want = read(partial), read(whole)
        loaded = torch.nn.Parameter(torch.zeros(want.shape, dtype=want.dtype), False)
        loaded.data.copy_(got)
    assert (got.shape, got.dtype, got.device) == (want.shape, want.dtype, want.device)
    assert torch.equal(loaded, want)


@pytest.mark.parametrize(
    "read",
    [lambda w: w.sum(), lambda w: w[1:3] + 1, lambda w: w[5:7].clone(), lambda w: w[0].float() + 0],
)
def test_what_is_not_there_cannot_be_read(read):
    partial = PartialTensor.make((8, 4), 8, torch.arange(16.0))
    with pytest.raises(ValueError, match="of which 16 are there"):
        read(partial)


@given(st.integers(0, 39), st.integers(1, 40))
def test_a_partial_vector(start, length):
    """From any element on, also where views of smaller elements begin within."""
    whole = torch.arange(80, dtype=torch.int32)
    partial = PartialTensor.make((80,), start, whole[start : start + length].clone())
    assert torch.equal(partial[start : start + length].clone(), whole[start : start + length])
    few = partial.view(torch.int8)[4 * start : 4 * start + 4]
    assert torch.equal(few.clone(), whole[start : start + 1].view(torch.int8))

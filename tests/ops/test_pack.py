"""`ops/pack.py` against slices and `.to()` of torch, bit by bit."""

import weakref
from dataclasses import dataclass, replace

import pytest
import torch
from guard import guarded
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from megarl.ops.pack import Box, PackTable

F32, BF16 = torch.float32, torch.bfloat16
DTYPES = [
    *(F32, BF16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8),
    *(torch.int8, torch.int16, torch.int64, torch.complex64, torch.complex128),
]
UNTOUCHED = 0xA5


def random_bytes(num_bytes, seed=0):
    """Every bit pattern: so floats have nan of every payload, inf and subnormals."""
    g = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=g)


def random_base(numel, dtype, seed=0):
    return random_bytes(numel * dtype.itemsize, seed).view(dtype)


def bits(tensor):
    return tensor.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


def assert_same(got, want, was_narrowed=False):
    """Bit by bit; but which nan a nan is rounded to is nobody's promise."""
    assert got.shape == want.shape
    if was_narrowed:
        assert torch.equal(got.isnan(), want.isnan())
        got, want = (torch.where(x.isnan(), torch.zeros_like(x), x) for x in (got, want))
    assert torch.equal(bits(got), bits(want))


def slot(bucket, offset, view, dtype):
    end = offset + view.numel() * dtype.itemsize
    return bucket[offset:end].clone().view(dtype).view(view.shape)


def empty_bucket(num_bytes, device="cpu"):
    """[num_bytes] uint8 of UNTOUCHED, at a multiple of 16 bytes."""
    whole = torch.full((num_bytes + 16,), UNTOUCHED, dtype=torch.uint8, device=device)
    start = -whole.data_ptr() % 16
    return whole[start : start + num_bytes]


@dataclass
class Case:
    """A box of `base` [numel]: shape, strides and start in it, and the dtype in the bucket."""

    base: Tensor
    shape: tuple
    strides: tuple
    start: int
    dtype: torch.dtype

    def view(self, base=None):
        base = self.base if base is None else base
        return base.as_strided(self.shape, self.strides, self.start)

    @property
    def is_cast(self):
        return self.dtype != self.base.dtype


@st.composite
def cases(draw, may_repeat):
    dtype = draw(st.sampled_from(DTYPES))
    other = {F32: BF16, BF16: F32}.get(dtype, dtype)
    bucket_dtype = other if draw(st.booleans()) else dtype
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    num_dims = len(shape)
    for sizes in ([8, 16], [33, 64]):  # at most one dimension each is as large
        if (dim := draw(st.integers(0, 6))) < num_dims:
            shape[dim] = draw(st.sampled_from(sizes))
    strides, step = [0] * num_dims, 1
    for dim in draw(st.permutations(range(num_dims))):
        gap = draw(st.sampled_from([0, 0, 1, 3, 8]))
        is_repeated = may_repeat and draw(st.integers(0, 9)) == 0
        strides[dim] = 0 if is_repeated else step
        step = max(1, shape[dim]) * step + gap
    start = draw(st.sampled_from([0, 1, 2, 8]))
    seed = draw(st.integers(0, 2**20))
    base = random_base(start + step, dtype, seed)
    return Case(base, tuple(shape), tuple(strides), start, bucket_dtype)


def table_of(several, bases):
    each = zip(several, bases, strict=True)
    return PackTable([Box(case.view(base), dtype=case.dtype) for case, base in each])


relaxed = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@relaxed
@given(several=st.lists(cases(may_repeat=True), max_size=6))
def test_pack_is_slices_and_casts(backend, device, several):
    bases = [case.base.to(device) for case in several]
    table = table_of(several, bases)
    bucket = empty_bucket(table.num_bytes + 5, device)
    table.pack(bucket)
    bucket = bucket.cpu()
    for case, offset in zip(several, table.offsets, strict=True):
        assert offset % 16 == 0
        got, want = slot(bucket, offset, case.view(), case.dtype), case.view().to(case.dtype)
        assert_same(got, want, case.is_cast)
        bucket[offset : offset + want.numel() * want.element_size()] = UNTOUCHED
    assert (bucket == UNTOUCHED).all()


@relaxed
@given(several=st.lists(cases(may_repeat=False), max_size=6), seed=st.integers(0, 2**20))
def test_unpack_writes_the_boxes_and_nothing_else(backend, device, several, seed):
    bases = [case.base.to(device, copy=True) for case in several]
    table = table_of(several, bases)
    bucket = empty_bucket(table.num_bytes)
    bucket.copy_(random_bytes(table.num_bytes, seed))
    on_device = empty_bucket(table.num_bytes, device)
    on_device.copy_(bucket)
    table.unpack(on_device)
    assert torch.equal(on_device.cpu(), bucket)
    for case, base, offset in zip(several, bases, table.offsets, strict=True):
        want = case.base.clone()
        sent = slot(bucket, offset, case.view(), case.dtype)
        case.view(want).copy_(sent)
        got = base.cpu()
        # A copy of equal dtypes goes bit by bit; around the box nothing was rounded.
        assert_same(case.view(got), sent.to(want.dtype), case.is_cast)
        case.view(got).zero_()
        case.view(want).zero_()
        assert_same(got, want)


@relaxed
@given(several=st.lists(cases(may_repeat=False), min_size=1, max_size=6))
def test_there_and_back(backend, device, several):
    sources = [case.base.to(device) for case in several]
    targets = [torch.zeros_like(base) for base in sources]
    several = [replace(case, dtype=case.base.dtype) for case in several]
    table = table_of(several, sources)
    bucket = empty_bucket(table.num_bytes, device)
    table.pack(bucket)
    table_of(several, targets).unpack(bucket)
    for case, target in zip(several, targets, strict=True):
        assert_same(case.view(target.cpu()), case.view())


@pytest.mark.parametrize("size_of_unit", [16, 8, 4, 2, 1])
@pytest.mark.parametrize(
    ("dtype", "bucket_dtype"), [(torch.uint8, torch.uint8), (F32, BF16), (BF16, F32)]
)
@pytest.mark.parametrize("rows", [1, 401])
def test_many_tiles_of_every_unit(backend, device, dtype, bucket_dtype, size_of_unit, rows):
    """Tiles of 32 KiB that begin and end within rows; a unit is in elements."""
    if dtype != torch.uint8 and size_of_unit == 16:
        pytest.skip("a cast has at most 8")
    if dtype == F32 and size_of_unit == 4 and rows == 1:
        pytest.skip("where 4 floats are aligned, 8 are")
    width, start = 16 * 23 + (size_of_unit % 16), size_of_unit % 16
    columns = width - start if rows > 1 else width * 400 + 1
    base = random_base((rows + 400) * width + 64, dtype).to(device)
    align = -base.data_ptr() % 16 // dtype.itemsize + start
    view = base[align:].as_strided((rows, columns), (width, 1))
    # Odd numbers of units a row, so that no larger ones fit.
    source = view[:, : columns // size_of_unit // 2 * 2 * size_of_unit - size_of_unit]
    source = source if rows > 1 else view
    table = PackTable([Box(source, dtype=bucket_dtype)])
    assert 1 << table._boxes[0, 6].item() == size_of_unit
    assert table._num_tiles > 1
    bucket = empty_bucket(table.num_bytes, device)
    table.pack(bucket)
    want = source.cpu().to(bucket_dtype)
    is_cast = dtype != bucket_dtype
    assert_same(slot(bucket.cpu(), 0, want, bucket_dtype), want, is_cast)
    base.view(torch.uint8).zero_()
    table.unpack(bucket)
    after = torch.zeros_like(base, device="cpu")
    sent = slot(bucket.cpu(), 0, want, bucket_dtype).to(dtype)
    now = after.as_strided(source.shape, source.stride(), source.storage_offset())
    now.copy_(sent)
    assert_same(base.cpu(), after, is_cast)


def test_several_tiles_a_block(backend, device):
    """More tiles than blocks, from the smallest boxes, with larger ones between."""
    small = random_base(8300, torch.int16).to(device)
    large = random_base(70_000, torch.int16, seed=1).to(device)
    boxes = [Box(small[i : i + 1]) for i in range(8300)]
    boxes.insert(4000, Box(large))
    boxes.append(Box(large[1:]))
    table = PackTable(boxes)
    bucket = empty_bucket(table.num_bytes, device)
    table.pack(bucket)
    got = bucket.cpu()
    for box, offset in zip(boxes, table.offsets, strict=True):
        want = box.tensor.cpu()
        assert torch.equal(slot(got, offset, want, torch.int16), want)


def test_rows_and_columns_of_a_tensor(backend, device):
    """As the planner's boxes: a tensor of more dimensions is [rows, columns]."""
    weight = random_base(4 * 6 * 10, torch.int32).view(4, 6, 10).to(device)
    norm = random_base(10, torch.int32, 1).to(device)
    scalar = random_base(1, torch.int32, 2).view(()).to(device)
    boxes = [Box(weight, (5, 11), (2, 7)), Box(norm, columns=(3, 9)), Box(weight, rows=(23, 24))]
    table = PackTable([*boxes, Box(scalar), Box(scalar, (0, 1), (0, 1)), Box(weight, (3, 3))])
    bucket = empty_bucket(table.num_bytes, device)
    table.pack(bucket)
    matrix = weight.cpu().view(24, 10)
    wants = [matrix[5:11, 2:7], norm.cpu()[None, 3:9], matrix[23:], *2 * [scalar.cpu()]]
    for want, offset in zip(wants, table.offsets, strict=False):
        assert torch.equal(slot(bucket.cpu(), offset, want, torch.int32), want)
    assert table.offsets == (0, 128, 160, 208, 224, 240)
    assert table.num_bytes == 240


def test_a_part_of_a_bucket(backend, device):
    """Some boxes at places of the sender's; the order of the list is free."""
    values = random_bytes(300_000).to(device)
    sender = PackTable([Box(values[:10]), Box(values[10:90_000]), Box(values[90_000:])])
    assert sender.offsets == (0, 16, 16 + 90_000)
    bucket = empty_bucket(sender.num_bytes, device)
    sender.pack(bucket)
    mine = torch.zeros(299_990, dtype=torch.uint8, device=device)
    table = PackTable([Box(mine[89_990:]), Box(mine[:89_990])], offsets=[90_016, 16])
    table.unpack(bucket)
    assert torch.equal(mine, values[10:])


def test_boxes_of_one_tensor_interleave(backend, device):
    """Columns of one matrix touch the same span of memory, and yet do not overlap."""
    weight = torch.zeros(50, 24, dtype=torch.int16, device=device)
    table = PackTable([Box(weight, columns=(0, 8)), Box(weight, columns=(8, 24))])
    bucket = random_bytes(table.num_bytes)
    table.unpack(bucket.to(device))
    want = torch.cat([bucket[:800].view(50, 16), bucket[800:].view(50, 32)], dim=1)
    assert torch.equal(weight.cpu(), want.view(torch.int16))


def test_parameters_that_need_gradients(backend, device):
    weight = torch.nn.Parameter(torch.randn(6, 8, device=device))
    table = PackTable([Box(weight, rows=(2, 4), dtype=BF16)])
    bucket = empty_bucket(table.num_bytes, device)
    table.pack(bucket)
    want = weight.detach().cpu().clone()
    want[2:4] = want[2:4].bfloat16().float()
    table.unpack(bucket)
    assert torch.equal(weight.detach().cpu(), want)


def test_the_same_bits_every_time(backend, device, monkeypatch):
    base = random_base(60_000, F32).to(device)
    table = PackTable([Box(base[1:], dtype=BF16), Box(base[:33]), Box(base.view(600, 100).t())])
    runs = [empty_bucket(table.num_bytes, device) for _ in range(3)]
    for seed, bucket in enumerate(runs):
        monkeypatch.setenv("MEGARL_EMU_SEED", str(seed))
        table.pack(bucket)
    assert all(torch.equal(runs[0], other) for other in runs[1:])


@pytest.mark.parametrize("at", ["end", "start"])
@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (3, 5), (7, 16), (1, 40_003), (1111, 33)])
@pytest.mark.parametrize(
    ("dtype", "bucket_dtype"), [(torch.uint8, torch.uint8), (F32, BF16), (BF16, F32)]
)
def test_no_access_outside_of_the_buffers(emulated, at, shape, dtype, bucket_dtype):
    rows, columns = shape
    base = random_base(rows * (columns + 3), dtype).view(rows, columns + 3)
    source, target = (guarded(base[:, :columns], at) for _ in range(2))
    for tensor in (source, target):
        table = PackTable([Box(tensor, dtype=bucket_dtype)])
        # Whole multiples of 16, so that the last box may also end where the bucket does.
        bucket = guarded(torch.zeros(table.num_bytes, dtype=torch.uint8), at)
        table._boxes = guarded(table._boxes, at)
        table._first_tiles = guarded(table._first_tiles, at)
        table.pack(bucket)
        table.unpack(bucket)
    want = base[:, :columns].to(bucket_dtype)
    assert_same(slot(bucket, 0, want, bucket_dtype), want, dtype != bucket_dtype)
    assert_same(target, want.to(dtype), dtype != bucket_dtype)


def test_no_boxes(backend, device):
    table = PackTable([])
    assert (table.offsets, table.num_bytes) == ((), 0)
    table.pack(empty_bucket(0, device))
    table.unpack(empty_bucket(3, device))
    empty = PackTable([Box(torch.zeros(0, 4, device=device)), Box(torch.zeros(3, 0).to(device))])
    bucket = empty_bucket(8, device)
    empty.pack(bucket)
    empty.unpack(bucket)
    assert empty.offsets == (0, 0)
    assert (bucket == UNTOUCHED).all()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda x: PackTable([Box(x, rows=(2, 7))]), r"rows \(2, 7\) of a tensor of \(6, 8\)"),
        (lambda x: PackTable([Box(x, columns=(-1, 2))]), r"columns \(-1, 2\)"),
        (lambda x: PackTable([Box(x.view(2, 3, 8)[:, :2], rows=(0, 1))]), "equal distances"),
        (lambda x: PackTable([Box(x, dtype=torch.float16)]), "from torch.float32 to torch.float16"),
        (lambda x: PackTable([Box(x.half(), dtype=F32)]), "from torch.float16 to torch.float32"),
        (lambda x: PackTable([Box(x.to_sparse())]), "not plain memory"),
        (lambda x: PackTable([Box(torch.zeros(2, dtype=torch.complex64).conj())]), "conjugate"),
        (lambda x: PackTable([Box(x), Box(x.to("meta"))]), "one device"),
        (lambda x: PackTable([Box(x)], alignment=8), "multiple of 16"),
        (lambda x: PackTable([Box(x), Box(x)], offsets=[0]), "offsets of 2 boxes"),
        (lambda x: PackTable([Box(x)], offsets=[8]), "multiples of 16"),
        (lambda x: PackTable([Box(x), Box(x)], offsets=[176, 0]), "overlap in the bucket at byte"),
        (lambda x: PackTable([Box(x.byte().as_strided((2**31,), (0,)))]), "2147483648 units of 1"),
    ],
)
def test_wrong_boxes_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make(torch.zeros(6, 8))


@pytest.mark.parametrize(
    ("bucket", "message"),
    [
        (empty_bucket(191), "191 bytes for 192"),
        (empty_bucket(192).view(torch.int8), r"\[bytes\] uint8"),
        (empty_bucket(384)[::2], r"strides \(2,\)"),
        (empty_bucket(192).view(12, 16), r"\(12, 16\)"),
        (empty_bucket(200)[8:], "multiple of 16"),
        (empty_bucket(192).to("meta"), "a bucket on meta for boxes on cpu"),
    ],
)
@pytest.mark.parametrize("way", ["pack", "unpack"])
def test_wrong_buckets_are_named(way, bucket, message):
    table = PackTable([Box(torch.zeros(6, 8))])
    with pytest.raises(ValueError, match=message):
        getattr(table, way)(bucket)


def test_a_tensor_that_was_allocated_anew(backend):
    weight = torch.nn.Parameter(torch.zeros(6, 8))
    table = PackTable([Box(torch.zeros(1)), Box(weight, rows=(1, 3))])
    bucket = empty_bucket(table.num_bytes)
    table.pack(bucket)
    weight.data = torch.ones(6, 8)
    for way in (table.pack, table.unpack):
        with pytest.raises(ValueError, match="tensor of box 1 was allocated anew"):
            way(bucket)


def test_tensors_live_as_long_as_their_table():
    tensor = torch.zeros(10)
    alive, table = weakref.ref(tensor), PackTable([Box(tensor)])
    del tensor
    assert alive() is not None
    del table
    assert alive() is None


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda x: [x[:, :5], x[:, 4:]], "boxes 0 and 1 overlap"),
        (lambda x: [x[:3], x[4:], x.view(-1)[20:30]], "boxes 0 and 2 overlap"),
        (lambda x: [x[:1].expand(3, 8)], "boxes 0 and 0 overlap"),
        (lambda x: [x.as_strided((3, 4), (3, 1))], "boxes 0 and 0 overlap"),
        (lambda x: [x.as_strided((2, 3, 4), (8, 9, 1))], "boxes 0 and 0 overlap"),
        (lambda x: [x.view(torch.uint8)[:, :4], x[:, 0]], "overlap"),
    ],
)
def test_overlapping_boxes_cannot_be_unpacked_into(backend, make, message):
    x = torch.arange(48.0).view(6, 8)
    views = make(x)
    table = PackTable([Box(view) for view in views])
    bucket = empty_bucket(table.num_bytes)
    table.pack(bucket)
    with pytest.raises(ValueError, match=message):
        table.unpack(bucket)
    for view, offset in zip(views, table.offsets, strict=True):
        assert torch.equal(slot(bucket, offset, view, view.dtype), view)


def test_a_bucket_that_is_the_boxes_own_memory():
    memory = empty_bucket(256)
    table = PackTable([Box(memory[100:140])])
    with pytest.raises(ValueError, match="memory of a box"):
        table.pack(memory[:112])
    table.pack(memory[144:])
    assert torch.equal(memory[144:184], memory[100:140])

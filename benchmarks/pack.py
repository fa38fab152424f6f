"""Boxes of a model's parameters into a bucket and back, fp8 blocks, and a round of the bridge:
ops/pack.py, ops/fp8.py and bridge/transport.py.

What one tensor-parallel rank of four takes of the sender's whole parameters: rows of column-
parallel layers, columns of row-parallel ones, norms whole. An error is a number of elements that
are not those of torch, bit by bit; ours must be 0. The first peer is a copy of as many bytes as
the op reads and writes, so "x peer" is the share of a copy's speed: the goal on a GPU is 0.9.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from timing import Bench, Variant
from torch import Tensor

from megarl.bridge.boxes import Box as PlanBox
from megarl.bridge.boxes import Held, tensor_2d
from megarl.bridge.plan import make_plan
from megarl.bridge.rounds import DIGEST_BYTES
from megarl.bridge.transport import Outgoing
from megarl.bridge.wire import digest_on_device
from megarl.ops.fp8 import FP8_BLOCK, FP8_LEAST_AMAX, FP8_MAX, quantize_fp8_blocks
from megarl.ops.pack import Box, PackTable

_TP, _RANK = 4, 1
_OTHER = 7
"""What outputs hold before; no box is full of it."""


@dataclass(frozen=True)
class _Model:
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int


_QWEN3_8B = _Model(4096, 36, 32, 8, 128, 12288, 151936)
_FEW_LAYERS = replace(_QWEN3_8B, layers=2, vocabulary=_QWEN3_8B.vocabulary // 16)
_SMALL = _Model(256, 2, 8, 4, 32, 768, 1000)


@dataclass(frozen=True)
class _Parameter:
    """A sender's tensor, [R, C] or [C], and the part of it that a rank has."""

    shape: tuple[int, ...]
    cut: int | None = None
    """Axis that is divided over ranks."""

    @property
    def extent(self) -> tuple[int, int]:
        """Of the rank on axis `cut`."""
        assert self.cut is not None
        size = self.shape[self.cut] // _TP
        return _RANK * size, (_RANK + 1) * size

    def box(self, tensor: Tensor, dtype: torch.dtype) -> Box:
        rows = self.extent if self.cut == 0 else None
        columns = self.extent if self.cut == 1 else None
        return Box(tensor, rows=rows, columns=columns, dtype=dtype)

    def sliced(self, tensor: Tensor) -> Tensor:
        """The same part by torch alone."""
        if self.cut is None:
            return tensor
        start, end = self.extent
        return tensor[start:end] if self.cut == 0 else tensor[:, start:end]


def _parameters(model: _Model) -> Iterator[_Parameter]:
    """Of a dense Qwen3, in its order; embedding and output layer are not tied."""
    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    yield _Parameter((model.vocabulary, model.hidden), 0)
    for _ in range(model.layers):
        yield _Parameter((model.hidden,))
        for rows in (queries, keys, keys):
            yield _Parameter((rows, model.hidden), 0)
        yield _Parameter((model.head_dim,))
        yield _Parameter((model.head_dim,))
        yield _Parameter((model.hidden, queries), 1)
        yield _Parameter((model.hidden,))
        yield _Parameter((model.intermediate, model.hidden), 0)
        yield _Parameter((model.intermediate, model.hidden), 0)
        yield _Parameter((model.hidden, model.intermediate), 1)
    yield _Parameter((model.hidden,))
    yield _Parameter((model.vocabulary, model.hidden), 0)


def run(bench: Bench) -> None:
    model, matrix = _QWEN3_8B, (_QWEN3_8B.intermediate, _QWEN3_8B.hidden)
    if bench.is_quick:
        model, matrix = _SMALL, (300, 264)  # with blocks that are cut at both edges
    elif not bench.is_cuda:
        model = _FEW_LAYERS
    for dtype in (torch.bfloat16, torch.float32):
        if bench.is_late():
            bench.skip("pack", f"{dtype}", "megarl", "skipped: no time left")
        else:
            case = _Boxes(bench, model, dtype)
            case.pack()
            case.unpack()
            del case  # before the next one's parameters are there too
    if bench.is_late():
        bench.skip("round", "", "megarl", "skipped: no time left")
    else:
        _pack_round(bench, model)
    for dtype in (torch.bfloat16, torch.float32):
        _quantize(bench, f"1 matrix {list(matrix)}", [matrix], dtype)
    layers = [
        tuple(part.sliced(torch.empty(part.shape, device="meta")).shape)
        for part in _parameters(model)
        if len(part.shape) == 2 and model.vocabulary not in part.shape
    ]
    _quantize(bench, f"{len(layers)} matrices of {model.layers} layers", layers, torch.bfloat16)


def _copy(bench: Bench, num_bytes: int) -> Variant:
    """A copy that reads and writes `num_bytes` together."""
    # Not zeros: on a CPU they would be one page, read from a cache.
    source, to = torch.ones(2, num_bytes // 2, dtype=torch.uint8, device=bench.device)
    return Variant("copy_ of as many bytes", lambda: to.copy_(source))


def _differing(made: Tensor, want: Tensor) -> int:
    """Elements that are not the same bits."""
    if made.shape != want.shape or made.dtype != want.dtype:
        return max(1, want.numel())
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[want.element_size()]
    return int((made.view(bits) != want.view(bits)).sum())


# ---------------------------------------------------------------- boxes


class _Boxes:
    """Parameters of `dtype`, a bucket of bfloat16."""

    def __init__(self, bench: Bench, model: _Model, dtype: torch.dtype) -> None:
        self.bench = bench
        self.parts = list(_parameters(model))
        random = bench.generator()
        self.tensors = [
            torch.empty(part.shape, dtype=dtype, device=bench.device).normal_(generator=random)
            for part in self.parts
        ]
        each = list(zip(self.parts, self.tensors, strict=True))
        self.table = PackTable([part.box(tensor, torch.bfloat16) for part, tensor in each])
        self.views = [part.sliced(tensor) for part, tensor in each]
        numel = sum(view.numel() for view in self.views)
        self.bucket = torch.empty(self.table.num_bytes, dtype=torch.uint8, device=bench.device)
        self.elements = self.bucket.view(torch.bfloat16)
        # Boxes are multiples of 16 bytes: none lies behind a gap, and torch.cat makes the same.
        assert self.elements.numel() == numel
        sizes = [view.numel() for view in self.views]
        slots = zip(self.elements.split(sizes), self.views, strict=True)
        self.slots = [slot.view(view.shape) for slot, view in slots]
        self.num_bytes = numel * (dtype.itemsize + 2)
        self.shape = f"{len(sizes)} boxes, {numel / 1e6:.1f} M elements, {dtype} and bfloat16"
        self.shape = self.shape.replace("torch.", "")

    def pack(self) -> None:
        def measure(_: object) -> float:
            wrong = 0
            for slot, view in zip(self.slots, self.views, strict=True):
                wrong += _differing(slot, view.to(torch.bfloat16))
            return wrong

        def cat() -> None:
            parts = [view.reshape(-1).to(torch.bfloat16) for view in self.views]
            torch.cat(parts, out=self.elements)

        self._compare(
            "pack",
            lambda: self.bucket.fill_(_OTHER),
            measure,
            lambda: self.table.pack(self.bucket),
            {
                "torch.cat": cat,
                "_foreach_copy_": lambda: torch._foreach_copy_(self.slots, self.views),
                "copy_ of each box": lambda: _copy_each(self.slots, self.views),
            },
        )

    def unpack(self) -> None:
        self.elements.normal_(generator=self.bench.generator(1))

        def prepare() -> None:
            for tensor in self.tensors:
                tensor.fill_(_OTHER)

        def measure(_: object) -> float:
            wrong = 0
            for part, tensor, slot in zip(self.parts, self.tensors, self.slots, strict=True):
                want = torch.full_like(tensor, _OTHER)
                part.sliced(want).copy_(slot.to(tensor.dtype))
                wrong += _differing(tensor, want)
            return wrong

        self._compare(
            "unpack",
            prepare,
            measure,
            lambda: self.table.unpack(self.bucket),
            {
                "_foreach_copy_": lambda: torch._foreach_copy_(self.views, self.slots),
                "copy_ of each box": lambda: _copy_each(self.views, self.slots),
            },
        )

    def _compare(
        self,
        name: str,
        prepare: Callable[[], object],
        measure: Callable[[object], float],
        ours: Callable[[], object],
        peers: dict[str, Callable[[], object]],
    ) -> None:
        def checked(result: object) -> float:
            return self.bench.check(f"{name} {self.shape}", measure(result), 0)

        self.bench.compare(
            name,
            self.shape,
            [
                Variant("megarl", ours, prepare, checked, is_ours=True),
                _copy(self.bench, self.num_bytes),
                *(Variant(peer, body, prepare, measure) for peer, body in peers.items()),
            ],
            gigabytes=self.num_bytes / 1e9,
            writes=True,
        )


def _copy_each(to: Sequence[Tensor], source: Sequence[Tensor]) -> None:
    for a, b in zip(to, source, strict=True):
        a.copy_(b)


# ---------------------------------------------------------------- a round of the bridge


def _pack_round(bench: Bench, model: _Model) -> None:
    """The first round of a trainer rank with a quarter of a model, for eight workers' halves.

    256 MiB in boxes of 64 KiB, as for so many ranks; with the messages' digests.
    """
    names, tensors = [], []
    for i, part in enumerate(_parameters(model)):
        shape = part.sliced(torch.empty(part.shape, device="meta")).shape
        tensors.append(torch.empty(shape, dtype=torch.bfloat16, device=bench.device))
        tensors[-1].normal_(generator=bench.generator(i))
        names.append(f"{i}")
    held = dict(zip(names, tensors, strict=True))
    sizes = {name: tensor_2d(tensor.shape, 2) for name, tensor in held.items()}
    trainer = {name: Held((size.box,), ((0,),)) for name, size in sizes.items()}
    workers = {}
    for (name, size), part in zip(sizes.items(), _parameters(model), strict=True):
        boxes = _eighths(size.rows, size.columns, part.cut)
        holders = tuple((k,) for k in range(8)) if len(boxes) == 8 else (tuple(range(8)),)
        workers[name] = Held(boxes, holders)
    bucket_bytes = 1 << (20 if bench.is_quick else 28)
    plan = make_plan(
        *(sizes, trainer, workers),
        **{"num_sources": 1, "num_workers": 8},
        **{"bucket_bytes": bucket_bytes, "piece_bytes": 1 << 16},
    )

    def sources(name: str, box: PlanBox) -> list[Box]:
        return [Box(held[name], rows=box[:2], columns=box[2:])]

    outgoing = Outgoing(plan, 0, sources, bench.device)
    round_ = outgoing.rounds[0]
    messages = round_.messages
    views = [[sources(i.name, i.box)[0].view() for i in m.items] for m in messages]

    def each() -> list[Tensor]:
        made = []
        for message, of_message in zip(messages, views, strict=True):
            num_bytes = message.num_bytes + DIGEST_BYTES
            buffer = torch.empty(num_bytes, dtype=torch.uint8, device=bench.device)
            for item, view in zip(message.items, of_message, strict=True):
                to = buffer[item.start : item.start + item.num_bytes]
                to.view(view.dtype).view(view.shape).copy_(view)
            buffer[-DIGEST_BYTES:] = digest_on_device(buffer[:-DIGEST_BYTES]).view(1).view(to.dtype)
            made.append(buffer)
        return made

    num_bytes = sum(message.num_bytes for message in messages)
    num_boxes = sum(len(message.items) for message in messages)
    shape = f"{num_boxes} boxes in {len(messages)} messages, {num_bytes / 1e6:.1f} MB"

    def checked(bucket: object) -> float:
        assert isinstance(bucket, Tensor)
        parts = [part for _, part in round_.parts(bucket)]
        wrong = sum(_differing(a, b) for a, b in zip(parts, each(), strict=True))
        return bench.check(f"round {shape}", wrong, 0)

    bench.compare(
        "round",
        shape,
        [
            Variant("megarl", lambda: outgoing.packed(0), measure=checked, is_ours=True),
            _copy(bench, 2 * num_bytes),
            Variant("copy_ of each box", each),
        ],
        gigabytes=2 * num_bytes / 1e9,
        writes=True,
    )


def _eighths(rows: int, columns: int, cut: int | None) -> tuple[PlanBox, ...]:
    """Of a tensor along the axis that it is cut on."""
    if cut is None:
        return (PlanBox(0, rows, 0, columns),)
    size = (rows, columns)[cut]
    edges = [(size * k // 8, size * (k + 1) // 8) for k in range(8)]
    if cut == 0:
        return tuple(PlanBox(a, b, 0, columns) for a, b in edges)
    return tuple(PlanBox(0, rows, a, b) for a, b in edges)


# ---------------------------------------------------------------- fp8


def _quantize(
    bench: Bench, shape: str, sizes: Sequence[tuple[int, ...]], dtype: torch.dtype
) -> None:
    """One call a matrix: of many small ones the time to launch them is in it."""
    shape = f"{shape}, {dtype}".replace("torch.", "")
    if bench.is_late():
        return bench.skip("fp8 blocks", shape, "megarl", "skipped: no time left")
    random = bench.generator()
    matrices = [
        torch.empty(size, dtype=dtype, device=bench.device).normal_(0, 0.02, generator=random)
        for size in sizes
    ]
    for x in matrices:
        x[:FP8_BLOCK, :FP8_BLOCK] = 0.0
        x[-1] *= 1e-3

    def measure(made: object) -> float:
        assert isinstance(made, list)
        wrong = 0
        for x, (codes, scales) in zip(matrices, made, strict=True):
            want_codes, want_scales = _plain(x)
            wrong += _differing(codes, want_codes) + _differing(scales, want_scales)
        return wrong

    def checked(made: object) -> float:
        return bench.check(f"fp8 blocks {shape}", measure(made), 0)

    num_elements = sum(x.numel() for x in matrices)
    num_scales = sum(_blocks(x.shape[0]) * _blocks(x.shape[1]) for x in matrices)
    num_bytes = num_elements * (dtype.itemsize + 1) + 4 * num_scales
    variants = [
        Variant(
            "megarl",
            lambda: [quantize_fp8_blocks(x) for x in matrices],
            measure=checked,
            is_ours=True,
        ),
        _copy(bench, num_bytes),
        Variant("torch, eager", lambda: [_plain(x) for x in matrices], measure=measure),
    ]
    if bench.is_cuda and len(matrices) == 1:
        torch._dynamo.reset()
        plain = torch.compile(_plain)
        body = lambda: [plain(x) for x in matrices]  # noqa: E731
        variants.append(Variant("torch.compile", body, measure=measure))
    bench.compare("fp8 blocks", shape, variants, gigabytes=num_bytes / 1e9, writes=True)


def _blocks(size: int) -> int:
    return -(-size // FP8_BLOCK)


def _plain(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales of the definition in quantize_fp8_blocks."""
    (rows, width), down, across = x.shape, _blocks(x.shape[0]), _blocks(x.shape[1])
    padding = (0, across * FP8_BLOCK - width, 0, down * FP8_BLOCK - rows)
    padded = torch.nn.functional.pad(x.float(), padding)
    blocks = padded.view(down, FP8_BLOCK, across, FP8_BLOCK)
    # A tensor: torch on CUDA divides by a number as a product with its rounded inverse.
    largest = torch.full((), FP8_MAX, device=x.device)
    scales = blocks.abs().amax(dim=(1, 3)).clamp_min(FP8_LEAST_AMAX) / largest
    codes = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
    return codes.view(padded.shape)[:rows, :width].contiguous(), scales

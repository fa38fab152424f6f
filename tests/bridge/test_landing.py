"""`bridge/engines/landing.py`: in place is what the loader would have made, or it is refused.

The models load as vLLM's and SGLang's do: narrow to this rank's part, copy_ into a slice.
"""

import math
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from megarl.bridge.boxes import Box, Held, tensor_2d
from megarl.bridge.engines.landing import Landing
from megarl.bridge.engines.trace import trace_loading
from megarl.bridge.layout import workers_layout
from megarl.bridge.plan import make_plan
from megarl.bridge.transport import Arrived, Assembly, Incoming
from megarl.ops.library import declare_again, ops_of

TP, HIDDEN, VOCAB, EXPERTS = 2, 16, 30, 3
SHAPES = {
    "embed": [VOCAB, HIDDEN],
    "norm": [HIDDEN],
    "q": [32, HIDDEN],
    "k": [8, HIDDEN],
    "q.bias": [32],
    "o": [HIDDEN, 32],
    "scale": [],
    "fused_experts": [EXPERTS, 8, HIDDEN],
    "stack": [EXPERTS, 4, HIDDEN],
    **{f"expert{e}.{part}": [8, HIDDEN] for e in range(EXPERTS) for part in ("gate", "up")},
}


class UnquantizedMethod:
    pass


class Linear(nn.Module):
    def __init__(self, *shape, dtype, bias=0):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False)
        if bias:
            self.bias = nn.Parameter(torch.zeros(bias, dtype=dtype), requires_grad=False)
        self.quant_method = UnquantizedMethod()


class Engine(nn.Module):
    """One rank of an engine's model. Rows of the vocabulary are padded to a multiple of 8."""

    def __init__(self, rank, dtype=torch.bfloat16):
        super().__init__()
        self.rank = rank
        self.embed = Linear(16, HIDDEN, dtype=dtype)
        self.head = Linear(16, HIDDEN, dtype=dtype)
        self.head.weight = self.embed.weight
        self.layer = nn.Module()
        self.layer.norm = Linear(HIDDEN, dtype=dtype)
        # Memory of another tensor, as where small parameters are kept together.
        self.layer.norm.weight = nn.Parameter(torch.zeros(40, dtype=dtype)[8:24])
        self.layer.qkv = Linear(20, HIDDEN, dtype=dtype, bias=20)
        self.layer.o = Linear(HIDDEN, 16, dtype=dtype)
        self.layer.experts = nn.Module()
        self.layer.experts.w13 = nn.Parameter(torch.zeros(EXPERTS, 8, HIDDEN, dtype=dtype))
        self.layer.experts.fused = nn.Parameter(torch.zeros(EXPERTS, 4, HIDDEN, dtype=dtype))
        self.layer.experts.wide = nn.Parameter(torch.zeros(EXPERTS, 6, HIDDEN, dtype=dtype))
        self.layer.register_buffer("scale", torch.zeros((), dtype=dtype))

    def load_weights(self, weights):
        with torch.no_grad():
            for name, tensor in weights:
                self.load_one(name, tensor)

    def half(self, tensor, dim=0):
        size = tensor.shape[dim] // TP
        return tensor.narrow(dim, self.rank * size, size)

    def load_one(self, name, w):
        layer = self.layer
        if name == "embed":
            rows = 16 - 2 * self.rank  # the vocabulary ends within the last rank's
            self.embed.weight[:rows].data.copy_(w.narrow(0, 16 * self.rank, rows))
            self.embed.weight[rows:].data.fill_(0)
        elif name == "norm":
            layer.norm.weight.data.copy_(w)
        elif name == "scale":
            layer.scale.copy_(w)
        elif name in ("q", "k"):
            start = {"q": 0, "k": 16}[name]
            part = self.half(w)
            layer.qkv.weight.data.narrow(0, start, part.shape[0]).copy_(part)
        elif name == "q.bias":
            layer.qkv.bias.data[:16].copy_(self.half(w))
        elif name == "o":
            layer.o.weight.data.copy_(self.half(w, 1))
        elif name == "fused_experts":
            layer.experts.fused.data.copy_(self.half(w, 1))
        elif name == "stack":
            layer.experts.wide.data[:, 1:5].copy_(w)
        else:
            expert, part = int(name[6]), name[8:]
            start = {"gate": 0, "up": 4}[part]
            layer.experts.w13.data[expert].narrow(0, start, 4).copy_(self.half(w))


def random_bytes(numel, seed):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(numel, generator=g)


def hf(dtype, seed=0, shapes=SHAPES):
    return {
        name: random_bytes(math.prod(shape), 100 * seed + i).view(shape).to(dtype)
        for i, (name, shape) in enumerate(shapes.items())
    }


def in_two(box):
    """The first row, or five elements of a vector, and the rest."""
    if box.row_end > 1:
        return (box._replace(row_end=1), box._replace(row=1))
    return (box._replace(column_end=5), box._replace(column=5)) if box.column_end > 5 else (box,)


class Case:
    """An engine's rank, its trace, and a plan whose rounds are made by hand."""

    def __init__(self, make=Engine, wire=torch.bfloat16, rank=1, shapes=SHAPES, **options):
        self.wire, self.shapes, self.options = wire, shapes, options
        self.dtype = str(wire).removeprefix("torch.")
        with torch.device("meta"):
            skeleton = make(rank)
        self.trace = trace_loading(skeleton, [(n, s, self.dtype) for n, s in shapes.items()])
        self.model, self.reference = make(rank), make(rank)
        sizes = {name: tensor_2d(shape, wire.itemsize) for name, shape in shapes.items()}
        # Two sources that cut where no part does.
        trainer = {
            name: Held(in_two(t.box), ((0,), (1,))[: len(in_two(t.box))])
            for name, t in sizes.items()
        }
        needs = [{n: [Box(*p) for p in parts] for n, parts in self.trace.parts.items()}]
        layout = workers_layout(needs)
        self.plan = make_plan(
            *(sizes, trainer, layout),
            num_sources=2,
            num_workers=1,
            bucket_bytes=600,
            piece_bytes=200,
        )
        self.incoming = Incoming(self.plan, 0, "cpu")
        assert len(self.incoming.rounds) > 3
        self.named = {name: (self.dtype, shape) for name, shape in shapes.items()}

    def landing(self, **options):
        given = {"engine": "sglang", **self.options, **options}
        return Landing(self.trace, self.model, self.incoming, self.named, **given)

    def rounds(self, values):
        for ordinal, round_ in enumerate(self.incoming.rounds):
            bucket = torch.full((round_.num_bytes,), 0x5A, dtype=torch.uint8)
            for item in round_.items():
                box, flat = item.box, values[item.name]
                flat = flat.reshape(-1, flat.shape[-1] if flat.ndim else 1)
                part = flat[box.row : box.row_end, box.column : box.column_end]
                data = part.contiguous().view(-1).view(torch.uint8)
                bucket[item.start : item.start + item.num_bytes] = data
            yield Arrived(ordinal, round_, bucket)

    def load(self, model, values, landing=None):
        assembly = Assembly(self.plan, self.named, "cpu")

        def tensors():
            for arrived in self.rounds(values):
                if landing is not None:
                    landing.watch(arrived)
                for name, box, data in arrived.boxes():
                    whole = assembly.add(name, box, data)
                    if whole is not None:
                        yield name, whole

        model.load_weights(tensors())
        assert not assembly.incomplete()

    def prove(self, **options):
        landing = self.landing(**options)
        self.load(self.model, hf(self.wire, shapes=self.shapes), landing)
        landing.prove()
        return landing


def bits(model):
    return {n: t.detach().clone().view(-1).view(torch.uint8) for n, t in model.state_dict().items()}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("wire", "there"),
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
        (torch.float32, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float32),
    ],
)
def test_in_place_is_what_the_loader_makes(rank, wire, there):
    case = Case(lambda rank: Engine(rank, there), wire, rank)
    landing = case.prove()
    assert landing.refusals == {}
    assert landing.is_ready()
    for seed in (1, 2):
        values = hf(wire, seed)
        for arrived in case.rounds(values):
            landing.land(arrived)
        case.load(case.reference, values)
        got, want = bits(case.model), bits(case.reference)
        assert got.keys() == want.keys()
        for name in want:
            assert torch.equal(got[name], want[name]), name
        # And that is what was sent.
        half = values["o"].narrow(1, 16 * rank, 16).to(there)
        assert torch.equal(case.model.layer.o.weight, half)
        assert torch.equal(case.model.head.weight, case.model.embed.weight)


@pytest.mark.parametrize("with_references", [True, False])
def test_parameters_made_in_inference_mode(with_references):
    """As SGLang's event loop makes and loads them."""
    with torch.inference_mode():
        case = Case()
    landing = case.landing()
    with torch.inference_mode():
        case.load(case.model, hf(case.wire), landing)
    landing.prove()
    values = hf(case.wire, 1)
    # The reference writes by torch, which minds the mode; a kernel does not.
    library = declare_again("landing", with_references=True)
    with ops_of("landing") if with_references else nullcontext():
        for arrived in case.rounds(values):
            landing.land(arrived)
    del library
    assert torch.equal(case.model.layer.norm.weight, values["norm"])


class TwoPlaces(Engine):
    """A head of its own, which the same HF tensor is copied into."""

    def __init__(self, rank):
        super().__init__(rank)
        self.head.weight = nn.Parameter(torch.zeros_like(self.embed.weight))

    def load_one(self, name, w):
        super().load_one(name, w)
        if name == "embed":
            rows = 16 - 2 * self.rank
            self.head.weight[:rows].data.copy_(w.narrow(0, 16 * self.rank, rows))


def test_a_tensor_that_goes_to_two_places():
    case = Case(TwoPlaces)
    landing = case.prove()
    assert landing.is_ready()
    values = hf(case.wire, 1)
    for arrived in case.rounds(values):
        landing.land(arrived)
    case.load(case.reference, values)
    assert torch.equal(case.model.head.weight, case.reference.head.weight)
    assert torch.equal(case.model.embed.weight[:14], values["embed"][16:])
    assert torch.equal(case.model.head.weight[:14], values["embed"][16:])

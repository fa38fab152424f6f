"""`bridge/engines/landing.py`: what it refuses to write in place, and what it says of that."""

import pytest
import torch
from test_landing import HIDDEN, SHAPES, Case, Engine, hf
from torch import nn


class Adds(Engine):
    def load_one(self, name, w):
        super().load_one(name, w + 1 if name == "norm" else w)


class AlsoReads(Engine):
    def load_one(self, name, w):
        super().load_one(name, w)
        if name == "norm":
            self.layer.largest = w.max()


class WritesOver(Engine):
    def load_one(self, name, w):
        super().load_one(name, w)
        if name == "norm":
            self.layer.norm.weight.data.mul_(2)


class Transposes(Engine):
    def __init__(self, rank):
        super().__init__(rank)
        self.layer.o.weight = nn.Parameter(torch.zeros(16, HIDDEN, dtype=torch.bfloat16))

    def load_one(self, name, w):
        if name == "o":
            self.layer.o.weight.data.copy_(self.half(w, 1).t())
        else:
            super().load_one(name, w)


class Keeps(Engine):
    """In what is no parameter."""

    def load_one(self, name, w):
        if name == "norm":
            self.layer.norm.kept = [torch.zeros(w.shape, dtype=w.dtype, device=w.device).copy_(w)]
        else:
            super().load_one(name, w)


class Mla(Engine):
    def __init__(self, rank):
        super().__init__(rank)
        self.layer.kv_b_proj = self.layer.o
        del self.layer.o

    def load_one(self, name, w):
        if name == "o":
            self.layer.kv_b_proj.weight.data.copy_(self.half(w, 1))
        else:
            super().load_one(name, w)


@pytest.mark.parametrize(
    ("make", "name", "reason"),
    [
        (Adds, "norm", "does not just copy"),
        (AlsoReads, "norm", "does not just copy"),
        (WritesOver, "norm", "does not just copy"),
        (Transposes, "o", "is not whole rows of what is copied"),
        (Keeps, "norm", "does not just copy"),
        (Mla, "o", "attention computes with matrices made of layer.kv_b_proj.weight"),
    ],
)
def test_a_loader_that_does_more_than_copy(make, name, reason):
    landing = Case(make).landing()
    assert list(landing.refusals) == [name]
    assert reason in landing.refusals[name]
    assert not landing.is_ready()


def packs(model):
    """A packed copy, as of a linear layer or of the two halves of kv_b_proj."""
    model.layer.o.packed = model.layer.o.weight.data.t().contiguous()


def absorbs(model):
    model.layer.attention = nn.Module()
    model.layer.attention.w_uk = (model.layer.qkv.weight.data[:4].clone(),)


def pads(model):
    model.layer.norm.weight = nn.Parameter(torch.zeros(HIDDEN + 1, dtype=torch.bfloat16))


def widens(model):
    model.layer.norm.weight = nn.Parameter(model.layer.norm.weight.data.float())


def transposes(model):
    weight = model.layer.o.weight
    weight.data = weight.data.t().contiguous().t()


def drops(model):
    del model.layer.norm.weight


def unties(model):
    model.head.weight = nn.Parameter(model.embed.weight.data.clone())


def ties(model):
    model.layer.norm.weight.data = model.layer.qkv.weight.data[0]


def quantises(model):
    model.layer.norm.quant_method = type("Fp8LinearMethod", (), {})()


LAYER = {name for name in SHAPES if name != "embed"}
AFTER_LOADING = [
    (packs, LAYER, "layer.o.packed, which was made after loading"),
    (absorbs, LAYER, "layer.attention.w_uk, which was made after loading"),
    (pads, {"norm"}, r"(17,) with strides (1,), and was loaded as bfloat16 (16,)"),
    (widens, {"norm"}, "is float32 (16,)"),
    (transposes, {"o"}, "with strides (1, 16)"),
    (drops, {"norm"}, "is not in the model"),
    (unties, {"embed"}, "shares its memory with []"),
    (ties, {"norm", "q", "k"}, "shares its memory with"),
    (quantises, {"norm"}, "quantised by Fp8LinearMethod"),
]


@pytest.mark.parametrize(("change", "names", "reason"), AFTER_LOADING)
def test_a_model_that_was_changed_after_loading(change, names, reason):
    case = Case()
    change(case.model)
    landing = case.landing()
    assert set(landing.refusals) == names
    assert all(reason in text for text in landing.refusals.values()), landing.refusals
    assert not landing.is_ready()
    for arrived in case.rounds(hf(case.wire)):
        landing.watch(arrived)
    landing.prove()
    assert not landing.is_ready()


@pytest.mark.parametrize("change", [packs, absorbs, pads, unties, quantises])
def test_a_model_that_is_changed_after_the_proof(change):
    landing = (case := Case()).prove()
    assert landing.is_ready()
    change(case.model)
    assert not landing.is_ready()


def test_a_parameter_that_moved():
    landing = (case := Case()).prove()
    norm = case.model.layer.norm
    norm.weight = nn.Parameter(norm.weight.data.clone())
    assert not landing.is_ready()
    assert landing.refusals == {}


def test_vllm_on_a_cpu_never_lands_in_place():
    landing = Case().prove(engine="vllm")
    assert set(landing.refusals) == set(SHAPES)
    assert not landing.is_ready()


def test_a_kv_cache_is_no_copy_of_weights():
    case = Case()
    case.model.layer.kv_cache = [torch.zeros(4)]
    assert case.prove().is_ready()


def test_rows_in_another_order_are_found_by_the_first_push():
    """As some kernels want gate and up the other way round: same shape, other bytes."""
    case = Case()
    landing = case.landing()
    assert landing.refusals == {}
    case.load(case.model, hf(case.wire), landing)
    w13 = case.model.layer.experts.w13.data
    w13.copy_(torch.cat([w13[:, 4:], w13[:, :4]], dim=1))
    landing.prove()
    assert set(landing.refusals) == {name for name in SHAPES if name.startswith("expert")}
    assert not landing.is_ready()


def test_a_dtype_that_no_cast_leads_to():
    case = Case(lambda rank: Engine(rank, torch.float16), torch.bfloat16)
    landing = case.landing()
    assert set(landing.refusals) == set(SHAPES)
    assert "it comes as bfloat16, and embed.weight is float16" in landing.refusals["embed"]


def test_not_before_the_proof():
    case = Case()
    landing = case.landing()
    assert not landing.is_ready()
    with pytest.raises(AssertionError, match="before prove"):
        landing.land(next(iter(case.rounds(hf(case.wire)))))
    with pytest.raises(AssertionError, match="before all rounds"):
        landing.prove()

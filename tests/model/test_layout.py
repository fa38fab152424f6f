"""Pieces of all tensor-parallel ranks cover every HF tensor exactly once, in any layout."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.errors import ConfigError
from megarl.model.families import family_of, rule_for
from megarl.model.layout import Rule, Sizes, chunk_of_layer, fill, pieces

sizes_and_tp = st.tuples(
    st.integers(1, 3),  # KV heads a rank
    st.integers(1, 4),  # query heads a KV head
    st.sampled_from([2, 4]),  # head dim
    st.integers(1, 4),  # tp
)


def shapes_of(split: str, sizes: Sizes, tp: int, odd: int) -> tuple[tuple[int, int], ...]:
    q, kv = sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
    return {
        "qkv": ((q, 3), (kv, 3), (kv, 3)),
        "gate_up": ((5 * tp, 3), (5 * tp, 3)),
        "rows": ((7 * tp, 3),),
        "columns": ((3, 7 * tp),),
        "vocab": ((odd, 3),),
        "replicated": ((6, 3),),
    }[split]


@pytest.mark.parametrize("split", ["qkv", "gate_up", "rows", "columns", "vocab", "replicated"])
@given(numbers=sizes_and_tp, odd=st.integers(1, 40))
def test_shards_are_an_exact_cover_and_fill_inverts_them(split, numbers, odd):
    kv_per_rank, group, head_dim, tp = numbers
    sizes = Sizes(kv_per_rank * tp * group, kv_per_rank * tp, head_dim)
    shapes = shapes_of(split, sizes, tp, odd)
    names = tuple("abc"[: len(shapes)])
    rule = Rule(split, names)
    dim = 1 if split == "columns" else 0
    tensors = {n: torch.rand(s) for n, s in zip(names, shapes, strict=True)}
    rebuilt = {n: torch.full(s, torch.nan) for n, s in zip(names, shapes, strict=True)}
    counts = {n: torch.zeros(s) for n, s in zip(names, shapes, strict=True)}

    for rank in range(tp):
        parts = pieces(rule, tuple(s[dim] for s in shapes), sizes, tp, rank)
        total = sum(p.length for p in parts)
        padded = -(-odd // tp) if split == "vocab" else total
        local = torch.full((3, padded) if dim else (padded, 3), torch.nan)
        fill(local, parts, lambda p: tensors[p.hf_name].narrow(p.dim, p.hf_start, p.length))
        assert not local.isnan().any()
        assert not local[total:].any() if split == "vocab" else True
        for p in parts:
            source = local.narrow(p.dim, p.local_start, p.length)
            rebuilt[p.hf_name].narrow(p.dim, p.hf_start, p.length).copy_(source)
            counts[p.hf_name].narrow(p.dim, p.hf_start, p.length).add_(1)
    for name in names:
        assert torch.equal(rebuilt[name], tensors[name])
        assert (counts[name] == (tp if split == "replicated" else 1)).all()


@given(st.integers(1, 130), st.integers(1, 130))
def test_chunks_follow_each_other_and_differ_by_a_layer_at_most(num_layers, num_chunks):
    num_layers = max(num_layers, num_chunks)
    chunks = [chunk_of_layer(i, num_layers, num_chunks) for i in range(num_layers)]
    assert chunks == sorted(chunks)
    depths = [chunks.count(chunk) for chunk in range(num_chunks)]
    assert sum(depths) == num_layers
    assert max(depths) - min(depths) <= 1


def test_a_width_that_does_not_divide_is_named():
    sizes = Sizes(6, 3, 8)
    with pytest.raises(ValueError, match="down: dimension 1 of 7"):
        pieces(Rule("columns", ("down",)), (7,), sizes, 2, 0)
    with pytest.raises(ValueError, match="3 KV heads do not divide by tp 2"):
        pieces(Rule("qkv", ("q", "k", "v")), (48, 24, 24), sizes, 2, 0)


def test_a_slice_of_the_wrong_shape_is_named():
    parts = pieces(Rule("rows", ("up",)), (4,), Sizes(1, 1, 1), 1, 0)
    with pytest.raises(ValueError, match="up: slice of"):
        fill(torch.empty(4, 3), parts, lambda piece: torch.zeros(4, 2))


def test_unknown_models_and_parameters_are_named():
    with pytest.raises(ConfigError, match="'gpt2' is not supported; supported: llama"):
        family_of({"model_type": "gpt2"})
    with pytest.raises(ConfigError, match="mlp_bias"):
        family_of({"model_type": "llama", "mlp_bias": True})
    llama = family_of({"model_type": "llama"})
    with pytest.raises(ValueError, match=r"'decoder\.layers\.0\.mlp\.router\.weight'"):
        rule_for(llama, "decoder.layers.0.mlp.router.weight", 0)

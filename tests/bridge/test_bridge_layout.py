"""`bridge/layout.py`: the trainer's layouts, by counting; against real models in tests/dist."""

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import tiny_hf

from megarl.bridge.boxes import Box, Held
from megarl.bridge.layout import hf_tensors, stage_of_layer, trainer_layout, workers_layout
from megarl.config.schema import ParallelConfig
from megarl.parallel import coordinates, expert_coordinates

CONFIGS = {
    (family, tied): tiny_hf(family, tied=tied, vocab=97, num_hidden_layers=5).config.to_dict()
    for family in ("llama", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3")
    for tied in (False, True)
}
EXPERTS = {"qwen3_moe": 4, "deepseek_v3": 8}


@st.composite
def layouts(draw):
    family, tied = draw(st.sampled_from(sorted(CONFIGS)))
    tp, cp, pp = draw(st.sampled_from([1, 2])), draw(st.integers(1, 2)), draw(st.integers(1, 2))
    dp = draw(st.integers(1, 4))
    options = {"tp": tp, "cp": cp, "pp": pp}
    if pp > 1:
        options["vpp"] = draw(st.sampled_from([None, 2]))
    if family in EXPERTS:
        in_stage = tp * cp * dp
        fits = [
            (ep, etp)
            for ep, etp in itertools.product((1, 2, 4), (1, 2))
            if in_stage % (ep * etp) == 0 and (etp == 1 or ep > 1 or tp > 1)
        ]
        options["ep"], options["etp"] = draw(st.sampled_from(fits))
    return family, tied, ParallelConfig(**options), tp * cp * pp * dp


@given(layouts())
def test_every_element_is_held_by_as_many_ranks_as_there_are_copies(case):
    family, tied, parallel, world = case
    config = CONFIGS[family, tied]
    layout = trainer_layout(config, parallel, world)
    tensors = hf_tensors(config, 4)
    assert layout.keys() == tensors.keys()
    for name, held in layout.items():
        whole = tensors[name].box
        assert sum(box.elements for box in held.boxes) == whole.elements, name
        for box, other in itertools.combinations(held.boxes, 2):
            assert box.meet(other) is None, name
        for box, ranks in zip(held.boxes, held.holders, strict=True):
            if not box.elements:
                continue
            assert box.meet(whole) == box
            assert sorted(set(ranks)) == list(ranks)
            in_stage = world // parallel.pp
            if ".experts." in name:
                want = in_stage // (parallel.ep * parallel.expert_tp)
            elif len(held.boxes) == 1:
                want = in_stage
            else:
                want = in_stage // parallel.tp
            if tied and parallel.pp > 1 and name == "model.embed_tokens.weight":
                want *= 2
            assert len(ranks) == want, (name, box, ranks)


@given(layouts())
def test_ranks_are_where_the_mesh_puts_them(case):
    """The order of ranks is written in two places; this is that they agree."""
    family, tied, parallel, world = case
    layout = trainer_layout(CONFIGS[family, tied], parallel, world)
    o_proj = layout["model.layers.1.self_attn.o_proj.weight"]
    stage = stage_of_layer(1, 5, parallel)
    for i, ranks in enumerate(o_proj.holders):
        for rank in ranks:
            place = coordinates(rank, world, parallel)
            assert (place.tp, place.pp) == (i, stage)
    count = EXPERTS.get(family, 0)
    for expert in range(count):
        down = layout[f"model.layers.1.mlp.experts.{expert}.down_proj.weight"]
        for i, ranks in enumerate(down.holders):
            for rank in ranks:
                place = expert_coordinates(rank, world, parallel)
                assert (place.etp, place.pp) == (i, stage)
                assert place.ep == expert // (count // parallel.ep)


def test_virtual_stages_go_round():
    parallel = ParallelConfig(pp=2, vpp=2)
    assert [stage_of_layer(layer, 8, parallel) for layer in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert [stage_of_layer(i, 8, ParallelConfig(pp=4)) for i in range(8)] == [
        *(0, 0, 1, 1, 2, 2, 3, 3),
    ]
    # One layer more in the earlier of two neighbours.
    assert [stage_of_layer(i, 7, ParallelConfig(pp=4)) for i in range(7)] == [0, 0, 1, 1, 2, 2, 3]


def test_workers_are_put_together():
    top, bottom, whole = Box(0, 2, 0, 4), Box(2, 4, 0, 4), Box(0, 4, 0, 4)
    needs = [{"w": [top], "n": [whole]}, {"w": [bottom], "n": [whole]}, {"w": [whole]}]
    layout = workers_layout(needs)
    assert layout["n"] == Held((whole,), ((0, 1),))
    assert Counter(zip(layout["w"].boxes, layout["w"].holders, strict=True)) == Counter(
        {(top, (0,)): 1, (bottom, (1,)): 1, (whole, (2,)): 1}
    )


@pytest.mark.parametrize(
    ("family", "parallel", "message"),
    [
        ("llama", ParallelConfig(tp=4), r"k_proj.weight: 2 KV heads do not divide by tp 4"),
        # 24 rows of 4 heads do divide; a head would be on two ranks.
        ("deepseek_v3", ParallelConfig(tp=8), r"num_attention_heads: 4 do not divide by tp 8"),
        ("deepseek_v3", ParallelConfig(ep=3, etp=1), "8 experts do not divide by ep 3"),
        ("deepseek_v3", ParallelConfig(pp=4, vpp=2), "5 layers are fewer than pp 4 . vpp 2"),
    ],
)
def test_what_does_not_divide_is_named(family, parallel, message):
    with pytest.raises(ValueError, match=message):
        trainer_layout(CONFIGS[family, False], parallel, 24)


def test_latents_are_whole_and_heads_are_cut():
    layout = trainer_layout(CONFIGS["deepseek_v3", False], ParallelConfig(tp=2, ep=2, etp=1), 2)
    prefix = "model.layers.1."
    for name in (
        *("self_attn.q_a_proj.weight", "self_attn.kv_a_proj_with_mqa.weight"),
        *("self_attn.q_a_layernorm.weight", "self_attn.kv_a_layernorm.weight"),
        *("mlp.gate.weight", "mlp.gate.e_score_correction_bias"),
    ):
        assert layout[prefix + name].holders == ((0, 1),), name
    for name in (
        *("self_attn.q_b_proj.weight", "self_attn.kv_b_proj.weight", "self_attn.o_proj.weight"),
        *("mlp.shared_experts.up_proj.weight", "mlp.shared_experts.down_proj.weight"),
    ):
        assert layout[prefix + name].holders == ((0,), (1,)), name
    # Of each head 12 + 16 rows: keys and values of a head are on one rank.
    assert layout[prefix + "self_attn.kv_b_proj.weight"].boxes == (
        *(Box(0, 56, 0, 20), Box(56, 112, 0, 20)),
    )
    assert layout[prefix + "mlp.experts.5.up_proj.weight"].holders == ((1,),)
    assert layout["model.layers.0.mlp.up_proj.weight"].holders == ((0,), (1,))


def test_the_routers_bias_travels_in_float32():
    tensors = hf_tensors(CONFIGS["deepseek_v3", False], 2)
    bias = tensors.pop("model.layers.1.mlp.gate.e_score_correction_bias")
    assert bias == (1, 8, 4)
    assert tensors["model.layers.1.mlp.gate.weight"].itemsize == 2

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
    (family, tied): tiny_hf(family, tied=tied, vocab=97).config.to_dict()
    for family in ("llama", "qwen2", "qwen3", "qwen3_moe")
    for tied in (False, True)
}


@st.composite
def layouts(draw):
    family, tied = draw(st.sampled_from(sorted(CONFIGS)))
    tp, cp, pp = draw(st.sampled_from([1, 2])), draw(st.integers(1, 2)), draw(st.integers(1, 2))
    dp = draw(st.integers(1, 4))
    options = {"tp": tp, "cp": cp, "pp": pp}
    if pp > 1:
        options["vpp"] = draw(st.sampled_from([None, 2]))
    if family == "qwen3_moe":
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
    stage = stage_of_layer(1, 4, parallel)
    for i, ranks in enumerate(o_proj.holders):
        for rank in ranks:
            place = coordinates(rank, world, parallel)
            assert (place.tp, place.pp) == (i, stage)
    if family != "qwen3_moe":
        return
    for expert in range(4):
        down = layout[f"model.layers.1.mlp.experts.{expert}.down_proj.weight"]
        for i, ranks in enumerate(down.holders):
            for rank in ranks:
                place = expert_coordinates(rank, world, parallel)
                assert (place.etp, place.pp) == (i, stage)
                assert place.ep == expert // (4 // parallel.ep)


def test_virtual_stages_go_round():
    parallel = ParallelConfig(pp=2, vpp=2)
    assert [stage_of_layer(layer, 8, parallel) for layer in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert [stage_of_layer(i, 8, ParallelConfig(pp=4)) for i in range(8)] == [
        *(0, 0, 1, 1, 2, 2, 3, 3),
    ]


def test_workers_are_put_together():
    top, bottom, whole = Box(0, 2, 0, 4), Box(2, 4, 0, 4), Box(0, 4, 0, 4)
    needs = [{"w": [top], "n": [whole]}, {"w": [bottom], "n": [whole]}, {"w": [whole]}]
    layout = workers_layout(needs)
    assert layout["n"] == Held((whole,), ((0, 1),))
    assert Counter(zip(layout["w"].boxes, layout["w"].holders, strict=True)) == Counter(
        {(top, (0,)): 1, (bottom, (1,)): 1, (whole, (2,)): 1}
    )


def test_a_tensor_that_does_not_divide_is_named():
    with pytest.raises(ValueError, match=r"k_proj.weight: 2 KV heads do not divide by tp 4"):
        trainer_layout(CONFIGS["llama", False], ParallelConfig(tp=4), 4)

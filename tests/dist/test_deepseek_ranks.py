"""DeepSeek's own: the router's bias, layers of multi-token prediction, scaled weights.

Logits and gradients against transformers are in test_hf_parity.py.
"""

import json
import logging

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_engine import compare as compare_steps
from test_engine import make_engine, train_hf
from test_state import load_and_go_on, save_after_two_steps, step
from tiny_models import save_tiny_hf

from megarl import parallel as mesh_module
from megarl.config.schema import ParallelConfig
from megarl.errors import CheckpointError

BIAS = "mlp.gate.e_score_correction_bias"
LAYOUTS = {
    "plain": (1, ParallelConfig()),
    "tp2": (2, ParallelConfig(tp=2)),
    "tp2ep2etp1": (2, ParallelConfig(tp=2, ep=2, etp=1)),
    "pp2": (2, ParallelConfig(pp=2)),
    "pp2vpp2": (2, ParallelConfig(pp=2, vpp=2)),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Five layers, so that stages are of unequal depth; a vocabulary that tp 2 pads."""
    folder = tmp_path_factory.mktemp("deepseek")
    save_tiny_hf(folder, "deepseek_v3", tied=False, vocab=97, num_hidden_layers=5)
    return folder


class Heard(logging.Handler):
    def __init__(self):
        super().__init__()
        self.messages = []

    def emit(self, record):
        self.messages.append(record.getMessage())


def load_and_export(folder, parallel, dtype):
    """(what was logged; rank 0's export, the others' nothing)."""
    heard = Heard()
    logger = logging.getLogger("megarl.model.weights")
    logger.addHandler(heard)
    try:
        engine = make_engine(folder, parallel, dtype=dtype)
        return heard.messages, {name: tensor.clone() for name, tensor in engine.export}
    finally:
        logger.removeHandler(heard)
        mesh_module.destroy()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_there_and_back_is_the_same_bits(ranks, checkpoint, layout, dtype):
    world_size, parallel = LAYOUTS[layout]
    results = ranks(world_size).run(load_and_export, checkpoint, parallel, dtype)
    got = results[0][1]
    want = load_file(checkpoint / "model.safetensors")
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        # The bias stays what it is, in a model of bfloat16 too.
        expected = tensor if name.endswith(BIAS) else tensor.to(getattr(torch, dtype))
        assert got[name].dtype == expected.dtype, name
        assert torch.equal(got[name], expected), name
    assert not any(messages for messages, _ in results)


def train_one_step(folder, parallel, dtype):
    engine = make_engine(folder, parallel, dtype=dtype)
    try:
        step(engine, 0)
        return {name: tensor.clone() for name, tensor in engine.export}
    finally:
        mesh_module.destroy()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_changes_all_but_the_bias(ranks, checkpoint, dtype):
    got = ranks(2).run(train_one_step, checkpoint, ParallelConfig(tp=2), dtype)[0]
    before = load_file(checkpoint / "model.safetensors")
    same = {name for name, x in before.items() if torch.equal(got[name], x.to(got[name].dtype))}
    biases = {name for name in before if name.endswith(BIAS)}
    assert all(torch.equal(got[name], before[name]) for name in biases)
    if dtype == "float32":
        assert same == biases
    else:  # a norm's weight near 1 may round back, and that of an expert without a token
        assert len(same) < len(before) / 4


def start_from_scratch(folder):
    engine = make_engine(folder, ParallelConfig(tp=2), init_from_scratch=True, optimizer=None)
    try:
        return {
            name: x.detach().clone()
            for name, x in engine.chunks[0].named_parameters()
            if "down_proj" in name
        }
    finally:
        mesh_module.destroy()


def test_whole_projections_start_as_the_model_does(ranks, checkpoint, tmp_path):
    folder = with_more(checkpoint, tmp_path, {}, initializer_range=0.5)
    first, second = ranks(2).run(start_from_scratch, folder)
    assert len(first) == 10  # of queries and of keys, in five layers
    for name, weight in first.items():
        assert weight.std() == pytest.approx(0.5, rel=0.2), name  # of 640 numbers and more
        assert torch.equal(second[name], weight), name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_steps_equal_torch_adamw(ranks, tmp_path_factory, layout):
    folder = tmp_path_factory.mktemp("trained")
    trained = folder, train_hf(save_tiny_hf(folder, "deepseek_v3", tied=False))
    compare_steps(ranks, trained, *LAYOUTS[layout], True)


@pytest.mark.parametrize(
    ("at_save", "at_load"),
    [
        (ParallelConfig(tp=2), ParallelConfig(pp=2)),
        (ParallelConfig(pp=2), ParallelConfig(tp=2, ep=2, etp=1)),
        (ParallelConfig(ep=2), ParallelConfig(ep=2)),
    ],
    ids=["tp-pp", "pp-tpep", "ep-ep"],
)
def test_training_goes_on_as_if_it_had_not_stopped(ranks, checkpoint, tmp_path, at_save, at_load):
    reference = ranks(2).run(save_after_two_steps, str(checkpoint), at_save, tmp_path)[0]
    for _, _, history in ranks(2).run(load_and_go_on, str(checkpoint), at_load, tmp_path):
        for got, want in zip(history, reference, strict=True):
            assert got["loss"] == pytest.approx(want["loss"], rel=1e-4)
            assert got["grad_norm"] == pytest.approx(want["grad_norm"], rel=1e-3)


def with_more(checkpoint, folder, tensors, **values):
    config = json.loads((checkpoint / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **values}))
    save_file(
        {**load_file(checkpoint / "model.safetensors"), **tensors}, folder / "model.safetensors"
    )
    return folder


def test_layers_of_multi_token_prediction_are_left_out_aloud(ranks, checkpoint, tmp_path):
    more = {
        "model.layers.5.eh_proj.weight": torch.ones(32, 64),
        "model.layers.5.mlp.gate.weight": torch.ones(8, 32),
    }
    folder = with_more(checkpoint, tmp_path, more, num_nextn_predict_layers=1)
    results = ranks(2).run(load_and_export, folder, ParallelConfig(pp=2), "float32")
    assert results[0][0] == [
        f"{folder}: 2 tensors of multi-token prediction are neither trained nor exported"
    ]
    assert results[1][0] == []
    assert results[0][1].keys() == load_file(checkpoint / "model.safetensors").keys()


def error_of_loading(folder):
    with pytest.raises(CheckpointError) as caught:
        load_and_export(folder, ParallelConfig(), "bfloat16")
    return str(caught.value)


def test_weights_with_scales_are_refused(ranks, checkpoint, tmp_path):
    """Even where config.json says nothing of them: their codes would be read as weights."""
    scale = "model.layers.1.self_attn.o_proj.weight_scale_inv"
    folder = with_more(checkpoint, tmp_path, {scale: torch.ones(1, 1)})
    (error,) = ranks(1).run(error_of_loading, folder)
    assert error == f"{folder}: {scale}: quantised weights cannot be trained"

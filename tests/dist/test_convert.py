"""HF folder -> training state -> HF folder: the same bits, whatever the two layouts."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_engine import make_batch, make_engine, nll, rows_of
from tiny_models import save_tiny_hf
from transformers import AutoModelForCausalLM

from megarl import parallel as mesh_module
from megarl.actor.state import StateWriter, latest_state, load_state
from megarl.config.schema import ParallelConfig
from megarl.convert import Conversion, convert_sharded
from megarl.errors import CheckpointError

TP2, PP2 = ParallelConfig(tp=2), ParallelConfig(pp=2)


def convert(job):
    mesh = mesh_module.initialize(job.parallel, seed=1)
    try:
        convert_sharded(job, mesh)
    finally:
        mesh_module.destroy()


def to_state(ranks, source, target, parallel, dtype="float32"):
    job = Conversion("hf_to_state", source, target, source, dtype, parallel)
    ranks(2).run(convert, job)


def to_hf(ranks, source, target, parallel, *, model=None, dtype=None):
    job = Conversion("state_to_hf", source, target, model or source, dtype, parallel)
    ranks(2).run(convert, job)


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    found = {}
    for path in folder.glob("*.safetensors"):
        found |= load_file(path)
    return found


def assert_same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert got[name].dtype == tensor.dtype, name
        assert torch.equal(got[name], tensor), name


@pytest.mark.parametrize(
    ("family", "tied", "at_save", "at_load"),
    [
        ("llama", True, TP2, PP2),
        ("llama", False, TP2, PP2),
        ("qwen2", False, PP2, TP2),
        ("qwen3", True, ParallelConfig(), ParallelConfig(pp=2, vpp=2)),
        ("qwen3", False, ParallelConfig(pp=2, vpp=2), ParallelConfig()),
        ("qwen3_moe", False, ParallelConfig(ep=2, etp=1), TP2),
        ("qwen3_moe", False, PP2, ParallelConfig(ep=2, etp=1)),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_there_and_back_is_the_same_bits(ranks, tmp_path, family, tied, at_save, at_load, dtype):
    hf, state, back = (tmp_path / name for name in ("hf", "state", "back"))
    # 97 entries: with tp 2 the vocabulary is padded, with pp 2 it is not.
    model = save_tiny_hf(hf, family, tied=tied, vocab=97)
    model.to(getattr(torch, dtype)).save_pretrained(hf)
    (hf / "tokenizer_config.json").write_text('{"model_max_length": 17}')
    to_state(ranks, hf, state, at_save, dtype)
    to_hf(ranks, state, back, at_load)
    assert_same(weights_of(back), weights_of(hf))
    # What is the state's own stays behind; what is the model's comes along.
    files = {path.name for path in hf.iterdir()}
    assert {path.name for path in back.iterdir()} == files
    assert (back / "tokenizer_config.json").read_text() == '{"model_max_length": 17}'
    config = json.loads((back / "config.json").read_text())
    assert config == json.loads((hf / "config.json").read_text()) | {"dtype": dtype}
    AutoModelForCausalLM.from_pretrained(back)


@pytest.mark.parametrize(("stored", "wanted"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_another_dtype(ranks, tmp_path, stored, wanted):
    hf, state, back = (tmp_path / name for name in ("hf", "state", "back"))
    save_tiny_hf(hf, "llama", tied=True)
    to_state(ranks, hf, state, TP2, stored)
    to_hf(ranks, state, back, PP2, dtype=wanted)
    rounded = {name: x.to(getattr(torch, stored)) for name, x in weights_of(hf).items()}
    want = {name: x.to(getattr(torch, wanted)) for name, x in rounded.items()}
    assert_same(weights_of(back), want)


def train_and_save(folder, parallel, root):
    """A run's own state, with optimizer and counters; rank 0 returns what it trained."""
    engine = make_engine(folder, parallel)
    try:
        batch = rows_of(make_batch(0), engine.mesh)
        num_tokens = int(batch["mask"].sum())
        engine.train_batch(batch, nll, keys=("mask",), num_tokens=num_tokens)
        StateWriter(engine, root).save(1, {"cursor": 17})
        return {name: tensor.clone() for name, tensor in engine.export}
    finally:
        mesh_module.destroy()


@pytest.mark.parametrize(
    ("family", "at_save", "at_load"),
    [
        ("qwen3", TP2, PP2),
        ("qwen3", ParallelConfig(), TP2),
        ("qwen3_moe", ParallelConfig(ep=2, etp=1), TP2),
    ],
)
def test_a_runs_state_becomes_an_hf_folder(ranks, tmp_path, family, at_save, at_load):
    hf, root, back = (tmp_path / name for name in ("hf", "recover", "back"))
    save_tiny_hf(hf, family, tied=family == "qwen3")
    trained = ranks(2).run(train_and_save, str(hf), at_save, root)[0]
    before = weights_of(hf)
    assert not any(torch.equal(trained[name], before[name]) for name in before)
    to_hf(ranks, latest_state(root), back, at_load, model=hf)
    assert_same(weights_of(back), trained)


def load_frozen(folder, root):
    engine = make_engine(folder, PP2, optimizer=None, init_from_scratch=True)
    try:
        return load_state(engine, root), {name: x.clone() for name, x in engine.export}
    finally:
        mesh_module.destroy()


def test_a_converted_state_is_one_that_a_frozen_model_loads(ranks, tmp_path):
    hf, state = tmp_path / "hf", tmp_path / "state"
    save_tiny_hf(hf, "llama", tied=False)
    to_state(ranks, hf, state, TP2)
    counters, got = ranks(2).run(load_frozen, str(hf), state)[0]
    assert counters == {"step": 0}
    assert_same(got, weights_of(hf))


def error_of(job):
    try:
        convert(job)
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("written", "read", "message"),
    [
        ({"tied": True}, {"tied": False}, "the state has no output_layer.weight"),
        ({"tied": False}, {"tied": True}, "no place for output_layer.weight"),
        ({"tied": True, "vocab": 96}, {"tied": True, "vocab": 104}, "embeddings.weight is "),
        ({"tied": True, "family": "qwen2"}, {"tied": True}, "linear_proj.weight is (4, 32, 32)"),
        ({"tied": True, "family": "qwen3"}, {"tied": True}, "no place for decoder.layers.self_"),
    ],
)
def test_a_state_of_another_model_is_refused(ranks, tmp_path, written, read, message):
    one, other, state = (tmp_path / name for name in ("one", "other", "state"))
    save_tiny_hf(one, **{"family": "llama", **written})
    save_tiny_hf(other, **{"family": "llama", **read})
    to_state(ranks, one, state, TP2)
    job = Conversion("state_to_hf", state, tmp_path / "x", other, None, PP2)
    errors = ranks(2).run(error_of, job)
    assert all(message in error for error in errors), errors
    assert not (tmp_path / "x").exists()

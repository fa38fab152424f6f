"""`megarl convert` as a user meets it: what it takes, what it refuses, what it leaves behind."""

import json
import os
import shutil
import string
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import save_tiny_hf
from transformers import AutoModelForCausalLM, AutoTokenizer

from megarl.config.schema import ParallelConfig
from megarl.errors import ConfigError
from megarl.launch.convert import parse_parallel, recognise, stored_dtype, world_size

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"


def convert(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "megarl.cli", "convert", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: x for path in folder.glob("*.safetensors") for name, x in load_file(path).items()}


def assert_same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], x) and got[name].dtype == x.dtype for name, x in want.items())


@pytest.fixture
def hf(tmp_path) -> Path:
    folder = tmp_path / "hf"
    save_tiny_hf(folder, "llama", tied=True)
    (folder / "tokenizer_config.json").write_text('{"model_max_length": 17}')
    return folder


# ---------------------------------------------------------------- there and back


def test_hf_to_state_to_hf_in_two_layouts(hf, tmp_path):
    """Also as a run's own state: without a config.json, beside the run's config.yaml."""
    before = {path.name for path in tmp_path.iterdir()}
    done = convert(hf, tmp_path / "state", "--parallel", "tp=2")
    assert done.returncode == 0, done.stderr
    done = convert(tmp_path / "state", tmp_path / "back", "--parallel", "pp=2")
    assert done.returncode == 0, done.stderr
    assert_same(weights_of(tmp_path / "back"), weights_of(hf))
    assert {path.name for path in (tmp_path / "back").iterdir()} == {p.name for p in hf.iterdir()}
    assert {path.name for path in tmp_path.iterdir()} == before | {"state", "back"}

    recover = tmp_path / "run" / "recover"
    shutil.copytree(tmp_path / "state", recover / "step_7")
    (recover / "step_7" / "config.json").unlink()
    (recover / "latest").write_text("step_7")
    done = convert(recover, tmp_path / "x")
    assert done.returncode == 2
    assert done.stderr.startswith("megarl: --model: needed, ")
    (tmp_path / "run" / "config.yaml").write_text(f"actor: {{path: {hf}}}\n")
    done = convert(recover, tmp_path / "from_run", "--dtype", "bfloat16")
    assert done.returncode == 0, done.stderr
    want = {name: x.bfloat16() for name, x in weights_of(hf).items()}
    assert_same(weights_of(tmp_path / "from_run"), want)
    assert (tmp_path / "from_run" / "tokenizer_config.json").is_file()


def test_a_conversion_that_fails_leaves_nothing(hf, tmp_path):
    weights = weights_of(hf)
    del weights["model.layers.3.mlp.up_proj.weight"]
    save_file(weights, hf / "model.safetensors")
    # Only the second stage misses it; its rank's error must reach the terminal.
    done = convert(hf, tmp_path / "new" / "state", "--parallel", "pp=2")
    assert done.returncode == 1
    assert "model.layers.3.mlp.up_proj.weight is missing" in done.stderr
    assert list(tmp_path.rglob("*state*")) == []


# ---------------------------------------------------------------- gguf


@pytest.fixture
def gguf_file(hf, tmp_path) -> Path:
    """`hf` in the form of llama.cpp, with a tokenizer that splits as SmolLM's."""
    gguf = pytest.importorskip("gguf")
    config, weights = json.loads((hf / "config.json").read_text()), weights_of(hf)
    path = tmp_path / "files" / "tiny.gguf"
    path.parent.mkdir()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(config["vocab_size"])
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokens = [*special, *string.ascii_letters, *string.digits, "Ġ", "Ċ", "ĠĠ", "Ġa"]
    tokens += [f"<unused{i}>" for i in range(config["vocab_size"] - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    writer.add_token_merges(["Ġ Ġ", "Ġ a"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(TEMPLATE)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, tensor in weights.items():
        x = tensor.numpy()
        if count := heads.get(name.split(".")[-2]):
            # llama.cpp rotates neighbouring rows, HF the two halves of a head.
            shape = (count, 2, x.shape[0] // count // 2, x.shape[1])
            x = x.reshape(shape).swapaxes(1, 2).reshape(x.shape)
        writer.add_tensor(names.get_name(name, (".weight",)), x)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_gguf_file_becomes_an_hf_folder(hf, gguf_file, tmp_path):
    done = convert(gguf_file.parent, tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert_same(weights_of(tmp_path / "out"), weights_of(hf))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    ids = torch.tensor([[5, 9, 40, 7]])
    with torch.no_grad():
        want = AutoModelForCausalLM.from_pretrained(hf)(ids).logits
        assert torch.allclose(model(ids).logits, want, atol=1e-5)
    assert model.generation_config.eos_token_id == model.generation_config.pad_token_id == 2
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.eos_token == tokenizer.pad_token == "<|im_end|>"
    text = tokenizer.apply_chat_template([{"role": "user", "content": "b 12"}], tokenize=False)
    assert text == "<|im_start|>b 12<|im_end|>"
    tokens = tokenizer.convert_ids_to_tokens(tokenizer.encode(text, add_special_tokens=False))
    assert tokens == ["<|im_start|>", "b", "Ġ", "1", "2", "<|im_end|>"]
    # GPT-2 would leave the second blank to the number: a, Ġ, Ġ, 5.
    ids = tokenizer.encode("a  5", add_special_tokens=False)
    assert tokenizer.convert_ids_to_tokens(ids) == ["a", "ĠĠ", "5"]
    assert tokenizer.decode([*ids, 2], skip_special_tokens=True) == "a  5"


def test_a_gguf_file_with_an_unknown_split_is_refused(gguf_file, tmp_path):
    gguf_file.write_bytes(gguf_file.read_bytes().replace(b"smollm", b"smolli"))
    done = convert(gguf_file, tmp_path / "out")
    assert done.returncode == 1
    assert "tokenizer.ggml.pre 'smolli'" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["files", "hf"]


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["hf", "hf"], "TARGET: hf exists already"),
        (["nothing", "out"], "SOURCE: nothing is no .gguf file, no folder with one, no HF folder"),
        (["ggufs", "out"], "SOURCE: ggufs has 2 .gguf files, name one: a.gguf, b.gguf"),
        (["cut", "out"], "SOURCE: cut/latest names cut/step_9, which is no whole state"),
        (["hf", "out", "--parallel", "tp"], "--parallel: at 'tp' in 'tp': expected NAME=NUMBER"),
        (["hf", "out", "--parallel", "dp=2"], "--parallel: at 'dp=2' in 'dp=2': expected"),
        (["hf", "out", "--parallel", "tp=0"], "--parallel: tp: must be >= 1, got 0"),
        (["hf", "out", "--parallel", "tp=4"], "--parallel: tp 4 does not divide num_key_value_h"),
        (["hf", "out", "--parallel", "pp=3"], "--parallel: pp * vpp 3 does not divide num_hidden"),
        (["hf", "out", "--parallel", "ep=2"], "--parallel: ep 2 needs experts, hf has none"),
        (["hf", "out", "--model", "hf"], "--model: hf: hf has its own config.json"),
        (["half", "out"], "--dtype: needed, the tensors of half are not all bfloat16 or all floa"),
        (["gpt2", "out"], "SOURCE: model_type 'gpt2' of gpt2 is not supported; supported: llama"),
        (["ggufs/a.gguf", "out", "--parallel", "tp=2"], "--parallel: tp=2: one process reads"),
        (["ggufs/a.gguf", "out", "--model", "hf"], "--model: hf: ggufs/a.gguf has its own config"),
    ],
)
def test_what_cannot_be_converted_is_one_line(hf, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    for folder in ("ggufs", "cut"):
        Path(folder).mkdir()
    for name in ("a", "b"):
        Path(f"ggufs/{name}.gguf").touch()
    Path("cut/latest").write_text("step_9")
    shutil.copytree(hf, "half")
    half = {"a": torch.zeros(2, dtype=torch.float16)}
    save_file(half, "half/model.safetensors")
    shutil.copytree(hf, "gpt2")
    Path("gpt2/config.json").write_text('{"model_type": "gpt2"}')
    before = sorted(path.name for path in tmp_path.iterdir())
    done = convert(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"megarl: {message}")
    assert done.stderr.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("text", "parallel", "ranks"),
    [
        ("", ParallelConfig(), 1),
        ("tp=2,pp=2", ParallelConfig(tp=2, pp=2), 4),
        ("tp=2,ep=2,etp=1", ParallelConfig(tp=2, ep=2, etp=1), 2),
        ("ep=4", ParallelConfig(ep=4), 4),
        ("tp=2,ep=2", ParallelConfig(tp=2, ep=2), 4),
        ("pp=2,vpp=2", ParallelConfig(pp=2, vpp=2), 2),
        ("tp=3,ep=2,etp=1", ParallelConfig(tp=3, ep=2, etp=1), 6),
    ],
)
def test_a_layout_is_the_fewest_ranks_that_hold_the_model(text, parallel, ranks):
    assert parse_parallel(text) == parallel
    assert world_size(parallel) == ranks
    assert parallel.dp(ranks) >= 1


def test_a_layout_names_each_size_once():
    with pytest.raises(ConfigError, match="at 'tp=4' in 'tp=2,tp=4'"):
        parse_parallel("tp=2,tp=4")


def test_a_model_folder_is_known_by_what_it_holds(hf):
    (hf / "extra.gguf").touch()
    assert recognise(hf) == ("hf_to_state", hf)
    assert stored_dtype(hf) == "float32"
    save_file({"a": torch.zeros(2).bfloat16()}, hf / "model.safetensors")
    assert stored_dtype(hf) == "bfloat16"
    save_file({"a": torch.zeros(2)}, hf / "model-2.safetensors")
    with pytest.raises(ConfigError, match="--dtype: needed"):
        stored_dtype(hf)

"""Every file in configs/ is a run that could start where its model and its GPUs are."""

import json
from pathlib import Path

import pytest

from megarl.config.checks import check
from megarl.config.load import dump, load, resolve
from megarl.config.run import GRPOConfig, SFTConfig

ROOT = Path(__file__).parents[2]
CONFIGS = sorted(path.name for path in (ROOT / "configs").glob("*.yaml"))
QWEN3 = {"model_type": "qwen3", "head_dim": 128, "vocab_size": 151936, "hidden_size": 2048}
MODELS = {  # sizes of what is not in the repository
    "models/qwen3-1.7b": {
        **QWEN3,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
    },
    "models/qwen3-30b-a3b": {
        **QWEN3,
        "model_type": "qwen3_moe",
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    },
    "models/smollm2-135m-instruct": {
        "model_type": "llama",
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
    },
}


def read(name, overrides=()):
    cls = SFTConfig if name.endswith("_sft.yaml") else GRPOConfig
    return resolve(load(ROOT / "configs" / name, overrides, cls))


def test_there_are_configs():
    assert {"quickstart.yaml", "qwen3_1p7b_gsm8k.yaml", "qwen3_30b_a3b_gsm8k.yaml"} <= set(CONFIGS)


@pytest.mark.parametrize("name", CONFIGS)
def test_it_reads_and_its_layout_divides(name, tmp_path):
    config = read(name)
    world = config.trainer_world_size
    dp = config.actor.parallel.dp(world)
    assert dp * config.actor.parallel.model_size == world
    if isinstance(config, GRPOConfig):
        assert config.train_dataset.batch_size * config.gconfig.n_samples % dp == 0
        places = config.cluster.n_nodes * config.cluster.n_gpus_per_node
        assert world + config.rollout.parallel.world_size == places  # none is left idle
    file = tmp_path / "dumped.yaml"
    file.write_text(dump(config))
    assert resolve(load(file, [], type(config))) == config


@pytest.mark.parametrize("name", CONFIGS)
def test_it_passes_every_check_with_its_model(name, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    path = read(name).actor.path
    overrides = []
    if path in MODELS:
        (tmp_path / "config.json").write_text(json.dumps(MODELS[path]))
        (tmp_path / "tokenizer.json").write_text("{}")
        (tmp_path / "model.safetensors").write_bytes(b"")
        overrides = [f"actor.path={tmp_path}"]
    elif not Path(path).is_dir():
        pytest.skip(f"{path} is neither here nor in MODELS")
    check(read(name, overrides))

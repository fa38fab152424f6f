"""A complete small run on disk: model folder, tokenizer and YAML file."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

MODEL = {
    "model_type": "qwen3",
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_hidden_layers": 6,
}


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """A folder that looks like a model: sizes only, the weights file is empty."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(MODEL))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"")
    return folder


@pytest.fixture
def run_file(tmp_path: Path, model_dir: Path) -> Callable[..., Path]:
    """Writes a run's YAML: the smallest one, merged with the sections given."""

    def write(**sections: Any) -> Path:
        data: dict[str, Any] = {
            "experiment_name": "e",
            "trial_name": "t",
            "train_dataset": {"path": "reasoning_gym:chain_sum", "size": 10, "batch_size": 4},
            "actor": {"path": str(model_dir)},
            "cluster": {"n_gpus_per_node": 5},  # one server and four trainer ranks
        }
        for name, section in sections.items():
            if isinstance(section, dict):
                data[name] = {**data.get(name, {}), **section}
            else:
                data[name] = section
        file = tmp_path / "run.yaml"
        file.write_text(yaml.safe_dump(data))
        return file

    return write

"""`megarl verify` as a user runs it: all is well with every family, and what is not is named."""

import json
import shutil

import pytest
from safetensors.torch import load_file, save_file
from tiny_models import save_tiny_hf
from whole_runs import REPOSITORY, Run

pytestmark = [pytest.mark.e2e, pytest.mark.server]

TP2_PP2 = ["actor.world_size=4", "actor.parallel={tp: 2, pp: 2}", "cluster.n_gpus_per_node=5"]
# The smallest heads that vLLM's CPU attention has are 32 wide.
SIZES = {"hidden_size": 128}
CHECKS = [
    "config.json, values that differ",
    "logits, Megatron - HF",
    "logprobs, Megatron - HF",
    "HF -> Megatron -> HF, tensors that differ",
    "weights at the servers, tensors that differ",
    "logprobs, trainer - server",
]


@pytest.fixture(scope="module")
def model_of(tmp_path_factory):
    folders = {}

    def get(family):
        if family not in folders:
            folder = folders[family] = tmp_path_factory.mktemp(family)
            heads = {} if family == "qwen2" else {"head_dim": 32}
            save_tiny_hf(folder, family, tied=family == "qwen2", **SIZES, **heads)
            for file in (REPOSITORY / "configs" / "quickstart_base").glob("*token*.json"):
                shutil.copy(file, folder)
        return folders[family]

    return get


def verify(tmp_path, *arguments):
    """Exit code and the rows by name."""
    run = Run("verify", "--json", *arguments, root=tmp_path)
    code = run.wait()
    run.assert_nothing_is_left()
    text = run.text()
    assert "\n{" in text, text
    report = json.loads(text[text.index("\n{") :])
    return code, {row["name"]: row for row in report["checks"]}


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3_moe"])
def test_every_family_is_right_at_tp2_pp2(tmp_path, model_of, family):
    code, rows = verify(tmp_path, f"actor.path={model_of(family)}", *TP2_PP2)
    assert list(rows) == CHECKS
    assert {name for name, row in rows.items() if not row["ok"]} == set()
    assert code == 0
    # The bounds are for real models; for these the numbers are those of a few roundings.
    assert rows["logprobs, Megatron - HF"]["measured"] < 1e-5
    assert rows["logprobs, trainer - server"]["measured"] < 1e-4


def test_a_swapped_tensor_is_named(tmp_path, model_of):
    odd = tmp_path / "odd"
    shutil.copytree(model_of("llama"), odd)
    tensors = load_file(odd / "model.safetensors")
    gate, up = (f"model.layers.3.mlp.{name}_proj.weight" for name in ("gate", "up"))
    tensors[gate], tensors[up] = tensors[up].clone(), tensors[gate].clone()
    save_file(tensors, odd / "model.safetensors", metadata={"format": "pt"})
    model = f"actor.path={model_of('llama')}"
    code, rows = verify(tmp_path, model, f"--checkpoint={odd}", "--no-servers", *TP2_PP2)
    assert code == 1
    row = rows["HF -> Megatron -> HF, tensors that differ"]
    assert (row["measured"], row["detail"]) == (2, f"{gate}, {up}")
    assert not rows["logits, Megatron - HF"]["ok"]
    assert rows["config.json, values that differ"]["ok"]


def test_a_wrong_rotary_base_is_named(tmp_path, model_of):
    odd = tmp_path / "odd"
    shutil.copytree(model_of("qwen3"), odd)
    config = json.loads((odd / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] = 1e6
    (odd / "config.json").write_text(json.dumps(config))
    model = f"actor.path={model_of('qwen3')}"
    code, rows = verify(tmp_path, model, f"--checkpoint={odd}", "--no-servers", *TP2_PP2)
    assert code == 1
    detail = rows["config.json, values that differ"]["detail"]
    assert detail == "rope_theta 1000000.0, reference 10000.0"
    assert not rows["logprobs, Megatron - HF"]["ok"]
    assert rows["HF -> Megatron -> HF, tensors that differ"]["ok"]

"""Our tables against transformers' own models at their real sizes, on the meta device."""

import json
from pathlib import Path

import pytest
import torch
import transformers as tr
from tiny_models import FAMILIES, split_experts, tiny_config

from megarl.bridge.layout import hf_tensors
from megarl.model.families import hf_shapes, is_untrained, routed_layers

MODELS = Path(__file__).parents[2] / "benchmarks" / "models"

BILLIONS = {
    "qwen3_30b_a3b": 30.5,
    "qwen3_235b_a22b": 235,
    "deepseek_v3": 671,
    "kimi_k2": 1026,
}
"""Parameters as the model cards say, DeepSeek-V3's without its layer of multi-token prediction.
Kimi-K2's report says 1.04 trillion, which such a layer would make of the 1.026 that it has."""


def meta_shapes(config):
    with torch.device("meta"):
        model = tr.AutoModelForCausalLM.from_config(config)
    tensors = split_experts(model.state_dict())
    if config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    return {name: tuple(x.shape) for name, x in tensors.items()}


def real(name):
    return json.loads((MODELS / f"{name}.json").read_text())


def transformers_config(raw):
    if raw["model_type"] == "kimi_k2":  # the name is not transformers', the model is
        raw = {**raw, "model_type": "deepseek_v3"}
    return tr.AutoConfig.for_model(**raw)


@pytest.mark.parametrize("name", BILLIONS)
def test_shapes_are_those_of_the_model(name):
    raw = real(name)
    config = transformers_config(raw)
    want = meta_shapes(config)
    assert hf_shapes(raw) == want
    # transformers writes the same config another way.
    assert hf_shapes(config.to_dict()) == want


@pytest.mark.parametrize("name", BILLIONS)
def test_parameters_are_as_many_as_published(name):
    tensors = hf_tensors(real(name), 2).values()
    count = sum(t.rows * t.columns for t in tensors)
    published = BILLIONS[name]
    assert round(count / 1e9, 1 if published < 100 else None) == published


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_shapes_of_every_family(family, tied):
    config = tiny_config(family, tied=tied, vocab=97)
    assert hf_shapes(config.to_dict()) == meta_shapes(config)


@pytest.mark.parametrize(
    "options",
    [
        {"q_lora_rank": None},
        {"first_k_dense_replace": 0},
        {"first_k_dense_replace": 4},
        {"n_shared_experts": 1},
    ],
    ids=str,
)
def test_shapes_of_variants_of_deepseek(options):
    config = tiny_config("deepseek_v3", tied=False, **options)
    assert hf_shapes(config.to_dict()) == meta_shapes(config)


def test_layers_of_multi_token_prediction_are_left_out():
    raw = real("deepseek_v3")
    assert len(routed_layers(raw)) == 61
    assert routed_layers(raw)[:4] == [False, False, False, True]
    assert is_untrained(raw, "model.layers.61.eh_proj.weight")
    assert not is_untrained(raw, "model.layers.60.input_layernorm.weight")
    assert not is_untrained(raw, "model.norm.weight")
    assert not is_untrained(real("kimi_k2"), "model.layers.61.eh_proj.weight")  # it has none
    assert not any(name.startswith("model.layers.61.") for name in hf_shapes(raw))

"""What of DeepSeek's config.json is refused; that the rest computes HF's numbers: tests/dist."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny_models import tiny_config

from megarl.config.schema import MoEConfig, ParallelConfig, RecomputeConfig
from megarl.errors import ConfigError
from megarl.model.build import model_spec
from megarl.model.deepseek import attention_options, routing_options

MODELS = Path(__file__).parents[2] / "benchmarks" / "models"
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


def config(**options):
    return {**tiny_config("deepseek_v3", tied=False).to_dict(), **options}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scoring_func": "softmax"}, "scoring_func: only 'sigmoid' is supported, got 'softmax'"),
        ({"topk_method": "greedy"}, "topk_method: only 'noaux_tc'"),
        ({"norm_topk_prob": False}, "norm_topk_prob: only True"),
        ({"moe_layer_freq": 2}, "moe_layer_freq: only 1"),
        ({"hidden_act": "gelu"}, "hidden_act: only 'silu'"),
        ({"num_experts_per_tok": 1, "n_group": 1}, "num_experts_per_tok: must be >= 2, got 1"),
        ({"n_shared_experts": 0}, "n_shared_experts: must be >= 1"),
        # transformers takes the two best of a group, Megatron the best three.
        ({"num_experts_per_tok": 6}, "topk_group: num_experts_per_tok 6 over topk_group 2 must"),
    ],
)
def test_routing_that_megatron_lacks_is_named(options, message):
    with pytest.raises(ConfigError, match=message):
        routing_options(config(**options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_key_value_heads": 2}, "num_key_value_heads: 2 must equal num_attention_heads 4"),
        ({"rope_interleave": False}, "rope_interleave: only true"),
        ({"rope_parameters": {"rope_type": "linear"}}, "rope_type: 'linear' is not supported"),
        ({"rope_parameters": {**YARN, "attention_factor": 1.2}}, "attention_factor: only None"),
        ({"rope_parameters": {**YARN, "truncate": False}}, "truncate: only True"),
        ({"rope_parameters": {**YARN, "mscale": 0.7}}, "mscale: 0.7 with mscale_all_dim None"),
        ({"rope_parameters": {**YARN, "mscale_all_dim": 0.7}}, "mscale: None with mscale_all_dim"),
    ],
)
def test_attention_that_megatron_lacks_is_named(options, message):
    with pytest.raises(ConfigError, match=message):
        attention_options(config(**options))


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        (
            "deepseek_v3",
            {"moe_router_num_groups": 8, "moe_router_group_topk": 4, "rotary_scaling_factor": 40},
        ),
        ("kimi_k2", {"rotary_base": 50000.0, "beta_fast": 1.0, "rotary_scaling_factor": 32.0}),
    ],
)
def test_real_configs_are_accepted(name, wanted):
    c = json.loads((MODELS / f"{name}.json").read_text())
    options = {**attention_options(c), **routing_options(c)}
    assert options.items() >= wanted.items()
    assert options["rope_type"] == "yarn"
    assert ("moe_router_num_groups" in options) == (name == "deepseek_v3")
    assert options["moe_shared_expert_intermediate_size"] == 2048


def spec_of(c, parallel, **options):
    mesh = SimpleNamespace(parallel=parallel, device=torch.device("cpu"))
    return model_spec(
        c, mesh, dtype=torch.float32, recompute=RecomputeConfig(), moe=MoEConfig(), **options
    )


def test_quantised_weights_are_refused():
    raw = json.loads((MODELS / "deepseek_v3.json").read_text())
    with pytest.raises(ConfigError, match=r"quantization_config\.quant_method: 'fp8' weights"):
        spec_of(raw, ParallelConfig())


def test_latent_attention_with_tp_needs_sequence_parallelism():
    with pytest.raises(ConfigError, match=r"sequence_parallel: must be true .* with tp 2"):
        spec_of(config(), ParallelConfig(tp=2), sequence_parallel=False)
    assert spec_of(config(), ParallelConfig(), sequence_parallel=False).transformer


def test_stages_of_real_depth():
    """61 layers over 16 stages, as DeepSeek-V3 is trained."""
    raw = json.loads((MODELS / "deepseek_v3.json").read_text())
    del raw["quantization_config"]
    spec = spec_of(raw, ParallelConfig(pp=16, ep=16, etp=1))
    stages = spec.transformer.pipeline_model_parallel_layout.layout
    depths = [sum(kind.name == "decoder" for kind in stage[0]) for stage in stages]
    assert sum(depths) == 61
    assert set(depths) == {3, 4}
    with pytest.raises(ConfigError, match="pp: 62 model chunks are more than 61 layers"):
        spec_of(raw, ParallelConfig(pp=62))

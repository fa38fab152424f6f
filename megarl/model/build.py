"""Our config and an HF config.json -> Megatron TransformerConfig -> GPTModel. Only here."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.extensions.transformer_engine import HAVE_TE, TENorm
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import nn

from megarl.config.schema import MoEConfig, ParallelConfig, RecomputeConfig
from megarl.errors import ConfigError
from megarl.model import deepseek
from megarl.model.attention import PackedAttention
from megarl.model.families import Family, family_of, num_experts, routed_layers
from megarl.model.layout import Sizes, chunk_of_layer
from megarl.parallel import Mesh


def read_hf_config(folder: str | Path) -> dict[str, Any]:
    """config.json of an HF folder. ConfigError if there is none."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise ConfigError(f"actor.path: {path} does not exist")
    config: dict[str, Any] = json.loads(path.read_text())
    return config


@dataclasses.dataclass(frozen=True)
class ModelSpec:
    """What the rest of the trainer needs to know of a model."""

    hf_config: dict[str, Any]
    family: Family
    transformer: TransformerConfig

    @property
    def vocab_size(self) -> int:
        return int(self.hf_config["vocab_size"])

    @property
    def tied_embeddings(self) -> bool:
        return bool(self.hf_config.get("tie_word_embeddings", False))

    @property
    def sizes(self) -> Sizes:
        t = self.transformer
        return Sizes(t.num_attention_heads, t.num_query_groups, t.kv_channels)


def model_spec(
    hf_config: dict[str, Any],
    mesh: Mesh,
    *,
    dtype: torch.dtype,
    recompute: RecomputeConfig,
    moe: MoEConfig,
    sequence_parallel: bool = True,
) -> ModelSpec:
    """Translate a config.json for this mesh.

    Raises:
      ConfigError: the model uses something the trainer lacks.
    """
    c, family, parallel = hf_config, family_of(hf_config), mesh.parallel
    deepseek.refuse_quantized(c)
    if family.latent_attention and parallel.tp > 1 and not sequence_parallel:
        # Megatron-Core 0.16.1 then leaves each rank with its own heads' part of the gradient of
        # the rotary key, which all heads share.
        raise ConfigError(
            f"sequence_parallel: must be true for latent attention with tp {parallel.tp}"
        )
    config_class = MLATransformerConfig if family.latent_attention else TransformerConfig
    transformer = config_class(
        num_layers=c["num_hidden_layers"],
        hidden_size=c["hidden_size"],
        num_attention_heads=c["num_attention_heads"],
        ffn_hidden_size=c["intermediate_size"],
        normalization="RMSNorm",
        layernorm_epsilon=c["rms_norm_eps"],
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=family.qkv_bias,
        qk_layernorm=family.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        init_method_std=c.get("initializer_range", 0.02),
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_cpu_initialization=mesh.device.type == "cpu",
        gradient_accumulation_fusion=False,
        **_attention_options(c, family),
        tensor_model_parallel_size=parallel.tp,
        sequence_parallel=sequence_parallel and parallel.tp > 1,
        pipeline_model_parallel_size=parallel.pp,
        virtual_pipeline_model_parallel_size=parallel.virtual_stages,
        pipeline_model_parallel_layout=_uneven_stages(c["num_hidden_layers"], parallel),
        context_parallel_size=parallel.cp,
        expert_model_parallel_size=parallel.ep,
        expert_tensor_parallel_size=parallel.etp,
        # Packed micro-batches differ in length, so stages tell each other the shape, unless
        # all ranks agreed on one length.
        variable_seq_lengths=parallel.pp > 1 and not needs_one_length(hf_config, mesh, moe),
        # With interleaved stages and the default, one batched send and receive, Megatron-Core
        # 0.16.1 gave logits that were off by 4.65 and no error (pp 2, vpp 2, 4 micro-batches).
        overlap_p2p_comm=bool(parallel.virtual_stages),
        batch_p2p_comm=not parallel.virtual_stages,
        **_moe_options(hf_config, moe),
        # Losses are divided by the step's global token count before the backward pass, so
        # gradients are summed over ranks and micro-batches, never averaged.
        calculate_per_token_loss=True,
        **_recompute_options(recompute),
    )
    return ModelSpec(hf_config=c, family=family, transformer=transformer)


def _attention_options(c: dict[str, Any], family: Family) -> dict[str, Any]:
    if family.latent_attention:
        return deepseek.attention_options(c)
    heads = c["num_attention_heads"]
    return {
        "num_query_groups": c.get("num_key_value_heads", heads),
        "kv_channels": c.get("head_dim") or c["hidden_size"] // heads,
        "apply_rope_fusion": HAVE_TE,
    }


def _uneven_stages(num_layers: int, parallel: ParallelConfig) -> list[list[str]] | None:
    """The layers of each model chunk, in the order of layers; None if all have equally many."""
    count = parallel.pp * (parallel.vpp or 1)
    if num_layers < count:
        raise ConfigError(f"pp: {count} model chunks are more than {num_layers} layers")
    if num_layers % count == 0:
        return None
    chunks: list[list[str]] = [[] for _ in range(count)]
    chunks[0].append("embedding")
    for layer in range(num_layers):
        chunks[chunk_of_layer(layer, num_layers, count)].append("decoder")
    chunks[-1].append("loss")
    return chunks


def needs_one_length(hf_config: dict[str, Any], mesh: Mesh, moe: MoEConfig) -> bool:
    """Whether all micro-batches of a step must have the same number of tokens, on all ranks."""
    has_experts = any(routed_layers(hf_config))
    gathers_tokens = has_experts and moe.token_dispatcher_type == "allgather"
    return gathers_tokens


def _moe_options(hf_config: dict[str, Any], moe: MoEConfig) -> dict[str, Any]:
    routed = routed_layers(hf_config)
    if not any(routed):
        # Read by dense models too: the default, allgather, refuses variable lengths.
        return {"moe_token_dispatcher_type": "alltoall"}
    options: dict[str, Any] = {
        "num_moe_experts": num_experts(hf_config),
        "moe_router_topk": hf_config["num_experts_per_tok"],
        "moe_ffn_hidden_size": hf_config["moe_intermediate_size"],
        "moe_router_dtype": "fp32" if moe.router_dtype == "fp32" else None,
        # Policy gradients alone decide where tokens go: no auxiliary loss, no dropped token.
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_token_dispatcher_type": moe.token_dispatcher_type,
        "moe_grouped_gemm": HAVE_TE,
        "moe_layer_freq": [int(is_routed) for is_routed in routed] if not all(routed) else 1,
    }
    if family_of(hf_config).latent_attention:
        return {**options, **deepseek.routing_options(hf_config)}
    # One softmax over all experts, then the best k of it; or one over the best k.
    return {**options, "moe_router_pre_softmax": not hf_config["norm_topk_prob"]}


def _recompute_options(recompute: RecomputeConfig) -> dict[str, Any]:
    if recompute.granularity == "none":
        return {}
    if recompute.granularity == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": recompute.modules}
    return {
        "recompute_granularity": "full",
        "recompute_method": recompute.method,
        "recompute_num_layers": recompute.num_layers,
    }


def _rope_options(spec: ModelSpec) -> dict[str, Any]:
    """GPTModel's rotary arguments. transformers 5 nests them in rope_parameters."""
    if spec.family.latent_attention:
        return {"position_embedding_type": "rope"}  # the attention has its own
    hf_config = spec.hf_config
    rope = hf_config.get("rope_parameters") or {
        "rope_theta": hf_config.get("rope_theta", 10000.0),
        **(hf_config.get("rope_scaling") or {}),
    }
    options: dict[str, Any] = {
        "position_embedding_type": "rope",
        "rotary_base": rope.get("rope_theta", 10000.0),
    }
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "llama3":
        fixed = {
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
        for key, value in fixed.items():
            if rope.get(key, value) != value:
                raise ConfigError(f"rope_parameters.{key}: only {value} is supported for llama3")
        options |= {"rope_scaling": True, "rope_scaling_factor": rope["factor"]}
    elif kind != "default":
        raise ConfigError(f"rope_parameters.rope_type: {kind!r} is not supported")
    return options


class SequenceParallelRMSNorm(nn.RMSNorm):
    """RMSNorm whose gradient Megatron sums over tp ranks when they split the sequence.

    Megatron's own WrappedTorchNorm refuses sequence parallelism.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **kwargs: Any
    ) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def _final_norm() -> Callable[..., nn.Module]:
    return TENorm if HAVE_TE else SequenceParallelRMSNorm


def _layer_spec(spec: ModelSpec, num_experts: int | None) -> ModuleSpec:
    """One layer, with one MLP or with experts."""
    latent = spec.family.latent_attention
    kind = {
        "num_experts": num_experts,
        "qk_layernorm": spec.family.qk_norm or latent,
        "multi_latent_attention": latent,
    }
    if HAVE_TE:
        layer = get_gpt_layer_with_transformer_engine_spec(moe_grouped_gemm=True, **kind)
    else:
        layer = get_gpt_layer_local_spec(normalization="RMSNorm", **kind)
        layer.submodules.input_layernorm = SequenceParallelRMSNorm
        layer.submodules.pre_mlp_layernorm = SequenceParallelRMSNorm
        attention = layer.submodules.self_attention.submodules
        attention.core_attention = PackedAttention
        if spec.family.qk_norm:
            attention.q_layernorm = attention.k_layernorm = SequenceParallelRMSNorm
    if latent:
        deepseek.finish_layer(layer, None if HAVE_TE else SequenceParallelRMSNorm)
    return layer


def build_model(spec: ModelSpec, mesh: Mesh) -> list[GPTModel]:
    """This rank's model chunks (one, or vpp of them), randomly initialised, on its device."""
    routed, parallel = routed_layers(spec.hf_config), mesh.parallel
    kinds = {
        is_routed: _layer_spec(spec, spec.transformer.num_moe_experts if is_routed else None)
        for is_routed in set(routed)
    }
    num_chunks = parallel.virtual_stages or 1
    chunks = []
    for chunk in range(num_chunks):
        vp_stage = chunk if parallel.virtual_stages else None
        num_layers = get_num_layers_to_build(spec.transformer, vp_stage=vp_stage)
        first = get_transformer_layer_offset(spec.transformer, vp_stage=vp_stage)
        layers = [kinds[is_routed] for is_routed in routed[first : first + num_layers]]
        block = TransformerBlockSubmodules(layer_specs=layers, layer_norm=_final_norm())
        model = GPTModel(
            spec.transformer,
            block,
            # Padded to a multiple of tp; the padding takes no part in any softmax.
            vocab_size=-(-spec.vocab_size // parallel.tp) * parallel.tp,
            max_sequence_length=spec.hf_config["max_position_embeddings"],
            pre_process=mesh.is_first_stage and chunk == 0,
            post_process=mesh.is_last_stage and chunk == num_chunks - 1,
            parallel_output=True,
            share_embeddings_and_output_weights=spec.tied_embeddings,
            vp_stage=vp_stage,
            **_rope_options(spec),
        )
        deepseek.init_whole_projections(model, spec.transformer.init_method)
        chunks.append(model.to(mesh.device))
    return chunks

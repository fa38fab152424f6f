"""What DeepSeek-V3 and Kimi-K2 have beside other decoders: latent attention, a router with a bias.

Not trained, and named here because a checkpoint has them:

    router bias       e_score_correction_bias is loaded, used to choose experts, exported and
                      pushed, all in float32. It has no gradient, and DeepSeek's rule that moves
                      it by the experts' load is off: policy gradients alone decide.
    further tokens    layers of multi-token prediction are left out; an export has none of them.
    fp8               weights with scales are refused: convert the checkpoint to bfloat16 first.
"""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.post_training.modelopt.layers import Linear
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor, nn

from megarl.errors import ConfigError

# Megatron-Core 0.16.1 without TransformerEngine takes a mock for its Linear, and then raises
# "isinstance() arg 2 must be a type" in MultiLatentAttention.__init__.
multi_latent_attention.HAVE_TE = HAVE_TE


def refuse_quantized(hf_config: dict[str, Any]) -> None:
    """ConfigError for a checkpoint whose weights are codes and scales."""
    quantization = hf_config.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method")
        raise ConfigError(
            f"quantization_config.quant_method: {method!r} weights cannot be trained; convert "
            "the checkpoint to bfloat16 and leave quantization_config out of its config.json"
        )


def attention_options(c: dict[str, Any]) -> dict[str, Any]:
    """MLATransformerConfig's options for a config.json.

    Raises:
      ConfigError: what Megatron-Core 0.16.1 computes otherwise than the model.
    """
    if c.get("num_key_value_heads", c["num_attention_heads"]) != c["num_attention_heads"]:
        raise ConfigError(
            f"num_key_value_heads: {c['num_key_value_heads']} must equal num_attention_heads "
            f"{c['num_attention_heads']} with latent attention"
        )
    if not c.get("rope_interleave", True):
        raise ConfigError("rope_interleave: only true is supported with latent attention")
    return {
        "num_query_groups": c["num_attention_heads"],
        "kv_channels": c["qk_nope_head_dim"] + c["qk_rope_head_dim"],
        "q_lora_rank": c.get("q_lora_rank"),
        "kv_lora_rank": c["kv_lora_rank"],
        "qk_head_dim": c["qk_nope_head_dim"],
        "qk_pos_emb_head_dim": c["qk_rope_head_dim"],
        "v_head_dim": c["v_head_dim"],
        # Its fused kernel knows yarn alone, and this repository's packed batches not at all.
        "apply_rope_fusion": False,
        **_rope_options(c),
    }


def _rope_options(c: dict[str, Any]) -> dict[str, Any]:
    rope = c.get("rope_parameters") or {
        "rope_theta": c.get("rope_theta", 10000.0),
        **(c.get("rope_scaling") or {}),
    }
    options = {"rotary_base": rope.get("rope_theta", 10000.0)}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        # 1: the attention's scale is not changed.
        return {**options, "rope_type": "rope", "rotary_scaling_factor": 1.0}
    if kind != "yarn":
        raise ConfigError(f"rope_parameters.rope_type: {kind!r} is not supported")
    for key, value in {"attention_factor": None, "truncate": True}.items():
        if rope.get(key, value) != value:
            raise ConfigError(f"rope_parameters.{key}: only {value} is supported for yarn")
    mscale, all_dim = rope.get("mscale") or None, rope.get("mscale_all_dim") or None
    if (mscale is None) != (all_dim is None):
        raise ConfigError(
            f"rope_parameters.mscale: {mscale} with mscale_all_dim {all_dim}: yarn needs both or "
            "neither"
        )
    return {
        **options,
        "rope_type": "yarn",
        "rotary_scaling_factor": rope["factor"],
        "original_max_position_embeddings": rope["original_max_position_embeddings"],
        "beta_fast": rope.get("beta_fast") or 32,
        "beta_slow": rope.get("beta_slow") or 1,
        # Without the two: rotations scaled by 0.1 ln(factor) + 1, the attention not at all.
        "mscale": 1.0 if mscale is None else mscale,
        "mscale_all_dim": 0.0 if all_dim is None else all_dim,
    }


def routing_options(c: dict[str, Any]) -> dict[str, Any]:
    """TransformerConfig's options of the router and the shared experts.

    Raises:
      ConfigError: what Megatron-Core 0.16.1 computes otherwise than the model.
    """
    topk = c["num_experts_per_tok"]
    only = {
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
        # Megatron divides the scores of the chosen experts by their sum, always.
        "norm_topk_prob": True,
        "hidden_act": "silu",
    }
    for key, value in only.items():
        if c.get(key, value) != value:
            raise ConfigError(f"{key}: only {value!r} is supported, got {c[key]!r}")
    if topk < 2:
        raise ConfigError(f"num_experts_per_tok: must be >= 2, got {topk}")
    if not c.get("n_shared_experts"):
        raise ConfigError("n_shared_experts: must be >= 1")
    options: dict[str, Any] = {
        "moe_router_score_function": "sigmoid",
        "moe_router_pre_softmax": True,
        "moe_router_topk_scaling_factor": c["routed_scaling_factor"],
        "moe_shared_expert_intermediate_size": c["n_shared_experts"] * c["moe_intermediate_size"],
    }
    groups, chosen = c.get("n_group") or 1, c.get("topk_group") or 1
    if groups > 1:
        # A group is worth the sum of its two best experts; Megatron takes the best topk / chosen.
        if topk // chosen != 2:
            raise ConfigError(
                f"topk_group: num_experts_per_tok {topk} over topk_group {chosen} must be 2"
            )
        options |= {"moe_router_num_groups": groups, "moe_router_group_topk": chosen}
    return options


class BiasedRouter(TopKRouter):  # type: ignore[misc]
    """Chooses experts by score plus `expert_bias` [experts], float32; weighs them by score.

    Megatron's own bias is a buffer that each step moves by the experts' load. This one is a
    parameter without a gradient: it is loaded, exported and checkpointed as others are.
    """

    def __init__(self, config: Any, pg_collection: Any = None) -> None:
        super().__init__(config=config, pg_collection=pg_collection)
        bias = torch.zeros(config.num_moe_experts, dtype=torch.float32)
        self.expert_bias = nn.Parameter(bias, requires_grad=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "BiasedRouter":
        """Goes along to another device, but not to another dtype."""
        bias = self.expert_bias.data
        super()._apply(fn, recurse)
        self.expert_bias.data = bias.to(self.expert_bias.device)
        return self


def finish_layer(layer: ModuleSpec, local_norm: type[nn.Module] | None) -> None:
    """Make one layer of Megatron's spec that of the model.

    Args:
      local_norm: of the latents, in a spec without TransformerEngine; None is one with it.
    """
    if hasattr(layer.submodules.mlp.submodules, "router"):
        layer.submodules.mlp.submodules.router = BiasedRouter
    if local_norm is None:
        return
    attention = layer.submodules.self_attention.submodules
    attention.q_layernorm = attention.kv_layernorm = local_norm
    # Whole on each tp rank, as TransformerEngine has it. Cut over tp, as the local spec has it,
    # Megatron-Core 0.16.1 loses the other ranks' heads in the gradient of the rotary key's rows:
    # gather_from_tensor_model_parallel_region splits it and sums nothing.
    attention.linear_q_down_proj = attention.linear_kv_down_proj = Linear


def init_whole_projections(model: nn.Module, init_method: Callable[[Tensor], object]) -> None:
    """The whole projections start as torch's Linear does; give them the model's own start."""
    for module in model.modules():
        if isinstance(module, Linear):
            init_method(module.weight)

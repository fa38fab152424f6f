"""Random HF models small enough for a test, one a family."""

from pathlib import Path

import torch
import transformers as tr

VOCAB, HIDDEN, LAYERS = 96, 32, 4

FAMILIES = {
    "llama": (tr.LlamaConfig, tr.LlamaForCausalLM),
    "qwen2": (tr.Qwen2Config, tr.Qwen2ForCausalLM),
    "qwen3": (tr.Qwen3Config, tr.Qwen3ForCausalLM),
    "qwen3_moe": (tr.Qwen3MoeConfig, tr.Qwen3MoeForCausalLM),
    "deepseek_v3": (tr.DeepseekV3Config, tr.DeepseekV3ForCausalLM),
}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}
_DEEPSEEK = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 12,
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 0,
    # Not read by transformers; vLLM chooses experts by softmax, without the bias, if they lack.
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    # Of the four angles two are kept, one is interpolated, and one lies between.
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 100.0,
        "factor": 8.0,
        "original_max_position_embeddings": 512,
        "beta_fast": 8.0,
        "beta_slow": 4.0,
        "mscale": 0.7,
        "mscale_all_dim": 1.3,
    },
}


def tiny_config(family: str, *, tied: bool, vocab: int = VOCAB, **options) -> tr.PreTrainedConfig:
    """Of a model of some 50,000 parameters; `options` are of the family's config."""
    sizes = {
        "vocab_size": vocab,
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 128,
        "initializer_range": 0.1,
        **({} if family in ("qwen2", "deepseek_v3") else {"head_dim": 16}),
        **(_EXPERTS if family == "qwen3_moe" else {}),
        **(_DEEPSEEK if family == "deepseek_v3" else {}),
        **options,
    }
    config_class = FAMILIES[family][0]
    return config_class(tie_word_embeddings=tied, attn_implementation="eager", **sizes)


def tiny_hf(
    family: str, *, tied: bool, seed: int = 0, vocab: int = VOCAB, **options
) -> torch.nn.Module:
    """A float32 model whose norms and biases are not their trivial initial values.

    Args:
      options: of the family's config.
    """
    config = tiny_config(family, tied=tied, vocab=vocab, **options)
    torch.manual_seed(seed)
    model = FAMILIES[family][1](config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(0.1 * torch.randn_like(parameter))
            elif "experts" in name or "mlp.gate" in name:
                parameter.normal_(std=0.1)  # transformers leaves fused experts uninitialised
        for name, buffer in model.named_buffers():
            if "e_score_correction_bias" in name:
                buffer.normal_(std=0.1)  # of the size of the scores' differences
    return model


def save_tiny_hf(folder: Path, family: str, **options) -> torch.nn.Module:
    model = tiny_hf(family, **options)
    model.save_pretrained(folder)
    return model


def split_experts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """transformers 5 holds the experts of a layer in two tensors; a checkpoint has three each."""
    out = {}
    for name, x in tensors.items():
        prefix, _, last = name.rpartition(".")
        if last == "gate_up_proj":
            for i, both in enumerate(x):
                gate, up = both.chunk(2)
                out[f"{prefix}.{i}.gate_proj.weight"] = gate
                out[f"{prefix}.{i}.up_proj.weight"] = up
        elif prefix.endswith("experts") and last == "down_proj":
            out |= {f"{prefix}.{i}.down_proj.weight": down for i, down in enumerate(x)}
        else:
            out[name] = x
    return out

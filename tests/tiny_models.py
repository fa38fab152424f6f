"""Random HF models small enough for a test, one a family."""

from pathlib import Path

import torch
import transformers as tr

VOCAB, HIDDEN, LAYERS = 96, 32, 4

_FAMILIES = {
    "llama": (tr.LlamaConfig, tr.LlamaForCausalLM),
    "qwen2": (tr.Qwen2Config, tr.Qwen2ForCausalLM),
    "qwen3": (tr.Qwen3Config, tr.Qwen3ForCausalLM),
    "qwen3_moe": (tr.Qwen3MoeConfig, tr.Qwen3MoeForCausalLM),
}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}


def tiny_hf(
    family: str, *, tied: bool, seed: int = 0, vocab: int = VOCAB, **options
) -> torch.nn.Module:
    """A float32 model whose norms and biases are not their trivial initial values.

    Args:
      options: of the family's config.
    """
    config_class, model_class = _FAMILIES[family]
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
        **({} if family == "qwen2" else {"head_dim": 16}),
        **(_EXPERTS if family == "qwen3_moe" else {}),
        **options,
    }
    config = config_class(tie_word_embeddings=tied, attn_implementation="eager", **sizes)
    torch.manual_seed(seed)
    model = model_class(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(0.1 * torch.randn_like(parameter))
            elif "experts" in name or "mlp.gate" in name:
                parameter.normal_(std=0.1)  # transformers leaves fused experts uninitialised
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

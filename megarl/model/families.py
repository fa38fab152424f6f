"""HF names of each model family, one table for loading, exporting and weight pushes.

The keys are Megatron's names inside a layer, with TransformerEngine's spelling beside the
local spec's where they differ (a fused norm lives inside the linear that follows it).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megarl.errors import ConfigError
from megarl.model.layout import Rule

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
FINAL_NORM = "model.norm.weight"

_ATTENTION = {
    "self_attention.linear_proj.weight": Rule("columns", ("self_attn.o_proj.weight",)),
    "self_attention.linear_qkv.weight": Rule(
        "qkv", tuple(f"self_attn.{x}_proj.weight" for x in "qkv")
    ),
    "input_layernorm.weight": Rule("replicated", ("input_layernorm.weight",)),
    "self_attention.linear_qkv.layer_norm_weight": Rule("replicated", ("input_layernorm.weight",)),
}
_QKV_BIAS = {
    "self_attention.linear_qkv.bias": Rule("qkv", tuple(f"self_attn.{x}_proj.bias" for x in "qkv")),
}
_QK_NORM = {
    "self_attention.q_layernorm.weight": Rule("replicated", ("self_attn.q_norm.weight",)),
    "self_attention.k_layernorm.weight": Rule("replicated", ("self_attn.k_norm.weight",)),
}
_DENSE_MLP = {
    "pre_mlp_layernorm.weight": Rule("replicated", ("post_attention_layernorm.weight",)),
    "mlp.linear_fc1.layer_norm_weight": Rule("replicated", ("post_attention_layernorm.weight",)),
    "mlp.linear_fc1.weight": Rule("gate_up", ("mlp.gate_proj.weight", "mlp.up_proj.weight")),
    "mlp.linear_fc2.weight": Rule("columns", ("mlp.down_proj.weight",)),
}


@dataclass(frozen=True)
class Family:
    """What one HF model_type needs beyond the sizes in its config.json."""

    model_type: str
    layer_rules: dict[str, Rule]
    qkv_bias: bool = False
    qk_norm: bool = False


_FAMILIES = (
    Family("llama", {**_ATTENTION, **_DENSE_MLP}),
    Family("qwen2", {**_ATTENTION, **_QKV_BIAS, **_DENSE_MLP}, qkv_bias=True),
    Family("qwen3", {**_ATTENTION, **_QK_NORM, **_DENSE_MLP}, qk_norm=True),
)


def family_of(hf_config: dict[str, Any]) -> Family:
    """The family of a config.json. ConfigError if there is none, or it uses what we lack."""
    model_type = hf_config.get("model_type")
    for family in _FAMILIES:
        if family.model_type == model_type:
            break
    else:
        known = ", ".join(family.model_type for family in _FAMILIES)
        raise ConfigError(f"model_type: {model_type!r} is not supported; supported: {known}")
    for key in ("attention_bias", "mlp_bias"):
        if hf_config.get(key):
            raise ConfigError(f"{key}: {model_type} models with {key} are not supported")
    if hf_config.get("use_sliding_window"):
        raise ConfigError("use_sliding_window: sliding-window attention is not supported")
    return family


def rule_for(family: Family, name: str, layer_offset: int) -> Rule:
    """The rule of one Megatron parameter.

    Args:
      name: inside a model chunk, `decoder.layers.0.mlp.linear_fc1.weight`.
      layer_offset: index in the whole model of the chunk's layer 0.

    Raises:
      ValueError: the family's table does not know it.
    """
    if name == "embedding.word_embeddings.weight":
        return Rule("vocab", (EMBEDDING,))
    if name == "output_layer.weight":
        return Rule("vocab", (HEAD,))
    if name == "decoder.final_layernorm.weight":
        return Rule("replicated", (FINAL_NORM,))
    prefix, _, rest = name.removeprefix("decoder.layers.").partition(".")
    rule = family.layer_rules.get(rest)
    if rule is None or not prefix.isdigit():
        raise ValueError(f"{family.model_type}: no HF name is known for parameter {name!r}")
    layer = f"model.layers.{int(prefix) + layer_offset}."
    return Rule(rule.split, tuple(layer + hf_name for hf_name in rule.hf_names))


def hf_shapes(hf_config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor of a checkpoint, in its usual order."""
    return dict(_hf_shapes(hf_config))


def _hf_shapes(c: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    family = family_of(c)
    hidden, width, vocab = c["hidden_size"], c["intermediate_size"], c["vocab_size"]
    heads = c["num_attention_heads"]
    head_dim = c.get("head_dim") or hidden // heads
    q_rows, kv_rows = heads * head_dim, c.get("num_key_value_heads", heads) * head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (q_rows, hidden),
        "self_attn.k_proj.weight": (kv_rows, hidden),
        "self_attn.v_proj.weight": (kv_rows, hidden),
        "self_attn.q_proj.bias": (q_rows,),
        "self_attn.k_proj.bias": (kv_rows,),
        "self_attn.v_proj.bias": (kv_rows,),
        "self_attn.o_proj.weight": (hidden, q_rows),
        "self_attn.q_norm.weight": (head_dim,),
        "self_attn.k_norm.weight": (head_dim,),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (width, hidden),
        "mlp.up_proj.weight": (width, hidden),
        "mlp.down_proj.weight": (hidden, width),
    }
    used = {name for rule in family.layer_rules.values() for name in rule.hf_names}
    yield EMBEDDING, (vocab, hidden)
    for layer in range(c["num_hidden_layers"]):
        for name, shape in shapes.items():
            if name in used:
                yield f"model.layers.{layer}.{name}", shape
    yield FINAL_NORM, (hidden,)
    if not c.get("tie_word_embeddings", False):
        yield HEAD, (vocab, hidden)

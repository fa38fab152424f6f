"""HF names of each model family, one table for loading, exporting and weight pushes.

The keys are Megatron's names inside a layer, with TransformerEngine's spelling beside the
local spec's where they differ (a fused norm lives inside the linear that follows it).

Layers of multi-token prediction (`num_nextn_predict_layers`; `model.layers.61.*` and on in
DeepSeek-V3's checkpoint) are in no table: they are not loaded, trained, exported or pushed.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
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
_ROUTED_MLP = {
    "pre_mlp_layernorm.weight": Rule("replicated", ("post_attention_layernorm.weight",)),
    "mlp.router.weight": Rule("replicated", ("mlp.gate.weight",)),
}
_EXPERT = {
    "linear_fc1": Rule("gate_up", ("gate_proj.weight", "up_proj.weight"), is_expert=True),
    "linear_fc2": Rule("columns", ("down_proj.weight",), is_expert=True),
}
# Multi-head latent attention. The projections down to the latents are whole on every rank, those
# up from them are cut by heads, of which a tensor has all rows of one together.
_MLA = {
    "self_attention.linear_proj.weight": Rule("columns", ("self_attn.o_proj.weight",)),
    "self_attention.linear_kv_down_proj.weight": Rule(
        "replicated", ("self_attn.kv_a_proj_with_mqa.weight",)
    ),
    "self_attention.kv_layernorm.weight": Rule("replicated", ("self_attn.kv_a_layernorm.weight",)),
    "self_attention.linear_kv_up_proj.layer_norm_weight": Rule(
        "replicated", ("self_attn.kv_a_layernorm.weight",)
    ),
    "self_attention.linear_kv_up_proj.weight": Rule("rows", ("self_attn.kv_b_proj.weight",)),
    "input_layernorm.weight": Rule("replicated", ("input_layernorm.weight",)),
}
_MLA_QUERY = {
    "self_attention.linear_q_down_proj.weight": Rule("replicated", ("self_attn.q_a_proj.weight",)),
    "self_attention.q_layernorm.weight": Rule("replicated", ("self_attn.q_a_layernorm.weight",)),
    "self_attention.linear_q_up_proj.layer_norm_weight": Rule(
        "replicated", ("self_attn.q_a_layernorm.weight",)
    ),
    "self_attention.linear_q_up_proj.weight": Rule("rows", ("self_attn.q_b_proj.weight",)),
}
_MLA_WHOLE_QUERY = {
    "self_attention.linear_q_proj.weight": Rule("rows", ("self_attn.q_proj.weight",)),
}
_ROUTER_BIAS = "mlp.gate.e_score_correction_bias"
_BIASED_ROUTED_MLP = {
    **_ROUTED_MLP,
    "mlp.router.expert_bias": Rule("replicated", (_ROUTER_BIAS,)),
    "mlp.shared_experts.linear_fc1.weight": Rule(
        "gate_up", ("mlp.shared_experts.gate_proj.weight", "mlp.shared_experts.up_proj.weight")
    ),
    "mlp.shared_experts.linear_fc2.weight": Rule(
        "columns", ("mlp.shared_experts.down_proj.weight",)
    ),
}
_EXPERT_NAME = re.compile(
    r"mlp\.experts\.(?:local_experts\.(?P<i>\d+)\.(?P<fc>linear_fc[12])\.weight"
    # TransformerEngine's grouped matrices
    r"|(?P<te_fc>linear_fc[12])\.weight(?P<te_i>\d+))"
)


@dataclass(frozen=True)
class Family:
    """What one HF model_type needs beyond the sizes in its config.json."""

    model_type: str
    layer_rules: dict[str, Rule]
    """Of a layer with one dense MLP, and what is common to all layers."""
    routed_rules: dict[str, Rule] = field(default_factory=dict)
    """Beside the common ones, of a layer with experts."""
    expert_rules: dict[str, Rule] = field(default_factory=dict)
    """Of one expert, whose HF names follow `mlp.experts.N.`."""
    qkv_bias: bool = False
    qk_norm: bool = False
    latent_attention: bool = False


_FAMILIES = (
    Family("llama", {**_ATTENTION, **_DENSE_MLP}),
    Family("qwen2", {**_ATTENTION, **_QKV_BIAS, **_DENSE_MLP}, qkv_bias=True),
    Family("qwen3", {**_ATTENTION, **_QK_NORM, **_DENSE_MLP}, qk_norm=True),
    Family(
        "qwen3_moe",
        {**_ATTENTION, **_QK_NORM, **_DENSE_MLP},
        routed_rules=_ROUTED_MLP,
        expert_rules=_EXPERT,
        qk_norm=True,
    ),
    # Its attention's rules depend on config.json: see family_of.
    *(
        Family(
            model_type,
            {**_MLA, **_DENSE_MLP},
            routed_rules=_BIASED_ROUTED_MLP,
            expert_rules=_EXPERT,
            latent_attention=True,
        )
        for model_type in ("deepseek_v3", "kimi_k2")
    ),
)


def num_experts(hf_config: dict[str, Any]) -> int:
    """Experts of a routed layer; the count has other names in transformers 5 and DeepSeek."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return int(next((hf_config[name] for name in names if hf_config.get(name)), 0))


def routed_layers(hf_config: dict[str, Any]) -> list[bool]:
    """Whether each layer's MLP is a set of experts."""
    c, layers = hf_config, range(hf_config["num_hidden_layers"])
    family = family_of(c)
    if not family.expert_rules:
        return [False for _ in layers]
    if family.latent_attention:
        return [num_experts(c) > 0 and i >= c["first_k_dense_replace"] for i in layers]
    dense, step = c.get("mlp_only_layers") or [], c.get("decoder_sparse_step", 1)
    return [i not in dense and num_experts(c) > 0 and (i + 1) % step == 0 for i in layers]


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
    if family.latent_attention:
        query = _MLA_WHOLE_QUERY if hf_config.get("q_lora_rank") is None else _MLA_QUERY
        return replace(family, layer_rules={**family.layer_rules, **query})
    return family


def stored_dtype(name: str, dtype: str) -> str:
    """Torch's name of the dtype of an HF tensor in a model of `dtype`.

    Adding the router's bias to its scores decides between experts that are a rounding of
    bfloat16 apart, so it stays in float32, as in DeepSeek's own checkpoints.
    """
    return "float32" if name.endswith(_ROUTER_BIAS) else dtype


def is_untrained(hf_config: dict[str, Any], name: str) -> bool:
    """Whether an HF tensor belongs to a layer of multi-token prediction, which is in no table."""
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    has_them = (hf_config.get("num_nextn_predict_layers") or 0) > 0
    return has_them and layer is not None and int(layer[1]) >= hf_config["num_hidden_layers"]


def rule_for(family: Family, name: str, layer_offset: int, expert_offset: int = 0) -> Rule:
    """The rule of one Megatron parameter.

    Args:
      name: inside a model chunk, `decoder.layers.0.mlp.linear_fc1.weight`.
      layer_offset: index in the whole model of the chunk's layer 0.
      expert_offset: index in the layer of the rank's expert 0.

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
    rule = family.layer_rules.get(rest) or family.routed_rules.get(rest)
    inside = ""
    if expert := _EXPERT_NAME.fullmatch(rest):
        rule = family.expert_rules.get(expert["fc"] or expert["te_fc"])
        inside = f"mlp.experts.{int(expert['i'] or expert['te_i']) + expert_offset}."
    if rule is None or not prefix.isdigit():
        raise ValueError(f"{family.model_type}: no HF name is known for parameter {name!r}")
    return _prefixed(f"model.layers.{int(prefix) + layer_offset}.{inside}", rule)


def rules(hf_config: dict[str, Any]) -> Iterator[tuple[int | None, int | None, Rule]]:
    """(layer, expert, rule with whole HF names) of every parameter of a model, each HF tensor
    once. The layer is None outside of the layers, the expert of what is no expert's."""
    family = family_of(hf_config)
    dense = _once(family.layer_rules)
    common = {name: rule for name, rule in dense.items() if name not in _once(_DENSE_MLP)}
    routed = {**common, **_once(family.routed_rules)}
    yield None, None, Rule("vocab", (EMBEDDING,))
    for layer, has_experts in enumerate(routed_layers(hf_config)):
        prefix = f"model.layers.{layer}."
        for rule in (routed if has_experts else dense).values():
            yield layer, None, _prefixed(prefix, rule)
        for expert in range(num_experts(hf_config) if has_experts else 0):
            for rule in family.expert_rules.values():
                yield layer, expert, _prefixed(f"{prefix}mlp.experts.{expert}.", rule)
    yield None, None, Rule("replicated", (FINAL_NORM,))
    if not hf_config.get("tie_word_embeddings", False):
        yield None, None, Rule("vocab", (HEAD,))


def _once(table: dict[str, Rule]) -> dict[tuple[str, ...], Rule]:
    """HF names -> rule: a parameter has a name for each spec in a table."""
    return {rule.hf_names: rule for rule in table.values()}


def _prefixed(prefix: str, rule: Rule) -> Rule:
    return replace(rule, hf_names=tuple(prefix + name for name in rule.hf_names))


def hf_shapes(hf_config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor of a checkpoint, in its usual order."""
    return dict(_hf_shapes(hf_config))


def _hf_shapes(c: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    family = family_of(c)
    hidden, width, vocab = c["hidden_size"], c["intermediate_size"], c["vocab_size"]
    attention = _latent_attention_shapes(c) if family.latent_attention else _attention_shapes(c)
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        **attention,
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (width, hidden),
        "mlp.up_proj.weight": (width, hidden),
        "mlp.down_proj.weight": (hidden, width),
        "mlp.gate.weight": (num_experts(c), hidden),
        _ROUTER_BIAS: (num_experts(c),),
    }
    if shared := c.get("n_shared_experts"):
        shared_width = shared * c["moe_intermediate_size"]
        shapes |= {
            "mlp.shared_experts.gate_proj.weight": (shared_width, hidden),
            "mlp.shared_experts.up_proj.weight": (shared_width, hidden),
            "mlp.shared_experts.down_proj.weight": (hidden, shared_width),
        }
    dense = _hf_names(family.layer_rules)
    routed = dense - _hf_names(_DENSE_MLP) | _hf_names(family.routed_rules)
    yield EMBEDDING, (vocab, hidden)
    for layer, has_experts in enumerate(routed_layers(c)):
        used = routed if has_experts else dense
        for name, shape in shapes.items():
            if name in used:
                yield f"model.layers.{layer}.{name}", shape
        if has_experts:
            yield from _expert_shapes(c, layer)
    yield FINAL_NORM, (hidden,)
    if not c.get("tie_word_embeddings", False):
        yield HEAD, (vocab, hidden)


def _attention_shapes(c: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, heads = c["hidden_size"], c["num_attention_heads"]
    head_dim = c.get("head_dim") or hidden // heads
    q_rows, kv_rows = heads * head_dim, c.get("num_key_value_heads", heads) * head_dim
    return {
        "self_attn.q_proj.weight": (q_rows, hidden),
        "self_attn.k_proj.weight": (kv_rows, hidden),
        "self_attn.v_proj.weight": (kv_rows, hidden),
        "self_attn.q_proj.bias": (q_rows,),
        "self_attn.k_proj.bias": (kv_rows,),
        "self_attn.v_proj.bias": (kv_rows,),
        "self_attn.o_proj.weight": (hidden, q_rows),
        "self_attn.q_norm.weight": (head_dim,),
        "self_attn.k_norm.weight": (head_dim,),
    }


def _latent_attention_shapes(c: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, heads, latent = c["hidden_size"], c["num_attention_heads"], c["kv_lora_rank"]
    nope, rope, value = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
    q_rows, q_latent = heads * (nope + rope), c.get("q_lora_rank") or 0
    return {
        "self_attn.q_proj.weight": (q_rows, hidden),
        "self_attn.q_a_proj.weight": (q_latent, hidden),
        "self_attn.q_a_layernorm.weight": (q_latent,),
        "self_attn.q_b_proj.weight": (q_rows, q_latent),
        "self_attn.kv_a_proj_with_mqa.weight": (latent + rope, hidden),
        "self_attn.kv_a_layernorm.weight": (latent,),
        "self_attn.kv_b_proj.weight": (heads * (nope + value), latent),
        "self_attn.o_proj.weight": (hidden, heads * value),
    }


def _hf_names(rules: dict[str, Rule]) -> set[str]:
    return {name for rule in rules.values() for name in rule.hf_names}


def _expert_shapes(c: dict[str, Any], layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, width = c["hidden_size"], c["moe_intermediate_size"]
    for expert in range(num_experts(c)):
        prefix = f"model.layers.{layer}.mlp.experts.{expert}."
        yield f"{prefix}gate_proj.weight", (width, hidden)
        yield f"{prefix}up_proj.weight", (width, hidden)
        yield f"{prefix}down_proj.weight", (hidden, width)

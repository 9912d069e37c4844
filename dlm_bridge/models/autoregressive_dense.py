"""More dense autoregressive families of transformers: Seed-OSS, SmolLM3, Phi-3, Granite, OLMo 2 and 3, Gemma 2 and 3.

They differ from Llama in biases, layers without rotary embedding, fused projections, multipliers and norms after
sublayers. The mappings' defaults are those of transformers' config classes, for keys that config.json omits.
"""

from __future__ import annotations

from typing import Any

from dlm_bridge.errors import CheckpointError
from dlm_bridge.mapping.fused import FusedGatedMLP, FusedQKV
from dlm_bridge.mapping.rules import Direct, GatedMLP, Rule
from dlm_bridge.models.autoregressive import SUPPORTED, autoregressive_spec
from dlm_bridge.models.decoder_mapping import (
    HUB_LAYER,
    LAYER,
    attention_rules,
    dense_mapping,
    outer_rules,
)
from dlm_bridge.models.families import FamilySpec
from dlm_bridge.models.initialisation import Constant, Distribution, InitialisationRule, normal_rule

HUB = "model." + HUB_LAYER

SEED_OSS = autoregressive_spec(
    "seed_oss",
    "Seed-OSS",
    ("ByteDance-Seed/Seed-OSS-36B-Instruct", "ByteDance-Seed/Seed-OSS-36B-Base"),
    "SeedOss",
    dense_mapping(
        {"rms_norm_eps": 1e-6, "num_key_value_heads": 8, "head_dim": 128},
        frozenset({"qkv_bias"}),
        required={**SUPPORTED, "attention_bias": True, "attention_out_bias": False},
    ),
)

# ------------------------------------------------------------------------------------------------ SmolLM3


def _layers_without_rope(config: dict[str, Any]) -> dict[str, Any]:
    """megatron-core's setting. Layers with a 1 in `no_rope_layers` have a rotary embedding."""
    layers = int(config["num_hidden_layers"])
    rotary = config.get("no_rope_layers")
    if rotary is None:
        every = int(config.get("no_rope_layer_interval") or 4)
        rotary = [int((layer + 1) % every != 0) for layer in range(layers)]
    if not isinstance(rotary, list) or len(rotary) < layers:
        raise CheckpointError("config.json", f"no_rope_layers {rotary!r} is not a list of {layers} numbers")
    without = [int(not has) for has in rotary[:layers]]
    return {"no_rope_freq": without} if any(without) else {}


SMOLLM3 = autoregressive_spec(
    "smollm3",
    "SmolLM3",
    ("HuggingFaceTB/SmolLM3-3B", "HuggingFaceTB/SmolLM3-3B-Base"),
    "SmolLM3",
    dense_mapping(
        {"rms_norm_eps": 1e-6, "num_key_value_heads": 4, "tie_word_embeddings": True, "rope_theta": 2e6},
        required={**SUPPORTED, "use_sliding_window": False},
        more_settings=_layers_without_rope,
    ),
)

# ------------------------------------------------------------------------------------------------ Phi-3


def _phi3_rules() -> tuple[Rule, ...]:
    """Rules of layers with fused QKV and fused gate and up projections."""
    attention = LAYER + "self_attention."
    return (
        Direct(attention + "linear_qkv.layer_norm_weight", name=HUB + "input_layernorm.weight", shape="hidden"),
        FusedQKV(attention + "linear_qkv.weight", name=HUB + "self_attn.qkv_proj.weight"),
        Direct(attention + "linear_proj.weight", name=HUB + "self_attn.o_proj.weight", shape="hidden q_rows", axis=1),
        Direct(
            LAYER + "mlp.linear_fc1.layer_norm_weight", name=HUB + "post_attention_layernorm.weight", shape="hidden"
        ),
        FusedGatedMLP(LAYER + "mlp.linear_fc1.weight", name=HUB + "mlp.gate_up_proj.weight"),
        Direct(LAYER + "mlp.linear_fc2.weight", name=HUB + "mlp.down_proj.weight", shape="hidden ffn", axis=1),
    )


PHI3 = autoregressive_spec(
    "phi3",
    "Phi-3, Phi-3.5, Phi-4",
    ("microsoft/Phi-3-mini-4k-instruct", "microsoft/Phi-3.5-mini-instruct", "microsoft/phi-4"),
    "Phi3",
    dense_mapping(
        {"rms_norm_eps": 1e-5}, required=SUPPORTED, sliding_window=True, rules=(*outer_rules(), *_phi3_rules())
    ),
    lora_targets=("qkv_proj", "o_proj"),
)

# ------------------------------------------------------------------------------------------------ Granite

_MULTIPLIERS = ("embedding_multiplier", "residual_multiplier", "logits_scaling")  # attention_multiplier is supported


def _softmax_scale(config: dict[str, Any]) -> dict[str, Any]:
    """megatron-core's setting. Raises CheckpointError for a multiplier other than attention's, which it lacks."""
    for name in _MULTIPLIERS:
        if float(config.get(name) or 1.0) != 1.0:
            raise CheckpointError(
                "config.json",
                f"{name} {config[name]}: Megatron's formats have no multipliers of embeddings, sublayers or logits",
            )
    return {"softmax_scale": float(config.get("attention_multiplier") or 1.0)}


GRANITE = autoregressive_spec(
    "granite",
    "Granite 3",
    ("ibm-granite/granite-3.1-8b-instruct", "ibm-granite/granite-3.3-2b-base"),
    "Granite",
    dense_mapping({"rms_norm_eps": 1e-6}, required=SUPPORTED, more_settings=_softmax_scale),
    training=("accelerate",),
)

# ------------------------------------------------------------------------------------------------ OLMo 2, OLMo 3
# Megatron's names of norms after a sublayer are those of Megatron Bridge for Gemma.

POST_ATTENTION = LAYER + "self_attention.linear_proj.post_layernorm.weight"
POST_MLP = LAYER + "mlp.linear_fc2.post_layernorm.weight"


_QK_NORM = frozenset({"qk_norm"})


def _olmo(name: str, title: str, hub_ids: tuple[str, ...], prefix: str) -> FamilySpec:
    reason = (
        f"{title} normalises the outputs of attention and MLP, and whole query and key rows; megatron-core has "
        "no norm after a sublayer, and its QK norm is per head: Megatron's formats are not supported, only the Hub's"
    )
    attention = [rule for rule in attention_rules(HUB) if "input_layernorm" not in rule.hub[0]]
    queries, keys = LAYER + "self_attention.q_layernorm.weight", LAYER + "self_attention.k_layernorm.weight"
    rules = (
        *(rule for rule in attention if rule.megatron not in (queries, keys) and not rule.when),
        Direct(queries, name=HUB + "self_attn.q_norm.weight", shape="q_rows"),
        Direct(keys, name=HUB + "self_attn.k_norm.weight", shape="kv_rows"),
        Direct(POST_ATTENTION, name=HUB + "post_attention_layernorm.weight", shape="hidden"),
        *_mlp(),
        Direct(POST_MLP, name=HUB + "post_feedforward_layernorm.weight", shape="hidden"),
    )
    return autoregressive_spec(
        name,
        f"{title} (Hub side only)",
        hub_ids,
        prefix,
        dense_mapping(
            {"rms_norm_eps": 1e-5}, _QK_NORM, required=SUPPORTED, rules=(*outer_rules(), *rules), hub_only=reason
        ),
        training=("accelerate",),
    )


def _mlp() -> tuple[Rule, ...]:
    """Rules of SwiGLU or GeGLU without a norm."""
    mlp = HUB + "mlp."
    return (
        GatedMLP(LAYER + "mlp.linear_fc1.weight", gate=mlp + "gate_proj.weight", up=mlp + "up_proj.weight"),
        Direct(LAYER + "mlp.linear_fc2.weight", name=mlp + "down_proj.weight", shape="hidden ffn", axis=1),
    )


OLMO2 = _olmo("olmo2", "OLMo 2", ("allenai/OLMo-2-1124-7B", "allenai/OLMo-2-0425-1B"), "Olmo2")
OLMO3 = _olmo("olmo3", "OLMo 3", ("allenai/Olmo-3-1025-7B", "allenai/Olmo-3-1125-32B"), "Olmo3")

# ------------------------------------------------------------------------------------------------ Gemma 2, Gemma 3

_GEMMA = {"num_key_value_heads": 4, "head_dim": 256, "tie_word_embeddings": True}
_GEMMA_REQUIRED = {
    "hidden_activation": "gelu_pytorch_tanh",
    "attention_bias": False,
    "use_bidirectional_attention": False,
}


def _gemma_initialisation(config: dict[str, Any]) -> InitialisationRule:
    """transformers' rule: a norm multiplies by one plus its weight, which is initialised to zero."""
    normal = normal_rule(config)

    def distribution(name: str) -> Distribution:
        return Constant(0.0) if name.endswith("norm.weight") else normal(name)

    return distribution


def _gemma(
    name: str, title: str, hub_ids: tuple[str, ...], prefix: str, reason: str, head_norm: bool, **fields: Any
) -> FamilySpec:
    attention = attention_rules(HUB)
    if not head_norm:
        attention = tuple(rule for rule in attention if rule.when != "qk_norm")
    rules = (
        *attention,
        Direct(POST_ATTENTION, name=HUB + "post_attention_layernorm.weight", shape="hidden"),
        Direct(
            LAYER + "mlp.linear_fc1.layer_norm_weight", name=HUB + "pre_feedforward_layernorm.weight", shape="hidden"
        ),
        *_mlp(),
        Direct(POST_MLP, name=HUB + "post_feedforward_layernorm.weight", shape="hidden"),
    )
    reason = (
        f"{title} normalises the outputs of attention and MLP and {reason}; megatron-core has neither: "
        "Megatron's formats are not supported, only the Hub's"
    )
    return autoregressive_spec(
        name,
        f"{title} (Hub side only)",
        hub_ids,
        prefix,
        dense_mapping(_GEMMA, _QK_NORM, required=_GEMMA_REQUIRED, rules=(*outer_rules(), *rules), hub_only=reason),
        initialisation=_gemma_initialisation,
        training=("accelerate",),
        **fields,
    )


GEMMA2 = _gemma(
    "gemma2",
    "Gemma 2",
    ("google/gemma-2-2b", "google/gemma-2-9b-it", "google/gemma-2-27b"),
    "Gemma2",
    "caps attention scores and logits",
    head_norm=False,
)
GEMMA3 = _gemma(
    "gemma3_text",
    "Gemma 3 (text)",
    ("google/gemma-3-270m", "google/gemma-3-1b-pt", "google/gemma-3-1b-it"),
    "Gemma3",
    "has different RoPE bases in sliding and full layers",
    head_norm=True,
    config_class="Gemma3TextConfig",
)

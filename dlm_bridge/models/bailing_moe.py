"""Ling-2.0 and Ring-2.0 (Bailing-MoE-V2), from which LLaDA2 was adapted: spec, mapping.

transformers has no class for them; the body is LLaDA2's with a causal mask. They have multi-token prediction layers.

Source: inclusionAI/Ling-V2 (af8837e): models/modeling_bailing_moe_v2.py, examples/pretrain.
"""

from __future__ import annotations

from typing import Any

from dlm_bridge.mapping.rules import Dims, Mapping
from dlm_bridge.models import llada2_moe
from dlm_bridge.models.decoder_mapping import (
    LAYER,
    decoder_dims,
    decoder_settings,
    expert_sizes,
    mtp_layers,
    mtp_rules,
    require_values,
    router_settings,
)
from dlm_bridge.models.families import FamilySpec

# Defaults of the public config class, for keys that config.json omits.
DEFAULTS: dict[str, Any] = {**llada2_moe.DEFAULTS, "routed_scaling_factor": 1.0}


def dims(config: dict[str, Any]) -> Dims:
    """Sizes of Bailing-MoE-V2."""
    config = _complete(config)
    return decoder_dims(
        config,
        frozenset({"qk_norm", "router_bias", "shared_expert"}),
        mtp=mtp_layers(config),
        sizes=(("mtp_input", 2 * int(config["hidden_size"])),),
        **expert_sizes(config),
    )


def transformer(config: dict[str, Any]) -> dict[str, Any]:
    """megatron-core's settings beyond the sizes."""
    config = _complete(config)
    sizes = dims(config)
    plain = decoder_settings(config, sizes.facts) | {"rotary_percent": float(config["partial_rotary_factor"])}
    return plain | router_settings(config, sizes)


def _complete(config: dict[str, Any]) -> dict[str, Any]:
    """Check the config; add defaults and Glm4-MoE's key for the shared experts."""
    require_values(config, llada2_moe.REQUIRED)
    config = {**DEFAULTS, **config}
    return config | {"n_shared_experts": config["num_shared_experts"]}


_RULES = tuple(rule for rule in llada2_moe.MAPPING.rules if " merged" not in rule.when)
_DENSE = ("mlp.linear_fc1.", "mlp.linear_fc2.")
_PREDICTING = [
    rule
    for rule in _RULES
    if rule.megatron.startswith(LAYER) and not rule.megatron.removeprefix(LAYER).startswith(_DENSE)
]

MAPPING = Mapping(
    rules=(*_RULES, *mtp_rules(llada2_moe.HUB, _PREDICTING, final="final_layernorm.weight")),
    dims=dims,
    transformer=transformer,
    passthrough=llada2_moe.MAPPING.passthrough,
)

SPEC = FamilySpec(
    name="bailing_moe_v2",
    title="Ling-2.0, Ring-2.0 (mini, flash)",
    hub_ids=("inclusionAI/Ling-mini-2.0", "inclusionAI/Ling-flash-2.0", "inclusionAI/Ring-mini-2.0"),
    architectures=("BailingMoeV2ForCausalLM",),
    model_type="bailing_moe",
    other_model_types=("bailing_moe_v2",),
    config_class="dlm_bridge.models.modeling_bailing_moe:BailingMoeV2Config",
    model_class="dlm_bridge.models.modeling_bailing_moe:BailingMoeV2ForCausalLM",
    mapping=MAPPING,
    auto_classes=("AutoModelForCausalLM",),
    kind="autoregressive",
    attention_pattern="causal",
    shift=True,
    objective="causal",
    lora_targets=("query_key_value", "o_proj"),
    checked_against="the public modeling of Ling-2.0",
)

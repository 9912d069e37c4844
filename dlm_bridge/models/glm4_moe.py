"""GLM-4.5 and GLM-4.6 (Glm4-MoE): spec, mapping.

Leading dense layers, a shared expert, partial rotary embedding, multi-token prediction.
"""

from __future__ import annotations

from typing import Any

from dlm_bridge.mapping.rules import Dims, Mapping
from dlm_bridge.models.autoregressive import autoregressive_spec
from dlm_bridge.models.decoder_mapping import (
    HUB_LAYER,
    TIED_HEAD,
    attention_rules,
    decoder_dims,
    decoder_settings,
    dense_rules,
    expert_rules,
    expert_sizes,
    mtp_layers,
    mtp_passthrough,
    mtp_rules,
    outer_rules,
    require_values,
    router_settings,
)

LAYER = "model." + HUB_LAYER
# Defaults of transformers' config class, for keys that config.json omits.
DEFAULTS: dict[str, Any] = {
    "rms_norm_eps": 1e-5,
    "num_key_value_heads": 8,
    "attention_bias": False,
    "use_qk_norm": False,
    "partial_rotary_factor": 0.5,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
}


def dims(config: dict[str, Any]) -> Dims:
    """Sizes of Glm4-MoE. Its `attention_bias` applies to query, key and value only."""
    config = {**DEFAULTS, **config}
    require_values(config, {"hidden_act": "silu"})
    facts = {"router_bias"}
    facts |= {"qkv_bias"} if config["attention_bias"] else set()
    facts |= {"qk_norm"} if config["use_qk_norm"] else set()
    facts |= {"shared_expert"} if config["n_shared_experts"] else set()
    return decoder_dims(
        config,
        frozenset(facts),
        mtp=mtp_layers(config),
        sizes=(("mtp_input", 2 * int(config["hidden_size"])),),
        **expert_sizes(config),
    )


def transformer(config: dict[str, Any]) -> dict[str, Any]:
    """megatron-core's settings beyond the sizes."""
    config = {**DEFAULTS, **config}
    sizes = dims(config)
    return decoder_settings(config, sizes.facts, sliding_window=True) | router_settings(config, sizes)


_EXPERTS = expert_rules(LAYER + "mlp.", LAYER + "post_attention_layernorm.weight", own_dtype=True)

MAPPING = Mapping(
    rules=(
        *outer_rules(),
        *attention_rules(LAYER),
        *dense_rules(LAYER),
        *_EXPERTS,
        *mtp_rules(LAYER, (*attention_rules(LAYER), *_EXPERTS)),
    ),
    dims=dims,
    transformer=transformer,
    passthrough=(*TIED_HEAD, *mtp_passthrough(LAYER)),
)

SPEC = autoregressive_spec(
    "glm4_moe", "GLM-4.5, GLM-4.6", ("zai-org/GLM-4.5", "zai-org/GLM-4.5-Air", "zai-org/GLM-4.6"), "Glm4Moe", MAPPING
)

"""DeepSeek-V3 and R1: spec, mapping.

Multi-head latent attention, sigmoid router over expert groups, multi-token prediction.
"""

from __future__ import annotations

from typing import Any

from dlm_bridge.errors import CheckpointError
from dlm_bridge.mapping.rules import Dims, Direct, Mapping, Rule
from dlm_bridge.models.autoregressive import autoregressive_spec
from dlm_bridge.models.decoder_mapping import (
    HUB_LAYER,
    LAYER,
    TIED_HEAD,
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
from dlm_bridge.models.rope import rope_parameters, yarn_numbers

HUB = "model." + HUB_LAYER
# Defaults of transformers' config class, for keys that config.json omits.
DEFAULTS: dict[str, Any] = {
    "rms_norm_eps": 1e-6,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_shared_experts": 1,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 3,
    "norm_topk_prob": True,
    "rope_interleave": True,
}
REQUIRED: dict[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "moe_layer_freq": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}


def dims(config: dict[str, Any]) -> Dims:
    """Sizes of DeepSeek-V3. Every head computes its key and value from one shared latent vector."""
    config = {**DEFAULTS, **config}
    require_values(config, REQUIRED)
    heads = int(config["num_attention_heads"])
    rope, nope, value = (int(config[key]) for key in ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"))
    q_lora, kv_lora = int(config["q_lora_rank"] or 0), int(config["kv_lora_rank"])
    facts = {"router_bias"}
    facts |= {"q_lora"} if q_lora else set()
    facts |= {"shared_expert"} if config["n_shared_experts"] else set()
    return decoder_dims(
        {**config, "num_key_value_heads": heads, "head_dim": rope + nope},
        frozenset(facts),
        mtp=mtp_layers(config),
        sizes=(
            ("q_lora", q_lora),
            ("kv_lora", kv_lora),
            ("kv_down", kv_lora + rope),  # the latent vector and the rotary key, which the heads share
            ("kv_up", heads * (nope + value)),
            ("values", heads * value),
            ("mtp_input", 2 * int(config["hidden_size"])),
        ),
        **expert_sizes(config),
    )


def transformer(config: dict[str, Any]) -> dict[str, Any]:
    """megatron-core's settings beyond the sizes: fields of its MLATransformerConfig."""
    config = {**DEFAULTS, **config}
    sizes = dims(config)
    if not config["rope_interleave"]:
        raise CheckpointError("config.json", "megatron-core's latent attention supports interleaved RoPE only")
    rope = rope_parameters(config)
    # The scaling has separate fields in MLATransformerConfig.
    settings = decoder_settings(
        {**config, "rope_theta": rope["rope_theta"], "rope_scaling": None, "rope_parameters": None}, sizes.facts
    )
    return (
        settings
        | _rope(config, rope)
        | router_settings(config, sizes)
        | {
            "multi_latent_attention": True,
            "q_lora_rank": config["q_lora_rank"] or None,
            "kv_lora_rank": config["kv_lora_rank"],
            "qk_head_dim": config["qk_nope_head_dim"],
            "qk_pos_emb_head_dim": config["qk_rope_head_dim"],
            "v_head_dim": config["v_head_dim"],
            "qk_layernorm": True,  # norms of the latent vectors
        }
    )


def _rope(config: dict[str, Any], rope: dict[str, Any]) -> dict[str, Any]:
    if rope["rope_type"] == "default":
        return {"rope_type": "rope"}
    if rope["rope_type"] != "yarn":
        raise CheckpointError(
            "config.json", f"megatron-core's latent attention supports RoPE scaling 'yarn', not '{rope['rope_type']}'"
        )
    numbers = yarn_numbers(config, rope)
    if numbers["mscale"] is None or rope.get("attention_factor") is not None:
        raise CheckpointError("config.json", "megatron-core's latent attention needs YaRN's mscale and mscale_all_dim")
    return {"rope_type": "yarn", **numbers}


def _attention() -> tuple[Rule, ...]:
    """Down-projections to the latent vectors (replicated), their norms, up-projections (sharded by heads)."""
    hub, megatron = HUB + "self_attn.", LAYER + "self_attention."
    return (
        Direct(LAYER + "input_layernorm.weight", name=HUB + "input_layernorm.weight", shape="hidden"),
        Direct(
            megatron + "linear_q_proj.weight",
            when="!q_lora",
            name=hub + "q_proj.weight",
            shape="q_rows hidden",
            axis=0,
        ),
        Direct(
            megatron + "linear_q_down_proj.weight", when="q_lora", name=hub + "q_a_proj.weight", shape="q_lora hidden"
        ),
        Direct(
            megatron + "linear_q_up_proj.layer_norm_weight",
            when="q_lora",
            name=hub + "q_a_layernorm.weight",
            shape="q_lora",
        ),
        Direct(
            megatron + "linear_q_up_proj.weight",
            when="q_lora",
            name=hub + "q_b_proj.weight",
            shape="q_rows q_lora",
            axis=0,
        ),
        Direct(
            megatron + "linear_kv_down_proj.weight", name=hub + "kv_a_proj_with_mqa.weight", shape="kv_down hidden"
        ),
        Direct(megatron + "linear_kv_up_proj.layer_norm_weight", name=hub + "kv_a_layernorm.weight", shape="kv_lora"),
        Direct(megatron + "linear_kv_up_proj.weight", name=hub + "kv_b_proj.weight", shape="kv_up kv_lora", axis=0),
        Direct(megatron + "linear_proj.weight", name=hub + "o_proj.weight", shape="hidden values", axis=1),
    )


_EXPERTS = expert_rules(HUB + "mlp.", HUB + "post_attention_layernorm.weight", own_dtype=True)

MAPPING = Mapping(
    rules=(*outer_rules(), *_attention(), *dense_rules(HUB), *_EXPERTS, *mtp_rules(HUB, (*_attention(), *_EXPERTS))),
    dims=dims,
    transformer=transformer,
    passthrough=(*TIED_HEAD, *mtp_passthrough(HUB)),
)

SPEC = autoregressive_spec(
    "deepseek_v3",
    "DeepSeek-V3, DeepSeek-R1",
    ("deepseek-ai/DeepSeek-V3", "deepseek-ai/DeepSeek-V3.1", "deepseek-ai/DeepSeek-R1"),
    "DeepseekV3",
    MAPPING,
    # Targets that a model does not have are ignored: with q_lora_rank null queries have one projection.
    lora_targets=("q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"),
)

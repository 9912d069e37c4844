"""Mixture of experts in megatron-core's terms: expert sizes, router settings, the Qwen3-MoE mapping."""

from __future__ import annotations

from typing import Any

from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.mapping.rules import Dims, Mapping
from dlm_bridge.models.decoder_mapping import (
    SUPPORTED_VALUES,
    TIED_HEAD,
    decoder_dims,
    decoder_rules,
    decoder_settings,
    require_values,
)

ATTENTION_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")  # LoRA's targets: the experts' weights are stacks


def moe_settings(dims: Dims, chosen: int, score: str = "softmax", renormalised: bool = True) -> dict[str, Any]:
    """megatron-core's settings of experts and their router, which gives a token `chosen` of them.

    A softmax over all experts whose best are renormalised is a softmax over the best alone, which is megatron-core's
    default; without renormalisation its softmax has to come first (`moe_router_pre_softmax`).
    """
    return {
        "num_moe_experts": dims.experts,
        "moe_router_topk": chosen,
        "moe_ffn_hidden_size": dims.moe_ffn,
        "moe_shared_expert_intermediate_size": dims.shared_ffn or None,
        "moe_router_score_function": score,
        "moe_router_pre_softmax": score == "softmax" and not renormalised,
        "moe_layer_freq": [int(dims.is_moe(layer)) for layer in range(dims.layers)] if dims.dense_layers else 1,
        "moe_router_load_balancing_type": "none",  # the objectives have no balancing term
    }


# Defaults of config classes of the models that were made of Qwen3-30B-A3B, for keys that a config.json leaves out.
QWEN3_30B_A3B: dict[str, Any] = {
    "head_dim": 128,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "rope_theta": 1000000.0,
}


def qwen3_moe_mapping(
    defaults: dict[str, Any], required: dict[str, Any] = SUPPORTED_VALUES, sliding_window: bool = False
) -> Mapping:
    """The mapping of a family with Qwen3-MoE's tensors; arguments as in `decoder_mapping.dense_mapping`."""
    facts = frozenset({"qk_norm"})

    def dims(config: dict[str, Any]) -> Dims:
        config = {**defaults, **config}
        require_values(config, required)
        experts = routed_experts(config)
        step = config.get("decoder_sparse_step") or 1
        dense = {layer for layer in range(int(config["num_hidden_layers"])) if (layer + 1) % step}
        return decoder_dims(
            config,
            facts,
            experts=experts,
            moe_ffn=config["moe_intermediate_size"],
            dense_layers=frozenset(dense | set(config.get("mlp_only_layers") or ())),
        )

    def transformer(config: dict[str, Any]) -> dict[str, Any]:
        config = {**defaults, **config, "max_window_layers": None}  # a window is every layer's
        renormalised = bool(config.get("norm_topk_prob"))
        settings = moe_settings(dims(config), config["num_experts_per_tok"], renormalised=renormalised)
        return decoder_settings(config, facts, sliding_window) | settings

    return Mapping(rules=decoder_rules(), dims=dims, transformer=transformer, passthrough=TIED_HEAD)


def routed_experts(config: dict[str, Any]) -> int:
    """Number of experts that the router selects from, by any of the names that families and transformers give it.

    Raises DlmBridgeError unless a token can be routed to `num_experts_per_tok` of them.
    """
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    experts = next((config[name] for name in names if config.get(name) is not None), None)
    top_k = config.get("num_experts_per_tok")
    if type(experts) is not int or type(top_k) is not int or not 1 <= top_k <= experts:
        raise DlmBridgeError(f"config.json: num_experts_per_tok {top_k!r} cannot be chosen of num_experts {experts!r}")
    return experts


def expert_sizes(config: dict[str, Any]) -> dict[str, Any]:
    """Fields of Dims that describe the experts. Raises DlmBridgeError for impossible numbers."""
    experts = routed_experts(config)
    groups, chosen = config["n_group"], config["topk_group"]
    if experts % groups or experts // groups < 2 or not 1 <= chosen <= groups:
        raise DlmBridgeError(f"config.json: topk_group {chosen} of n_group {groups} of {experts} experts is unsound")
    return {
        "experts": experts,
        "moe_ffn": config["moe_intermediate_size"],
        "shared_ffn": config["moe_intermediate_size"] * config["n_shared_experts"],
        "dense_layers": frozenset(range(config["first_k_dense_replace"])),
    }


def router_settings(config: dict[str, Any], dims: Dims) -> dict[str, Any]:
    """megatron-core's settings. Raises DlmBridgeError where its router is another one: it scores a group by its best
    `num_experts_per_tok / topk_group` experts, these models by the best two, and it always renormalises."""
    chosen, groups = config["num_experts_per_tok"], config["n_group"]
    if not config["norm_topk_prob"] or chosen == 1:
        raise DlmBridgeError(
            "config.json: megatron-core's sigmoid router needs norm_topk_prob and two experts a token"
        )
    settings = moe_settings(dims, chosen, score="sigmoid") | {
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.0,
        "moe_router_topk_scaling_factor": float(config["routed_scaling_factor"]),
        "moe_router_dtype": "fp32",
    }
    if groups == 1:
        return settings
    if chosen != 2 * config["topk_group"]:
        raise DlmBridgeError(
            f"config.json: megatron-core scores expert groups as this model does only where num_experts_per_tok "
            f"{chosen} is twice topk_group {config['topk_group']}"
        )
    return settings | {"moe_router_num_groups": groups, "moe_router_group_topk": config["topk_group"]}

"""What Glm4-MoE and DeepSeek-V3 share: the sigmoid router limited to groups, and the sizes of their experts."""

from __future__ import annotations

from typing import Any

from dlm_bridge.convert.mapping import Dims
from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.models.autoregressive.common import routed_experts
from dlm_bridge.models.moe import moe_settings


def expert_sizes(config: dict[str, Any]) -> dict[str, Any]:
    """The fields of Dims that describe the experts. Raises DlmBridgeError for numbers that cannot be."""
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

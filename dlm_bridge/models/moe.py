"""What the mixture-of-experts families tell megatron-core, and the whole mapping of those on the Qwen3-MoE body."""

from __future__ import annotations

from typing import Any

from dlm_bridge.convert.mapping import Dims, Mapping
from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.models.standard import PLAIN, TIED_HEAD, require, standard_dims, standard_rules, standard_transformer


def check_experts(config: dict[str, Any]) -> None:
    """Raise DlmBridgeError unless every token can be given `num_experts_per_tok` of `num_experts` experts."""
    experts, chosen = config.get("num_experts"), config.get("num_experts_per_tok")
    if type(experts) is not int or type(chosen) is not int or not 1 <= chosen <= experts:
        raise DlmBridgeError(
            f"config.json: num_experts_per_tok {chosen!r} cannot be chosen of num_experts {experts!r}"
        )


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


def qwen3_moe_mapping(defaults: dict[str, Any]) -> Mapping:
    """The mapping of a family whose tensors are Qwen3-MoE's. `defaults` are its configuration class's."""
    facts = frozenset({"qk_norm"})

    def dims(config: dict[str, Any]) -> Dims:
        config = {**defaults, **config}
        require(config, PLAIN)
        check_experts(config)
        every = config.get("decoder_sparse_step") or 1
        dense = {layer for layer in range(int(config["num_hidden_layers"])) if (layer + 1) % every}
        return standard_dims(
            config,
            facts,
            experts=config["num_experts"],
            moe_ffn=config["moe_intermediate_size"],
            dense_layers=frozenset(dense | set(config.get("mlp_only_layers") or ())),
        )

    def transformer(config: dict[str, Any]) -> dict[str, Any]:
        config = {**defaults, **config}
        renormalised = bool(config.get("norm_topk_prob"))
        settings = moe_settings(dims(config), config["num_experts_per_tok"], renormalised=renormalised)
        return standard_transformer(config, facts) | settings

    return Mapping(rules=standard_rules(), dims=dims, transformer=transformer, carried=TIED_HEAD)

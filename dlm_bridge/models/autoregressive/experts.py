"""Qwen3-MoE, Mixtral and OLMoE: a softmax router, every layer (or every so many) with experts."""

from __future__ import annotations

from typing import Any

from dlm_bridge.convert.mapping import Dims, Direct, GatedMLP, Mapping, Rule
from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.models.autoregressive.common import ACTIVATION, routed_experts, settings
from dlm_bridge.models.moe import moe_settings
from dlm_bridge.models.standard import (
    HUB_LAYER,
    LAYER,
    TIED_HEAD,
    attention_rules,
    outer_rules,
    require,
    standard_dims,
    standard_rules,
)

# Where config.json leaves a key out, transformers' configuration classes say this.
_QWEN3_MOE: dict[str, Any] = {
    "rms_norm_eps": 1e-6,
    "num_key_value_heads": 4,
    "head_dim": None,
    "use_sliding_window": False,
    "max_window_layers": None,
    "norm_topk_prob": False,
    "decoder_sparse_step": 1,
}
_MIXTRAL: dict[str, Any] = {"rms_norm_eps": 1e-5, "num_key_value_heads": 8, "num_experts_per_tok": 2}
_OLMOE: dict[str, Any] = {"rms_norm_eps": 1e-5, "norm_topk_prob": False}
NO_OLMOE = (
    "OLMoE normalises whole query and key rows, megatron-core's QK norm is per head, so Megatron cannot hold it: "
    "use it on the Hub side"
)


def _qwen3_moe_dims(config: dict[str, Any]) -> Dims:
    config = {**_QWEN3_MOE, **config}
    require(config, ACTIVATION)
    every = int(config["decoder_sparse_step"])
    dense = {layer for layer in range(int(config["num_hidden_layers"])) if (layer + 1) % every}
    return standard_dims(
        config,
        frozenset({"qk_norm"}),
        experts=routed_experts(config),
        moe_ffn=config["moe_intermediate_size"],
        dense_layers=frozenset(dense | set(config.get("mlp_only_layers") or ())),
    )


def _qwen3_moe_transformer(config: dict[str, Any]) -> dict[str, Any]:
    config = {**_QWEN3_MOE, **config, "max_window_layers": None}  # its window is every layer's
    dims = _qwen3_moe_dims(config)
    renormalised = bool(config["norm_topk_prob"])
    return settings(config, dims) | moe_settings(dims, config["num_experts_per_tok"], renormalised=renormalised)


QWEN3_MOE = Mapping(
    rules=standard_rules(), dims=_qwen3_moe_dims, transformer=_qwen3_moe_transformer, carried=TIED_HEAD
)


def _mixtral_dims(config: dict[str, Any]) -> Dims:
    config = {**_MIXTRAL, **config}
    require(config, ACTIVATION)
    return standard_dims(config, experts=routed_experts(config), moe_ffn=config["intermediate_size"])


def _mixtral_transformer(config: dict[str, Any]) -> dict[str, Any]:
    config = {**_MIXTRAL, **config}
    dims = _mixtral_dims(config)
    return settings(config, dims, theta=1e6) | moe_settings(dims, config["num_experts_per_tok"])


def _mixtral_experts(layer: str) -> tuple[Rule, ...]:
    """Experts under the names of the original release: w1 is the gate, w3 goes up, w2 down."""
    mlp = layer + "block_sparse_moe."
    expert, megatron = mlp + "experts.{expert}.", LAYER + "mlp."
    return (
        Direct(LAYER + "pre_mlp_layernorm.weight", name=layer + "post_attention_layernorm.weight", shape="hidden"),
        Direct(megatron + "router.weight", name=mlp + "gate.weight", shape="experts hidden"),
        GatedMLP(
            megatron + "experts.experts.{expert}.linear_fc1.weight",
            gate=expert + "w1.weight",
            up=expert + "w3.weight",
            width="moe_ffn",
        ),
        Direct(
            megatron + "experts.experts.{expert}.linear_fc2.weight",
            name=expert + "w2.weight",
            shape="hidden moe_ffn",
            axis=1,
        ),
    )


MIXTRAL = Mapping(
    rules=(
        *outer_rules(),
        *attention_rules("model." + HUB_LAYER),
        *_mixtral_experts("model." + HUB_LAYER),
    ),
    dims=_mixtral_dims,
    transformer=_mixtral_transformer,
    carried=TIED_HEAD,
)


def _olmoe_dims(config: dict[str, Any]) -> Dims:
    config = {**_OLMOE, **config}
    require(config, ACTIVATION)
    return standard_dims(config, experts=routed_experts(config), moe_ffn=config["intermediate_size"])


def _olmoe_transformer(config: dict[str, Any]) -> dict[str, Any]:
    raise DlmBridgeError(NO_OLMOE)


OLMOE = Mapping(
    rules=(
        *standard_rules(),
        Direct(
            LAYER + "self_attention.q_layernorm.weight",
            name="model." + HUB_LAYER + "self_attn.q_norm.weight",
            shape="q_rows",
        ),
        Direct(
            LAYER + "self_attention.k_layernorm.weight",
            name="model." + HUB_LAYER + "self_attn.k_norm.weight",
            shape="kv_rows",
        ),
    ),
    dims=_olmoe_dims,
    transformer=_olmoe_transformer,
    carried=TIED_HEAD,
    hub_only=NO_OLMOE,
)

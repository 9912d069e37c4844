"""LLaDA-MoE's tensors are Qwen3-MoE's, under a config with names of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dlm_bridge.convert.mapping import Dims
from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.models.moe import qwen3_moe_mapping
from dlm_bridge.models.standard import require

# What the public checkpoints say and the body can do. Anything else would be silently wrong.
REQUIRED: dict[str, Any] = {
    "qk_layernorm": True,
    "clip_qkv": None,
    "partial_rotary_factor": 1,
    "rope_scaling": None,
    "moe_router_enable_expert_bias": False,
    "moe_router_score_function": "softmax",
    "routed_scaling_factor": 1,
    "norm_topk_prob": False,  # the original code never renormalises
}

QWEN3_MOE = qwen3_moe_mapping({})


def check(config: dict[str, Any]) -> None:
    """Raise DlmBridgeError for a LLaDA-MoE config that the Qwen3-MoE body cannot hold."""
    require(config, REQUIRED)
    if config.get("shared_expert_intermediate_size"):
        raise DlmBridgeError("config.json: a shared expert is not supported for LLaDA-MoE (no public model has one)")
    if not all(config.get("moe_layer_freq") or ()):
        raise DlmBridgeError("config.json: layers without experts are not supported for LLaDA-MoE (no public model)")


def dims(config: dict[str, Any]) -> Dims:
    """LLaDA-MoE's sizes."""
    return QWEN3_MOE.dims(_qwen3_moe(config))


def transformer(config: dict[str, Any]) -> dict[str, Any]:
    """What megatron-core needs beyond the sizes."""
    return QWEN3_MOE.transformer(_qwen3_moe(config))


def _qwen3_moe(config: dict[str, Any]) -> dict[str, Any]:
    """The config under Qwen3-MoE's names."""
    check(config)
    renamed = {
        "intermediate_size": config.get("dense_intermediate_size") or config.get("expert_intermediate_size"),
        "moe_intermediate_size": config.get("expert_intermediate_size"),
        "head_dim": None,
    }
    return {"rope_theta": 50000.0, "rms_norm_eps": 1e-5, **config, **renamed}


MAPPING = replace(QWEN3_MOE, dims=dims, transformer=transformer)

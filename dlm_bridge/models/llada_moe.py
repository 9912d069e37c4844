"""LLaDA-MoE-7B-A1B: spec, mapping. Qwen3-MoE's tensors under a config with key names of its own.

Source: the public modeling_lladamoe.py and configs, arXiv 2509.24389.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.mapping.rules import Dims
from dlm_bridge.models.decoder_mapping import ATTENTION_TARGETS, qwen3_moe_mapping, require_values
from dlm_bridge.models.families import FamilySpec
from dlm_bridge.models.llada import SPEC as LLADA

# Values of the public checkpoints, which the body implements. Any other would be silently wrong.
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


def check_config(config: dict[str, Any]) -> None:
    """Raise DlmBridgeError for a LLaDA-MoE config that the Qwen3-MoE body cannot hold."""
    require_values(config, REQUIRED)
    if config.get("shared_expert_intermediate_size"):
        raise DlmBridgeError("config.json: a shared expert is not supported for LLaDA-MoE (no public model has one)")
    if not all(config.get("moe_layer_freq") or ()):
        raise DlmBridgeError("config.json: layers without experts are not supported for LLaDA-MoE (no public model)")


def dims(config: dict[str, Any]) -> Dims:
    """LLaDA-MoE's sizes."""
    return QWEN3_MOE.dims(_qwen3_moe(config))


def transformer(config: dict[str, Any]) -> dict[str, Any]:
    """megatron-core's settings beyond the sizes."""
    return QWEN3_MOE.transformer(_qwen3_moe(config))


def _qwen3_moe(config: dict[str, Any]) -> dict[str, Any]:
    """The config under Qwen3-MoE's names."""
    check_config(config)
    renamed = {
        "intermediate_size": config.get("dense_intermediate_size") or config.get("expert_intermediate_size"),
        "moe_intermediate_size": config.get("expert_intermediate_size"),
        "head_dim": None,
    }
    return {"rope_theta": 50000.0, "rms_norm_eps": 1e-5, **config, **renamed}


MAPPING = replace(QWEN3_MOE, dims=dims, transformer=transformer)


SPEC = FamilySpec(
    name="llada_moe",
    title="LLaDA-MoE-7B-A1B",
    hub_ids=(
        "inclusionAI/LLaDA-MoE-7B-A1B-Base",
        "inclusionAI/LLaDA-MoE-7B-A1B-Instruct",
        "inclusionAI/LLaDA-MoE-7B-A1B-Instruct-TD",
    ),
    architectures=("LLaDAMoEModelLM", "LLaDAMoEModel"),
    model_type=LLADA.model_type,  # shared: AutoConfig tells them apart by `architectures`
    other_model_types=("lladamoe",),  # dLLM's, whose examples tell users to write it
    config_class="dlm_bridge.models.modeling_llada_moe:LLaDAMoEConfig",
    model_class="dlm_bridge.models.modeling_llada_moe:LLaDAMoEModelLM",
    mapping=MAPPING,
    mask_token_id=156895,
    sft=LLADA.sft,
    sampler=LLADA.sampler,
    lora_targets=ATTENTION_TARGETS,
    checked_against="the public modeling_lladamoe.py",
)

"""LLaDA-MoE-7B-A1B, Qwen3-MoE's tensors with other config keys: spec, mapping.

Source: the public modeling_lladamoe.py and configs, arXiv 2509.24389.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dlm_bridge.errors import CheckpointError
from dlm_bridge.mapping.rules import Dims
from dlm_bridge.models.decoder_mapping import ATTENTION_TARGETS, qwen3_moe_mapping, require_values
from dlm_bridge.models.families import FamilySpec
from dlm_bridge.models.llada import SPEC as LLADA

# Values of the public checkpoints. With any other the body would be silently wrong.
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
    """Raise CheckpointError for a LLaDA-MoE config that the Qwen3-MoE body does not support."""
    require_values(config, REQUIRED)
    if config.get("shared_expert_intermediate_size"):
        raise CheckpointError("config.json", "a shared expert is not supported (no public LLaDA-MoE has one)")
    if not all(config.get("moe_layer_freq") or ()):
        raise CheckpointError("config.json", "layers without experts are not supported (no public LLaDA-MoE has them)")


def dims(config: dict[str, Any]) -> Dims:
    """Sizes of LLaDA-MoE."""
    return QWEN3_MOE.dims(_qwen3_moe(config))


def transformer(config: dict[str, Any]) -> dict[str, Any]:
    """megatron-core's settings beyond the sizes."""
    return QWEN3_MOE.transformer(_qwen3_moe(config))


def _qwen3_moe(config: dict[str, Any]) -> dict[str, Any]:
    """Check the config; rename its keys to Qwen3-MoE's."""
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
    model_type=LLADA.model_type,  # shared: configs dispatch on `architectures`
    other_model_types=("lladamoe",),  # written after dLLM's examples
    config_class="dlm_bridge.models.modeling_llada_moe:LLaDAMoEConfig",
    model_class="dlm_bridge.models.modeling_llada_moe:LLaDAMoEModelLM",
    mapping=MAPPING,
    mask_token_id=156895,
    sft=LLADA.sft,
    sampler=LLADA.sampler,
    lora_targets=ATTENTION_TARGETS,
    checked_against="the public modeling_lladamoe.py",
)

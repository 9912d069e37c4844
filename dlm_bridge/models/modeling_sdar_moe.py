"""SDAR-MoE on transformers' Qwen3-MoE body with block-causal attention: config and model."""

# mypy: disable-error-code="arg-type, assignment, misc, override"

from __future__ import annotations

from typing import ClassVar

from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from dlm_bridge.models.diffusion_lm import register_hub_names
from dlm_bridge.models.hub_config import HubConfig
from dlm_bridge.models.modeling_moe import DiffusionMoE, expert_converters
from dlm_bridge.models.sdar_moe import SPEC


class SDARMoeConfig(HubConfig, Qwen3MoeConfig):
    """Published configs may omit `block_size` and `mask_token_id`. For a -b8 to -b64 variant pass the block size
    (`from_pretrained(..., block_size=32)`)."""

    model_type = "sdar_moe"
    family = SPEC
    attribute_map: ClassVar[dict[str, str]] = {"num_local_experts": "num_experts"}
    default_theta = 1000000.0

    head_dim: int = 128
    norm_topk_prob: bool = True
    use_cache: bool = False
    block_size: int = 4
    mask_token_id: int | None = 151669


class SDARMoeForCausalLM(DiffusionMoE, Qwen3MoeForCausalLM):
    """Block-causal attention. `logits[i]` predicts token i."""

    config_class = SDARMoeConfig
    family = SPEC


register_hub_names(SDARMoeForCausalLM, (), expert_converters())

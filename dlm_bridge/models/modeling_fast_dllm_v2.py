"""Fast-dLLM v2 on transformers' Qwen2 body with block-causal attention: config and model."""

# mypy: disable-error-code="arg-type, assignment, misc, override"

from __future__ import annotations

from typing import ClassVar

from transformers import Qwen2Config, Qwen2ForCausalLM

from dlm_bridge.models.diffusion_lm import DiffusionLM
from dlm_bridge.models.fast_dllm_v2 import SPEC
from dlm_bridge.models.hub_config import HubConfig


class Fast_dLLM_QwenConfig(HubConfig, Qwen2Config):  # noqa: N801 (the Hub's name)
    """`block_size` is an alias of `bd_size`."""

    model_type = "Fast_dLLM_Qwen"
    family = SPEC
    attribute_map: ClassVar[dict[str, str]] = {"block_size": "bd_size"}

    bd_size: int = 32
    mask_token_id: int | None = 151665


class Fast_dLLM_QwenForCausalLM(DiffusionLM, Qwen2ForCausalLM):  # noqa: N801 (the Hub's name)
    """`logits[i]` predicts token i + 1 (`family.shift`), as in the original."""

    config_class = Fast_dLLM_QwenConfig
    family = SPEC

"""SDAR on transformers' Qwen3 body with block-causal attention: config and model."""

# mypy: disable-error-code="arg-type, assignment, misc, override"

from __future__ import annotations

from transformers import Qwen3Config, Qwen3ForCausalLM

from dlm_bridge.models.diffusion_lm import DiffusionLM
from dlm_bridge.models.hub_config import HubConfig
from dlm_bridge.models.sdar import SPEC


class SDARConfig(HubConfig, Qwen3Config):
    """Published configs may omit `block_size` and `mask_token_id`. For the -b8 to -b64 variants pass the block size
    (`from_pretrained(..., block_size=32)`)."""

    model_type = "sdar"
    family = SPEC

    use_cache: bool = False
    block_size: int = 4
    mask_token_id: int | None = 151669


class SDARForCausalLM(DiffusionLM, Qwen3ForCausalLM):
    """Block-causal attention. `logits[i]` predicts token i."""

    config_class = SDARConfig
    family = SPEC

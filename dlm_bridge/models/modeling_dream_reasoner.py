"""DreamReasoner on transformers' Qwen3 body with block-causal attention: config and model."""

# mypy: disable-error-code="arg-type, assignment, misc, override"

from __future__ import annotations

from huggingface_hub.dataclasses import strict
from transformers import Qwen3Config, Qwen3ForCausalLM

from dlm_bridge.models.diffusion_lm import DiffusionLM
from dlm_bridge.models.dream_reasoner import SPEC
from dlm_bridge.models.hub_config import HubConfig


@strict  # head_dim may be null here
class DreamReasonerConfig(HubConfig, Qwen3Config):
    """Named DreamConfig on the Hub, like Dream's. `head_dim` None: hidden / heads."""

    model_type = "Dream"
    family = SPEC

    use_cache: bool = False
    head_dim: int | None = None
    block_size: int = 32
    mask_token_id: int | None = 151669


class DreamForCausalLM(DiffusionLM, Qwen3ForCausalLM):
    """Block-causal attention. `logits[i]` predicts token i, unlike Dream's."""

    config_class = DreamReasonerConfig
    family = SPEC

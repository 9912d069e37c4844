"""DiffLM on transformers' Qwen3 body with bidirectional attention: config and model."""

# mypy: disable-error-code="arg-type, assignment, misc, override"

from __future__ import annotations

from huggingface_hub.dataclasses import strict
from transformers import Qwen3Config, Qwen3ForCausalLM

from dlm_bridge.models.difflm import REQUIRED, SPEC
from dlm_bridge.models.diffusion_lm import DiffusionLM
from dlm_bridge.models.hub_config import HubConfig


@strict  # head_dim may be null here
class DLMConfig(HubConfig, Qwen3Config):
    """Config with the fields and defaults of the public configuration_dlm.py. `head_dim` None: hidden / heads."""

    model_type = ""
    family = SPEC
    required_values = REQUIRED

    use_cache: bool = False
    head_dim: int | None = None
    attn_mask_type: str = "bidirectional"
    mask_token_id: int | None = None


class DiffLM(DiffusionLM, Qwen3ForCausalLM):
    """`logits[i]` predicts token i. Load it with `DiffLM.from_pretrained(path)`: its config has no model type for the
    Auto classes."""

    config_class = DLMConfig
    family = SPEC

"""DiffuLLaMA on transformers' Llama body with bidirectional attention: config and model."""

# mypy: disable-error-code="arg-type, assignment, misc, override"

from __future__ import annotations

from transformers import LlamaConfig
from transformers import LlamaForCausalLM as Llama

from dlm_bridge.models.diffullama import SPEC
from dlm_bridge.models.diffusion_lm import DiffusionLM
from dlm_bridge.models.hub_config import HubConfig


class DiffuLLaMAConfig(HubConfig, LlamaConfig):
    """Saved as the Llama config that was loaded."""

    family = SPEC

    mask_token_id: int | None = 811


class LlamaForCausalLM(DiffusionLM, Llama):
    """Named as on the Hub, since a saved checkpoint names its class. `logits[i]` predicts token i + 1."""

    config_class = DiffuLLaMAConfig
    family = SPEC

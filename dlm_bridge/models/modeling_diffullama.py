"""DiffuLLaMA on transformers' Llama body with bidirectional attention: config and model."""

# mypy: disable-error-code="arg-type, assignment, misc, override"

from __future__ import annotations

from transformers import LlamaConfig
from transformers import LlamaForCausalLM as Llama

from dlm_bridge.models.diffullama import SPEC
from dlm_bridge.models.diffusion_lm import DiffusionLM
from dlm_bridge.models.hub_config import HubConfig


class DiffuLLaMAConfig(HubConfig, LlamaConfig):
    """Llama's config with a mask token; saved as Llama's."""

    family = SPEC

    mask_token_id: int | None = 811


class LlamaForCausalLM(DiffusionLM, Llama):
    """`logits[i]` predicts token i + 1. Has the Hub's class name, which checkpoints store."""

    config_class = DiffuLLaMAConfig
    family = SPEC

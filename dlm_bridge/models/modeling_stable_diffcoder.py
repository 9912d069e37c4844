"""Stable-DiffCoder on transformers' Llama body with block-causal attention: config and model."""

# mypy: disable-error-code="arg-type, assignment, misc, override"

from __future__ import annotations

from transformers import LlamaConfig, LlamaForCausalLM

from dlm_bridge.errors import CheckpointError
from dlm_bridge.models.diffusion_lm import DiffusionLM
from dlm_bridge.models.hub_config import HubConfig
from dlm_bridge.models.stable_diffcoder import SPEC


class StableDiffcoderConfig(HubConfig, LlamaConfig):
    """Llama's config with block size and mask token, by default those of the published `generate_block`."""

    family = SPEC

    block_size: int = 4
    mask_token_id: int | None = 5

    def __post_init__(self, **kwargs: object) -> None:
        if type(self.block_size) is not int or self.block_size < 1:
            raise CheckpointError("config.json", f"block_size {self.block_size!r} must be a positive integer")
        super().__post_init__(**kwargs)


class StableDiffcoderForCausalLM(DiffusionLM, LlamaForCausalLM):
    """Block-causal attention. `logits[i]` predicts token i. Load it with `StableDiffcoderForCausalLM.from_pretrained`;
    the Auto classes load a causal Llama."""

    config_class = StableDiffcoderConfig
    family = SPEC

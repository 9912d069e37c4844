"""WeDLM on transformers' Qwen3 body, with optional QK norms and Qwen2's optional biases: config and model."""

# mypy: disable-error-code="arg-type, assignment, misc, override"

from __future__ import annotations

from typing import Any

from huggingface_hub.dataclasses import strict
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from dlm_bridge.models.diffusion_lm import DiffusionLM
from dlm_bridge.models.hub_config import HubConfig
from dlm_bridge.models.wedlm import SPEC


@strict  # head_dim may be null here
class WeDLMConfig(HubConfig, Qwen3Config):
    """Config with the fields and defaults of the public configuration_wedlm.py. `head_dim` None: hidden / heads."""

    model_type = "wedlm"
    family = SPEC
    is_causal = True

    attention_bias: bool = True  # biases of queries, keys and values
    qk_norm: bool = False
    head_dim: int | None = None
    mask_token_id: int | None = 151665

    def __post_init__(self, **kwargs: Any) -> None:
        self.mask_token_id = SPEC.mask_token_id if self.mask_token_id is None else self.mask_token_id
        super().__post_init__(**kwargs)


class WeDLMForCausalLM(DiffusionLM, Qwen3ForCausalLM):
    """Causal attention in input order, regardless of `position_ids`: a sampler orders known tokens before masks.
    `logits[i]` of a mask predicts the token at its own position."""

    config_class = WeDLMConfig
    family = SPEC

    def __init__(self, config: WeDLMConfig) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            attention = layer.self_attn
            if not config.qk_norm:
                attention.q_norm = attention.k_norm = nn.Identity()
            if config.attention_bias:  # Qwen3 would add one to the output projection as well
                attention.o_proj = nn.Linear(attention.o_proj.in_features, config.hidden_size, bias=False)
        self.post_init()

"""WeDLM on transformers' Qwen3 body: config and model.

Without QK norms, or with Qwen2's biases, where the config says so.
"""

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
    """Field names and defaults are those of the public configuration_wedlm.py; `head_dim` None is hidden / heads."""

    model_type = "wedlm"
    family = SPEC
    is_causal = True

    attention_bias: bool = True  # of queries, keys and values
    qk_norm: bool = False
    head_dim: int | None = None
    mask_token_id: int | None = 151665

    def __post_init__(self, **kwargs: Any) -> None:
        self.mask_token_id = SPEC.mask_token_id if self.mask_token_id is None else self.mask_token_id
        super().__post_init__(**kwargs)


class WeDLMForCausalLM(DiffusionLM, Qwen3ForCausalLM):
    """Causal attention by the order of the input, whatever the `position_ids`: a decoder puts known tokens first and
    masks last. `logits[i]` of a mask predicts the token of its own position."""

    config_class = WeDLMConfig
    family = SPEC

    def __init__(self, config: WeDLMConfig) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            attention = layer.self_attn
            if not config.qk_norm:
                attention.q_norm = attention.k_norm = nn.Identity()
            if config.attention_bias:  # in Qwen3 it would be the output projection's, too
                attention.o_proj = nn.Linear(attention.o_proj.in_features, config.hidden_size, bias=False)
        self.post_init()

"""WeDLM on transformers' Qwen3 body, without its QK norms or with Qwen2's biases where the config says so."""

from __future__ import annotations

from typing import ClassVar

from torch import nn
from transformers import Qwen3ForCausalLM

from dlm_bridge.convert.mapping import Mapping
from dlm_bridge.models.diffusion import DiffusionLM
from dlm_bridge.models.spec import FamilySpec
from dlm_bridge.models.wedlm.configuration import WeDLMConfig
from dlm_bridge.models.wedlm.mapping import MAPPING
from dlm_bridge.models.wedlm.spec import SPEC


class WeDLMForCausalLM(DiffusionLM, Qwen3ForCausalLM):
    """A token sees those before it in the input, whatever their `position_ids`: a decoder puts what is known first and
    masks last. `logits[i]` of a mask predicts the token of its own position."""

    config_class = WeDLMConfig
    config: WeDLMConfig
    family: ClassVar[FamilySpec] = SPEC
    megatron_mapping: ClassVar[Mapping] = MAPPING

    def __init__(self, config: WeDLMConfig) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            attention = layer.self_attn
            if not config.qk_norm:
                attention.q_norm = attention.k_norm = nn.Identity()
            if config.attention_bias:  # in Qwen3 it would be the output projection's, too
                attention.o_proj = nn.Linear(attention.o_proj.in_features, config.hidden_size, bias=False)
        self.post_init()

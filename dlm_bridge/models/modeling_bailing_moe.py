"""Ling-2.0 on LLaDA2's body with causal attention: config and model."""

# mypy: disable-error-code="arg-type, assignment, misc, override"

from __future__ import annotations

from typing import Any

from huggingface_hub.dataclasses import strict
from torch import nn
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeForCausalLM

from dlm_bridge.models.bailing_moe import SPEC
from dlm_bridge.models.decoder_mapping import require_values
from dlm_bridge.models.diffusion_lm import register_hub_names
from dlm_bridge.models.hub_config import HubConfig
from dlm_bridge.models.llada2_moe import REQUIRED
from dlm_bridge.models.modeling_llada2_moe import (
    RENAMES,
    LLaDA2MoeConfig,
    LLaDA2MoeModel,
    LLaDA2MoePreTrainedModel,
)
from dlm_bridge.models.modeling_moe import expert_converters


@strict
class BailingMoeV2Config(LLaDA2MoeConfig):
    """Config with the fields of the public configuration_bailing_moe_v2.py and the defaults of Ling-mini-2.0."""

    model_type = "bailing_moe"
    family = SPEC
    is_causal = True

    routed_scaling_factor: float = 1.0
    use_cache: bool = True
    num_nextn_predict_layers: int = 0
    mask_token_id: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        require_values({**{key: getattr(self, key, value) for key, value in REQUIRED.items()}, **kwargs}, REQUIRED)
        HubConfig.__post_init__(self, **kwargs)


class BailingMoeV2ForCausalLM(LLaDA2MoePreTrainedModel, Glm4MoeForCausalLM):
    """Causal attention; `logits[i]` predicts token i + 1. Multi-token prediction layers are not loaded."""

    config_class = BailingMoeV2Config

    def __init__(self, config: BailingMoeV2Config) -> None:
        LLaDA2MoePreTrainedModel.__init__(self, config)
        self.model = LLaDA2MoeModel(config)
        for layer in self.model.layers:
            layer.self_attn.is_causal = True
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        last = config.num_hidden_layers
        self._keys_to_ignore_on_load_unexpected = [
            rf"model\.layers\.{last + depth}\." for depth in range(config.num_nextn_predict_layers or 0)
        ]
        self.post_init()


register_hub_names(BailingMoeV2ForCausalLM, RENAMES, expert_converters())

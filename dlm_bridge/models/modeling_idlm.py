"""I-DLM on transformers' Qwen3 body with causal attention: config and model."""

# mypy: disable-error-code="arg-type, assignment, misc, override"

from __future__ import annotations

from typing import Any, ClassVar

from transformers import Qwen3Config, Qwen3ForCausalLM

from dlm_bridge.models.diffusion_lm import DiffusionLM
from dlm_bridge.models.hub_config import HubConfig
from dlm_bridge.models.idlm import SPEC


class IDLMConfig(HubConfig, Qwen3Config):
    """Identified by `use_regular_causal`. `block_size`: number of masks after a token in training."""

    model_type = "sdar"
    family = SPEC
    required_values: ClassVar[dict[str, Any]] = {"use_regular_causal": True}
    is_causal = True

    use_cache: bool = False
    block_size: int = 1
    mask_token_id: int | None = 151669
    use_regular_causal: bool = True

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Add the key to the config of a model that was chosen by `family="idlm"`."""
        return super().from_dict({"use_regular_causal": True, **config_dict}, **kwargs)


class IDLMForCausalLM(DiffusionLM, Qwen3ForCausalLM):
    """Causal attention, also among masks. `logits[i]` predicts token i + 1."""

    config_class = IDLMConfig
    family = SPEC


IDLMForCausalLM.__name__ = "SDARForCausalLM"  # the Hub's name, which checkpoints store

"""I-DLM on transformers' Qwen3 body with causal attention: config and model."""

# mypy: disable-error-code="arg-type, assignment, misc, override"

from __future__ import annotations

from typing import Any, ClassVar

from transformers import Qwen3Config, Qwen3ForCausalLM

from dlm_bridge.models.diffusion_lm import DiffusionLM
from dlm_bridge.models.hub_config import HubConfig
from dlm_bridge.models.idlm import SPEC


class IDLMConfig(HubConfig, Qwen3Config):
    """Told from SDAR's by `use_regular_causal`. `block_size` is the number of masks that it was trained to follow a
    token with."""

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
        """A config that does not have the key yet, of a model chosen by `family="idlm"`, is saved with it."""
        return super().from_dict({"use_regular_causal": True, **config_dict}, **kwargs)


class IDLMForCausalLM(DiffusionLM, Qwen3ForCausalLM):
    """Causal attention, to masks as well. `logits[i]` predicts token i + 1."""

    config_class = IDLMConfig
    family = SPEC


IDLMForCausalLM.__name__ = "SDARForCausalLM"  # as on the Hub: a saved checkpoint names its class

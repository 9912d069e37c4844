"""DreamOn's config and model: Dream's, with a token that expands a mask."""

# mypy: disable-error-code="assignment, misc, override"

from __future__ import annotations

from typing import Any

from dlm_bridge.models.dreamon import EXPAND_TOKEN_ID, SPEC
from dlm_bridge.models.modeling_dream import DreamConfig, DreamModel


class DreamOnConfig(DreamConfig):
    """Identified by `expand_token_id`. `eos_token_id` is the token that deletes a mask."""

    family = SPEC

    expand_token_id: int = EXPAND_TOKEN_ID

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Add the key to the config of a Dream model that was chosen by `family="dreamon"`."""
        return super().from_dict({"expand_token_id": EXPAND_TOKEN_ID, **config_dict}, **kwargs)


class DreamOnModel(DreamModel):
    """`logits[i]` predicts token i + 1."""

    config_class = DreamOnConfig
    family = SPEC


DreamOnModel.__name__ = "DreamModel"  # the Hub's name, which checkpoints store

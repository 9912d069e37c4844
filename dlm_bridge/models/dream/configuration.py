"""Dream's configuration: Qwen2's keys and the token ids of masked diffusion."""

from __future__ import annotations

from typing import Any, ClassVar

from transformers import Qwen2Config

from dlm_bridge.models.dream.spec import SPEC
from dlm_bridge.models.hub_config import HubConfig
from dlm_bridge.models.spec import FamilySpec
from dlm_bridge.models.standard import require


class DreamConfig(HubConfig, Qwen2Config):
    """Field names and defaults are those of the public configuration_dream.py."""

    model_type = "Dream"
    family: ClassVar[FamilySpec] = SPEC
    is_causal: ClassVar[bool] = False  # makes transformers build bidirectional masks

    use_cache: bool = False
    mask_token_id: int | None = 151666
    pad_token_id: int | None = 151643

    def __post_init__(self, **kwargs: Any) -> None:
        require({"use_sliding_window": self.use_sliding_window}, {"use_sliding_window": False})
        super().__post_init__(**kwargs)

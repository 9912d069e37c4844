"""DreamReasoner's configuration: Qwen3's keys under Dream's model type, the block size and the mask token."""

from __future__ import annotations

from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers import Qwen3Config

from dlm_bridge.models.dream_reasoner.spec import SPEC
from dlm_bridge.models.hub_config import HubConfig
from dlm_bridge.models.spec import FamilySpec


@strict  # head_dim may be null here
class DreamReasonerConfig(HubConfig, Qwen3Config):
    """On the Hub its class is named DreamConfig, as Dream's is; `head_dim` None is hidden / heads."""

    model_type = "Dream"
    family: ClassVar[FamilySpec] = SPEC
    is_causal: ClassVar[bool] = False

    use_cache: bool = False
    head_dim: int | None = None  # type: ignore[assignment]
    block_size: int = 32
    mask_token_id: int | None = 151669

    def __post_init__(self, **kwargs: Any) -> None:
        self.head_dim = self.head_dim or self.hidden_size // self.num_attention_heads
        super().__post_init__(**kwargs)

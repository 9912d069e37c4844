"""DiffLM's configuration: Qwen3's keys, no model type, a mask token for each tokenizer."""

from __future__ import annotations

from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers import Qwen3Config

from dlm_bridge.models.difflm.spec import SPEC
from dlm_bridge.models.hub_config import HubConfig
from dlm_bridge.models.spec import FamilySpec
from dlm_bridge.models.standard import require


@strict  # head_dim may be null here
class DLMConfig(HubConfig, Qwen3Config):
    """Field names and defaults are those of the public configuration_dlm.py; `head_dim` None is hidden / heads."""

    model_type = ""
    family: ClassVar[FamilySpec] = SPEC
    is_causal: ClassVar[bool] = False

    use_cache: bool = False
    head_dim: int | None = None  # type: ignore[assignment]
    attn_mask_type: str = "bidirectional"
    mask_token_id: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        require(vars(self), {"attn_mask_type": "bidirectional", "use_sliding_window": False})
        self.head_dim = self.head_dim or self.hidden_size // self.num_attention_heads
        super().__post_init__(**kwargs)

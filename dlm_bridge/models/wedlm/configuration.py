"""WeDLM's configuration: `qk_norm` and `attention_bias` say whether the body is Qwen3's or Qwen2's."""

from __future__ import annotations

from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers import Qwen3Config

from dlm_bridge.models.hub_config import HubConfig
from dlm_bridge.models.spec import FamilySpec
from dlm_bridge.models.standard import require
from dlm_bridge.models.wedlm.spec import SPEC


@strict  # head_dim may be null here
class WeDLMConfig(HubConfig, Qwen3Config):
    """Field names and defaults are those of the public configuration_wedlm.py; `head_dim` None is hidden / heads."""

    model_type = "wedlm"
    family: ClassVar[FamilySpec] = SPEC

    attention_bias: bool = True  # of queries, keys and values
    qk_norm: bool = False
    head_dim: int | None = None  # type: ignore[assignment]
    mask_token_id: int | None = 151665

    def __post_init__(self, **kwargs: Any) -> None:
        require({"use_sliding_window": self.use_sliding_window}, {"use_sliding_window": False})
        self.mask_token_id = SPEC.mask_token_id if self.mask_token_id is None else self.mask_token_id
        self.head_dim = self.head_dim or self.hidden_size // self.num_attention_heads
        super().__post_init__(**kwargs)

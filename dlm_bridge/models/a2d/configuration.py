"""The A2D configurations: the body's own keys under another model type, and the mask token where it is known."""

from __future__ import annotations

from typing import Any, ClassVar

from transformers import LlamaConfig, Qwen2Config, Qwen3Config

from dlm_bridge.models.a2d.spec import LLAMA, QWEN2, QWEN3
from dlm_bridge.models.hub_config import HubConfig
from dlm_bridge.models.spec import FamilySpec
from dlm_bridge.models.standard import require

NO_WINDOW = {"use_sliding_window": False}  # the original code gives window layers the full mask all the same


class A2DQwen3Config(HubConfig, Qwen3Config):
    model_type = "a2d-qwen3"
    family: ClassVar[FamilySpec] = QWEN3
    is_causal: ClassVar[bool] = False

    mask_token_id: int | None = QWEN3.mask_token_id

    def __post_init__(self, **kwargs: Any) -> None:
        require({"use_sliding_window": self.use_sliding_window}, NO_WINDOW)
        super().__post_init__(**kwargs)


class A2DQwen2Config(HubConfig, Qwen2Config):
    model_type = "a2d-qwen2"
    family: ClassVar[FamilySpec] = QWEN2
    is_causal: ClassVar[bool] = False

    mask_token_id: int | None = QWEN2.mask_token_id

    def __post_init__(self, **kwargs: Any) -> None:
        require({"use_sliding_window": self.use_sliding_window}, NO_WINDOW)
        super().__post_init__(**kwargs)


class A2DLlamaConfig(HubConfig, LlamaConfig):
    model_type = "a2d-llama"
    family: ClassVar[FamilySpec] = LLAMA
    is_causal: ClassVar[bool] = False

    mask_token_id: int | None = LLAMA.mask_token_id

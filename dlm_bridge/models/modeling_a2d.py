"""dLLM's A2D models on transformers' Qwen3, Qwen2 and Llama bodies, bidirectional: configs and models."""

# mypy: disable-error-code="arg-type, assignment, misc, override"

from __future__ import annotations

from typing import Any, ClassVar

from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from dlm_bridge.models.a2d import LLAMA, QWEN2, QWEN3
from dlm_bridge.models.decoder_mapping import require_values
from dlm_bridge.models.diffusion_lm import DiffusionLM
from dlm_bridge.models.family_spec import FamilySpec
from dlm_bridge.models.hub_config import HubConfig

NO_WINDOW = {"use_sliding_window": False}  # the original code gives window layers the full mask all the same


class A2DQwen3Config(HubConfig, Qwen3Config):
    model_type = "a2d-qwen3"
    family: ClassVar[FamilySpec] = QWEN3
    is_causal: ClassVar[bool] = False

    mask_token_id: int | None = QWEN3.mask_token_id

    def __post_init__(self, **kwargs: Any) -> None:
        require_values({"use_sliding_window": self.use_sliding_window}, NO_WINDOW)
        super().__post_init__(**kwargs)


class A2DQwen2Config(HubConfig, Qwen2Config):
    model_type = "a2d-qwen2"
    family: ClassVar[FamilySpec] = QWEN2
    is_causal: ClassVar[bool] = False

    mask_token_id: int | None = QWEN2.mask_token_id

    def __post_init__(self, **kwargs: Any) -> None:
        require_values({"use_sliding_window": self.use_sliding_window}, NO_WINDOW)
        super().__post_init__(**kwargs)


class A2DLlamaConfig(HubConfig, LlamaConfig):
    model_type = "a2d-llama"
    family: ClassVar[FamilySpec] = LLAMA
    is_causal: ClassVar[bool] = False

    mask_token_id: int | None = LLAMA.mask_token_id


class A2DQwen3LMHeadModel(DiffusionLM, Qwen3ForCausalLM):
    """`logits[i]` predicts token i. The bd3lm checkpoints expect a block-causal mask of blocks of 32 instead: pass it
    as a 4-D `attention_mask`; `generate(algorithm="bd3lm")` does."""

    config_class = A2DQwen3Config
    config: A2DQwen3Config
    family: ClassVar[FamilySpec] = QWEN3


class A2DQwen2LMHeadModel(DiffusionLM, Qwen2ForCausalLM):
    """As A2DQwen3LMHeadModel, on Qwen2's body."""

    config_class = A2DQwen2Config
    config: A2DQwen2Config
    family: ClassVar[FamilySpec] = QWEN2


class A2DLlamaLMHeadModel(DiffusionLM, LlamaForCausalLM):
    """As A2DQwen3LMHeadModel, on Llama's body."""

    config_class = A2DLlamaConfig
    config: A2DLlamaConfig
    family: ClassVar[FamilySpec] = LLAMA

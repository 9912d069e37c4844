"""dLLM's A2D models on transformers' Qwen3, Qwen2 and Llama bodies, bidirectional: configs and models."""

# mypy: disable-error-code="arg-type, assignment, misc, override"

from __future__ import annotations

from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from dlm_bridge.models.a2d import LLAMA, QWEN2, QWEN3
from dlm_bridge.models.diffusion_lm import DiffusionLM
from dlm_bridge.models.hub_config import HubConfig


class A2DQwen3Config(HubConfig, Qwen3Config):
    model_type = "a2d-qwen3"
    family = QWEN3

    mask_token_id: int | None = QWEN3.mask_token_id


class A2DQwen2Config(HubConfig, Qwen2Config):
    model_type = "a2d-qwen2"
    family = QWEN2

    mask_token_id: int | None = QWEN2.mask_token_id


class A2DLlamaConfig(HubConfig, LlamaConfig):
    model_type = "a2d-llama"
    family = LLAMA

    mask_token_id: int | None = LLAMA.mask_token_id


class A2DQwen3LMHeadModel(DiffusionLM, Qwen3ForCausalLM):
    """`logits[i]` predicts token i. The bd3lm checkpoints need a block-causal mask with blocks of 32 as a 4-D
    `attention_mask`, which `generate(algorithm="bd3lm")` passes."""

    config_class = A2DQwen3Config
    family = QWEN3


class A2DQwen2LMHeadModel(DiffusionLM, Qwen2ForCausalLM):
    """Qwen2 counterpart of A2DQwen3LMHeadModel."""

    config_class = A2DQwen2Config
    family = QWEN2


class A2DLlamaLMHeadModel(DiffusionLM, LlamaForCausalLM):
    """Llama counterpart of A2DQwen3LMHeadModel."""

    config_class = A2DLlamaConfig
    family = LLAMA

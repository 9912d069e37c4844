"""The A2D models on transformers' Qwen3, Qwen2 and Llama bodies, with bidirectional attention."""

from __future__ import annotations

from typing import ClassVar

from transformers import LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM

from dlm_bridge.convert.mapping import Mapping
from dlm_bridge.models.a2d import mapping, spec
from dlm_bridge.models.a2d.configuration import A2DLlamaConfig, A2DQwen2Config, A2DQwen3Config
from dlm_bridge.models.diffusion import DiffusionLM
from dlm_bridge.models.spec import FamilySpec


class A2DQwen3LMHeadModel(DiffusionLM, Qwen3ForCausalLM):
    """`logits[i]` predicts token i. The bd3lm checkpoints expect a block-causal mask of blocks of 32 instead: pass it
    as a 4-D `attention_mask`; `generate(algorithm="bd3lm")` does."""

    config_class = A2DQwen3Config
    config: A2DQwen3Config
    family: ClassVar[FamilySpec] = spec.QWEN3
    megatron_mapping: ClassVar[Mapping] = mapping.QWEN3


class A2DQwen2LMHeadModel(DiffusionLM, Qwen2ForCausalLM):
    """As A2DQwen3LMHeadModel, on Qwen2's body."""

    config_class = A2DQwen2Config
    config: A2DQwen2Config
    family: ClassVar[FamilySpec] = spec.QWEN2
    megatron_mapping: ClassVar[Mapping] = mapping.QWEN2


class A2DLlamaLMHeadModel(DiffusionLM, LlamaForCausalLM):
    """As A2DQwen3LMHeadModel, on Llama's body."""

    config_class = A2DLlamaConfig
    config: A2DLlamaConfig
    family: ClassVar[FamilySpec] = spec.LLAMA
    megatron_mapping: ClassVar[Mapping] = mapping.LLAMA

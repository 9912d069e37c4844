"""Fast-dLLM v2 on transformers' Qwen2 body, with block-causal attention."""

from __future__ import annotations

from typing import ClassVar

from transformers import Qwen2ForCausalLM

from dlm_bridge.convert.mapping import Mapping
from dlm_bridge.models.diffusion import DiffusionLM
from dlm_bridge.models.fast_dllm_v2.configuration import Fast_dLLM_QwenConfig
from dlm_bridge.models.fast_dllm_v2.mapping import MAPPING
from dlm_bridge.models.fast_dllm_v2.spec import SPEC
from dlm_bridge.models.spec import FamilySpec


class Fast_dLLM_QwenForCausalLM(DiffusionLM, Qwen2ForCausalLM):  # noqa: N801 (the Hub's name)
    """Logits are the body's own, as in the original: `logits[i]` is about token i + 1 (`family.shift`)."""

    config_class = Fast_dLLM_QwenConfig
    config: Fast_dLLM_QwenConfig
    family: ClassVar[FamilySpec] = SPEC
    megatron_mapping: ClassVar[Mapping] = MAPPING

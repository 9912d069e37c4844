"""Dream on transformers' Qwen2 body, without a causal mask. The output layer is there under `AutoModel` too."""

from __future__ import annotations

from typing import ClassVar

from transformers.models.qwen2.modeling_qwen2 import Qwen2ForCausalLM

from dlm_bridge.convert.mapping import Mapping
from dlm_bridge.models.diffusion import DiffusionLM
from dlm_bridge.models.dream.configuration import DreamConfig
from dlm_bridge.models.dream.mapping import MAPPING
from dlm_bridge.models.dream.spec import SPEC
from dlm_bridge.models.spec import FamilySpec


class DreamModel(DiffusionLM, Qwen2ForCausalLM):
    """Logits are the body's own, as in the original: `logits[i]` is about token i + 1 (`family.shift`)."""

    config_class = DreamConfig
    config: DreamConfig
    family: ClassVar[FamilySpec] = SPEC
    megatron_mapping: ClassVar[Mapping] = MAPPING

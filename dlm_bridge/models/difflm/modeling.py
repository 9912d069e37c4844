"""DiffLM on transformers' Qwen3 body, with bidirectional attention."""

from __future__ import annotations

from typing import ClassVar

from transformers import Qwen3ForCausalLM

from dlm_bridge.convert.mapping import Mapping
from dlm_bridge.models.difflm.configuration import DLMConfig
from dlm_bridge.models.difflm.mapping import MAPPING
from dlm_bridge.models.difflm.spec import SPEC
from dlm_bridge.models.diffusion import DiffusionLM
from dlm_bridge.models.spec import FamilySpec


class DiffLM(DiffusionLM, Qwen3ForCausalLM):
    """Load it with `DiffLM.from_pretrained(path)`: without a model type no Auto class can. `logits[i]` predicts
    token i."""

    config_class = DLMConfig
    config: DLMConfig
    family: ClassVar[FamilySpec] = SPEC
    megatron_mapping: ClassVar[Mapping] = MAPPING

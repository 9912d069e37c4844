"""DreamReasoner on transformers' Qwen3 body, with block-causal attention."""

from __future__ import annotations

from typing import ClassVar

from transformers import Qwen3ForCausalLM

from dlm_bridge.convert.mapping import Mapping
from dlm_bridge.models.diffusion import DiffusionLM
from dlm_bridge.models.dream_reasoner.configuration import DreamReasonerConfig
from dlm_bridge.models.dream_reasoner.mapping import MAPPING
from dlm_bridge.models.dream_reasoner.spec import SPEC
from dlm_bridge.models.spec import FamilySpec


class DreamForCausalLM(DiffusionLM, Qwen3ForCausalLM):
    """A position sees its own block and those before it. `logits[i]` predicts token i (Dream's token i + 1)."""

    config_class = DreamReasonerConfig
    config: DreamReasonerConfig
    family: ClassVar[FamilySpec] = SPEC
    megatron_mapping: ClassVar[Mapping] = MAPPING

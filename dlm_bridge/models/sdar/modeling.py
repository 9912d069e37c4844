"""SDAR on transformers' Qwen3 body, with block-causal attention."""

from __future__ import annotations

from typing import ClassVar

from transformers import Qwen3ForCausalLM

from dlm_bridge.convert.mapping import Mapping
from dlm_bridge.models.diffusion import DiffusionLM
from dlm_bridge.models.sdar.configuration import SDARConfig
from dlm_bridge.models.sdar.mapping import MAPPING
from dlm_bridge.models.sdar.spec import SPEC
from dlm_bridge.models.spec import FamilySpec


class SDARForCausalLM(DiffusionLM, Qwen3ForCausalLM):
    """A position sees its own block and those before it. `logits[i]` predicts token i."""

    config_class = SDARConfig
    config: SDARConfig
    family: ClassVar[FamilySpec] = SPEC
    megatron_mapping: ClassVar[Mapping] = MAPPING

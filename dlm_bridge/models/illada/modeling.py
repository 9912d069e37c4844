"""iLLaDA on transformers' Llama body, with bidirectional attention."""

from __future__ import annotations

from typing import ClassVar

from transformers import LlamaForCausalLM

from dlm_bridge.convert.mapping import Mapping
from dlm_bridge.models.diffusion import DiffusionLM
from dlm_bridge.models.illada.configuration import ILLaDAConfig
from dlm_bridge.models.illada.mapping import MAPPING
from dlm_bridge.models.illada.spec import SPEC
from dlm_bridge.models.spec import FamilySpec


class ILLaDAForCausalLM(DiffusionLM, LlamaForCausalLM):
    """`logits[i]` predicts token i; the original code's own loss over `labels` shifts them, which is wrong here."""

    config_class = ILLaDAConfig
    config: ILLaDAConfig
    family: ClassVar[FamilySpec] = SPEC
    megatron_mapping: ClassVar[Mapping] = MAPPING

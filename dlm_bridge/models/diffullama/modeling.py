"""DiffuLLaMA on transformers' Llama body, with bidirectional attention."""

from __future__ import annotations

from typing import ClassVar

from transformers import LlamaForCausalLM as Llama

from dlm_bridge.convert.mapping import Mapping
from dlm_bridge.models.diffullama.configuration import DiffuLLaMAConfig
from dlm_bridge.models.diffullama.mapping import MAPPING
from dlm_bridge.models.diffullama.spec import SPEC
from dlm_bridge.models.diffusion import DiffusionLM
from dlm_bridge.models.spec import FamilySpec


class LlamaForCausalLM(DiffusionLM, Llama):
    """Named as on the Hub, since a saved checkpoint names its class. `logits[i]` predicts token i + 1."""

    config_class = DiffuLLaMAConfig
    config: DiffuLLaMAConfig
    family: ClassVar[FamilySpec] = SPEC
    megatron_mapping: ClassVar[Mapping] = MAPPING

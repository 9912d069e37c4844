"""LLaDA-MoE on transformers' Qwen3-MoE body: QK norm per head, top-k weights as they are, no causal mask."""

from __future__ import annotations

from typing import ClassVar

from transformers import Qwen3MoeForCausalLM

from dlm_bridge.convert.mapping import Mapping
from dlm_bridge.models.diffusion import register_renames
from dlm_bridge.models.experts import DiffusionMoE, expert_stacks
from dlm_bridge.models.llada_moe.configuration import LLaDAMoEConfig
from dlm_bridge.models.llada_moe.mapping import MAPPING
from dlm_bridge.models.llada_moe.spec import SPEC
from dlm_bridge.models.spec import FamilySpec


class LLaDAMoEModelLM(DiffusionMoE, Qwen3MoeForCausalLM):
    """What `AutoModel` and `AutoModelForCausalLM` both give, as in the Hub's auto_map."""

    config_class = LLaDAMoEConfig
    config: LLaDAMoEConfig
    family: ClassVar[FamilySpec] = SPEC
    megatron_mapping: ClassVar[Mapping] = MAPPING


register_renames(LLaDAMoEModelLM, (), expert_stacks())

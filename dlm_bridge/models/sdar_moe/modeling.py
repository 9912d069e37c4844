"""SDAR-MoE on transformers' Qwen3-MoE body, with block-causal attention."""

from __future__ import annotations

from typing import ClassVar

from transformers import Qwen3MoeForCausalLM

from dlm_bridge.convert.mapping import Mapping
from dlm_bridge.models.diffusion import register_renames
from dlm_bridge.models.experts import DiffusionMoE, expert_stacks
from dlm_bridge.models.sdar_moe.configuration import SDARMoeConfig
from dlm_bridge.models.sdar_moe.mapping import MAPPING
from dlm_bridge.models.sdar_moe.spec import SPEC
from dlm_bridge.models.spec import FamilySpec


class SDARMoeForCausalLM(DiffusionMoE, Qwen3MoeForCausalLM):
    """A position sees its own block and those before it. `logits[i]` predicts token i."""

    config_class = SDARMoeConfig
    config: SDARMoeConfig
    family: ClassVar[FamilySpec] = SPEC
    megatron_mapping: ClassVar[Mapping] = MAPPING


register_renames(SDARMoeForCausalLM, (), expert_stacks())

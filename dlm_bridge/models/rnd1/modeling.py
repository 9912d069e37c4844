"""RND1 on transformers' Qwen3-MoE body, without a causal mask."""

from __future__ import annotations

from typing import ClassVar

from transformers import Qwen3MoeForCausalLM

from dlm_bridge.convert.mapping import Mapping
from dlm_bridge.models.diffusion import register_renames
from dlm_bridge.models.experts import DiffusionMoE, expert_stacks
from dlm_bridge.models.rnd1.configuration import RND1Config
from dlm_bridge.models.rnd1.mapping import MAPPING
from dlm_bridge.models.rnd1.spec import SPEC
from dlm_bridge.models.spec import FamilySpec


class RND1LM(DiffusionMoE, Qwen3MoeForCausalLM):
    """Logits are the body's own, as in the original: `logits[i]` is about token i + 1 (`family.shift`)."""

    config_class = RND1Config
    config: RND1Config
    family: ClassVar[FamilySpec] = SPEC
    megatron_mapping: ClassVar[Mapping] = MAPPING


register_renames(RND1LM, (), expert_stacks())

"""RND1 on transformers' Qwen3-MoE body with bidirectional attention: config and model."""

# mypy: disable-error-code="arg-type, assignment, misc, override"

from __future__ import annotations

from typing import ClassVar

from huggingface_hub.dataclasses import strict
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from dlm_bridge.models.diffusion_lm import register_hub_names
from dlm_bridge.models.hub_config import HubConfig
from dlm_bridge.models.modeling_moe import DiffusionMoE, expert_converters
from dlm_bridge.models.rnd1 import SPEC


@strict  # again, because a field may be false that is a number in Qwen3-MoE's
class RND1Config(HubConfig, Qwen3MoeConfig):
    """Config with the fields and defaults of the public configuration_rnd.py."""

    model_type = "rnd1"
    family = SPEC
    attribute_map: ClassVar[dict[str, str]] = {"num_local_experts": "num_experts"}
    default_theta = 1000000.0

    num_hidden_layers: int = 48
    head_dim: int = 128
    norm_topk_prob: bool = True
    max_position_embeddings: int = 40960
    use_cache: bool = False
    sliding_window: int | bool | None = None
    num_diffusion_steps: int = 256
    mask_token_id: int | None = 151669
    eos_token_id: int | list[int] | None = 151645
    pad_token_id: int | None = 151643


class RND1LM(DiffusionMoE, Qwen3MoeForCausalLM):
    """`logits[i]` predicts token i + 1 (`family.shift`), as in the original."""

    config_class = RND1Config
    family = SPEC


register_hub_names(RND1LM, (), expert_converters())

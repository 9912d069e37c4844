"""LLaDA-MoE on transformers' Qwen3-MoE body with bidirectional attention: config and model."""

# mypy: disable-error-code="arg-type, assignment, misc, override"

from __future__ import annotations

from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from dlm_bridge.models.diffusion_lm import register_hub_names
from dlm_bridge.models.hub_config import HubConfig
from dlm_bridge.models.llada_moe import SPEC, check_config
from dlm_bridge.models.modeling_moe import DiffusionMoE, expert_converters


@strict  # again, because fields are nullable that Qwen3-MoE's are not
class LLaDAMoEConfig(HubConfig, Qwen3MoeConfig):
    """Config with the fields of the public configuration_lladamoe.py and the defaults of the 7B-A1B checkpoints."""

    model_type = "llada"
    family = SPEC
    attribute_map: ClassVar[dict[str, str]] = {
        "num_local_experts": "num_experts",
        "intermediate_size": "dense_intermediate_size",
        "moe_intermediate_size": "expert_intermediate_size",
    }
    default_theta = 50000.0

    vocab_size: int = 157184
    num_hidden_layers: int = 16
    num_attention_heads: int = 16
    num_key_value_heads: int | None = None
    num_experts: int = 64
    expert_intermediate_size: int = 1024
    dense_intermediate_size: int = 8192
    max_position_embeddings: int = 8192
    rms_norm_eps: float = 1e-5
    norm_topk_prob: bool | None = None
    qk_layernorm: bool = True
    use_cache: bool = False
    mask_token_id: int | None = 156895
    eos_token_id: int | list[int] | None = 156892
    pad_token_id: int | None = 156892

    def __post_init__(self, **kwargs: Any) -> None:
        check_config({**kwargs, "qk_layernorm": self.qk_layernorm, "norm_topk_prob": self.norm_topk_prob})
        self.num_key_value_heads = self.num_key_value_heads or self.num_attention_heads
        super().__post_init__(**kwargs)


class LLaDAMoEModelLM(DiffusionMoE, Qwen3MoeForCausalLM):
    """LLaDA-MoE with output layer, for `AutoModel` and `AutoModelForCausalLM` as in the Hub's auto_map."""

    config_class = LLaDAMoEConfig
    family = SPEC


register_hub_names(LLaDAMoEModelLM, (), expert_converters())

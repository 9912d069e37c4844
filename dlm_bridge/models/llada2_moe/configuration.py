"""LLaDA2's configuration: the Hub's key names, readable under Glm4-MoE's as well."""

from __future__ import annotations

from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers import Glm4MoeConfig

from dlm_bridge.models.hub_config import HubConfig
from dlm_bridge.models.llada2_moe import mapping
from dlm_bridge.models.llada2_moe.spec import SPEC
from dlm_bridge.models.spec import FamilySpec


@strict  # anew, for the fields that are null or numbers here and not in Glm4-MoE's
class LLaDA2MoeConfig(HubConfig, Glm4MoeConfig):
    """Field names are those of the public configuration_llada2_moe.py, defaults those of LLaDA2.0-mini.

    The checkpoints name neither the mask token nor the block size; `block_size` is the 32 that all were trained with.
    """

    model_type = "llada2_moe"
    family: ClassVar[FamilySpec] = SPEC
    is_causal: ClassVar[bool] = False
    attribute_map: ClassVar[dict[str, str]] = {
        "num_local_experts": "num_experts",
        "n_routed_experts": "num_experts",
        "n_shared_experts": "num_shared_experts",
        "attention_bias": "use_qkv_bias",
    }
    # QKV is one matrix, whose rows cannot be cut evenly: ranks compute shares of it and gather them.
    base_model_tp_plan: ClassVar[dict[str, Any]] = {
        **{name: style for name, style in Glm4MoeConfig.base_model_tp_plan.items() if "self_attn" not in name},
        "layers.*.self_attn.query_key_value": "colwise_gather_output",
        "layers.*.self_attn.o_proj": "rowwise_split_input",
    }
    default_theta = 600000.0

    vocab_size: int = 157184
    hidden_size: int = 2048
    intermediate_size: int = 5120
    num_hidden_layers: int = 20
    num_attention_heads: int = 16
    num_key_value_heads: int = 4
    head_dim: int = 128
    max_position_embeddings: int = 32768
    rms_norm_eps: float = 1e-6
    moe_intermediate_size: int = 512
    num_experts: int = 256
    num_shared_experts: int = 1
    routed_scaling_factor: float = 2.5
    n_group: int = 8
    topk_group: int = 4
    use_qk_norm: bool = True
    use_qkv_bias: bool = False
    use_cache: bool = False
    num_mtp_layers: int = 0
    block_size: int = 32
    mask_token_id: int | None = 156895
    eos_token_id: int | list[int] | None = 156892
    pad_token_id: int | None = 156892

    def __post_init__(self, **kwargs: Any) -> None:
        mapping.check({**{key: getattr(self, key) for key in CHECKED}, **kwargs})
        super().__post_init__(**kwargs)


# The fields among what is checked; the other keys come in as further arguments.
CHECKED = (
    "hidden_act",
    "max_position_embeddings",
    "norm_topk_prob",
    "num_shared_experts",
    "use_qk_norm",
    "use_qkv_bias",
)

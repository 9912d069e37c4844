"""LLaDA2 on transformers' Glm4-MoE body: config and model.

QKV in one matrix, block-causal attention, the router in its own dtype.
"""

# mypy: disable-error-code="arg-type, assignment, misc, override"

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from huggingface_hub.dataclasses import strict
from torch import nn
from transformers import Glm4MoeConfig
from transformers.models.glm4_moe.modeling_glm4_moe import (
    ALL_ATTENTION_FUNCTIONS,
    Glm4MoeAttention,
    Glm4MoeDecoderLayer,
    Glm4MoeForCausalLM,
    Glm4MoeModel,
    Glm4MoePreTrainedModel,
    Glm4MoeRMSNorm,
    Glm4MoeRotaryEmbedding,
    Glm4MoeTopkRouter,
    OutputRecorder,
    apply_rotary_pos_emb,
    eager_attention_forward,
)

from dlm_bridge.models.diffusion_lm import register_hub_names
from dlm_bridge.models.hub_config import HubConfig
from dlm_bridge.models.llada2_moe import SPEC, check_config
from dlm_bridge.models.modeling_moe import DiffusionMoE, ExpertsMixin, expert_converters

# Fields that `check_config` reads; further keys that it reads are passed as keyword arguments.
CHECKED = (
    "hidden_act",
    "max_position_embeddings",
    "norm_topk_prob",
    "num_shared_experts",
    "use_qk_norm",
    "use_qkv_bias",
)


@strict  # again, for the fields that are null or numbers here and not in Glm4-MoE's
class LLaDA2MoeConfig(HubConfig, Glm4MoeConfig):
    """Field names are those of the public configuration_llada2_moe.py, defaults those of LLaDA2.0-mini.

    The checkpoints name neither the mask token nor the block size; `block_size` is the 32 that all were trained with.
    """

    model_type = "llada2_moe"
    family = SPEC
    attribute_map: ClassVar[dict[str, str]] = {
        "num_local_experts": "num_experts",
        "n_routed_experts": "num_experts",
        "n_shared_experts": "num_shared_experts",
        "attention_bias": "use_qkv_bias",
    }
    # QKV is one matrix whose rows cannot be split evenly: ranks compute a part each and gather.
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
        check_config({**{key: getattr(self, key) for key in CHECKED}, **kwargs})
        super().__post_init__(**kwargs)


# Hub name (a regular expression) to the body's.
RENAMES = (
    (r"^model\.word_embeddings\.", "model.embed_tokens."),
    (r"\.attention\.", ".self_attn."),
    (r"\.query_layernorm\.", ".q_norm."),
    (r"\.key_layernorm\.", ".k_norm."),
    (r"\.dense\.", ".o_proj."),
    (r"\.gate\.expert_bias", ".gate.e_score_correction_bias"),
)


class LLaDA2MoeAttention(Glm4MoeAttention):
    """Queries, keys and values from one projection [all q; all k; all v]."""

    def __init__(self, config: LLaDA2MoeConfig, layer_idx: int) -> None:
        nn.Module.__init__(self)
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = self.head_dim**-0.5
        self.attention_dropout = config.attention_dropout
        self.is_causal = False
        self.heads = (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads)
        self.query_key_value = nn.Linear(config.hidden_size, sum(self.heads) * self.head_dim, bias=False)
        self.q_norm = Glm4MoeRMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.k_norm = Glm4MoeRMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.o_proj = nn.Linear(config.num_attention_heads * self.head_dim, config.hidden_size, bias=False)

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        shape_BS = hidden_states.shape[:-1]
        qkv_BSHD = self.query_key_value(hidden_states).view(*shape_BS, -1, self.head_dim)
        q_BSHD, k_BSHD, v_BSHD = qkv_BSHD.split(self.heads, dim=-2)
        q_BHSD, k_BHSD = self.q_norm(q_BSHD).transpose(1, 2), self.k_norm(k_BSHD).transpose(1, 2)
        q_BHSD, k_BHSD = apply_rotary_pos_emb(q_BHSD, k_BHSD, *position_embeddings)
        attend: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        output, weights = attend(
            self,
            q_BHSD,
            k_BHSD,
            v_BSHD.transpose(1, 2),
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            **kwargs,
        )
        return self.o_proj(output.reshape(*shape_BS, -1).contiguous()), weights


class LLaDA2MoeDecoderLayer(Glm4MoeDecoderLayer):
    def __init__(self, config: LLaDA2MoeConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.self_attn = LLaDA2MoeAttention(config, layer_idx)


class LLaDA2MoePreTrainedModel(ExpertsMixin, Glm4MoePreTrainedModel):
    config_class = LLaDA2MoeConfig
    _no_split_modules: ClassVar[list[str]] = ["LLaDA2MoeDecoderLayer"]
    _keys_to_ignore_on_load_unexpected: ClassVar[list[str]] = []  # Glm4-MoE drops its MTP layers 46 and 92
    _can_record_outputs: ClassVar[dict[str, Any]] = {
        "hidden_states": LLaDA2MoeDecoderLayer,
        "attentions": LLaDA2MoeAttention,
        "router_logits": OutputRecorder(Glm4MoeTopkRouter, index=0),
    }

    def _get_dtype_plan(self, dtype: torch.dtype) -> dict[str, Any]:
        """As in transformers; but a router keeps the dtype that the checkpoint stores it in (fp32 by `router_dtype`)
        where the model is loaded in half precision: it computes in fp32 all the same."""
        if dtype not in (torch.float16, torch.bfloat16):
            return super()._get_dtype_plan(dtype)
        return {r"mlp.gate.weight": None, "mlp.gate.e_score_correction_bias": None}


class LLaDA2MoeModel(LLaDA2MoePreTrainedModel, Glm4MoeModel):
    """The body. Its forward is Glm4-MoE's."""

    def __init__(self, config: LLaDA2MoeConfig) -> None:
        LLaDA2MoePreTrainedModel.__init__(self, config)  # Glm4-MoE's own would build its layers first
        self.padding_idx = None
        self.vocab_size = config.vocab_size
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([LLaDA2MoeDecoderLayer(config, i) for i in range(config.num_hidden_layers)])
        self.norm = Glm4MoeRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = Glm4MoeRotaryEmbedding(config=config)
        self.gradient_checkpointing = False
        self.post_init()


class LLaDA2MoeModelLM(DiffusionMoE, LLaDA2MoePreTrainedModel, Glm4MoeForCausalLM):
    """Block-causal attention with blocks of 32. `logits[i]` predicts token i."""

    family = SPEC

    def __init__(self, config: LLaDA2MoeConfig) -> None:
        LLaDA2MoePreTrainedModel.__init__(self, config)
        self.model = LLaDA2MoeModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()


register_hub_names(LLaDA2MoeModelLM, RENAMES, expert_converters())

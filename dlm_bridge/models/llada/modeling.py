"""LLaDA on transformers' Llama body: the same layers, bidirectional attention, rotary embedding in fp32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import nn
from transformers.models.llama.modeling_llama import (
    ALL_ATTENTION_FUNCTIONS,
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaForCausalLM,
    LlamaModel,
    LlamaPreTrainedModel,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
    eager_attention_forward,
)

from dlm_bridge.convert.mapping import Mapping
from dlm_bridge.models.diffusion import DiffusionLM, register_renames
from dlm_bridge.models.llada.configuration import LLaDAConfig
from dlm_bridge.models.llada.mapping import MAPPING
from dlm_bridge.models.llada.spec import SPEC
from dlm_bridge.models.spec import FamilySpec

# Hub name (a regular expression) to the Llama body's. Order matters: the ff_out outside the blocks is the head.
RENAMES = (
    (r"^model\.transformer\.wte\.", "model.embed_tokens."),
    (r"^model\.transformer\.ln_f\.", "model.norm."),
    (r"^model\.transformer\.ff_out\.", "lm_head."),
    (r"^model\.transformer\.blocks\.", "model.layers."),
    (r"\.attn_norm\.", ".input_layernorm."),
    (r"\.ff_norm\.", ".post_attention_layernorm."),
    (r"\.q_proj\.", ".self_attn.q_proj."),
    (r"\.k_proj\.", ".self_attn.k_proj."),
    (r"\.v_proj\.", ".self_attn.v_proj."),
    (r"\.attn_out\.", ".self_attn.o_proj."),
    (r"\.ff_proj\.", ".mlp.gate_proj."),
    (r"\.up_proj\.", ".mlp.up_proj."),
    (r"\.ff_out\.", ".mlp.down_proj."),
)


class LLaDAAttention(LlamaAttention):
    """Llama's attention without the causal mask; with `rope_full_precision` queries and keys turn in fp32, as in the
    original code, which matters in bf16."""

    def __init__(self, config: LLaDAConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.is_causal = False

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if position_embeddings is None:
            raise TypeError("LLaDAAttention needs position_embeddings")
        shape_BS = hidden_states.shape[:-1]
        heads = (*shape_BS, -1, self.head_dim)
        q_BHSD = self.q_proj(hidden_states).view(heads).transpose(1, 2)
        k_BHSD = self.k_proj(hidden_states).view(heads).transpose(1, 2)
        v_BHSD = self.v_proj(hidden_states).view(heads).transpose(1, 2)
        # cos and sin are fp32 where the config asks for full precision: the products are then, too.
        q_BHSD, k_BHSD = apply_rotary_pos_emb(q_BHSD, k_BHSD, *position_embeddings)
        q_BHSD, k_BHSD = q_BHSD.to(v_BHSD.dtype), k_BHSD.to(v_BHSD.dtype)
        attend: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        output, weights = attend(
            self,
            q_BHSD,
            k_BHSD,
            v_BHSD,
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            **kwargs,
        )
        return self.o_proj(output.reshape(*shape_BS, -1).contiguous()), weights


class LLaDARotaryEmbedding(LlamaRotaryEmbedding):
    """cos and sin in fp32 under `rope_full_precision`, else in the activations' dtype."""

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return super().forward(
            x.new_empty(0, dtype=torch.float32) if self.config.rope_full_precision else x, position_ids
        )


class LLaDADecoderLayer(LlamaDecoderLayer):
    def __init__(self, config: LLaDAConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.self_attn = LLaDAAttention(config, layer_idx)


class LLaDAPreTrainedModel(LlamaPreTrainedModel):
    config_class = LLaDAConfig
    config: LLaDAConfig
    _no_split_modules: ClassVar[list[str]] = ["LLaDADecoderLayer"]
    _can_record_outputs: ClassVar[dict[str, Any]] = {
        "hidden_states": LLaDADecoderLayer,
        "attentions": LLaDAAttention,
    }


class LLaDAModel(LLaDAPreTrainedModel, LlamaModel):
    """The body. Its forward is Llama's; `config.is_causal = False` makes the mask bidirectional."""

    def __init__(self, config: LLaDAConfig) -> None:
        LLaDAPreTrainedModel.__init__(self, config)  # Llama's own would build its layers first
        self.padding_idx = None
        self.vocab_size = config.embedding_size or config.vocab_size
        self.embed_tokens = nn.Embedding(self.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([LLaDADecoderLayer(config, i) for i in range(config.num_hidden_layers)])
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = LLaDARotaryEmbedding(config=config)
        self.gradient_checkpointing = False
        self.post_init()


class LLaDAModelLM(DiffusionLM, LLaDAPreTrainedModel, LlamaForCausalLM):
    """LLaDA with its output layer: what `AutoModel` and `AutoModelForCausalLM` both give, as in the Hub's auto_map."""

    family: ClassVar[FamilySpec] = SPEC
    megatron_mapping: ClassVar[Mapping] = MAPPING

    def __init__(self, config: LLaDAConfig) -> None:
        LLaDAPreTrainedModel.__init__(self, config)
        self.model = LLaDAModel(config)
        self.vocab_size = self.model.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, self.vocab_size, bias=False)
        self.post_init()

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Embedding:
        embeddings = super().resize_token_embeddings(*args, **kwargs)
        if self.config.embedding_size is not None:
            self.config.embedding_size = embeddings.weight.shape[0]
        return embeddings


register_renames(LLaDAModelLM, RENAMES)

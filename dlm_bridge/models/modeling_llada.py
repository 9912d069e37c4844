"""LLaDA on transformers' Llama body, with bidirectional attention and rotary embedding in fp32: config and model."""

# mypy: disable-error-code="arg-type, assignment, misc, override"

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
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

from dlm_bridge.errors import CheckpointError
from dlm_bridge.models.diffusion_lm import DiffusionLM, attend, register_hub_names
from dlm_bridge.models.hub_config import HubConfig
from dlm_bridge.models.llada import REQUIRED, SPEC, check_config


class LLaDAConfig(HubConfig):
    """Field names, defaults and null rules are those of the public configuration_llada.py for the 8B models."""

    model_type = "llada"
    family = SPEC
    attention_bias: ClassVar[bool] = False
    mlp_bias: ClassVar[bool] = False
    attribute_map: ClassVar[dict[str, str]] = {
        "hidden_size": "d_model",
        "num_attention_heads": "n_heads",
        "num_hidden_layers": "n_layers",
        "max_position_embeddings": "max_sequence_length",
        "hidden_act": "activation_type",
        "tie_word_embeddings": "weight_tying",
        "initializer_range": "init_std",
    }
    base_model_tp_plan = LlamaConfig.base_model_tp_plan
    base_model_pp_plan = LlamaConfig.base_model_pp_plan

    d_model: int = 4096
    n_heads: int = 32
    n_kv_heads: int | None = None
    n_layers: int = 32
    mlp_hidden_size: int | None = None
    mlp_ratio: int = 4
    multi_query_attention: bool | None = None
    max_sequence_length: int = 4096
    vocab_size: int = 126464
    embedding_size: int | None = None
    activation_type: str = "silu"
    block_type: str = "llama"
    block_group_size: int = 1
    layer_norm_type: str = "rms"
    layer_norm_with_affine: bool = True
    attention_layer_norm: bool = False
    include_bias: bool = False
    include_qkv_bias: bool | None = False
    bias_for_layer_norm: bool | None = False
    rms_norm_eps: float = 1e-5
    rope: bool = True
    rope_theta: float = 500000.0
    rope_parameters: dict[str, Any] | None = None
    rope_full_precision: bool = True
    alibi: bool = False
    scale_logits: bool = False
    input_emb_norm: bool = False
    weight_tying: bool = False
    attention_dropout: float = 0.0
    init_fn: str = "mitchell"
    init_std: float = 0.02
    use_cache: bool = False
    mask_token_id: int | None = 126336
    eos_token_id: int | list[int] | None = 126081
    pad_token_id: int | None = 126081
    bos_token_id: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        check_config({key: getattr(self, key) for key in REQUIRED})
        for key in ("rms_norm_eps", "rope_theta", "attention_dropout", "init_std"):
            value = getattr(self, key)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise CheckpointError("config.json", f"{key} must be a number, not {value!r}")

    @property
    def num_key_value_heads(self) -> int:
        return self.n_kv_heads or (1 if self.multi_query_attention else self.n_heads)

    @num_key_value_heads.setter
    def num_key_value_heads(self, value: int) -> None:
        self.n_kv_heads = value

    @property
    def intermediate_size(self) -> int:
        return self.mlp_hidden_size or self.mlp_ratio * self.d_model

    @intermediate_size.setter
    def intermediate_size(self, value: int) -> None:
        self.mlp_hidden_size = value

    @property
    def head_dim(self) -> int:
        return self.d_model // self.n_heads


# Regular expression of the Hub name to the body's name, in this order: ff_out outside the blocks is the head.
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
    """Llama's attention without the causal mask.

    With `rope_full_precision` the rotary embedding is applied in fp32, as in the original code; bf16 would differ.
    """

    def __init__(self, config: LLaDAConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.is_causal = False

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Any = None,
        cache: Any = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        assert position_embeddings is not None
        shape_BS = hidden_states.shape[:-1]
        heads = (*shape_BS, -1, self.head_dim)
        q_BHSD = self.q_proj(hidden_states).view(heads).transpose(1, 2)
        k_BHSD = self.k_proj(hidden_states).view(heads).transpose(1, 2)
        v_BHSD = self.v_proj(hidden_states).view(heads).transpose(1, 2)
        # With full precision cos and sin are fp32, and so are the products.
        q_BHSD, k_BHSD = apply_rotary_pos_emb(q_BHSD, k_BHSD, *position_embeddings)
        q_BHSD, k_BHSD = q_BHSD.to(v_BHSD.dtype), k_BHSD.to(v_BHSD.dtype)
        return attend(self, q_BHSD, k_BHSD, v_BHSD, attention_mask, eager_attention_forward, **kwargs)


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
    _no_split_modules: ClassVar[list[str]] = ["LLaDADecoderLayer"]
    _can_record_outputs: ClassVar[dict[str, Any]] = {"hidden_states": LLaDADecoderLayer, "attentions": LLaDAAttention}


class LLaDAModel(LLaDAPreTrainedModel, LlamaModel):
    """Body of the model. Its forward is Llama's; `config.is_causal = False` makes the mask bidirectional."""

    def __init__(self, config: LLaDAConfig) -> None:
        LLaDAPreTrainedModel.__init__(self, config)  # LlamaModel.__init__ would build its layers
        self.padding_idx = None
        self.vocab_size = config.embedding_size or config.vocab_size
        self.embed_tokens = nn.Embedding(self.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([LLaDADecoderLayer(config, i) for i in range(config.num_hidden_layers)])
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = LLaDARotaryEmbedding(config=config)
        self.gradient_checkpointing = False
        self.post_init()


class LLaDAModelLM(DiffusionLM, LLaDAPreTrainedModel, LlamaForCausalLM):
    """LLaDA with output layer, for `AutoModel` and `AutoModelForCausalLM` as in the Hub's auto_map."""

    family = SPEC

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


register_hub_names(LLaDAModelLM, RENAMES)

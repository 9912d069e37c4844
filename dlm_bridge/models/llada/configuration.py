"""LLaDA's configuration: OLMo's key names on the Hub, readable under transformers' names as well."""

from __future__ import annotations

from typing import Any, ClassVar

from dlm_bridge.models.hub_config import HubConfig
from dlm_bridge.models.llada import mapping
from dlm_bridge.models.llada.spec import SPEC
from dlm_bridge.models.spec import FamilySpec


class LLaDAConfig(HubConfig):
    """Field names, defaults and null rules are those of the public configuration_llada.py for the 8B models."""

    model_type = "llada"
    family: ClassVar[FamilySpec] = SPEC
    is_causal: ClassVar[bool] = False  # makes transformers build bidirectional masks
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]
    attribute_map: ClassVar[dict[str, str]] = {
        "hidden_size": "d_model",
        "num_attention_heads": "n_heads",
        "num_hidden_layers": "n_layers",
        "max_position_embeddings": "max_sequence_length",
        "hidden_act": "activation_type",
        "tie_word_embeddings": "weight_tying",
        "initializer_range": "init_std",
    }
    base_model_tp_plan: ClassVar[dict[str, str] | None] = {
        "layers.*.self_attn.q_proj": "colwise",
        "layers.*.self_attn.k_proj": "colwise",
        "layers.*.self_attn.v_proj": "colwise",
        "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.mlp.gate_proj": "colwise",
        "layers.*.mlp.up_proj": "colwise",
        "layers.*.mlp.down_proj": "rowwise",
    }
    base_model_pp_plan: ClassVar[dict[str, Any] | None] = {
        "embed_tokens": (["input_ids"], ["inputs_embeds"]),
        "layers": (["hidden_states", "attention_mask"], ["hidden_states"]),
        "norm": (["hidden_states"], ["hidden_states"]),
    }

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
        # Read by transformers' Llama body; class attributes would do, but they must not reach config.json.
        mapping.check({key: getattr(self, key) for key in mapping.REQUIRED})

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

    @property
    def attention_bias(self) -> bool:
        return False

    @property
    def mlp_bias(self) -> bool:
        return False

"""LLaDA2 on transformers' Glm4-MoE body: config and model.

Fused QKV, block-causal attention, a router in its stored dtype; in LLaDA2.2, routing by blocks of tokens.
"""

# mypy: disable-error-code="arg-type, assignment, misc, override"

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F  # noqa: N812
from huggingface_hub.dataclasses import strict
from torch import nn
from transformers import Glm4MoeConfig
from transformers.models.glm4_moe.modeling_glm4_moe import (
    Glm4MoeAttention,
    Glm4MoeDecoderLayer,
    Glm4MoeForCausalLM,
    Glm4MoeModel,
    Glm4MoeMoE,
    Glm4MoePreTrainedModel,
    Glm4MoeRMSNorm,
    Glm4MoeRotaryEmbedding,
    Glm4MoeTopkRouter,
    OutputRecorder,
    apply_rotary_pos_emb,
    eager_attention_forward,
)

from dlm_bridge.errors import CheckpointError
from dlm_bridge.models.diffusion_lm import attend, register_hub_names
from dlm_bridge.models.hub_config import HubConfig
from dlm_bridge.models.llada2_moe import MERGED, SPEC, check_config
from dlm_bridge.models.modeling_moe import DiffusionMoE, ExpertsMixin, expert_converters

# Fields that `check_config` reads. It also reads keyword arguments that are not fields.
CHECKED = (
    "block_size",
    "expert_capacity",
    "hidden_act",
    "max_position_embeddings",
    "norm_topk_prob",
    "num_experts",
    "num_experts_per_tok",
    "num_shared_experts",
    "use_qk_norm",
    "use_qkv_bias",
)


@strict  # again, because the types of some fields differ from Glm4-MoE's
class LLaDA2MoeConfig(HubConfig, Glm4MoeConfig):
    """Field names are those of the public configuration_llada2_moe.py, defaults those of LLaDA2.0-mini.

    Configs of 2.0 and 2.1 have neither mask token nor block size; all were trained with blocks of 32. 2.2 has an
    `expert_capacity`, the number of experts that the tokens of a block share.
    """

    model_type = "llada2_moe"
    family = SPEC
    attribute_map: ClassVar[dict[str, str]] = {
        "num_local_experts": "num_experts",
        "n_routed_experts": "num_experts",
        "n_shared_experts": "num_shared_experts",
        "attention_bias": "use_qkv_bias",
    }
    # The rows of the fused QKV do not split by heads: each rank computes a part, then all gather.
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
    expert_capacity: int | None = None
    delete_token_id: int | None = None
    split_token_id: int | None = None
    mask_token_id: int | None = 156895
    eos_token_id: int | list[int] | None = 156892
    pad_token_id: int | None = 156892

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Extends HubConfig. Raises CheckpointError for dFactory's layout, which can be converted but not loaded."""
        if config_dict.get("model_type") == MERGED:
            raise CheckpointError(
                "config.json",
                f"model_type {MERGED} is dFactory's training layout (merged experts): run dlm-bridge import, then "
                "export with an `hf_config` whose model_type is llada2_moe",
            )
        return super().from_dict(config_dict, **kwargs)

    def __post_init__(self, **kwargs: Any) -> None:
        check_config({**{key: getattr(self, key) for key in CHECKED}, **kwargs})
        super().__post_init__(**kwargs)


# Regular expression of the Hub name to the body's name.
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
        cache: Any = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Same as Glm4-MoE's; transformers >= 5.24 passes `past_key_values` as `cache`."""
        shape_BS = hidden_states.shape[:-1]
        qkv_BSHD = self.query_key_value(hidden_states).view(*shape_BS, -1, self.head_dim)
        q_BSHD, k_BSHD, v_BSHD = qkv_BSHD.split(self.heads, dim=-2)
        q_BHSD, k_BHSD = self.q_norm(q_BSHD).transpose(1, 2), self.k_norm(k_BSHD).transpose(1, 2)
        q_BHSD, k_BHSD = apply_rotary_pos_emb(q_BHSD, k_BHSD, *position_embeddings)
        v_BHSD = v_BSHD.transpose(1, 2)
        cache = past_key_values if cache is None else cache
        if cache is not None:  # of Ling, which transformers samples
            k_BHSD, v_BHSD = cache.update(k_BHSD, v_BHSD, self.layer_idx)
        return attend(self, q_BHSD, k_BHSD, v_BHSD, attention_mask, eager_attention_forward, **kwargs)


def routing_blocks(positions_BS: torch.Tensor, block_size: int) -> torch.Tensor:
    """Index [B * S] of the run of tokens that share experts: consecutive tokens of one block of positions.

    A run also ends where positions do not increase: between documents of a packed row, between the noisy and the clean
    stream, and at every padding token, whose position repeats.
    """
    blocks_BS = positions_BS // block_size
    goes_on = (blocks_BS[:, 1:] == blocks_BS[:, :-1]) & (positions_BS[:, 1:] > positions_BS[:, :-1])
    begins_BS = torch.cat([torch.ones_like(goes_on[:, :1]), ~goes_on], dim=1)
    return begins_BS.flatten().cumsum(dim=0) - 1


class LLaDA2MoeBlockRouter(Glm4MoeTopkRouter):
    """LLaDA2.2's router: the tokens of a block select from the block's `expert_capacity` best experts, by the maximum
    score over its tokens. Expert groups are ignored."""

    def __init__(self, config: LLaDA2MoeConfig) -> None:
        super().__init__(config)
        self.capacity = config.expert_capacity

    def forward(
        self, hidden_states: torch.Tensor, routing_blocks: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Logits [N, E], weights [N, K] and experts [N, K] of N tokens in the blocks `routing_blocks` [N]."""
        hidden_NH = hidden_states.view(-1, self.hidden_dim)
        logits_NE = F.linear(hidden_NH.float(), self.weight.float())
        scores_NE = logits_NE.sigmoid()
        choice_NE = scores_NE.detach() + self.e_score_correction_bias
        of_token_NE = routing_blocks[:, None].expand_as(choice_NE)
        # N rows, because reading the number of blocks would synchronise with the device.
        best_NE = torch.full_like(choice_NE, -torch.inf).scatter_reduce(0, of_token_NE, choice_NE, "amax")
        pool_NC = best_NE.topk(self.capacity, dim=-1).indices
        allowed_NE = torch.zeros_like(choice_NE, dtype=torch.bool).scatter(1, pool_NC, True)[routing_blocks]
        experts_NK = choice_NE.masked_fill(~allowed_NE, -torch.inf).topk(self.top_k, dim=-1, sorted=False).indices
        weights_NK = scores_NE.gather(1, experts_NK)
        weights_NK = weights_NK / (weights_NK.sum(dim=-1, keepdim=True) + 1e-20)
        return logits_NE, weights_NK * self.routed_scaling_factor, experts_NK


class LLaDA2MoeBlockMoE(Glm4MoeMoE):
    """Experts with LLaDA2.2's router."""

    def __init__(self, config: LLaDA2MoeConfig) -> None:
        super().__init__(config)
        self.gate = LLaDA2MoeBlockRouter(config)

    def forward(self, hidden_states: torch.Tensor, routing_blocks: torch.Tensor) -> torch.Tensor:
        _, weights_NK, experts_NK = self.gate(hidden_states, routing_blocks)
        routed = self.experts(hidden_states.view(-1, hidden_states.shape[-1]), experts_NK, weights_NK)
        return routed.view_as(hidden_states) + self.shared_experts(hidden_states)


class LLaDA2MoeDecoderLayer(Glm4MoeDecoderLayer):
    def __init__(self, config: LLaDA2MoeConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.self_attn = LLaDA2MoeAttention(config, layer_idx)
        if config.expert_capacity and isinstance(self.mlp, Glm4MoeMoE):
            self.mlp = LLaDA2MoeBlockMoE(config)

    def forward(
        self, hidden_states: torch.Tensor, routing_blocks: torch.Tensor | None = None, **kwargs: Any
    ) -> torch.Tensor:
        """Extends Glm4-MoE's. `routing_blocks`: result of the function of that name, for LLaDA2.2's router."""
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
        hidden_states = hidden_states + attended
        normed = self.post_attention_layernorm(hidden_states)
        routed = (normed, routing_blocks) if isinstance(self.mlp, LLaDA2MoeBlockMoE) else (normed,)
        return hidden_states + self.mlp(*routed)


class LLaDA2MoePreTrainedModel(ExpertsMixin, Glm4MoePreTrainedModel):
    config_class = LLaDA2MoeConfig
    _no_split_modules: ClassVar[list[str]] = ["LLaDA2MoeDecoderLayer"]
    _keys_to_ignore_on_load_unexpected: ClassVar[list[str]] = []  # Glm4-MoE ignores its MTP layers 46 and 92
    _can_record_outputs: ClassVar[dict[str, Any]] = {
        "hidden_states": LLaDA2MoeDecoderLayer,
        "attentions": LLaDA2MoeAttention,
        "router_logits": OutputRecorder(Glm4MoeTopkRouter, index=0),
    }

    def _get_dtype_plan(self, dtype: torch.dtype) -> dict[str, Any]:
        """Extends transformers' method: a router, which computes in fp32, keeps its stored dtype (fp32 by
        `router_dtype`) if the model is loaded in half precision."""
        if dtype not in (torch.float16, torch.bfloat16):
            return super()._get_dtype_plan(dtype)
        return {r"mlp.gate.weight": None, "mlp.gate.e_score_correction_bias": None}


class LLaDA2MoeModel(LLaDA2MoePreTrainedModel, Glm4MoeModel):
    """Body of the model. Its forward is Glm4-MoE's, with the blocks of LLaDA2.2's router."""

    def __init__(self, config: LLaDA2MoeConfig) -> None:
        LLaDA2MoePreTrainedModel.__init__(self, config)  # Glm4MoeModel.__init__ would build its layers
        self.padding_idx = None
        self.vocab_size = config.vocab_size
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([LLaDA2MoeDecoderLayer(config, i) for i in range(config.num_hidden_layers)])
        self.norm = Glm4MoeRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = Glm4MoeRotaryEmbedding(config=config)
        self.gradient_checkpointing = False
        self.post_init()

    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        tokens = input_ids if input_ids is not None else inputs_embeds
        if self.config.expert_capacity and tokens is not None:
            positions = torch.arange(tokens.shape[1], device=tokens.device) if position_ids is None else position_ids
            kwargs["routing_blocks"] = routing_blocks(positions.expand(tokens.shape[:2]), self.config.block_size)
        return super().forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            **kwargs,
        )


class LLaDA2MoeModelLM(DiffusionMoE, LLaDA2MoePreTrainedModel, Glm4MoeForCausalLM):
    """Block-causal attention with blocks of 32. `logits[i]` predicts token i."""

    family = SPEC

    @property
    def sampler_defaults(self) -> Mapping[str, Any]:
        """Extends DiffusionLM: LLaDA2.2, identified by its router, has its own sampler."""
        if not self.config.expert_capacity:
            return super().sampler_defaults
        ids = {name: getattr(self.config, name) for name in ("delete_token_id", "split_token_id")}
        return {"algorithm": "llada2.2"} | {name: token for name, token in ids.items() if token is not None}

    def __init__(self, config: LLaDA2MoeConfig) -> None:
        LLaDA2MoePreTrainedModel.__init__(self, config)
        self.model = LLaDA2MoeModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()


register_hub_names(LLaDA2MoeModelLM, RENAMES, expert_converters())

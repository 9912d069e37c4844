"""Self-attention layers on megatron-core's, and their rotary embeddings at explicit positions.

Three layers replace megatron-core's where a model or the platform asks for it: queries scaled by position (Ministral
3, from Llama 4), the fused QK-norm and RoPE kernel, and multi-head latent attention (DeepSeek-V2, arXiv 2405.04434).
"""

from __future__ import annotations

from typing import Any

import torch

from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.parallel import platform
from dlm_bridge.parallel.core import (
    MLASelfAttention,
    SelfAttention,
    TransformerConfig,
    concentration_factor,
)
from dlm_bridge.parallel.mcore_patches.modules import LocalHeadNorm, patched_latent_linear


def rotary_angles(rotary: Any, position_ids_BS: torch.Tensor, shared: bool = False) -> torch.Tensor:
    """[S, B or 1, 1, D] fp32 angles of `position_ids_BS` [B or 1, S], in the form that a layer's `rotary_pos_emb` has.

    `rotary` is a model's own `rotary_pos_emb` module, so Llama 3's scaling, YaRN, linear interpolation and partial
    rotary embeddings are kept; at positions 0, 1, 2, ... the values are the module's own, bit for bit. megatron-core's
    modules ignore position ids, hence this: two streams repeat them, packed documents begin anew, context parallel
    ranks hold slices, and WeDLM's positions differ from row to row.

    With `shared` all rows must share their positions, as the fused rotary kernel (TransformerConfig.apply_rope_fusion)
    needs it. Raises DlmBridgeError where they do not.
    """
    if shared and position_ids_BS.shape[0] > 1:
        raise DlmBridgeError(
            "the fused rotary kernel takes one row of position ids, and here each row has its own: "
            "set apply_rope_fusion to false"
        )
    positions_SB = position_ids_BS.t().float()
    if rotary.seq_len_interpolation_factor is not None and not _is_yarn(rotary):
        positions_SB = positions_SB * (1 / rotary.seq_len_interpolation_factor)
    return positions_SB[:, :, None, None] * _frequencies(rotary).to(positions_SB.device)


def _is_yarn(rotary: Any) -> bool:
    return hasattr(rotary, "inv_freq_extra")


def _frequencies(rotary: Any) -> torch.Tensor:
    """[D] the angles of position 1."""
    if _is_yarn(rotary):  # mixes two sets of frequencies in `get_emb`, and ignores the interpolation factor
        return rotary.get_emb(2)[0][1, 0, 0]
    if rotary.rotary_interleaved:
        return rotary.inv_freq.repeat_interleave(2)
    return torch.cat((rotary.inv_freq, rotary.inv_freq))


# Attributes of a TransformerConfig, which has no such fields.
PREFIX = "query_scaling_"
BETA, LENGTH = PREFIX + "beta", PREFIX + "length"


def scales_queries(config: TransformerConfig) -> bool:
    """Whether the model scales queries by their position."""
    return hasattr(config, BETA)


def with_query_scale(
    angles: torch.Tensor, position_ids_BS: torch.Tensor | None, config: TransformerConfig
) -> torch.Tensor:
    """[S, B or 1, 1, D + 1] the rotary angles [S, B or 1, 1, D] and the queries' factors at the same positions (None
    for 0, 1, 2, ...), for `ScaledQueryAttention`.

    A query at position p is multiplied by 1 + beta log(1 + floor(p / length)), where `length` is the original context:
    `get_llama_4_attn_scale` in transformers' modeling_ministral3.py. megatron-core hands its layers no positions: the
    factor travels as one more column of the rotary angles, which reach every layer of every pipeline stage, also when
    a layer is recomputed.
    """
    if position_ids_BS is None:
        position_ids_BS = torch.arange(len(angles), device=angles.device)[None]
    periods_SB = torch.floor(position_ids_BS.t() / getattr(config, LENGTH))
    scale_SB = 1 + getattr(config, BETA) * torch.log(1 + periods_SB)
    return torch.cat((angles, scale_SB[:, :, None, None].to(angles)), dim=-1)


class ScaledQueryAttention(SelfAttention):
    """Attention with queries scaled by position; its `rotary_pos_emb` is that of `with_query_scale`. Queries are
    scaled before they are rotated, which is the same: a rotation keeps lengths."""

    _scale: torch.Tensor | None = None  # [S, B or 1, 1, 1] during a forward pass

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *args: Any,
        rotary_pos_emb: torch.Tensor,
        packed_seq_params: Any = None,
        **kwargs: Any,
    ) -> Any:
        """As megatron-core's."""
        angles, scale = rotary_pos_emb[..., :-1], rotary_pos_emb[..., -1:]
        if packed_seq_params is not None:  # the rows are positions, which every document has from 0 on
            ranks = self.tp_group.size() if self.config.sequence_parallel else 1
            scale = scale[packed_positions(packed_seq_params.cu_seqlens_q, len(hidden_states) * ranks)]
        self._scale = scale
        try:
            return super().forward(
                hidden_states,
                attention_mask,
                *args,
                rotary_pos_emb=angles,
                packed_seq_params=packed_seq_params,
                **kwargs,
            )
        finally:
            self._scale = None

    def get_query_key_value_tensors(self, *args: Any, **kwargs: Any) -> Any:
        """Scaled queries [S, B, H, D], and whatever else megatron-core's gives."""
        query, *rest = super().get_query_key_value_tensors(*args, **kwargs)
        assert self._scale is not None
        return query * self._scale.to(query.dtype), *rest


def packed_positions(cu_seqlens: torch.Tensor, tokens: int) -> torch.Tensor:
    """[T] each token's position in its document, of documents that begin at `cu_seqlens` [documents + 1]."""
    row = torch.arange(tokens, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    return row - cu_seqlens[torch.searchsorted(cu_seqlens, row, right=True) - 1]


# Settings of megatron-core under which queries, keys and values are made in another way than the kernel makes them.
OTHERWISE = (
    "attention_output_gate",
    "layernorm_zero_centered_gamma",
    "mrope_section",
    "multi_latent_attention",
    "no_rope_freq",
    "qk_l2_norm",
    "test_mode",
)


def fuses_heads(config: TransformerConfig) -> bool:
    """Whether layers of Transformer Engine's modules have `FusedSelfAttention`."""
    return (
        platform.current().uses_fused_kernels()
        and config.num_query_groups >= config.tensor_model_parallel_size  # else ranks share a group's key and value
        and not scales_queries(config)
        and not any(getattr(config, name, False) for name in OTHERWISE)
    )


def rotary_table(
    angles: torch.Tensor, config: TransformerConfig, tokens: int, packed_seq_params: Any = None
) -> torch.Tensor:
    """[S, B or 1, 2, A / 2] fp32 cosines and sines of the rotary angles [S, B or 1, 1, A], which are what
    `FusedSelfAttention` takes as its `rotary_pos_emb`. Of packed documents, `tokens` in a row, each begins anew."""
    half = angles.shape[-1] // 2
    # Both numbers of a pair have the same angle.
    angles = angles[:, :, 0, ::2] if config.rotary_interleaved else angles[:, :, 0, :half]
    if packed_seq_params is not None:
        angles = angles[packed_positions(packed_seq_params.cu_seqlens_q, tokens)]
    return torch.stack((angles.cos(), angles.sin()), dim=2).float() * concentration_factor(config)


class HeadNorm(LocalHeadNorm):
    """A norm that the fused kernel applies. Calling it gives the weight: data parallelism waits for weights in the
    hooks of a call."""

    def forward(self) -> torch.Tensor:  # type: ignore[override, unused-ignore]
        """[D] the weight."""
        return self.weight.view_as(self.weight)


class FusedSelfAttention(SelfAttention):
    """Self-attention with one kernel between the QKV projection and core attention (`fused.qk_norm_rope`); its
    `rotary_pos_emb` is a `rotary_table`."""

    _table: torch.Tensor | None = None  # during a forward pass

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *args: Any,
        rotary_pos_emb: torch.Tensor,
        **kwargs: Any,
    ) -> Any:
        """As megatron-core's."""
        self._table = rotary_pos_emb
        try:
            return super().forward(hidden_states, attention_mask, *args, rotary_pos_emb=None, **kwargs)
        finally:
            self._table = None

    def get_query_key_value_tensors(
        self, hidden_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query [S, B, H, D], key and value [S, B, G, D], normalised and rotated."""
        from dlm_bridge.parallel.fused.qk_norm_rope import HeadLayout, split_qkv

        assert self._table is not None
        mixed, _ = self.linear_qkv(hidden_states)
        groups, size = self.num_query_groups_per_partition, self.hidden_size_per_attention_head
        heads = HeadLayout(
            queries=self.num_attention_heads_per_partition // groups,
            size=size,
            eps=self.config.layernorm_epsilon,
            interleaved=self.config.rotary_interleaved,
        )
        normed = isinstance(self.q_layernorm, HeadNorm)
        query_weight, key_weight = (self.q_layernorm(), self.k_layernorm()) if normed else (None, None)
        mixed = mixed.unflatten(-1, (groups, -1)).contiguous()
        return split_qkv(mixed, self._table, query_weight, key_weight, heads)


class LatentAttention(MLASelfAttention):
    """Multi-head latent attention at explicit positions. megatron-core's layer computes its rotary angles itself, of
    positions 0, 1, 2, ..., and needs Transformer Engine's linear layers."""

    rotary_pos_emb: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with patched_latent_linear():
            super().__init__(*args, **kwargs)
        self.rotary_pos_emb = _GivenAngles(self.rotary_pos_emb)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *args: Any,
        rotary_pos_emb: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """As megatron-core's. `rotary_pos_emb` is [S, B or 1, 1, D] with D the rotated part of a head; None for the
        positions 0, 1, 2, ... of the row or of each packed document."""
        self.rotary_pos_emb.given = rotary_pos_emb
        try:
            return super().forward(hidden_states, attention_mask, *args, **kwargs)
        finally:
            self.rotary_pos_emb.given = None


class _GivenAngles(torch.nn.Module):
    """A layer's rotary embedding `own`, or the angles `given` to a forward pass."""

    def __init__(self, own: Any) -> None:
        super().__init__()
        self.own = own
        self.given: torch.Tensor | None = None

    def get_rotary_seq_len(self, *args: Any, **kwargs: Any) -> int:
        """As megatron-core's."""
        length: int = self.own.get_rotary_seq_len(*args, **kwargs)
        return length

    def forward(self, length: int, packed_seq: bool = False) -> Any:
        """Angles [S, B or 1, 1, D], with YaRN's scale where that is the embedding."""
        found = self.own(length, packed_seq=packed_seq)
        if self.given is None:
            return found
        return (self.given, found[1]) if isinstance(found, tuple) else self.given

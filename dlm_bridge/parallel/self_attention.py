"""Self-attention layers derived from megatron-core's, and their rotary embeddings at explicit positions.

Three layers replace megatron-core's, depending on the model and the platform: queries scaled by position (Ministral 3,
from Llama 4), the fused QK-norm and RoPE kernel, and multi-head latent attention (DeepSeek-V2, arXiv 2405.04434).
"""

from __future__ import annotations

from typing import Any

import torch

from dlm_bridge.errors import SettingError
from dlm_bridge.parallel import platform
from dlm_bridge.parallel.core import (
    MLASelfAttention,
    SelfAttention,
    TransformerConfig,
    concentration_factor,
)
from dlm_bridge.parallel.mcore_patches.modules import LocalHeadNorm, patched_latent_linear


def rotary_angles(rotary: Any, position_ids_BS: torch.Tensor, shared: bool = False) -> torch.Tensor:
    """Rotary angles [S, B or 1, 1, D] in fp32 for a layer's `rotary_pos_emb`, at explicit positions.

    megatron-core's modules ignore position ids, but two streams repeat them, packed documents restart at 0, context
    parallel ranks hold slices, and WeDLM's positions differ between rows. At positions 0, 1, 2, ... the values are the
    module's own, bit for bit.

    Args:
        rotary: the model's `rotary_pos_emb` module, with Llama 3's scaling, YaRN, linear interpolation or partial
            rotary embeddings.
        position_ids_BS: [B or 1, S].
        shared: all rows must have the same positions, as the fused rotary kernel
            (TransformerConfig.apply_rope_fusion) requires.

    Raises SettingError if rows differ and `shared` is set.
    """
    if shared and position_ids_BS.shape[0] > 1:
        raise SettingError(
            "apply_rope_fusion", "the fused kernel needs the same position ids in all rows: set it to False"
        )
    positions_SB = position_ids_BS.t().float()
    if rotary.seq_len_interpolation_factor is not None and not _is_yarn(rotary):
        positions_SB = positions_SB * (1 / rotary.seq_len_interpolation_factor)
    return positions_SB[:, :, None, None] * _frequencies(rotary).to(positions_SB.device)


def _is_yarn(rotary: Any) -> bool:
    return hasattr(rotary, "inv_freq_extra")


def _frequencies(rotary: Any) -> torch.Tensor:
    """Angles [D] of position 1."""
    if _is_yarn(rotary):  # mixes two sets of frequencies in `get_emb`, and ignores the interpolation factor
        return rotary.get_emb(2)[0][1, 0, 0]
    if rotary.rotary_interleaved:
        return rotary.inv_freq.repeat_interleave(2)
    return torch.cat((rotary.inv_freq, rotary.inv_freq))


# Attributes that are set on a TransformerConfig beside its fields.
PREFIX = "query_scaling_"
BETA, LENGTH = PREFIX + "beta", PREFIX + "length"


def scales_queries(config: TransformerConfig) -> bool:
    """True if the model scales queries by their position."""
    return hasattr(config, BETA)


def with_query_scale(
    angles: torch.Tensor, position_ids_BS: torch.Tensor | None, config: TransformerConfig
) -> torch.Tensor:
    """Append the queries' factors to the rotary angles [S, B or 1, 1, D], giving [S, B or 1, 1, D + 1] for
    `ScaledQueryAttention`. `position_ids_BS` are the positions of the angles; None for 0, 1, 2, ...

    A query at position p is multiplied by 1 + beta log(1 + floor(p / length)), where `length` is the original context:
    `get_llama_4_attn_scale` in transformers' modeling_ministral3.py. megatron-core does not pass positions to its
    layers, but the rotary angles reach every layer of every pipeline stage, also when a layer is recomputed.
    """
    if position_ids_BS is None:
        position_ids_BS = torch.arange(len(angles), device=angles.device)[None]
    periods_SB = torch.floor(position_ids_BS.t() / getattr(config, LENGTH))
    scale_SB = 1 + getattr(config, BETA) * torch.log(1 + periods_SB)
    return torch.cat((angles, scale_SB[:, :, None, None].to(angles)), dim=-1)


class ScaledQueryAttention(SelfAttention):
    """Attention with queries scaled by position; `rotary_pos_emb` comes from `with_query_scale`. Queries are scaled
    before they are rotated, which is equivalent."""

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
        """Same as megatron-core's, with `rotary_pos_emb` [S, B or 1, 1, D + 1]."""
        angles, scale = rotary_pos_emb[..., :-1], rotary_pos_emb[..., -1:]
        if packed_seq_params is not None:  # rows are indexed by the position in a document
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
        """Scaled queries [S, B, H, D], and megatron-core's other results."""
        query, *rest = super().get_query_key_value_tensors(*args, **kwargs)
        assert self._scale is not None
        return query * self._scale.to(query.dtype), *rest


def packed_positions(cu_seqlens: torch.Tensor, tokens: int) -> torch.Tensor:
    """Position [T] of each token in its document; documents start at `cu_seqlens` [documents + 1]."""
    row = torch.arange(tokens, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    return row - cu_seqlens[torch.searchsorted(cu_seqlens, row, right=True) - 1]


# Settings of megatron-core that the fused kernel does not implement.
NOT_FUSED = (
    "attention_output_gate",
    "layernorm_zero_centered_gamma",
    "mrope_section",
    "multi_latent_attention",
    "no_rope_freq",
    "qk_l2_norm",
    "test_mode",
)


def fuses_heads(config: TransformerConfig) -> bool:
    """True if layers with Transformer Engine's modules use `FusedSelfAttention`."""
    return (
        platform.current().uses_fused_kernels()
        and config.num_query_groups >= config.tensor_model_parallel_size  # ranks do not share a group's key and value
        and not scales_queries(config)
        and not any(getattr(config, name, False) for name in NOT_FUSED)
    )


def rotary_table(
    angles: torch.Tensor, config: TransformerConfig, tokens: int, packed_seq_params: Any = None
) -> torch.Tensor:
    """Cosines and sines [S, B or 1, 2, A / 2] in fp32 of the rotary angles [S, B or 1, 1, A]: the `rotary_pos_emb` of
    `FusedSelfAttention`. Positions restart at 0 in each packed document of a row of `tokens`."""
    half = angles.shape[-1] // 2
    # Both elements of a pair have the same angle.
    angles = angles[:, :, 0, ::2] if config.rotary_interleaved else angles[:, :, 0, :half]
    if packed_seq_params is not None:
        angles = angles[packed_positions(packed_seq_params.cu_seqlens_q, tokens)]
    return torch.stack((angles.cos(), angles.sin()), dim=2).float() * concentration_factor(config)


class HeadNorm(LocalHeadNorm):
    """Head norm that the fused kernel applies. Calling it returns the weight, because data parallelism waits for
    weights in the hooks of a call."""

    def forward(self) -> torch.Tensor:  # type: ignore[override, unused-ignore]
        """The weight [D]."""
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
        """Same as megatron-core's, with a `rotary_table`."""
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
    """Multi-head latent attention at explicit positions. megatron-core's layer computes its rotary angles itself, for
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
        """Same as megatron-core's. `rotary_pos_emb` is [S, B or 1, 1, D] with D the rotated part of a head; None for
        positions 0, 1, 2, ... in the row or in each packed document."""
        self.rotary_pos_emb.given = rotary_pos_emb
        try:
            return super().forward(hidden_states, attention_mask, *args, **kwargs)
        finally:
            self.rotary_pos_emb.given = None


class _GivenAngles(torch.nn.Module):
    """Rotary embedding of a layer: the angles `given` to a forward pass, otherwise those of `own`."""

    def __init__(self, own: Any) -> None:
        super().__init__()
        self.own = own
        self.given: torch.Tensor | None = None

    def get_rotary_seq_len(self, *args: Any, **kwargs: Any) -> int:
        """Same as megatron-core's."""
        length: int = self.own.get_rotary_seq_len(*args, **kwargs)
        return length

    def forward(self, length: int, packed_seq: bool = False) -> Any:
        """Angles [S, B or 1, 1, D], with YaRN's scale if the embedding is YaRN."""
        found = self.own(length, packed_seq=packed_seq)
        if self.given is None:
            return found
        return (self.given, found[1]) if isinstance(found, tuple) else self.given

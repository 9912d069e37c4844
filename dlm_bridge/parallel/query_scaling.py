"""Queries that grow with their position, as Ministral 3 has them from Llama 4, on megatron-core's attention.

A query at position p is multiplied by 1 + beta log(1 + floor(p / length)), where `length` is the original context: see
`get_llama_4_attn_scale` in transformers' modeling_ministral3.py. megatron-core has no such thing, and hands its layers
no positions: the factor travels as one more column of the rotary angles, which reach every layer of every pipeline
stage, also when a layer is computed again.
"""

from __future__ import annotations

from typing import Any

import torch

from dlm_bridge.parallel.core import SelfAttention, TransformerConfig

# Attributes of a TransformerConfig, which has no such fields.
PREFIX = "query_scaling_"
BETA, LENGTH = PREFIX + "beta", PREFIX + "length"


def scales_queries(config: TransformerConfig) -> bool:
    """Whether the model's queries grow with their position."""
    return hasattr(config, BETA)


def with_query_scale(
    angles: torch.Tensor, position_ids_BS: torch.Tensor | None, config: TransformerConfig
) -> torch.Tensor:
    """[S, B or 1, 1, D + 1] the rotary angles [S, B or 1, 1, D] and the queries' factors at the same positions (None
    for 0, 1, 2, ...), as `ScaledQueryAttention` takes them."""
    if position_ids_BS is None:
        position_ids_BS = torch.arange(len(angles), device=angles.device)[None]
    periods_SB = torch.floor(position_ids_BS.t() / getattr(config, LENGTH))
    scale_SB = 1 + getattr(config, BETA) * torch.log(1 + periods_SB)
    return torch.cat((angles, scale_SB[:, :, None, None].to(angles)), dim=-1)


class ScaledQueryAttention(SelfAttention):
    """megatron-core's attention whose `rotary_pos_emb` is that of `with_query_scale`. Queries are scaled before they
    are rotated, which is the same: a rotation keeps lengths."""

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

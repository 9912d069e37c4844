"""megatron-core's self-attention with one kernel between the fused product and attention (`fused.heads`)."""

from __future__ import annotations

from typing import Any

import torch

from dlm_bridge.parallel.core import SelfAttention, TransformerConfig, concentration_factor
from dlm_bridge.parallel.fused import available
from dlm_bridge.parallel.layer_norms import LocalHeadNorm
from dlm_bridge.parallel.query_scaling import packed_positions, scales_queries

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
        available()
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
    """A norm that the kernel applies. It is called all the same, for its weight: data parallelism waits for weights in
    the hooks of a call."""

    def forward(self) -> torch.Tensor:  # type: ignore[override, unused-ignore]
        """[D] the weight."""
        return self.weight.view_as(self.weight)


class FusedSelfAttention(SelfAttention):
    """Its `rotary_pos_emb` is a `rotary_table`."""

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
        from dlm_bridge.parallel.fused.heads import Heads, split_heads

        assert self._table is not None
        mixed, _ = self.linear_qkv(hidden_states)
        groups, size = self.num_query_groups_per_partition, self.hidden_size_per_attention_head
        heads = Heads(
            queries=self.num_attention_heads_per_partition // groups,
            size=size,
            eps=self.config.layernorm_epsilon,
            interleaved=self.config.rotary_interleaved,
        )
        normed = isinstance(self.q_layernorm, HeadNorm)
        query_weight, key_weight = (self.q_layernorm(), self.k_layernorm()) if normed else (None, None)
        mixed = mixed.unflatten(-1, (groups, -1)).contiguous()
        return split_heads(mixed, self._table, query_weight, key_weight, heads)

"""Rotary embeddings of explicit positions: megatron-core's own frequencies, but not only for 0, 1, 2, ..."""

from __future__ import annotations

from typing import Any

import torch

from dlm_bridge.errors import DlmBridgeError


def rotary_angles(rotary: Any, position_ids_BS: torch.Tensor, fused: bool = False) -> torch.Tensor:
    """[S, B or 1, 1, D] fp32 angles of `position_ids_BS` [B or 1, S], in the form that a layer's `rotary_pos_emb` has.

    `rotary` is a model's own `rotary_pos_emb` module, so Llama 3's scaling, YaRN, linear interpolation and partial
    rotary embeddings are kept; at positions 0, 1, 2, ... the values are the module's own, bit for bit. megatron-core's
    modules ignore position ids, hence this: two streams repeat them, packed documents begin anew, context parallel
    ranks hold slices, and WeDLM's positions differ from row to row.

    `fused` says whether the rotary kernel is (TransformerConfig.apply_rope_fusion): it takes positions that all rows
    share. Raises DlmBridgeError where they are not.
    """
    if fused and position_ids_BS.shape[0] > 1:
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
    """[D] what one step of the position adds to the angles."""
    if _is_yarn(rotary):  # mixes two sets of frequencies in `get_emb`, and ignores the interpolation factor
        return rotary.get_emb(2)[0][1, 0, 0]
    if rotary.rotary_interleaved:
        return rotary.inv_freq.repeat_interleave(2)
    return torch.cat((rotary.inv_freq, rotary.inv_freq))

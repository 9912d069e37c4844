"""Attention masks by topology, from positions alone: who may look at whom, and in the form that a kernel honours."""

from __future__ import annotations

from typing import Literal

import torch

from dlm_bridge.errors import DlmBridgeError

Stream = Literal["block", "causal"]


def block_causal_mask(positions_BS: torch.Tensor, block: int, real_BS: torch.Tensor | None = None) -> torch.Tensor:
    """[B, 1, S, S] bool: position q looks at position k where k // block <= q // block, and k is real.

    Blocks are counted from position 0. A padding position looks at itself, so that no row of a softmax is empty.
    """
    blocks_BS = positions_BS // block
    allowed_BSS = blocks_BS[:, None, :] <= blocks_BS[:, :, None]
    if real_BS is not None:
        allowed_BSS = allowed_BSS & real_BS.bool()[:, None, :]
        allowed_BSS = allowed_BSS | torch.eye(allowed_BSS.shape[-1], dtype=torch.bool, device=allowed_BSS.device)
    return allowed_BSS[:, None]


def causal_mask(real_BS: torch.Tensor, draft_start: int | None = None) -> torch.Tensor:
    """[B, 1, S, S] bool: a token looks at itself and at the real ones before it in the input; those from `draft_start`
    on, the block that is being denoised, look at each other as well."""
    order_S = torch.arange(real_BS.shape[1], device=real_BS.device)
    allowed_SS = order_S[:, None] >= order_S[None, :]
    if draft_start is not None:
        allowed_SS = allowed_SS | ((order_S[:, None] >= draft_start) & (order_S[None, :] >= draft_start))
    own_SS = torch.eye(len(order_S), dtype=torch.bool, device=real_BS.device)
    return ((allowed_SS & real_BS.bool()[:, None, :]) | own_SS)[:, None]


def two_stream_mask(
    positions_BL: torch.Tensor,
    block: int,
    real_BS: torch.Tensor | None = None,
    noisy: Stream = "block",
    clean: Stream = "block",
) -> torch.Tensor:
    """[B, 1, S, S] bool, S = 2L, for training on [noisy | clean] (BD3-LM, arXiv 2503.09573).

    A noisy token looks at its own block of the noisy stream, all of it or ("causal") what stands before it, and at the
    clean blocks before; a clean token at the clean blocks up to its own, or ("causal") the clean tokens before it; and
    clean never looks at noisy. Only what is real (`real_BS`) is looked at, and padding looks at itself as well.
    """
    blocks_BL = positions_BL // block
    order_L = torch.arange(positions_BL.shape[1], device=positions_BL.device)
    until_BLL = (order_L[:, None] >= order_L[None, :])[None]
    own_BLL = blocks_BL[:, :, None] == blocks_BL[:, None, :]
    before_BLL = blocks_BL[:, :, None] > blocks_BL[:, None, :]
    noisy_BLL = own_BLL & until_BLL if noisy == "causal" else own_BLL
    clean_BLL = until_BLL.expand_as(own_BLL) if clean == "causal" else own_BLL | before_BLL
    noisy_BLS = torch.cat([noisy_BLL, before_BLL], dim=2)
    clean_BLS = torch.cat([torch.zeros_like(own_BLL), clean_BLL], dim=2)
    allowed_BSS = torch.cat([noisy_BLS, clean_BLS], dim=1)
    if real_BS is not None:
        own_SS = torch.eye(allowed_BSS.shape[-1], dtype=torch.bool, device=allowed_BSS.device)
        allowed_BSS = (allowed_BSS & real_BS.bool()[:, None, :]) | own_SS
    return allowed_BSS[:, None]


def positions_of(real_BS: torch.Tensor) -> torch.Tensor:
    """[B, S] positions that count real tokens only, so that a padded row is numbered as if it were alone."""
    return (real_BS.long().cumsum(dim=-1) - 1).clamp(min=0)


def for_kernel(mask: torch.Tensor, implementation: str, dtype: torch.dtype) -> torch.Tensor:
    """A 4-D mask, boolean (True: may look) or additive, as the attention implementation honours it.

    Raises DlmBridgeError where the implementation would ignore it.
    """
    if implementation not in ("eager", "sdpa", "dlm_bridge_cached"):
        raise DlmBridgeError(
            f"{implementation} would ignore a 4-D attention_mask: load with attn_implementation='sdpa'"
        )
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise DlmBridgeError(f"a 4-D attention_mask is boolean or additive floating point, not {mask.dtype}")
    if mask.dtype == torch.bool and implementation == "eager":
        additive = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
        return additive.masked_fill_(~mask, torch.finfo(dtype).min)
    return mask

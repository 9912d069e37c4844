"""Attention masks by attention pattern: dense masks and the compact mask descriptor.

A dense mask of S positions has S^2 entries. `MaskDescriptor` describes it with five integers per position: it can be
split over context parallel ranks and gives the dense mask, the predicate of a block-sparse kernel, or the mask of some
queries over all keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Literal

from dlm_bridge.errors import SettingError
from dlm_bridge.lazy_import import LazyModule

if TYPE_CHECKING:
    import torch
else:
    torch = LazyModule("torch", globals())

AttentionPattern = Literal["bidirectional", "block_causal", "causal"]
StreamPattern = Literal["block", "causal"]  # attention pattern of one stream in two-stream training


def block_causal_mask(
    positions_BS: torch.Tensor,
    block: int,
    real_BS: torch.Tensor | None = None,
    documents_BS: torch.Tensor | None = None,
) -> torch.Tensor:
    """Block-causal mask [B, 1, S, S], bool: query q attends to key k if k // block <= q // block and k is not padding.

    Args:
        positions_BS: [B, S] positions, from 0 in each document.
        block: block size.
        real_BS: [B, S], False at padding. Padding attends to itself, so that no softmax row is empty.
        documents_BS: [B, S] document ids of a packed row.
    """
    blocks_BS = positions_BS // block
    allowed_BSS = blocks_BS[:, None, :] <= blocks_BS[:, :, None]
    if documents_BS is not None:
        allowed_BSS = allowed_BSS & (documents_BS[:, None, :] == documents_BS[:, :, None])
    if real_BS is not None:
        allowed_BSS = allowed_BSS & real_BS.bool()[:, None, :]
        allowed_BSS = allowed_BSS | torch.eye(allowed_BSS.shape[-1], dtype=torch.bool, device=allowed_BSS.device)
    return allowed_BSS[:, None]


def causal_mask(real_BS: torch.Tensor, draft_start: int | None = None) -> torch.Tensor:
    """Causal mask [B, 1, S, S], bool, in input order, without padding keys.

    Positions from `draft_start` on, the block being denoised, attend to each other bidirectionally.
    """
    order_S = torch.arange(real_BS.shape[1], device=real_BS.device)
    allowed_SS = order_S[:, None] >= order_S[None, :]
    if draft_start is not None:
        allowed_SS = allowed_SS | ((order_S[:, None] >= draft_start) & (order_S[None, :] >= draft_start))
    own_SS = torch.eye(len(order_S), dtype=torch.bool, device=real_BS.device)
    return ((allowed_SS & real_BS.bool()[:, None, :]) | own_SS)[:, None]


def position_ids_from_padding(real_BS: torch.Tensor) -> torch.Tensor:
    """Position ids [B, S] that skip padding: tokens have the same position as without padding."""
    return (real_BS.long().cumsum(dim=-1) - 1).clamp(min=0)


def mask_for_implementation(mask: torch.Tensor, implementation: str, dtype: torch.dtype) -> torch.Tensor:
    """Convert a 4-D mask, boolean (True: may attend) or additive, to the form that an attention implementation needs.

    Raises SettingError for an implementation that would ignore it, and for a mask of another dtype.
    """
    if implementation not in ("eager", "sdpa", "dlm_bridge_cached"):
        raise SettingError(
            "attn_implementation", f"{implementation} would ignore a 4-D attention mask: load with sdpa"
        )
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise SettingError("attention_mask", f"must be boolean or additive floating point in 4-D, not {mask.dtype}")
    if mask.dtype == torch.bool and implementation == "eager":
        additive = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
        return additive.masked_fill_(~mask, torch.finfo(dtype).min)
    return mask


class MaskColumn(IntEnum):
    """Columns of `MaskDescriptor.codes`."""

    DOCUMENT = 0  # document id; queries attend within their document
    NOISY_BLOCK = 1  # block of a noisy position, to which only noisy queries of the block attend; -1: clean position
    ORDER = 2  # order of a key, compared with the limits of queries
    NOISY_LIMIT = 3  # a query attends to noisy keys of its own block with an order below this
    CLEAN_LIMIT = 4  # a query attends to clean keys with an order below this


UNLIMITED = 2**31 - 1  # the largest int32


@dataclass(frozen=True)
class MaskDescriptor:
    """Query q attends to key k if both are in the same document and k's order is below q's limit for k's stream."""

    codes: torch.Tensor  # [B or 1, S, 5] int32, columns as in `MaskColumn`

    @classmethod
    def bidirectional(cls, documents_BS: torch.Tensor) -> MaskDescriptor:
        """Full attention within each document; see `document_ids` for padding."""
        return cls._of(documents_BS, order=0, clean=1)

    @classmethod
    def causal(cls, documents_BS: torch.Tensor) -> MaskDescriptor:
        """Causal attention within each document."""
        order = _order(documents_BS)
        return cls._of(documents_BS, order=order, clean=order + 1)

    @classmethod
    def block_causal(cls, documents_BS: torch.Tensor, positions_BS: torch.Tensor, block: int) -> MaskDescriptor:
        """Attention to the own and earlier blocks within each document; blocks are given by `positions_BS`."""
        blocks = positions_BS // block
        return cls._of(documents_BS, order=blocks, clean=blocks + 1)

    @classmethod
    def of_pattern(
        cls,
        attention_pattern: str,
        documents_BS: torch.Tensor,
        positions_BS: torch.Tensor | None = None,
        block: int | None = None,
    ) -> MaskDescriptor:
        """A family's attention pattern within each document. Block-causal attention needs a block size; without
        positions each row counts from 0. Raises SettingError for a missing block size."""
        if attention_pattern == "causal":
            return cls.causal(documents_BS)
        if attention_pattern == "bidirectional":
            return cls.bidirectional(documents_BS)
        if block is None or block < 1:
            raise SettingError("block_size", f"must be at least 1 for block-causal attention, not {block}")
        return cls.block_causal(documents_BS, _order(documents_BS) if positions_BS is None else positions_BS, block)

    @classmethod
    def two_streams(
        cls,
        documents_BL: torch.Tensor,
        positions_BL: torch.Tensor,
        block: int,
        noisy: StreamPattern = "block",
        clean: StreamPattern = "block",
        noisy_documents_BL: torch.Tensor | None = None,
    ) -> MaskDescriptor:
        """Mask of two-stream training on [noisy | clean], S = 2 L (BD3-LM, arXiv 2503.09573).

        A noisy position attends to its own block of the noisy stream (with "causal" only up to itself) and to earlier
        clean blocks. A clean position attends to clean blocks up to its own (with "causal" only up to itself).

        Args:
            documents_BL: document ids of the clean stream.
            positions_BL: positions of the clean stream.
            block: block size.
            noisy: pattern of the noisy stream.
            clean: pattern of the clean stream.
            noisy_documents_BL: document ids of a noisy stream with another order within blocks.
        """
        documents_BL, positions_BL = torch.broadcast_tensors(documents_BL, positions_BL)
        blocks, order = positions_BL // block, _order(documents_BL)
        first = order - positions_BL % block  # order of the block's first position
        noisy_half = cls._of(
            documents_BL if noisy_documents_BL is None else noisy_documents_BL,
            order=order,
            clean=first,
            noisy_block=blocks,
            noisy=order + 1 if noisy == "causal" else UNLIMITED,
        )
        clean_half = cls._of(documents_BL, order=order, clean=order + 1 if clean == "causal" else first + block)
        return cls(torch.cat([noisy_half.codes, clean_half.codes], dim=1))

    @classmethod
    def _of(
        cls,
        documents: torch.Tensor,
        order: torch.Tensor | int,
        clean: torch.Tensor | int,
        noisy_block: torch.Tensor | int = -1,
        noisy: torch.Tensor | int = 0,
    ) -> MaskDescriptor:
        columns = [documents, noisy_block, order, noisy, clean]
        tensors = [torch.as_tensor(column, device=documents.device, dtype=torch.int32) for column in columns]
        return cls(torch.stack(torch.broadcast_tensors(*tensors), dim=-1))

    def dense(self, queries: torch.Tensor | None = None) -> torch.Tensor:
        """Dense mask [B or 1, 1, Q, S], bool, of the positions `queries` [Q] or of all positions."""
        rows = self.codes if queries is None else self.codes[:, queries]
        return can_attend(rows[:, :, None], self.codes[:, None])[:, None]

    def to(self, device: torch.device) -> MaskDescriptor:
        return MaskDescriptor(self.codes.to(device, non_blocking=True))


def can_attend(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Boolean [...]: the query attends to the key, by their codes [..., 5], which broadcast."""
    return can_attend_by_columns(query.unbind(-1), key.unbind(-1))


def can_attend_by_columns(query: Sequence[torch.Tensor], key: Sequence[torch.Tensor]) -> torch.Tensor:
    """`can_attend` with one tensor per column in the order of `MaskColumn`, for compiled kernels."""
    query_document, query_block, _, noisy_limit, clean_limit = query
    key_document, key_block, order, _, _ = key
    noisy = (query_block == key_block) & (order < noisy_limit)
    return (query_document == key_document) & torch.where(key_block >= 0, noisy, order < clean_limit)


def document_ids(real_BS: torch.Tensor, documents_BS: torch.Tensor | None = None) -> torch.Tensor:
    """Document ids [B, S] for `MaskDescriptor`, counted from 0.

    Each padding position is a separate document: it attends to itself, so that no softmax row is empty, and no other
    position attends to it.
    """
    documents = torch.zeros_like(real_BS, dtype=torch.int32) if documents_BS is None else documents_BS.int()
    padding = -1 - torch.arange(real_BS.shape[-1], device=real_BS.device, dtype=torch.int32)
    return torch.where(real_BS.bool(), documents, padding)


def _order(documents_BS: torch.Tensor) -> torch.Tensor:
    return torch.arange(documents_BS.shape[-1], device=documents_BS.device, dtype=torch.int32)[None]

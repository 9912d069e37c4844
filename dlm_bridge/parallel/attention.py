"""Attention masks of the Megatron engine: mask descriptors, and their forms for the attention kernels."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from functools import cache, lru_cache
from typing import Any

import torch

from dlm_bridge.attention.masks import MaskColumn, MaskDescriptor, can_attend, can_attend_by_columns, document_ids
from dlm_bridge.convert.checkpoint import Checkpoint
from dlm_bridge.errors import SettingError
from dlm_bridge.parallel.batch import rank_positions
from dlm_bridge.parallel.core import AttnMaskType

# Attention pattern of a call without a mask, for the layer spec.
MASK_TYPES = {
    "bidirectional": AttnMaskType.no_mask,
    "causal": AttnMaskType.causal,
    "block_causal": AttnMaskType.arbitrary,
}


def attention_mask(
    attention_pattern: str,
    position_ids_BS: torch.Tensor,
    block_size: int | None = None,
    real_BS: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """The `attention_mask` of a forward pass: a mask descriptor [B or 1, S, 5], which replaces the layers' mask type,
    or None if the mask type is sufficient.

    Args:
        position_ids_BS: positions, from 0 in each row.
        block_size: of block-causal attention; `block_size(checkpoint)` returns a model's.
        real_BS: False at padding, which attends only to itself.

    Raises SettingError for an attention pattern that the engine lacks, and for a missing block size.
    """
    check_attention_pattern(attention_pattern)
    if attention_pattern != "block_causal" and real_BS is None:
        return None
    documents = document_ids(torch.ones_like(position_ids_BS, dtype=torch.bool) if real_BS is None else real_BS)
    return MaskDescriptor.of_pattern(attention_pattern, documents, position_ids_BS, block_size).codes


def check_attention_pattern(attention_pattern: str) -> None:
    """Raise SettingError for an attention pattern that the engine lacks."""
    if attention_pattern not in MASK_TYPES:
        raise SettingError("engine", f"megatron lacks {attention_pattern} attention: it has {', '.join(MASK_TYPES)}")


def block_size(checkpoint: Checkpoint) -> int | None:
    """Block size of a block-causal model, from its config or its family's default; None for other patterns."""
    if checkpoint.family.attention_pattern != "block_causal":
        return None
    return int(checkpoint.family.load("config_class").from_dict(checkpoint.config).block_size)


CACHED_MICRO_BATCHES = 16  # with more micro-batches in flight in a pipeline, masks are built again


class MaskCache:
    """LRU cache of masks built from a tensor, keyed by the tensor's memory.

    Recomputation passes detached tensors to the layers, and a pipeline has several micro-batches in flight. An entry
    keeps a reference to its tensor, so that the memory is not reused; an in-place write invalidates the entry.
    """

    def __init__(self, kept: int = CACHED_MICRO_BATCHES) -> None:
        self._kept = kept
        self._entries: OrderedDict[Hashable, tuple[torch.Tensor, Any]] = OrderedDict()

    def get(self, source: torch.Tensor, kind: Hashable, make: Callable[[torch.Tensor], Any]) -> Any:
        """Return `make(source)`, cached for the same memory and `kind`."""
        version = None if source.is_inference() else source._version
        key = (source.data_ptr(), source.device, tuple(source.shape), source.stride(), version, kind)
        if key not in self._entries:
            self._entries[key] = (source, make(source))
            if len(self._entries) > self._kept:
                self._entries.popitem(last=False)
        self._entries.move_to_end(key)
        return self._entries[key][1]

    def clear(self) -> None:
        """Remove all entries."""
        self._entries.clear()

    def __len__(self) -> int:
        return len(self._entries)


def dense_mask(mask: torch.Tensor, rank: int, queries: int, window: int | None = None) -> torch.Tensor:
    """[B or 1, 1, Q, K] bool, True where a query attends: the `queries` of one context parallel rank over all keys,
    from a descriptor [B or 1, K, 5] or a dense mask [B or 1, 1, K, K] in rank order. `window` as in `block_mask`.
    Raises SettingError for a window with a mask that is not a causal descriptor."""
    mine = slice(rank * queries, (rank + 1) * queries)
    if window is not None:
        _check_windowed(mask)
    if mask.dim() == 4:
        return mask[:, :, mine]
    seen = can_attend(mask[:, mine, None], mask[:, None])
    if window is not None:
        order = mask[..., MaskColumn.ORDER]
        seen &= order[:, mine, None] - order[:, None] <= window
    return seen[:, None]


def _check_windowed(mask: torch.Tensor) -> None:
    """Raise SettingError for a mask without the order of causal documents, by which a sliding window is measured."""
    if mask.dim() == 3:
        order = mask[..., MaskColumn.ORDER]
        causal = (mask[..., MaskColumn.NOISY_BLOCK] < 0) & (mask[..., MaskColumn.CLEAN_LIMIT] == order + 1)
        if bool(causal.all() & (order.sort(dim=-1).values.diff(dim=-1) == 1).all()):
            return
    raise SettingError("attention_mask", "would ignore the sliding window: pass None, or a causal descriptor")


def block_mask(descriptor: torch.Tensor, rank: int, queries: int, window: int | None = None) -> Any:
    """FlexAttention's `BlockMask` of the queries of one context parallel rank over all keys. A query attends to at
    most `window` positions before it; None for no limit. Raises SettingError for a window unless the descriptor is
    causal."""
    from torch.nn.attention.flex_attention import create_block_mask

    if window is not None:
        _check_windowed(descriptor)
    rows, keys, _ = descriptor.shape
    batch = None if rows == 1 else rows
    # Eager mode would materialise the dense mask and every term of the rule.
    make = _compiled_create_block_mask() if descriptor.is_cuda else create_block_mask
    return make(mask_mod(descriptor, rank * queries, window), batch, None, queries, keys, device=descriptor.device)


def mask_mod(descriptor: torch.Tensor, first_query: int, window: int | None = None) -> Callable[..., torch.Tensor]:
    """FlexAttention's `mask_mod`: (batch, head, query, key) -> bool. Query 0 is at position `first_query`; a query
    attends to at most `window` positions before it."""
    columns = descriptor.permute(2, 0, 1).contiguous().unbind(0)  # the kernel reads scalars
    if window is not None:
        seen, order, shared_row = mask_mod(descriptor, first_query), columns[MaskColumn.ORDER], len(descriptor) == 1

        def of_window(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
            row = order[0] if shared_row else order[b]
            return seen(b, h, q, k) & (row[q + first_query] - row[k] <= window)

        return of_window
    if descriptor.shape[0] == 1:
        shared = tuple(column[0] for column in columns)

        def of_all_rows(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
            query = q + first_query
            return can_attend_by_columns([column[query] for column in shared], [column[k] for column in shared])

        return of_all_rows

    def of_each_row(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        query = q + first_query
        return can_attend_by_columns([column[b, query] for column in columns], [column[b, k] for column in columns])

    return of_each_row


@lru_cache(maxsize=8)
def plain_mask(
    queries: int, rank: int, ranks: int, window: tuple[int, int] | None, device: torch.device
) -> torch.Tensor:
    """[1, 1, Q, K] bool mask of causal attention for the queries of one rank, in the order in which Transformer Engine
    assigns positions to context parallel ranks. `window`: number of positions back and ahead that a query attends
    to."""
    order = rank_positions(queries * ranks, ranks).to(device)
    back = order[rank][:, None] - order.flatten()[None]
    seen = back >= 0
    if window is not None:
        seen &= (back <= window[0]) & (back >= -window[1])
    return seen[None, None]


@lru_cache(maxsize=8)
def causal_descriptor(length: int, ranks: int, device: torch.device) -> torch.Tensor:
    """[1, S, 5] mask descriptor of causal attention over a whole row, in the order in which Transformer Engine assigns
    positions to context parallel ranks."""
    descriptor = MaskDescriptor.causal(torch.zeros(1, length, dtype=torch.int32)).codes
    return descriptor[:, rank_positions(length, ranks).flatten()].to(device)


@cache
def _compiled_create_block_mask() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import create_block_mask

    return torch.compile(create_block_mask, dynamic=False)

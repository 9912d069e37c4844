"""Masks of one micro-batch in the form that an attention kernel takes, built once and not once a layer."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from functools import cache, lru_cache
from typing import Any

import torch

from dlm_bridge.models.visibility import allowed, allowed_by_columns
from dlm_bridge.parallel.batch import rank_positions

KEPT = 16  # micro-batches whose masks are kept; what a pipeline has in flight beyond that is built again


class MaskCache:
    """What was made of a tensor, found again by whoever has the tensor or a view of the same memory.

    Recomputation hands detached tensors to the layers, and a pipeline has several micro-batches in flight. An entry
    holds its tensor, so that no other can take its memory; writing into the tensor makes the entry void.
    """

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self._entries: OrderedDict[Hashable, tuple[torch.Tensor, Any]] = OrderedDict()

    def get(self, source: torch.Tensor, kind: Hashable, make: Callable[[torch.Tensor], Any]) -> Any:
        """`make(source)`, or what it made before of the same memory for the same `kind`."""
        version = None if source.is_inference() else source._version
        key = (source.data_ptr(), source.device, tuple(source.shape), source.stride(), version, kind)
        if key not in self._entries:
            self._entries[key] = (source, make(source))
            if len(self._entries) > self._kept:
                self._entries.popitem(last=False)
        self._entries.move_to_end(key)
        return self._entries[key][1]

    def clear(self) -> None:
        """Let go of every tensor."""
        self._entries.clear()

    def __len__(self) -> int:
        return len(self._entries)


def dense_mask(mask: torch.Tensor, rank: int, queries: int) -> torch.Tensor:
    """[B or 1, 1, Q, K] bool, True where a query may look: the `queries` of one context parallel rank over all keys,
    of codes [B or 1, K, 5] or of a dense mask [B or 1, 1, K, K] in rank order."""
    mine = slice(rank * queries, (rank + 1) * queries)
    if mask.dim() == 4:
        return mask[:, :, mine]
    return allowed(mask[:, mine, None], mask[:, None])[:, None]


def block_mask(codes: torch.Tensor, rank: int, queries: int) -> Any:
    """FlexAttention's `BlockMask` of the queries of one context parallel rank over all keys."""
    from torch.nn.attention.flex_attention import create_block_mask

    rows, keys, _ = codes.shape
    batch = None if rows == 1 else rows
    # Eagerly it would write out the dense mask and every term of the rule.
    make = _compiled_create_block_mask() if codes.is_cuda else create_block_mask
    return make(mask_mod(codes, rank * queries), batch, None, queries, keys, device=codes.device)


def mask_mod(codes: torch.Tensor, first_query: int) -> Callable[..., torch.Tensor]:
    """The rule as FlexAttention asks it: (batch, head, query, key) -> bool, where query 0 is at `first_query`."""
    columns = codes.permute(2, 0, 1).contiguous().unbind(0)  # a kernel reads single numbers
    if codes.shape[0] == 1:
        shared = tuple(column[0] for column in columns)

        def of_all_rows(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
            query = q + first_query
            return allowed_by_columns([column[query] for column in shared], [column[k] for column in shared])

        return of_all_rows

    def of_each_row(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        query = q + first_query
        return allowed_by_columns([column[b, query] for column in columns], [column[b, k] for column in columns])

    return of_each_row


@lru_cache(maxsize=8)
def plain_mask(
    queries: int, rank: int, ranks: int, window: tuple[int, int] | None, device: torch.device
) -> torch.Tensor:
    """[1, 1, Q, K] bool of causal attention without codes: the queries of a rank, in the order in which Transformer
    Engine deals positions to context parallel ranks. `window`: how far back and ahead a query may look."""
    order = rank_positions(queries * ranks, ranks).to(device)
    back = order[rank][:, None] - order.flatten()[None]
    seen = back >= 0
    if window is not None:
        seen &= (back <= window[0]) & (back >= -window[1])
    return seen[None, None]


@cache
def _compiled_create_block_mask() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import create_block_mask

    return torch.compile(create_block_mask, dynamic=False)

"""Variable-length attention: rows of different lengths without their padding.

The real tokens of a padded batch [A, Q] are packed into one row [1, T]. Linear layers, norms and experts process
tokens independently and skip the padding; attention receives the offsets of the rows. With a KV cache, a row's queries
attend to its own number of cached columns.

Attention runs `torch.nn.attention.varlen` on CUDA devices in half precision. Otherwise, rows are padded for attention;
by default, they are not packed then (`runner.supports_packing`).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

MAX_HEAD_SIZE = 256  # limit of the kernel


@dataclass(frozen=True)
class Packing:
    """Description of the padding of a view [A, Q], so that its rows can run without it."""

    real: torch.Tensor  # [A, Q], False at padding
    lengths: tuple[int, ...]  # number of real columns of each row
    # With a KV cache, number of columns that each row attends to, by the view's mask [A, K]; None: the view's own.
    attended: tuple[int, ...] | None = None
    # [A, Q] block indices: a query attends to its own block and those of lower index. None: to all columns.
    blocks: torch.Tensor | None = None
    causal: bool = False  # a query attends to its own token and those before it

    def repeat(self, copies: int) -> Packing:
        """Packing of `copies` copies of the rows, one after the other."""
        return replace(
            self,
            real=self.real.repeat(copies, 1),
            lengths=self.lengths * copies,
            attended=None if self.attended is None else self.attended * copies,
            blocks=None if self.blocks is None else self.blocks.repeat(copies, 1),
        )

    def from_column(self, first: int) -> Packing:
        """Drop the columns before `first`, which are padding in all rows."""
        blocks = None if self.blocks is None else self.blocks[:, first:]
        return replace(self, real=self.real[:, first:], blocks=blocks)


@dataclass(frozen=True)
class PackedTokens:
    """Indices of the T real tokens of a view of A rows and Q columns in packed order."""

    source: torch.Tensor  # [T], indices in the flattened view
    place: torch.Tensor  # [A, Q], inverse of `source`; arbitrary at padding
    cu_seqlens: torch.Tensor  # [A + 1] int32, row i has the packed tokens from entry i to entry i + 1
    max_seqlen: int  # maximum length of a row

    @classmethod
    def of(cls, real_AQ: torch.Tensor, lengths: Sequence[int]) -> PackedTokens:
        """Pack the positions at which `real_AQ` is True. `lengths`: their number per row, which avoids a device
        sync."""
        total = sum(lengths)
        real = real_AQ.bool().flatten()
        place = real.long().cumsum(0) - 1
        source = torch.empty(total + 1, dtype=torch.long, device=real.device)
        source.scatter_(0, torch.where(real, place, total), torch.arange(len(real), device=real.device))
        ends = real_AQ.bool().sum(dim=1).cumsum(0)
        return cls(
            source[:total], place.clamp(min=0).view(real_AQ.shape), pad(ends, (1, 0)).int(), max(lengths, default=0)
        )

    def pack(self, values_AQ: torch.Tensor) -> torch.Tensor:
        """[1, T], values at the real tokens."""
        return values_AQ.flatten()[self.source][None]


def packed_shape(tokens: int, longest: int) -> tuple[int, int]:
    """(tokens, longest row) of the recorded forward pass for this number of tokens.

    There are 16 sizes per doubling, so that batches share graphs with at most 1/16 more tokens. The added tokens are
    not longer than the longest row.
    """
    step = max(64, (1 << (tokens - 1).bit_length()) // 32)
    return -(-tokens // step) * step, max(128, 1 << (max(longest, step) - 1).bit_length())


def padded_cu_seqlens(cu_seqlens: torch.Tensor, rows: int, tokens: int) -> torch.Tensor:
    """[rows + 2], padded with empty rows, and a last row of padding up to `tokens`."""
    empty = cu_seqlens[-1:].expand(rows + 1 - len(cu_seqlens))
    return torch.cat([cu_seqlens, empty, cu_seqlens.new_full((1,), tokens)])


@functools.cache
def varlen_attention() -> Callable[..., Any] | None:
    """PyTorch's function, with grouped queries; None if it does not exist."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:  # from torch 2.12 on
        return functools.partial(varlen_attn, enable_gqa=True)
    return varlen_attn


@torch.library.custom_op("dlm_bridge::attend_packed", mutates_args=())
def attend_packed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    scaling: float | None,
    window: int | None,
    blocks: torch.Tensor | None = None,
    causal: bool = False,
) -> torch.Tensor:
    """Attention within each packed row, [1, T, heads, D].

    This is one operator, so that compiled layers do not depend on its implementation.

    Args:
        query, key, value: [1, heads, T, D], and twice [1, KV heads, T, D].
        cu_seqlens, max_seqlen: see `PackedTokens`; the last row may be padding.
        window: a query attends only to keys at a distance below this, on either side.
        blocks: [1, T], see `Packing`. The kernel has no such mask, so rows are padded. (Combining three passes of the
            kernel takes 1.5 to 4 ms, attention over padded rows 0.3 ms: H100, 64 rows of 40 to 240 tokens, 32 heads,
            blocks of 32 and 4.)
        causal: a query attends to its own token and earlier ones.
    """
    kernel = _kernel_for(query)
    if kernel is None or blocks is not None:
        return attend_padded(query, key, value, cu_seqlens, max_seqlen, scaling, window, blocks, causal)
    near = -1 if window is None else window - 1
    packed = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    sides = (near, 0 if causal else near)
    output: torch.Tensor = kernel(
        *packed, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, scale=scaling, window_size=sides
    )
    return output[None].contiguous()


@attend_packed.register_fake
def _(query: Any, key: Any, value: Any, *_: Any) -> Any:
    batch, heads, width, _size = query.shape
    return query.new_empty(batch, width, heads, value.shape[-1])


def attend_padded(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    scaling: float | None,
    window: int | None,
    blocks: torch.Tensor | None = None,
    causal: bool = False,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_k: int | None = None,
) -> torch.Tensor:
    """`attend_packed` with PyTorch's attention over rows padded on the right. With `cu_seqlens_k` and `max_seqlen_k`,
    each row has separate keys, to all of which it attends."""
    source_AQ, _ = _padded_rows(cu_seqlens, max_seqlen, query.shape[2])
    if cu_seqlens_k is None or max_seqlen_k is None:
        cu_seqlens_k, max_seqlen_k = cu_seqlens, max_seqlen
    source_AK, real_AK = _padded_rows(cu_seqlens_k, max_seqlen_k, key.shape[2])
    shared = query.shape[1] // key.shape[1]
    # Copies whole tokens with all their heads.
    query_AHQD, key_AHKD, value_AHKD = (
        tensor[0].transpose(0, 1)[source].transpose(1, 2)
        for tensor, source in ((query, source_AQ), (key, source_AK), (value, source_AK))
    )
    if shared > 1:
        key_AHKD, value_AHKD = (tensor.repeat_interleave(shared, dim=1) for tensor in (key_AHKD, value_AHKD))
    places_K = torch.arange(max_seqlen_k, device=query.device)
    mask = (real_AK | (places_K == 0))[:, None, None, :]  # empty rows must attend to a column
    if window is not None:
        mask = mask & ((places_K[:, None] - places_K).abs() < window)
    if blocks is not None:
        block_AK = blocks[0, source_AK]
        mask = mask & (block_AK[:, None, None, :] <= block_AK[:, None, :, None])
    if causal:
        mask = mask & (places_K[:, None] >= places_K)
    output_AHLD = scaled_dot_product_attention(query_AHQD, key_AHKD, value_AHKD, attn_mask=mask, scale=scaling)
    token_T = torch.arange(query.shape[2], device=query.device)
    row_T = torch.searchsorted(cu_seqlens[1:].contiguous(), token_T.int(), right=True)
    output: torch.Tensor = output_AHLD[row_T, :, token_T - cu_seqlens[row_T]]
    return output[None].contiguous()


def _padded_rows(cu_seqlens: torch.Tensor, longest: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[A, L], indices of the packed tokens of each row, and False at padding."""
    source_AL = cu_seqlens[:-1, None] + torch.arange(longest, device=cu_seqlens.device)
    return source_AL.clamp(max=tokens - 1), source_AL < cu_seqlens[1:, None]


@torch.library.custom_op("dlm_bridge::attend_packed_cached", mutates_args=("key_cache", "value_cache"))
def attend_packed_cached(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    columns: torch.Tensor,
    attended: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_k: int,
    scaling: float | None,
) -> torch.Tensor:
    """Store packed keys and values with `write_packed`, then compute attention to each row's cached columns.

    Args:
        attended: [1, K], attended cached columns, row by row, as row * width + column.
        cu_seqlens, max_seqlen: for the queries, see `PackedTokens`.
        cu_seqlens_k, max_seqlen_k: for the attended columns.

    Returns:
        [1, T, heads, D].
    """
    write_packed(key, value, key_cache, value_cache, columns)
    width = key_cache.shape[2]
    rows_K, columns_K = attended[0] // width, attended[0] % width
    keys_KGD, values_KGD = (cache.transpose(1, 2)[rows_K, columns_K] for cache in (key_cache, value_cache))
    kernel = _kernel_for(query)
    if kernel is None:
        keys, values = keys_KGD.transpose(0, 1)[None], values_KGD.transpose(0, 1)[None]
        return attend_padded(
            query, keys, values, cu_seqlens, max_seqlen, scaling, None, None, False, cu_seqlens_k, max_seqlen_k
        )
    query_THD = query[0].transpose(0, 1)
    lengths = (cu_seqlens, cu_seqlens_k, max_seqlen, max_seqlen_k)
    output: torch.Tensor = kernel(query_THD, keys_KGD, values_KGD, *lengths, scale=scaling)
    return output[None].contiguous()


@attend_packed_cached.register_fake
def _(query: Any, key: Any, value: Any, *_: Any) -> Any:
    batch, heads, width, _size = query.shape
    return query.new_empty(batch, width, heads, value.shape[-1])


def _kernel_for(query: torch.Tensor) -> Callable[..., Any] | None:
    return varlen_attention() if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) else None


@torch.library.custom_op("dlm_bridge::write_packed", mutates_args=("key_cache", "value_cache"))
def write_packed(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    columns: torch.Tensor,
) -> None:
    """Store packed keys and values [1, KV heads, T, D] in a layer's buffers [rows, KV heads, width, D].

    Args:
        columns: [1, T], row * width + column.
    """
    width = key_cache.shape[2]
    rows_T, columns_T = columns[0] // width, columns[0] % width
    for cache, new in ((key_cache, key), (value_cache, value)):
        cache.transpose(1, 2).index_put_((rows_T, columns_T), new[0].transpose(0, 1))


@write_packed.register_fake
def _(*_: Any) -> None:
    return None

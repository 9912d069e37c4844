"""Attention over the KV cache: a transformers attention function on a layer's static buffers."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

NAME = "dlm_bridge_cached"


def register() -> None:
    """Make the function known to transformers as the attention implementation `NAME`.

    No mask function is registered with it: the model's body then takes a 4-D mask as it is, and makes none itself.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attend)


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    kv_columns: torch.Tensor | None = None,
    kv_end: int | None = None,
    kv_ends: torch.Tensor | None = None,
    kv_block: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface; every query sees every key that the mask allows, by default all.

    Args:
        query, key, value: [B, heads, Q, D], [B, groups, Q, D] twice, turned by their positions already.
        attention_mask: [B, 1, Q or 1, K] boolean, True: may look.
        kv_columns: [Q] or, of each row its own, [B, Q]: where keys and values are kept in the layer's buffers. None:
            nothing is kept.
        kv_end, kv_ends, kv_block: which of the buffers' columns are looked at; see `attend_kept`.

    Returns:
        [B, Q, heads, D].
    """
    if kv_columns is None:
        return _attention(query, key, value, attention_mask, scaling).transpose(1, 2).contiguous(), None
    output = torch.ops.dlm_bridge.attend_kept(
        query,
        key,
        value,
        module.kv_keys,
        module.kv_values,
        kv_columns,
        kv_end,
        attention_mask,
        scaling,
        kv_ends,
        kv_block,
    )
    return output, None


def uses_kernel(
    shapes: Iterable[tuple[int, int]], dtype: torch.dtype, columns: torch.Tensor, mask: torch.Tensor | None
) -> bool:
    """Whether layers of these shapes (query heads that share keys, head size) attend by `kernel` to what is kept."""
    kernel = _kernel(columns.device.type) if columns.dim() == 1 else None
    return kernel is not None and all(
        kernel.serves(dtype, len(columns), shared, size, mask) for shared, size in shapes
    )


@torch.library.custom_op("dlm_bridge::attend_kept", mutates_args=("kept_keys", "kept_values"))
def attend_cached(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    kept_keys: torch.Tensor,
    kept_values: torch.Tensor,
    columns: torch.Tensor,
    end: int,
    mask: torch.Tensor | None,
    scaling: float | None,
    ends: torch.Tensor | None,
    block: int | None,
) -> torch.Tensor:
    """Keep `key` and `value` at their columns, then attend to the first `end` columns of what is kept.

    One operator, so that a compiled layer updates the buffers in place instead of copying them. On a CUDA device with
    Triton a few queries attend in place (`kernel`), else PyTorch's attention does it.

    Args:
        ends: [1], how many of those columns there are, where that is known on the device alone: a recorded forward
            then serves every length. The mask has `end` columns all the same.
        block: of the new columns, which are then the last ones, a query sees its own block of so many and those
            before it, as if the blocks were run one after the other. None: it sees all of them.
    """
    kernel = _kernel(query.device.type) if columns.dim() == 1 else None
    shared, width, size = query.shape[1] // key.shape[1], query.shape[2], query.shape[3]
    attend = attend_torch
    if kernel is not None and kernel.serves(query.dtype, width, shared, size, mask):
        attend = kernel.attend
    return attend(query, key, value, kept_keys, kept_values, columns, end, mask, scaling, ends, block)


@attend_cached.register_fake
def _(query: Any, *_: Any) -> Any:
    batch, heads, width, size = query.shape
    return query.new_empty(batch, width, heads, size)


def attend_torch(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    kept_keys: torch.Tensor,
    kept_values: torch.Tensor,
    columns: torch.Tensor,
    end: int,
    mask: torch.Tensor | None,
    scaling: float | None,
    ends: torch.Tensor | None,
    block: int | None,
) -> torch.Tensor:
    """`attend_kept` by PyTorch's attention."""
    width = query.shape[2]
    if columns.dim() == 1:
        kept_keys.index_copy_(2, columns, key)
        kept_values.index_copy_(2, columns, value)
    else:
        places = columns[:, None, :, None].expand_as(key)
        kept_keys.scatter_(2, places, key)
        kept_values.scatter_(2, places, value)
    keys, values = kept_keys[:, :, :end], kept_values[:, :, :end]
    if block == 1 and ends is None:  # causal: one product with a mask, not one for each column
        ends = columns.new_full((1,), end)
    if ends is not None:
        mask, block = _until(columns, end, ends, block, mask), None
    parts = []
    for first in range(0, width, block or width):  # no query of a part sees what another of it does not
        stop = min(first + (block or width), width)
        seen = end - (width - stop)
        own = mask if mask is None else mask[..., first:stop, :seen] if mask.shape[2] > 1 else mask[..., :seen]
        parts.append(_attention(query[:, :, first:stop], keys[:, :, :seen], values[:, :, :seen], own, scaling))
    output = parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
    return output.transpose(1, 2).contiguous()


def _until(
    columns: torch.Tensor, end: int, ends: torch.Tensor, block: int | None, mask: torch.Tensor | None
) -> torch.Tensor:
    """[B or 1, 1, Q or 1, end], the mask with what the queries see by `ends` and their blocks."""
    limit_Q = ends
    if block is not None:
        own_Q = torch.arange(len(columns), device=columns.device) // block
        limit_Q = torch.minimum(ends, columns[0] + (own_Q + 1) * block)
    seen_QK = torch.arange(end, device=columns.device) < limit_Q[:, None]
    return seen_QK[None, None] if mask is None else seen_QK & mask


@functools.cache
def _kernel(device: str) -> ModuleType | None:
    """The module of the Triton kernels. None where there is no Triton, or none for such a device."""
    if device != "cuda":
        return None
    try:
        from dlm_bridge.generation.runtime import triton_kernels
    except ImportError:
        return None
    return triton_kernels


def _attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scaling: float | None
) -> torch.Tensor:
    """[B, heads, Q, D]. Query heads that share keys become one head of more rows where all rows see the same, so that
    keys and values are read once and not copied out for each head."""
    batch, heads, width, size = query.shape
    groups = key.shape[1]
    if heads == groups:
        return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)
    if mask is None or mask.shape[2] == 1:
        rows = query.reshape(batch, groups, heads // groups * width, size)
        output = scaled_dot_product_attention(rows, key, value, attn_mask=mask, scale=scaling)
        return output.reshape(batch, heads, width, size)
    key = key.repeat_interleave(heads // groups, dim=1)
    value = value.repeat_interleave(heads // groups, dim=1)
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)

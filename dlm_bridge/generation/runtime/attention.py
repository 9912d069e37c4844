"""Attention over the KV cache: a transformers attention function on a layer's static buffers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from dlm_bridge.generation.kv_cache import StaticKVCache
from dlm_bridge.generation.runtime.varlen import attend_packed, attend_packed_cached, write_packed
from dlm_bridge.registration import find_kernels

NAME = "dlm_bridge_cached"


def register() -> None:
    """Register `attend` with transformers as the attention implementation `NAME`.

    No mask function is registered: the model's body then takes a 4-D mask as it is, and makes none itself.
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
    kv_length: torch.Tensor | None = None,
    kv_block: int | None = None,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    packed_blocks: torch.Tensor | None = None,
    packed_causal: bool = False,
    kv_attended: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_k: int | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention function in transformers' interface; not causal by itself.

    Args:
        query, key, value: [B, heads, Q, D], and twice [B, KV heads, Q, D], after rotary embedding.
        attention_mask: [B, 1, Q or 1, K] boolean, True: attended to. None: all keys are.
        kv_columns: [Q] or [B, Q], cache columns of keys and values. None: no cache.
        kv_end, kv_length, kv_block: attended cache columns, see `attend_cached`.
        cu_seqlens, max_seqlen, packed_blocks, packed_causal: for packed rows, see `varlen.attend_packed`; `kv_columns`
            is then the argument of `write_packed`.
        kv_attended, cu_seqlens_k, max_seqlen_k: cached columns that packed rows attend to, see
            `varlen.attend_packed_cached`.
        sliding_window: a query attends only to keys at a distance below this, on either side.
        softcap: soft limit of the absolute scores.
        s_aux: [heads], attention sinks: an additional score in each softmax, without a value.

    Returns:
        [B, Q, heads, D].
    """
    if cu_seqlens is not None:
        assert max_seqlen is not None
        assert softcap is None
        assert s_aux is None
        if kv_attended is not None:
            assert kv_columns is not None
            assert cu_seqlens_k is not None
            assert max_seqlen_k is not None
            assert sliding_window is None
            caches = (module.kv_keys, module.kv_values)
            lengths = (cu_seqlens, max_seqlen, cu_seqlens_k, max_seqlen_k)
            return attend_packed_cached(query, key, value, *caches, kv_columns, kv_attended, *lengths, scaling), None
        if kv_columns is not None:
            write_packed(key, value, module.kv_keys, module.kv_values, kv_columns)
        rows = (cu_seqlens, max_seqlen)
        return attend_packed(query, key, value, *rows, scaling, sliding_window, packed_blocks, packed_causal), None
    if sliding_window is not None or softcap is not None or s_aux is not None:
        limits: dict[str, Any] = {"columns": kv_columns, "end": kv_end, "length": kv_length, "block": kv_block}
        changes = (sliding_window, softcap, s_aux)
        return _changed(module, query, key, value, attention_mask, scaling, *changes, **limits), None
    if kv_columns is None:
        return _attention(query, key, value, attention_mask, scaling).transpose(1, 2).contiguous(), None
    keys, values = module.kv_keys, module.kv_values
    output = torch.ops.dlm_bridge.attend_cached(
        query, key, value, keys, values, kv_columns, kv_end, attention_mask, scaling, kv_length, kv_block
    )
    return output, None


def uses_kernel(
    shapes: Iterable[tuple[int, int]], dtype: torch.dtype, columns: torch.Tensor, mask: torch.Tensor | None
) -> bool:
    """True if layers of these shapes (query heads per KV head, head size) run a kernel of an extension."""
    kernel = find_kernels("attention", columns.device.type)
    return kernel is not None and all(
        kernel.supports_attention(dtype, columns.shape[-1], shared, size, mask) for shared, size in shapes
    )


def _changed(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    columns: torch.Tensor | None,
    end: int | None,
    length: torch.Tensor | None,
    block: int | None,
) -> torch.Tensor:
    """[B, Q, heads, D], `attend` with a sliding window, capped scores or sinks, by one dense mask."""
    if columns is None:
        columns = torch.arange(query.shape[2], device=query.device)
    else:
        StaticKVCache.write(module.kv_keys, columns, key)
        StaticKVCache.write(module.kv_values, columns, value)
        assert end is not None
        key, value = StaticKVCache.read(module.kv_keys, end), StaticKVCache.read(module.kv_values, end)
        if block is not None or length is not None:
            mask = _masked_until(columns, end, columns.new_full((1,), end) if length is None else length, block, mask)
    if window is not None:
        keys_K = torch.arange(key.shape[2], device=query.device)
        near = ((columns[..., :, None] - keys_K).abs() < window).unsqueeze(-3)
        mask = near if mask is None else mask & near
        if mask.dim() == 3:
            mask = mask[None]
    if softcap is None and sinks is None:
        return _attention(query, key, value, mask, scaling).transpose(1, 2).contiguous()
    shared = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(shared, dim=1), value.repeat_interleave(shared, dim=1)
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    keys = scores.shape[-1]
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(*scores.shape[:-1], 1)], dim=-1)
    weights = scores.softmax(-1, dtype=torch.float32).to(query.dtype)[..., :keys]
    return (weights @ value).transpose(1, 2).contiguous()


@torch.library.custom_op("dlm_bridge::attend_cached", mutates_args=("key_cache", "value_cache"))
def attend_cached(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    columns: torch.Tensor,
    end: int,
    mask: torch.Tensor | None,
    scaling: float | None,
    length: torch.Tensor | None,
    block: int | None,
) -> torch.Tensor:
    """Write `key` and `value` to the cache at their columns, then attend to the cache's first `end` columns.

    One operator, so that a compiled layer updates the buffers in place instead of copying them. Where an extension has
    a kernel that reads the cache in place, a few queries run it; otherwise PyTorch's attention runs.

    Args:
        length: [1], the number of those columns as a tensor on the device, so that a recorded graph serves every
            context length. The mask has `end` columns all the same.
        block: attention among the new columns, which are then the last ones that a row attends to, is block-causal in
            blocks of this length, as if the blocks were run one after the other. None: the new columns all attend to
            each other.
    """
    kernel = find_kernels("attention", query.device.type)
    shared, width, size = query.shape[1] // key.shape[1], query.shape[2], query.shape[3]
    attend = attend_torch
    same = value.shape[-1] == size  # latent attention has narrower values
    if kernel is not None and same and kernel.supports_attention(query.dtype, width, shared, size, mask):
        attend = kernel.attend
    return attend(query, key, value, key_cache, value_cache, columns, end, mask, scaling, length, block)


@attend_cached.register_fake
def _(query: Any, key: Any, value: Any, *_: Any) -> Any:
    batch, heads, width, _size = query.shape
    return query.new_empty(batch, width, heads, value.shape[-1])


def attend_torch(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    columns: torch.Tensor,
    end: int,
    mask: torch.Tensor | None,
    scaling: float | None,
    length: torch.Tensor | None,
    block: int | None,
) -> torch.Tensor:
    """`attend_cached` with PyTorch's attention."""
    width = query.shape[2]
    StaticKVCache.write(key_cache, columns, key)
    StaticKVCache.write(value_cache, columns, value)
    keys, values = StaticKVCache.read(key_cache, end), StaticKVCache.read(value_cache, end)
    # Causal attention, or rows in their own columns: one product with a mask instead of one per block.
    if length is None and (block == 1 or (block is not None and columns.dim() == 2)):
        length = columns.new_full((1,), end)
    if length is not None:
        mask, block = _masked_until(columns, end, length, block, mask), None
    parts = []
    for first in range(0, width, block or width):  # all queries of a part attend to the same columns
        stop = min(first + (block or width), width)
        seen = end - (width - stop)
        own = mask if mask is None else mask[..., first:stop, :seen] if mask.shape[2] > 1 else mask[..., :seen]
        parts.append(_attention(query[:, :, first:stop], keys[:, :, :seen], values[:, :, :seen], own, scaling))
    output = parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
    return output.transpose(1, 2).contiguous()


def _masked_until(
    columns: torch.Tensor, end: int, length: torch.Tensor, block: int | None, mask: torch.Tensor | None
) -> torch.Tensor:
    """[B or 1, 1, Q or 1, end], the mask combined with the limits of `length` and of the queries' blocks."""
    limit_BQ = length[None]
    if block is not None:
        own_Q = torch.arange(columns.shape[-1], device=columns.device) // block
        limit_BQ = torch.minimum(length, columns.view(-1, columns.shape[-1])[:, :1] + (own_Q + 1) * block)
    seen_BQK = torch.arange(end, device=columns.device) < limit_BQ[..., None]
    return seen_BQK[:, None] if mask is None else seen_BQK[:, None] & mask


def _attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scaling: float | None
) -> torch.Tensor:
    """[B, heads, Q, D]. If the mask is the same for all queries, query heads of one KV head become one head with more
    rows, so that keys and values are read once and not copied per head."""
    batch, heads, width, size = query.shape
    groups = key.shape[1]
    if heads == groups:
        return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)
    if mask is None or mask.shape[2] == 1:
        rows = query.reshape(batch, groups, heads // groups * width, size)
        output = scaled_dot_product_attention(rows, key, value, attn_mask=mask, scale=scaling)
        return output.reshape(batch, heads, width, value.shape[-1])
    key = key.repeat_interleave(heads // groups, dim=1)
    value = value.repeat_interleave(heads // groups, dim=1)
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)

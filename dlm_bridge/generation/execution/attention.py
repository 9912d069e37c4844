"""Attention over kept keys and values: a transformers attention function on a layer's own buffers."""

from __future__ import annotations

import functools
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
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface; every query sees every key that the mask allows, by default all.

    Args:
        query, key, value: [B, heads, Q, D], [B, groups, Q, D] twice, turned by their positions already.
        attention_mask: [B, 1, Q or 1, K] boolean, True: may look.
        kv_columns: [Q] or, of each row its own, [B, Q]: where keys and values are kept in the layer's buffers. None:
            nothing is kept.
        kv_end: K, how many of the buffers' columns are looked at.

    Returns:
        [B, Q, heads, D].
    """
    if kv_columns is None:
        return _attention(query, key, value, attention_mask, scaling).transpose(1, 2).contiguous(), None
    output = torch.ops.dlm_bridge.attend_kept(
        query, key, value, module.kv_keys, module.kv_values, kv_columns, kv_end, attention_mask, scaling
    )
    return output, None


@torch.library.custom_op("dlm_bridge::attend_kept", mutates_args=("kept_keys", "kept_values"))
def attend_kept(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    kept_keys: torch.Tensor,
    kept_values: torch.Tensor,
    columns: torch.Tensor,
    end: int,
    mask: torch.Tensor | None,
    scaling: float | None,
) -> torch.Tensor:
    """Keep `key` and `value` at their columns, then attend to the first `end` columns of what is kept.

    One operator, so that a compiled layer updates the buffers in place instead of copying them. On a CUDA device with
    Triton a few queries attend in place (`kernel`), else PyTorch's attention does it.
    """
    kernel = _kernel() if query.is_cuda and columns.dim() == 1 else None
    if kernel is not None and kernel.serves(query, key, mask):
        attended: torch.Tensor = kernel.attend(query, key, value, kept_keys, kept_values, columns, end, mask, scaling)
        return attended
    if columns.dim() == 1:
        kept_keys.index_copy_(2, columns, key)
        kept_values.index_copy_(2, columns, value)
    else:
        places = columns[:, None, :, None].expand_as(key)
        kept_keys.scatter_(2, places, key)
        kept_values.scatter_(2, places, value)
    output = _attention(query, kept_keys[:, :, :end], kept_values[:, :, :end], mask, scaling)
    return output.transpose(1, 2).contiguous()


@attend_kept.register_fake
def _(
    query: Any, key: Any, value: Any, kept_keys: Any, kept_values: Any, columns: Any, end: Any, mask: Any, scaling: Any
) -> Any:
    batch, heads, width, size = query.shape
    return query.new_empty(batch, width, heads, size)


@functools.cache
def _kernel() -> ModuleType | None:
    """The module of the Triton kernels. None where there is no Triton."""
    try:
        from dlm_bridge.generation.execution import kernel
    except ImportError:
        return None
    return kernel


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

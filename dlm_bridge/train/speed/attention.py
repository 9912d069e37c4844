"""Which attention kernel torch takes: cuDNN's where nothing is masked, the fastest there for bidirectional models."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch.nn.attention import SDPBackend, sdpa_kernel

# In order; each is asked whether it can take the heads' size and dtype.
KERNELS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


@contextlib.contextmanager
def attention_kernels(device: torch.device, masked: bool, compiled: bool) -> Iterator[None]:
    """Around a forward pass and its backward pass, which may recompute it. With a mask, and on other devices than CUDA
    ones, torch's own order stands. In `compiled` layers the heads of a group get their keys and values by a copy,
    which costs less there than kernels that know of groups."""
    if device.type != "cuda" or masked:
        yield
        return
    with sdpa_kernel(KERNELS, set_priority=True), repeated_heads() if compiled else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def repeated_heads() -> Iterator[None]:
    """transformers' models with "sdpa" attention call `sdpa_of_repeated_heads`."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

    usual = ALL_ATTENTION_FUNCTIONS["sdpa"]
    AttentionInterface.register("sdpa", sdpa_of_repeated_heads)
    try:
        yield
    finally:
        AttentionInterface.register("sdpa", usual)


def sdpa_of_repeated_heads(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention by SDPA of whole sequences: [B, H, S, D] queries, keys and values of as many heads or
    fewer; returns [B, S, H, D]."""
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
    causal = (module.is_causal if is_causal is None else is_causal) and attention_mask is None
    output = F.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, dropout_p=dropout, is_causal=causal, scale=scaling
    )
    return output.transpose(1, 2).contiguous(), None

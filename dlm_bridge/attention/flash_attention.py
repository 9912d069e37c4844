"""FlashAttention 4 as one differentiable torch operator, for whole sequences and packed documents.

The kernels (`flash-attn-4`, optional extra `flash`) are written in CuTe DSL for Hopper and later. They are called
directly, because the package's autograd function cannot write to a given memory layout. Here output and gradients have
the layout of queries, keys and values, so that no engine copies. `torch.compile` sees one opaque operator.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch.nn.attention import SDPBackend

from dlm_bridge.errors import one_line

PACKAGE = "flash-attn-4"
VERSION = "4.0.0b36"  # the private functions used here change between versions
CAPABILITY = (9, 0)
HALF = (torch.bfloat16, torch.float16)
MULTIPLE = 8  # head sizes must be multiples of this
LARGEST = {9: 256}  # maximum head size by major compute capability
LARGEST_ELSEWHERE = 128
# torch's kernels for other calls, in order of preference: torch uses the first that supports the call.
SDPA_KERNELS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


def flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    causal: bool,
    starts: torch.Tensor | None = None,
    longest: int = 0,
) -> torch.Tensor:
    """Attention over whole sequences or packed documents; see `missing` and `unsupported_heads` for the requirements.

    Args:
        query: [B, S, H, D], bf16 or fp16, in any memory order with D innermost, which output and gradients have too.
            With `starts`: [T, H, D], the concatenated documents.
        key: [B, S, G, D], H a multiple of G. With `starts`: [T, G, D].
        value: same as `key`.
        scale: factor of the attention scores.
        causal: causal attention within each sequence or document.
        starts: [documents + 1] int32, the start of each document and the total length.
        longest: maximum length of a document.

    Returns:
        The output, in the shape of `query`.
    """
    output, _ = _forward(query, key, value, scale, causal, starts, longest)
    return output


@cache
def missing() -> str | None:
    """Reason why this machine cannot run the kernels, or None. Warns about an unusable version of the package."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < CAPABILITY:
        return "FlashAttention 4 needs an NVIDIA GPU of compute capability 9.0 or later"
    try:
        found = version(PACKAGE)
    except PackageNotFoundError:
        return f"{PACKAGE} is not installed: pip install 'dlm-bridge[flash]'"
    reason = None
    if found != VERSION:
        reason = f"{PACKAGE} is {found}, only {VERSION} is supported: pip install 'dlm-bridge[flash]'"
    else:
        try:
            kernels()
        except Exception as error:  # its dependencies raise various exceptions
            reason = f"{PACKAGE} cannot be imported: {one_line(error)}"
    if reason is not None:
        warnings.warn(f"FlashAttention 4 is not used: {reason}", stacklevel=2)
    return reason


def unsupported_heads(head_dim: int, dtype: torch.dtype) -> str | None:
    """Reason why heads of this size and dtype need other kernels, or None."""
    if dtype not in HALF:
        return f"FlashAttention 4 computes in bf16 or fp16, not in {str(dtype).removeprefix('torch.')}"
    largest = LARGEST.get(torch.cuda.get_device_capability()[0], LARGEST_ELSEWHERE)
    if head_dim % MULTIPLE or head_dim > largest:
        return f"FlashAttention 4 supports head sizes of multiples of {MULTIPLE} up to {largest} here, not {head_dim}"
    return None


@cache
def kernels() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The package's forward and backward functions."""
    from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd

    return _flash_attn_fwd, _flash_attn_bwd


@torch.library.custom_op("dlm_bridge::flash_attention", mutates_args=())
def _forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    causal: bool,
    starts: torch.Tensor | None,
    longest: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp; the latter is [B, H, S] or [H, T], fp32."""
    output = _empty_as(query)
    found = kernels()[0](
        query.detach(),
        key.detach(),
        value.detach(),
        **_documents(starts, longest),
        softmax_scale=scale,
        causal=causal,
        return_lse=True,
        out=output,
    )
    return output, found[1]


@_forward.register_fake
def _(
    query: torch.Tensor, key: Any, value: Any, scale: float, causal: bool, starts: torch.Tensor | None, longest: int
) -> tuple[torch.Tensor, torch.Tensor]:
    *rows, heads, _ = query.shape
    sums = (rows[0], heads, rows[1]) if starts is None else (heads, rows[0])
    return _empty_as(query), query.new_empty(sums, dtype=torch.float32)


@torch.library.custom_op("dlm_bridge::flash_attention_backward", mutates_args=())
def _backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    sums: torch.Tensor,
    scale: float,
    causal: bool,
    starts: torch.Tensor | None,
    longest: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query, key and value."""
    if gradient.stride(-1) != 1 or 0 in gradient.stride():  # such as the expanded gradient of a sum
        gradient = gradient.contiguous()
    gradients = _empty_as(query), _empty_as(key), _empty_as(value)
    kernels()[1](
        query,
        key,
        value,
        output,
        gradient,
        sums,
        **_documents(starts, longest),
        softmax_scale=scale,
        causal=causal,
        **dict(zip(("dq", "dk", "dv"), gradients, strict=True)),
    )
    return gradients


@_backward.register_fake
def _(
    gradient: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _empty_as(query), _empty_as(key), _empty_as(value)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    query, key, value, ctx.scale, ctx.causal, starts, ctx.longest = inputs
    ctx.save_for_backward(query, key, value, *output, starts)
    ctx.set_materialize_grads(False)  # the log-sum-exp has no gradient


def _autograd_backward(ctx: Any, gradient: torch.Tensor, _: None) -> tuple[Any, ...]:
    *tensors, starts = ctx.saved_tensors
    gradients = _backward(gradient, *tensors, ctx.scale, ctx.causal, starts, ctx.longest)
    return *gradients, None, None, None, None


_forward.register_autograd(_autograd_backward, setup_context=_save_for_backward)


def _empty_as(like: torch.Tensor) -> torch.Tensor:
    """Dense empty tensor of the same shape, with positions outermost in memory if `like` has them so, else rows."""
    if like.dim() == 4 and like.stride(0) < like.stride(1):
        rows, positions, heads, size = like.shape
        return like.new_empty(positions, rows, heads, size).transpose(0, 1)
    return like.new_empty(like.shape)


def _documents(starts: torch.Tensor | None, longest: int) -> dict[str, Any]:
    if starts is None:
        return {}
    return {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": longest, "max_seqlen_k": longest}

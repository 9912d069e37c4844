"""FlashAttention 4 as one torch operator with a gradient, for whole sequences and for packed documents.

The kernels are Dao and others', in CuTe DSL (`flash-attn-4`, optional extra `flash`), for Hopper and later. They are
called below the package's own autograd function, which cannot write in a given memory layout: here the output and the
gradients have the layout of queries, keys and values, so that neither engine copies. `torch.compile` sees one opaque
operator.
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
VERSION = "4.0.0b36"  # the functions below are not the package's public ones, and have changed between versions
CAPABILITY = (9, 0)
HALF = (torch.bfloat16, torch.float16)
MULTIPLE = 8  # of a head's size
LARGEST = {9: 256}  # head size by the major compute capability
LARGEST_ELSEWHERE = 128
# torch's own kernels where these are not used, in order of preference: it takes the first that supports the call.
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
    """Attention of whole sequences: [B, S, H, D] of `query` [B, S, H, D], `key` and `value` [B, S, G, D] for H a
    multiple of G, all bf16 or fp16, in any order in memory with D innermost, which the output and the gradients keep.

    With `starts` [documents + 1] int32, where each begins and the length of all, the tensors are [T, H, D] and
    [T, G, D] of documents one after the other, none longer than `longest`. What may not be: `missing`, `unfit`.
    """
    output, _ = _forward(query, key, value, scale, causal, starts, longest)
    return output


@cache
def missing() -> str | None:
    """Why this machine cannot run the kernels; None where it can. Warns of a package that cannot be used."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < CAPABILITY:
        return "FlashAttention 4 needs an NVIDIA GPU of compute capability 9.0 or later"
    try:
        found = version(PACKAGE)
    except PackageNotFoundError:
        return f"{PACKAGE} is not installed: pip install 'dlm-bridge[flash]'"
    reason = None
    if found != VERSION:
        reason = f"{PACKAGE} is {found}, and only {VERSION} is known to fit: pip install 'dlm-bridge[flash]'"
    else:
        try:
            kernels()
        except Exception as error:  # the packages below it fail in many ways
            reason = f"{PACKAGE} cannot be imported: {one_line(error)}"
    if reason is not None:
        warnings.warn(f"FlashAttention 4 is not used: {reason}", stacklevel=2)
    return reason


def unsupported_heads(head_dim: int, dtype: torch.dtype) -> str | None:
    """Why heads of this size and dtype need other kernels; None where FlashAttention 4 supports them."""
    if dtype not in HALF:
        return f"FlashAttention 4 computes in bf16 or fp16, not in {str(dtype).removeprefix('torch.')}"
    largest = LARGEST.get(torch.cuda.get_device_capability()[0], LARGEST_ELSEWHERE)
    if head_dim % MULTIPLE or head_dim > largest:
        return f"FlashAttention 4 takes heads of a multiple of {MULTIPLE} up to {largest} here, not of {head_dim}"
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
    """The output and the log-sum-exp, [B, H, S] or [H, T] fp32."""
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
    """The gradients of query, key and value."""
    if gradient.stride(-1) != 1 or 0 in gradient.stride():  # of a sum: one number for all
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
    ctx.set_materialize_grads(False)  # the sums have no gradient


def _autograd_backward(ctx: Any, gradient: torch.Tensor, _: None) -> tuple[Any, ...]:
    *tensors, starts = ctx.saved_tensors
    gradients = _backward(gradient, *tensors, ctx.scale, ctx.causal, starts, ctx.longest)
    return *gradients, None, None, None, None


_forward.register_autograd(_autograd_backward, setup_context=_save_for_backward)


def _empty_as(like: torch.Tensor) -> torch.Tensor:
    """A dense empty tensor of the same shape: positions outermost where `like` has them so, else rows."""
    if like.dim() == 4 and like.stride(0) < like.stride(1):
        rows, positions, heads, size = like.shape
        return like.new_empty(positions, rows, heads, size).transpose(0, 1)
    return like.new_empty(like.shape)


def _documents(starts: torch.Tensor | None, longest: int) -> dict[str, Any]:
    if starts is None:
        return {}
    return {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": longest, "max_seqlen_k": longest}

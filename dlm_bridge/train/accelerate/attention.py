"""Attention kernels of the Accelerate engine: FlashAttention 4 where installed, otherwise SDPA with cuDNN first."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch.nn.attention import sdpa_kernel

from dlm_bridge.attention import flash_attention
from dlm_bridge.attention.flash_attention import SDPA_KERNELS
from dlm_bridge.attention.masks import mask_for_implementation
from dlm_bridge.errors import SettingError, one_line

FLASH = "flash"  # FlashAttention 4 in `attention_backend`, beside transformers' names


def uses_flash_attention(model: Any, backend: str | None, device: torch.device, precision: str) -> bool:
    """True if FlashAttention 4 computes the attention of whole sequences: with `backend` None if it is supported, with
    FLASH always. Raises SettingError for FLASH if it is not supported."""
    if backend not in (None, FLASH):
        return False
    reason = (
        (None if device.type == "cuda" else "FlashAttention 4 needs a GPU")
        or flash_attention.missing()
        or _flash_unsupported(model, torch.float32 if precision == "fp32" else torch.bfloat16)
    )
    if reason is not None and backend == FLASH:
        raise SettingError("attention_backend", f"{FLASH}: {reason}")
    return reason is None


def _flash_unsupported(model: Any, dtype: torch.dtype) -> str | None:
    """Reason why the layers of a model cannot use FlashAttention 4, or None."""
    if (implementation := model.config._attn_implementation) != "sdpa":
        return f"FlashAttention 4 replaces sdpa, and this model uses {implementation}"
    if torch.are_deterministic_algorithms_enabled():
        return "FlashAttention 4's gradients are not deterministic"
    layers = [module for module in model.modules() if hasattr(module, "is_causal") and hasattr(module, "head_dim")]
    if not layers:
        return "FlashAttention 4 is not used for this model's attention"
    if any(getattr(layer, "attention_dropout", 0.0) for layer in layers):
        return "FlashAttention 4 has no dropout, and this model's attention has"
    return next(
        (why for layer in layers if (why := flash_attention.unsupported_heads(layer.head_dim, dtype)) is not None),
        None,
    )


def layer_masks(mask: torch.Tensor, config: Any, dtype: torch.dtype) -> torch.Tensor | dict[str, torch.Tensor]:
    """Attention mask for model classes of transformers, whose sliding layers do not apply their window to a 4-D mask.

    Args:
        mask: [B, 1, S, S] bool.

    Returns:
        The mask within the sliding window, or masks by layer type if only some layers have a window.
    """
    window, kinds = getattr(config, "sliding_window", None), set(getattr(config, "layer_types", None) or ())
    given = partial(mask_for_implementation, implementation=config._attn_implementation, dtype=dtype)
    if window is None or (kinds and SLIDING not in kinds):
        return given(mask)
    order = torch.arange(mask.shape[-1], device=mask.device)
    near = given(mask & (order[:, None] - order < window))
    return {SLIDING: near, "full_attention": given(mask)} if len(kinds) > 1 else near


SLIDING = "sliding_attention"  # in a config's `layer_types`


@contextlib.contextmanager
def attention_kernels(device: torch.device, masked: bool, compiled: bool, flash: bool = False) -> Iterator[None]:
    """Context manager that selects the attention kernels of a forward pass and its backward pass, which may recompute.

    With a mask, and on devices without CUDA, torch's own order of kernels applies. `flash` selects FlashAttention 4.
    In `compiled` layers keys and values are repeated for the heads of their query group, which is faster there than
    torch's grouped-query kernels."""
    if device.type != "cuda" or masked:
        yield
        return
    function = flash_attention_forward if flash else sdpa_repeated_kv_forward if compiled else None
    replaced = contextlib.nullcontext() if function is None else replace_sdpa(function)
    with sdpa_kernel(SDPA_KERNELS, set_priority=True), replaced:
        yield


@contextlib.contextmanager
def replace_sdpa(function: Callable[..., Any]) -> Iterator[None]:
    """Context manager in which transformers' models with "sdpa" attention call `function`."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

    original = ALL_ATTENTION_FUNCTIONS["sdpa"]
    AttentionInterface.register("sdpa", function)
    try:
        yield
    finally:
        AttentionInterface.register("sdpa", original)


def flash_attention_forward(
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
    """Attention function for transformers by FlashAttention 4, or by SDPA for calls that it does not support, such as
    those with a mask.

    Args:
        query: [B, H, S, D].
        key, value: [B, G, S, D], where the number of query groups G divides H.

    Returns:
        [B, S, H, D], and None.
    """
    whole = attention_mask is None and query.shape[2:] == key.shape[2:] and key.shape == value.shape
    if not whole or dropout or value.dtype not in flash_attention.HALF:
        return sdpa_repeated_kv_forward(module, query, key, value, attention_mask, dropout, scaling, is_causal)
    causal = bool(module.is_causal if is_causal is None else is_causal)
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    # Under autocast, values are in half precision, and rotated queries and keys in fp32.
    q, k, v = (tensor.to(value.dtype).transpose(1, 2) for tensor in (query, key, value))
    return flash_attention.flash_attention(q, k, v, scale, causal), None


def sdpa_repeated_kv_forward(
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
    """Attention function for transformers by SDPA, with keys and values repeated per query group. Shapes as in
    `flash_attention_forward`."""
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
    causal = (module.is_causal if is_causal is None else is_causal) and attention_mask is None
    output = F.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, dropout_p=dropout, is_causal=causal, scale=scaling
    )
    return output.transpose(1, 2).contiguous(), None


def set_attention(model: Any, backend: str) -> None:
    """Select one of transformers' attention implementations. Raises SettingError if it is not available."""
    try:
        model.set_attn_implementation(backend)
    except (ValueError, ImportError) as error:
        raise SettingError("attention_backend", f"{backend}: {one_line(error)}") from error

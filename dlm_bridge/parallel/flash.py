"""Which layers of the Megatron engine get FlashAttention 4, and its call in megatron-core's order of axes."""

from __future__ import annotations

from typing import Any

import torch

from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.kernels import flash
from dlm_bridge.parallel import platform
from dlm_bridge.parallel.core import AttnBackend, AttnMaskType, TransformerConfig


def takes_flash(
    config: TransformerConfig, mask_type: AttnMaskType, window: tuple[int, int] | None, setting: str | None, ranks: int
) -> bool:
    """Whether a layer's calls without a mask are FlashAttention 4's: with `attention_backend` auto wherever it can,
    with flash always. `setting` names one that only Transformer Engine has, `ranks` are the context parallel ones.
    Raises DlmBridgeError for flash where it cannot."""
    if config.attention_backend not in (AttnBackend.auto, AttnBackend.flash):
        return False
    reason = (
        _unfit(config, mask_type, window, setting, ranks)
        or _missing()
        or flash.unfit(config.kv_channels, config.params_dtype)
    )
    if reason is not None and config.attention_backend == AttnBackend.flash:
        raise DlmBridgeError(f"--attention-backend flash: {reason}; or leave the option out")
    return reason is None


def takes_call(packed: Any, bias: torch.Tensor | None) -> bool:
    """Whether a call is of whole sequences, or of documents without padding between them."""
    if bias is not None:
        return False
    odd = ("cu_seqlens_q_padded", "cu_seqlens_kv_padded", "cp_group", "local_cp_size")
    return packed is None or (
        packed.qkv_format == "thd"
        and packed.cu_seqlens_q is packed.cu_seqlens_kv
        and all(getattr(packed, name, None) is None for name in odd)
    )


def flash_rows(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, causal: bool, packed: Any = None
) -> torch.Tensor:
    """[S, B, H * D] of `query` [S, B, H, D], `key` and `value` [S, B, G, D]; of `packed` documents [T, H * D] of
    [T, H, D] and [T, G, D]. Nothing is copied."""
    if packed is not None:
        starts, longest = packed.cu_seqlens_q, int(packed.max_seqlen_q)
        return flash.flash_attention(query, key, value, scale, causal, starts, longest).flatten(1)
    q, k, v = (tensor.transpose(0, 1) for tensor in (query, key, value))
    return flash.flash_attention(q, k, v, scale, causal).transpose(0, 1).flatten(2)


def _missing() -> str | None:
    """A GPU that is there is of no use to a platform that computes elsewhere."""
    name = platform.current().name
    return flash.missing() if name == "cuda" else f"FlashAttention 4 needs the CUDA platform, this one is {name}"


def _unfit(
    config: TransformerConfig, mask_type: AttnMaskType, window: tuple[int, int] | None, setting: str | None, ranks: int
) -> str | None:
    reasons = {
        "block-causal attention is FlexAttention's": mask_type == AttnMaskType.arbitrary,
        "FlashAttention 4 is not used under context parallelism (--cp)": ranks > 1,
        "FlashAttention 4 is not used with a sliding window, which this model has": window is not None,
        "FlashAttention 4 is not used for multi-head latent attention": config.multi_latent_attention,
        f"FlashAttention 4 would ignore {setting}": setting is not None,
        "FlashAttention 4's gradients are not deterministic": config.deterministic_mode,
        "FlashAttention 4 has no FP8": config.fp8_dot_product_attention or config.fp8_multi_head_attention,
    }
    return next((reason for reason, there in reasons.items() if there), None)

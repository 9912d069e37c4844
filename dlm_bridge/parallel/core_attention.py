"""Core attention of the engine's layers: FlashAttention 4, Transformer Engine, FlexAttention or SDPA. Each applies the
mask of a call, or refuses it. Attention with sinks (gpt-oss) uses FlexAttention, on CPU a dense softmax.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch.nn.attention import sdpa_kernel

from dlm_bridge.attention import flash_attention
from dlm_bridge.attention.flash_attention import SDPA_KERNELS
from dlm_bridge.errors import MissingExtraError, SettingError
from dlm_bridge.parallel import platform
from dlm_bridge.parallel.attention import MaskCache, block_mask, causal_descriptor, dense_mask, plain_mask
from dlm_bridge.parallel.core import (
    AttnBackend,
    AttnMaskType,
    MegatronModule,
    TransformerConfig,
    gather_from_sequence_parallel_region,
    is_layer_window_attention,
    make_sharded_tensors_for_checkpoint,
    set_tensor_model_parallel_attributes,
)

MASKS = MaskCache()
WIDE_HEAD = 128  # largest head size for which FlexAttention's default fp32 tiles fit


class LocalAttention(MegatronModule):
    """Attention without Transformer Engine: FlashAttention 4 or torch's kernels, on CPU the exact reference.

    Context parallel ranks gather keys and values. Without a mask, causal attention assumes Transformer Engine's order
    of positions on the ranks (`batch.rank_positions`).

    With `softmax_type` learnable each head has a sink, an additional logit in its softmax without a value:
    `softmax_offset` [H] for this tensor parallel rank's heads, under megatron-core's name. Such layers use this class
    with Transformer Engine too.
    """

    softmax_offset: torch.nn.Parameter | None

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str = "self",
        softmax_scale: float | None = None,
        pg_collection: Any = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        if reason := unsupported(config):
            raise MissingExtraError(reason, "needs Transformer Engine: unset it, or install it on a GPU")
        self.attn_mask_type = attn_mask_type
        self.scale = softmax_scale or 1 / math.sqrt(config.kv_channels)
        self.window = _window(config, layer_number)
        self.cp_group = pg_collection.cp
        self.flash = uses_flash(config, attn_mask_type, self.window, None, self.cp_group.size())
        self.tp_group = pg_collection.tp
        self.register_parameter("softmax_offset", _sinks(config, self.tp_group.size()) if has_sinks(config) else None)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> torch.Tensor:
        """Attention output [S, B, H * Dv] for `query` [S, B, H, D], `key` [S, B, G, D] and `value` [S, B, G, Dv], each
        this rank's part of the row."""
        if packed_seq_params is not None:
            raise MissingExtraError(
                "packed_seq_params", "need Transformer Engine: pass an `attention_mask` of documents instead"
            )
        if attention_bias is not None:
            raise SettingError("attention_bias", "would be ignored by the engine's attention: unset it")
        check_mask(attention_mask, self.attn_mask_type, query, self.cp_group.size())
        ranks = self.cp_group.size()
        if attention_mask is None and self.softmax_offset is not None:
            attention_mask = causal_descriptor(len(query) * ranks, ranks, query.device)
        if attention_mask is not None:
            return masked_attention(
                query, key, value, attention_mask, self.scale, self.cp_group, self.window, self.softmax_offset
            )
        causal = self.attn_mask_type == AttnMaskType.causal
        if self.flash:
            return flash_rows(query, key, value, self.scale, causal)
        key, value = gather_keys_values(key, value, self.cp_group)
        mask = None
        if causal and (self.cp_group.size() > 1 or self.window is not None):
            mask = plain_mask(len(query), self.cp_group.rank(), self.cp_group.size(), self.window, query.device)
        return _torch_attention(query, key, value, mask, causal and mask is None, self.scale)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """The sinks, sharded over tensor parallel ranks; empty without sinks."""
        group = (metadata or {}).get("dp_cp_group")
        found: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            self.state_dict(keep_vars=True),
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=group,
        )
        return found


@cache
def transformer_engine_attention() -> type:
    """Class of Transformer Engine's attention with masks.

    Without a mask it is FlashAttention 4 if `uses_flash`, otherwise Transformer Engine's attention with its own
    context parallelism; both apply the layers' mask type and packed documents. With a mask it is FlexAttention over
    gathered keys and values.
    """
    from megatron.core.extensions.transformer_engine import TEDotProductAttention

    class MaskedTEDotProductAttention(TEDotProductAttention):  # type: ignore[misc, unused-ignore]
        def __init__(self, config: TransformerConfig, layer_number: int, **kwargs: Any) -> None:
            super().__init__(config, layer_number, **kwargs)
            self._window = _window(config, layer_number)
            self._mask_type = kwargs["attn_mask_type"]
            self._scale = kwargs.get("softmax_scale") or 1 / math.sqrt(config.kv_channels)
            self._gather_group = kwargs["pg_collection"].cp
            ranks = self._gather_group.size()
            self._flash = uses_flash(config, self._mask_type, self._window, unsupported(config), ranks)

        def forward(
            self,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            attention_mask: torch.Tensor | None,
            *args: Any,
            packed_seq_params: Any = None,
            **kwargs: Any,
        ) -> torch.Tensor:
            if attention_mask is None or packed_seq_params is not None:
                if attention_mask is not None:
                    raise SettingError("attention_mask", "would be ignored with `packed_seq_params`: pass one of them")
                check_mask(None, self._mask_type, query, self._gather_group.size())
                if self._flash and is_flash_call(packed_seq_params, kwargs.get("attention_bias")):
                    causal = self._mask_type == AttnMaskType.causal
                    return flash_rows(query, key, value, self._scale, causal, packed_seq_params)
                return super().forward(query, key, value, None, *args, packed_seq_params=packed_seq_params, **kwargs)
            check_mask(attention_mask, self._mask_type, query, self._gather_group.size())
            if reason := unsupported(self.config):
                raise SettingError(reason, "would be ignored by attention under an `attention_mask`: unset it")
            return masked_attention(query, key, value, attention_mask, self._scale, self._gather_group, self._window)

    return MaskedTEDotProductAttention


def masked_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    cp_group: torch.distributed.ProcessGroup,
    window: tuple[int, int] | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention output [S, B, H * Dv] of this context parallel rank's queries over all ranks' keys and values, under a
    mask in rank order: FlexAttention for a mask descriptor on a GPU, otherwise a dense mask.

    Args:
        window: number of positions back and ahead that a query attends to.
        sinks: [H].

    Raises SettingError if the mask cannot be combined with the window.
    """
    key, value = gather_keys_values(key, value, cp_group)
    rank, queries, back = cp_group.rank(), len(query), None if window is None else window[0]
    kind = (rank, queries, back)
    if mask.is_cuda and mask.dim() == 3:
        blocks = MASKS.get(mask, ("blocks", *kind), lambda descriptor: block_mask(descriptor, *kind))
        q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        options = {"scale": scale, "enable_gqa": q.shape[1] != k.shape[1], "kernel_options": tile_options(q, v)}
        flex = _compiled_flex_attention()
        if sinks is None:
            return _heads_last(flex(q, k, v, block_mask=blocks, **options))
        output_BHSD, log_sum_BHS = flex(q, k, v, block_mask=blocks, return_lse=True, **options)
        return _heads_last(output_BHSD * non_sink_mass(log_sum_BHS, sinks).to(output_BHSD.dtype))
    if mask.dim() == 4:
        dense = dense_mask(mask, *kind)
    else:
        dense = MASKS.get(mask, ("dense", *kind), lambda descriptor: dense_mask(descriptor, *kind))
    if sinks is not None:
        return _sink_attention(query, key, value, dense, scale, sinks)
    return _torch_attention(query, key, value, dense, False, scale)


def non_sink_mass(log_sum_BHS: torch.Tensor, sinks_H: torch.Tensor) -> torch.Tensor:
    """Probability mass [B, H, S, 1] of the keys in a softmax with a sink; `log_sum_BHS` is the log-sum-exp over the
    keys."""
    return torch.sigmoid(log_sum_BHS.float() - sinks_H.float()[:, None])[..., None]


def _sink_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    sinks: torch.Tensor,
) -> torch.Tensor:
    """Reference: a softmax over the keys' logits and the sink, whose probability is then dropped."""
    q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
    if q.shape[1] != k.shape[1]:
        k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for tensor in (k, v))
    logits_BHQK = (q @ k.transpose(-1, -2)).float() * scale
    logits_BHQK = logits_BHQK.masked_fill(~mask, -torch.inf)
    sink_BHQ1 = sinks.float()[:, None, None].expand(*logits_BHQK.shape[:-1], 1)
    probabilities = torch.cat((logits_BHQK, sink_BHQ1), dim=-1).softmax(dim=-1)[..., :-1]
    return _heads_last(probabilities.to(v.dtype) @ v)


def tile_options(query: torch.Tensor, value: torch.Tensor) -> dict[str, Any] | None:
    """FlexAttention's `kernel_options` for heads [..., D] and [..., Dv]; None for torch's defaults.

    For fp32 heads wider than 128, which Triton rounds up to a power of two, torch 2.11 uses three tiles of 64 keys and
    values, but shared memory does not hold two. Tiles of 32 queries, keys and values need 96 KiB at a width of 256.
    Short rows use the same kernel, because torch's kernel for them does not take these options.
    """
    if query.dtype != torch.float32 or max(query.shape[-1], value.shape[-1]) <= WIDE_HEAD:
        return None
    forward = {"fwd_BLOCK_M": 32, "fwd_BLOCK_N": 32, "fwd_num_stages": 1}
    backward = {f"bwd_BLOCK_{axis}": 16 for axis in ("M1", "N1", "M2", "N2")} | {"bwd_num_stages": 1}
    return {**forward, **backward, "FORCE_USE_FLEX_ATTENTION": True}


def gather_keys_values(
    key: torch.Tensor, value: torch.Tensor, cp_group: torch.distributed.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys [S_total, B, G, D] and values [S_total, B, G, Dv] of all context parallel ranks, concatenated; the backward
    pass sums each rank's gradients over all ranks."""
    if cp_group.size() == 1:
        return key, value
    both = gather_from_sequence_parallel_region(torch.cat((key, value), dim=-1), group=cp_group)
    key, value = both.split([key.shape[-1], value.shape[-1]], dim=-1)
    return key, value


def check_mask(mask: torch.Tensor | None, mask_type: AttnMaskType, query: torch.Tensor, ranks: int) -> None:
    """Raise SettingError for a mask that is missing, or whose dtype or shape does not fit the call."""
    if mask is None:
        if mask_type == AttnMaskType.arbitrary:
            raise SettingError(
                "attention_mask",
                "is missing, but block-causal attention needs it in every call: create it with "
                "dlm_bridge.parallel.attention.attention_mask",
            )
        return
    keys, batch = query.shape[0] * ranks, query.shape[1]
    is_descriptor = mask.dtype == torch.int32 and tuple(mask.shape[1:]) == (keys, 5)
    is_dense = mask.dtype == torch.bool and tuple(mask.shape[1:]) == (1, keys, keys)
    if not (is_descriptor or is_dense) or mask.shape[0] not in (1, batch):
        raise SettingError(
            "attention_mask",
            f"must be an int32 descriptor [{batch} or 1, {keys}, 5] or bool [{batch} or 1, 1, {keys}, {keys}], True "
            f"where a query attends, not {mask.dtype} {list(mask.shape)}",
        )


def _sinks(config: TransformerConfig, ranks: int) -> torch.nn.Parameter:
    """Sinks [H] of one of `ranks` tensor parallel ranks, with the attributes that megatron-core's gradient norm
    reads."""
    heads, device = config.num_attention_heads // ranks, platform.current().device()
    sinks = torch.nn.Parameter(torch.empty(heads, device=device, dtype=config.params_dtype))
    set_tensor_model_parallel_attributes(sinks, True, 0, 1)
    config.init_method(sinks)
    return sinks


def has_sinks(config: TransformerConfig) -> bool:
    """True if attention heads have sinks, which `LocalAttention` computes."""
    return bool(config.softmax_type == "learnable")


def unsupported(config: TransformerConfig) -> str | None:
    """First setting in use that Transformer Engine supports and torch's kernels do not; None if there is none."""
    settings = {
        "attention_dropout": config.attention_dropout > 0,
        "softmax_type": config.softmax_type not in ("vanilla", "learnable"),
        "apply_query_key_layer_scaling": config.apply_query_key_layer_scaling,
        "qk_clip": config.qk_clip,
        "log_max_attention_logit": config.log_max_attention_logit,
    }
    return next((name for name, there in settings.items() if there), None)


def _window(config: TransformerConfig, layer_number: int) -> tuple[int, int] | None:
    """Sliding window of a layer: positions back and ahead; None without one."""
    slides = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
    return tuple(config.window_size) if slides else None


def _torch_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float,
) -> torch.Tensor:
    q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
    if q.shape[1] != k.shape[1]:
        k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for tensor in (k, v))
    with sdpa_kernel(SDPA_KERNELS, set_priority=True) if q.is_cuda else nullcontext():
        return _heads_last(F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale))


def _heads_last(output_BHSD: torch.Tensor) -> torch.Tensor:
    """Permute to [S, B, H * D]."""
    return output_BHSD.permute(2, 0, 1, 3).flatten(2)


@cache
def _compiled_flex_attention() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def uses_flash(
    config: TransformerConfig, mask_type: AttnMaskType, window: tuple[int, int] | None, setting: str | None, ranks: int
) -> bool:
    """True if a layer uses FlashAttention 4 for calls without a mask: with `attention_backend` auto if it is
    supported, with flash always.

    Args:
        setting: the layer's setting that only Transformer Engine supports, if any.
        ranks: number of context parallel ranks.

    Raises SettingError for flash if it is not supported.
    """
    if config.attention_backend not in (AttnBackend.auto, AttnBackend.flash):
        return False
    reason = (
        _flash_unsupported(config, mask_type, window, setting, ranks)
        or _flash_missing()
        or flash_attention.unsupported_heads(config.kv_channels, config.params_dtype)
    )
    if reason is not None and config.attention_backend == AttnBackend.flash:
        raise SettingError("attention_backend", f"flash: {reason}; or leave the setting out")
    return reason is None


def is_flash_call(packed: Any, bias: torch.Tensor | None) -> bool:
    """True if FlashAttention 4 supports a call: whole sequences, or documents without padding between them."""
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
    """FlashAttention 4 without copies: [S, B, H * D] for `query` [S, B, H, D], `key` and `value` [S, B, G, D]; with
    `packed` documents [T, H * D] for [T, H, D] and [T, G, D]."""
    if packed is not None:
        starts, longest = packed.cu_seqlens_q, int(packed.max_seqlen_q)
        return flash_attention.flash_attention(query, key, value, scale, causal, starts, longest).flatten(1)
    q, k, v = (tensor.transpose(0, 1) for tensor in (query, key, value))
    return flash_attention.flash_attention(q, k, v, scale, causal).transpose(0, 1).flatten(2)


def _flash_missing() -> str | None:
    """Reason why FlashAttention 4 is not available on this platform; None if it is."""
    if (name := platform.current().name) != "cuda":
        return f"FlashAttention 4 needs the CUDA platform, not {name}"
    return flash_attention.missing()


def _flash_unsupported(
    config: TransformerConfig, mask_type: AttnMaskType, window: tuple[int, int] | None, setting: str | None, ranks: int
) -> str | None:
    reasons = {
        "block-causal attention needs FlexAttention": mask_type == AttnMaskType.arbitrary,
        "FlashAttention 4 is not used under context parallelism (`cp`)": ranks > 1,
        "FlashAttention 4 is not used with a sliding window, which this model has": window is not None,
        "FlashAttention 4 does not support attention sinks, which this model has": has_sinks(config),
        "FlashAttention 4 is not used for multi-head latent attention": config.multi_latent_attention,
        f"FlashAttention 4 would ignore {setting}": setting is not None,
        "FlashAttention 4's gradients are not deterministic": config.deterministic_mode,
        "FlashAttention 4 does not support FP8": config.fp8_dot_product_attention or config.fp8_multi_head_attention,
    }
    return next((reason for reason, there in reasons.items() if there), None)

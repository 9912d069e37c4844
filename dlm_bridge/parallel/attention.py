"""Who attends to whom on megatron-core: the mask that a call takes, and core attentions that never ignore one."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.models.masks import block_causal_mask
from dlm_bridge.parallel.core import AttnMaskType

if TYPE_CHECKING:
    from dlm_bridge.bridge import Bridge

# Set in the layer spec, because the local attention ignores the type that a call passes.
MASK_TYPES = {
    "bidirectional": AttnMaskType.no_mask,
    "causal": AttnMaskType.causal,
    "block_causal": AttnMaskType.arbitrary,
}


def attention_mask(
    topology: str,
    position_ids_BS: torch.Tensor,
    block_size: int | None = None,
    real_BS: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """The `attention_mask` that a live model's call takes: [B, 1, S, S] bool, True where query q may *not* look at key
    k, which is megatron-core's way round; None where the layers' own mask type says it all.

    `position_ids_BS` count from 0 in each row; `block_size` is what block-causal attention goes by (`block_size(...)`
    has a family's); `real_BS` is False at padding, which nobody looks at but itself. Raises DlmBridgeError.
    """
    if topology == "block_causal":
        if block_size is None or block_size < 1:
            raise DlmBridgeError(f"block-causal attention needs a block size of at least 1, not {block_size}")
        return ~block_causal_mask(position_ids_BS, block_size, real_BS)
    if topology not in MASK_TYPES:
        raise DlmBridgeError(f"the Megatron engine has no {topology} attention, only {', '.join(MASK_TYPES)}")
    if real_BS is None:
        return None
    # Causal attention is block-causal in blocks of one, bidirectional attention in one block.
    block = 1 if topology == "causal" else int(position_ids_BS.max()) + 1
    return ~block_causal_mask(position_ids_BS, block, real_BS)


def block_size(bridge: Bridge) -> int | None:
    """The block size of a block-causal model, by its config or its family's default; None for other topologies."""
    if bridge.family.topology != "block_causal":
        return None
    return int(bridge.family.load("config_class").from_dict(bridge.config).block_size)


@cache
def guarded(attention: type, takes_any_mask: bool) -> type:
    """`attention` (a core attention module's class), refusing what it would silently ignore.

    `takes_any_mask`: whether it honours a mask under the types `no_mask` and `causal` too. The mask then is all there
    is, as a 4-D mask is on the Hub side. The refusals raise DlmBridgeError.
    """

    class Guarded(attention):  # type: ignore[misc, unused-ignore]
        def forward(
            self,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            attention_mask: torch.Tensor | None,
            *args: Any,
            **kwargs: Any,
        ) -> torch.Tensor:
            mask_type = args[0] if args else kwargs.get("attn_mask_type", self.attn_mask_type)
            _check(self, attention_mask, mask_type, takes_any_mask)
            return super().forward(query, key, value, attention_mask, *args, **kwargs)

    Guarded.__name__ = Guarded.__qualname__ = f"Guarded{attention.__name__}"
    return Guarded


def _check(module: Any, mask: torch.Tensor | None, mask_type: Any, takes_any_mask: bool) -> None:
    name = type(module).__name__.removeprefix("Guarded")
    if mask is None:
        if mask_type == AttnMaskType.arbitrary:
            raise DlmBridgeError(
                "block-causal attention needs an attention_mask in every call: make it with "
                "dlm_bridge.parallel.attention.attention_mask"
            )
        return
    if mask.dtype != torch.bool or mask.dim() != 4:
        raise DlmBridgeError(
            f"attention_mask must be bool [B, 1, S, S], True where masked, not {mask.dtype} {list(mask.shape)}"
        )
    if module.config.window_size is not None:
        raise DlmBridgeError(f"{name} would ignore an attention_mask beside the sliding window: pass None")
    if module.config.masked_softmax_fusion and mask_type == AttnMaskType.causal:
        raise DlmBridgeError(f"{name} would ignore an attention_mask with masked_softmax_fusion: switch that off")
    if mask_type != AttnMaskType.arbitrary and not takes_any_mask:
        raise DlmBridgeError(f"{name} would ignore an attention_mask under mask type {mask_type.name}: pass None")

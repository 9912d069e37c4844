"""Who attends to whom on megatron-core: a topology in the layers' terms, and the mask that a call takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.models.visibility import Visibility, documents_of
from dlm_bridge.parallel.core import AttnMaskType

if TYPE_CHECKING:
    from dlm_bridge.bridge import Bridge

# Set in the layer spec: who looks at whom where a call has no mask.
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
    """The `attention_mask` that a live model's call takes: `Visibility` codes [B or 1, S, 5]; None where the layers'
    own mask type says it all. With one, it is all there is: the mask type counts no more.

    `position_ids_BS` count from 0 in each row; `block_size` is what block-causal attention goes by (`block_size(...)`
    has a family's); `real_BS` is False at padding, which nobody looks at but itself. Raises DlmBridgeError.
    """
    check_topology(topology)
    everywhere = torch.ones_like(position_ids_BS, dtype=torch.bool)
    documents = documents_of(everywhere if real_BS is None else real_BS)
    if topology == "block_causal":
        if block_size is None or block_size < 1:
            raise DlmBridgeError(f"block-causal attention needs a block size of at least 1, not {block_size}")
        return Visibility.block_causal(documents, position_ids_BS, block_size).codes
    if real_BS is None:
        return None
    return (Visibility.causal if topology == "causal" else Visibility.bidirectional)(documents).codes


def check_topology(topology: str) -> None:
    """Raise DlmBridgeError for a topology that the engine has not."""
    if topology not in MASK_TYPES:
        raise DlmBridgeError(f"the Megatron engine has no {topology} attention, only {', '.join(MASK_TYPES)}")


def block_size(bridge: Bridge) -> int | None:
    """The block size of a block-causal model, by its config or its family's default; None for other topologies."""
    if bridge.family.topology != "block_causal":
        return None
    return int(bridge.family.load("config_class").from_dict(bridge.config).block_size)

"""A Megatron checkpoint's logits by megatron-core's own GPTModel, on this process alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from dlm_bridge.convert.layout import Layout
from dlm_bridge.errors import DlmBridgeError

if TYPE_CHECKING:
    from dlm_bridge.bridge import Bridge


def why_not(bridge: Bridge) -> str | None:
    """Why megatron-core cannot compute this model here: it is not installed, or it has no such model. None: it can."""
    try:
        with _one_process():
            from dlm_bridge.parallel.config import model_config
            from dlm_bridge.parallel.layer_spec import block_spec

            config = model_config(bridge.mapping, bridge.config, bridge.dims, Layout(), torch.float32)
            block_spec(config.transformer, bridge.family.topology, None)
    except DlmBridgeError as error:
        return str(error)
    return None


def device() -> torch.device:
    """Where megatron-core computes."""
    from dlm_bridge.parallel import platform

    return platform.current().device()


@torch.no_grad()
def megatron_logits(bridge: Bridge, tokens_BS: torch.Tensor) -> torch.Tensor:
    """[B, S, V] in fp32, under the family's topology.

    Raises DlmBridgeError where a tensor is missing, left over or mis-shaped.
    """
    with _one_process():
        from dlm_bridge.parallel.attention import attention_mask, block_size

        (model,) = bridge.build_megatron_model(Layout(), torch.float32)
        tokens_BS = tokens_BS.to(device())
        positions_BS = torch.arange(tokens_BS.shape[1], device=tokens_BS.device).expand_as(tokens_BS)
        mask = attention_mask(bridge.family.topology, positions_BS, block_size(bridge))
        return model.eval()(tokens_BS, positions_BS, mask).cpu()


@contextmanager
def _one_process() -> Iterator[None]:
    """megatron-core's groups for one process, and afterwards none, unless the caller had begun them."""
    from dlm_bridge.parallel import groups, overrides

    found = torch.distributed.is_initialized()
    try:
        groups.initialize(Layout())
        yield
    finally:
        if not found:
            groups.destroy()
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()
            overrides.uninstall()

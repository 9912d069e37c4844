"""Logits of a checkpoint's model on one process, which `verify` compares with transformers'."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from dlm_bridge.bridge import Bridge
from dlm_bridge.job import process_group_ends
from dlm_bridge.mapping.layout import Layout
from dlm_bridge.parallel import groups, overrides, platform
from dlm_bridge.parallel.attention import attention_mask, block_size
from dlm_bridge.parallel.config import model_config
from dlm_bridge.parallel.core import parallel_state
from dlm_bridge.parallel.layer_spec import block_spec
from dlm_bridge.parallel.parallelize import build_megatron_model


def check_logits(bridge: Bridge) -> None:
    """Raise SettingError or MissingExtraError if megatron-core does not support this model."""
    with _one_process():
        config = model_config(bridge.mapping, bridge.config, bridge.dims, Layout(), torch.float32)
        block_spec(config.transformer, bridge.family.attention_pattern, None)


@torch.no_grad()
def logits(bridge: Bridge, tokens_BS: torch.Tensor) -> torch.Tensor:
    """Logits [B, S, V] in fp32, with the family's attention pattern.

    Raises CheckpointError if a tensor is missing, unknown or of the wrong shape.
    """
    with _one_process():
        (model,) = build_megatron_model(bridge.checkpoint, Layout(), torch.float32)
        tokens_BS = tokens_BS.to(platform.current().device())
        positions_BS = torch.arange(tokens_BS.shape[1], device=tokens_BS.device).expand_as(tokens_BS)
        mask = attention_mask(bridge.family.attention_pattern, positions_BS, block_size(bridge.checkpoint))
        return model.eval()(tokens_BS, positions_BS, mask).cpu()


@contextmanager
def _one_process() -> Iterator[None]:
    """Context manager with megatron-core's process groups for one process; groups that did not exist are destroyed on
    exit."""
    grouped = parallel_state.model_parallel_is_initialized()
    with process_group_ends():
        try:
            groups.initialize(Layout())
            yield
        finally:
            if not grouped:
                groups.destroy()
                overrides.uninstall()

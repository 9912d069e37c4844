"""megatron-core's groups, in processes that go through several layouts."""

from __future__ import annotations

import contextlib

import torch.distributed as dist

from dlm_bridge import DlmBridgeError, Layout
from dlm_bridge.mapping.layout import ContextParallelConfig
from dlm_bridge.parallel import groups
from dlm_bridge.parallel.core import parallel_state


def make_way(layout: Layout, parallel: ContextParallelConfig | None = None, instances: int = 1) -> None:
    """Destroy the groups unless there are none, or they are those of the layout."""
    if not dist.is_initialized():
        return
    if parallel_state.model_parallel_is_initialized():
        with contextlib.suppress(DlmBridgeError):
            groups._check_groups(layout, parallel or ContextParallelConfig(), instances)
            return
    groups.destroy()

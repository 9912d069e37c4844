"""megatron-core's offloading optimizer in runs on a CPU: it takes what it updates for copies of what is on a GPU."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.parallel import precision_aware


def install(patch: pytest.MonkeyPatch) -> None:
    """Runs of the Megatron engine offload their optimizer, and find stand-ins for Transformer Engine and a GPU."""
    from megatron.core import optimizer
    from megatron.core.optimizer import cpu_offloading, distrib_optimizer
    from megatron.core.optimizer.cpu_offloading import hybrid_optimizer

    from dlm_bridge.parallel.train import mcore_config

    precision_aware.install(patch)
    event = SimpleNamespace(synchronize=lambda: None, wait=lambda *_: None)
    stream = SimpleNamespace(wait_stream=lambda _: None, record_event=lambda *_: event, wait_event=lambda _: None)
    cuda = SimpleNamespace(current_stream=lambda: stream, stream=lambda _: torch.no_grad())
    patch.setattr(hybrid_optimizer, "torch", SimpleNamespace(**{**vars(torch), "cuda": cuda}))

    class OnHost(hybrid_optimizer.HybridDeviceOptimizer):
        def _init_sub_optimizers(self) -> None:
            super()._init_sub_optimizers()
            self.cpu_copys_map_gpu_param = self.inner_param_to_orig_param
            self.gpu_params_map_cpu_copy = self.param_to_inner_param

    for module in (optimizer, distrib_optimizer, cpu_offloading):
        patch.setattr(module, "HybridDeviceOptimizer", OnHost, raising=False)
    original = mcore_config.optimizer_config

    def offloaded(config: Any) -> Any:
        return replace(
            original(config),
            optimizer_cpu_offload=True,
            optimizer_offload_fraction=1.0,
            use_precision_aware_optimizer=True,
            pin_cpu_grads=False,
            pin_cpu_params=False,
            overlap_cpu_optimizer_d2h_h2d=False,
        )

    patch.setattr(mcore_config, "optimizer_config", offloaded)

"""RMSNorm of megatron-core's layers in plain torch, with what megatron-core reads off its weights."""

from __future__ import annotations

from typing import Any

import torch

from dlm_bridge.parallel import platform
from dlm_bridge.parallel.core import TransformerConfig


class LocalRMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm, which megatron-core wraps too, but also for sequence parallelism: each rank then normalises its
    own tokens, and `weight.sequence_parallel` tells megatron-core to sum the gradient over tensor parallel ranks."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, device=platform.current().device(), dtype=config.params_dtype)
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010 (unknown to torch)


class LocalHeadNorm(LocalRMSNorm):
    """Of each query and key head. A rank has whole sequences of its own heads, so nothing here is sequence parallel;
    megatron-core sums the gradients over tensor parallel ranks by the modules' names."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **kwargs: Any) -> None:
        super().__init__(config, hidden_size, eps, **kwargs)
        setattr(self.weight, "sequence_parallel", False)  # noqa: B010

"""Which attention kernel torch takes: cuDNN's where nothing is masked, the fastest there for bidirectional models."""

from __future__ import annotations

import contextlib

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

# In order; each is asked whether it can take the heads' size and dtype.
KERNELS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


def attention_kernels(device: torch.device, masked: bool) -> contextlib.AbstractContextManager[None]:
    """A context for a forward pass and its backward pass, which may recompute it. With a mask, and on other devices
    than CUDA ones, torch's own order stands."""
    if device.type != "cuda" or masked:
        return contextlib.nullcontext()
    return sdpa_kernel(KERNELS, set_priority=True)

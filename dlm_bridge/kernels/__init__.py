"""Kernels in Triton, and what swaps a model's modules for fused ones. Without this package sampling runs the same
operations in PyTorch."""

from dlm_bridge.registration import Extension

EXTENSION = Extension(
    "kernels",
    kernels={
        "attention.cuda": "dlm_bridge.kernels.sampling",
        "tokens.cuda": "dlm_bridge.kernels.sampling",
        "layers": "dlm_bridge.kernels.layers",
    },
)

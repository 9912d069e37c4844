"""Triton kernels, and fused modules that replace those of a model. Without this package sampling runs the same
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

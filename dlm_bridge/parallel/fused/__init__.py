"""Kernels of several steps in one pass over memory, in Triton, for layers of Transformer Engine's modules."""

from __future__ import annotations

import importlib.util

from dlm_bridge.parallel import platform


def available() -> bool:
    """Whether layers can use them: Triton comes with torch's CUDA builds."""
    return platform.current().uses_transformer_engine() and importlib.util.find_spec("triton") is not None

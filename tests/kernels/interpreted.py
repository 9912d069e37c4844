"""Triton's interpreter, which runs kernels on a CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch


def round_to_nearest_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the interpreter round float32 to the nearest bfloat16, as a GPU does; it truncates."""
    import triton.language as tl
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def rounding(data: Any, source: Any, target: Any, mode: Any) -> Any:
        if source == tl.float32 and target == tl.bfloat16:
            return torch.from_numpy(np.ascontiguousarray(data)).bfloat16().view(torch.uint16).numpy()
        return convert(data, source, target, mode)

    monkeypatch.setattr(interpreter, "_convert_float", rounding)

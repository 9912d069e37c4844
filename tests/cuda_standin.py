"""A CPU in the place of a GPU: what the benchmarks take of `torch.cuda`, for tests of all but their figures."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable
from typing import Any

import torch

FACTORIES = ("arange", "empty", "full", "ones", "rand", "randint", "randn", "tensor", "zeros")


class Event:
    """A moment on the CPU's clock."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.seconds = 0.0

    def record(self, *_: Any) -> None:
        self.seconds = time.perf_counter()

    def elapsed_time(self, other: Event) -> float:
        return 1000 * (other.seconds - self.seconds) + 1e-6

    def synchronize(self) -> None:
        """It is over."""


class Generator(torch.Generator):
    """Of random numbers on the CPU."""

    def __new__(cls, device: Any = "cpu") -> Any:
        return super().__new__(cls, device="cpu" if str(device).startswith("cuda") else device)


class Graph:
    """Runs what is recorded, once; a replay does nothing."""

    def replay(self) -> None:
        pass


def install() -> None:
    """For the rest of the process, which reports no GPU to whoever asks."""
    cuda: Any = torch.cuda
    cuda.Event = Event
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats", "set_device"):
        setattr(cuda, name, lambda *_: None)
    cuda.CUDAGraph = Graph
    cuda.graph = lambda graph: contextlib.nullcontext()
    cuda.max_memory_allocated = lambda *_: 2**20
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign,assignment]
    torch.nn.Module.cuda = lambda self, *_: self  # type: ignore[method-assign,assignment]
    torch.Generator = Generator  # type: ignore[misc]
    for name in FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))


def _on_cpu(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(make)
    def made(*args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        return make(*args, device="cpu" if str(device).startswith("cuda") else device, **kwargs)

    return made

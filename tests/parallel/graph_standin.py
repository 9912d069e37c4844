"""CUDA graphs on the CPU: what megatron-core's cuda_graphs module takes of `torch.cuda`, for tests.

A graph records the operators of a block of code with their tensors. A replay runs them again on whatever the tensors
hold by then, and writes the results to where they were: as a real graph, it sees nothing of Python, and its tensors
keep their places.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Graph:
    """Recorded operators, and how often they were replayed."""

    replays = 0  # of all graphs

    def __init__(self) -> None:
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[torch.Tensor]]] = []

    def register_generator_state(self, state: Any) -> None:
        """No random number is drawn."""

    @torch.no_grad()
    def replay(self) -> None:
        Graph.replays += 1
        for operator, arguments, options, outputs in self.calls:
            again = _tensors(operator(*arguments, **options))
            for output, value in zip(outputs, again, strict=True):
                if output.data_ptr() != value.data_ptr():  # else a view, or an operator in place
                    output.copy_(value)


class _Recorder(TorchDispatchMode):
    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self.graph = graph

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = operator(*args, **(kwargs or {}))
        self.graph.calls.append((operator, args, kwargs or {}, _tensors(found)))
        return found


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


@contextlib.contextmanager
def _recording(graph: Graph, **_: Any) -> Iterator[None]:
    with _Recorder(graph):
        yield


class _Event:
    """On a device where every kernel has ended when it is launched."""

    def __init__(self, **_: Any) -> None: ...

    def record(self, *_: Any) -> None: ...

    wait = synchronize = record


class _Cuda(types.ModuleType):
    CUDAGraph, Stream, default_generators = Graph, object, ()
    Event, current_stream = _Event, staticmethod(lambda: None)
    graph = staticmethod(_recording)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)

    @staticmethod
    def memory_stats() -> dict[str, int]:
        return dict.fromkeys(("allocated_bytes.all.current", "reserved_bytes.all.current"), 0)

    @staticmethod
    def get_device_capability() -> tuple[int, int]:
        return 9, 0

    @staticmethod
    def device_count() -> int:
        return 0

    @staticmethod
    def graph_pool_handle() -> object:
        return object()

    @staticmethod
    def set_stream(stream: Any) -> None:
        """There is one."""

    default_stream = staticmethod(lambda: None)
    synchronize = staticmethod(lambda: None)


class _Torch(types.ModuleType):
    cuda = _Cuda("cuda")

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def install(patch: pytest.MonkeyPatch) -> None:
    """Let the engine record its layers on the CPU platform."""
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer import cuda_graphs

    from dlm_bridge.parallel import mcore_patches, platform
    from dlm_bridge.parallel.platform import CPU

    mcore_patches.install(platform.current())  # which replaces some of the same
    patch.setattr(cuda_graphs, "torch", _Torch("torch"))
    patch.setattr(cuda_graphs, "_ensure_generator_state_is_cudagraph_safe", lambda generator: generator)
    patch.setattr(random, "_get_cuda_rng_state", lambda *_, **__: torch.Generator())
    patch.setattr(random, "_set_cuda_rng_state", lambda *_, **__: None)
    for name in ("_cuda_beginAllocateCurrentThreadToPool", "_cuda_endAllocateToPool"):
        patch.setattr(torch._C, name, lambda *_: None)
    patch.setattr(torch.cuda, "CUDAGraph", Graph)  # the tracker looks whether its generators can be registered
    patch.setattr(CPU, "records_graphs", lambda self: True)
    Graph.replays = 0

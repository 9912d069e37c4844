"""Stand-in for CUDA graphs on a CPU: what is recorded, what is replayed, and whose result it overwrites."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from dlm_bridge.generation import canvas
from dlm_bridge.generation.runtime import attention, graphs, runner


class Graph:
    """Of a forward on a CPU."""

    replay: Callable[[], None]


class GraphedOnCPU(graphs.GraphedBody):
    """Replays a forward by running it on the tensors that were recorded. All other graphs' results are lost by that:
    on a GPU the graphs share their memory."""

    def __init__(self, *arguments: Any, **sizes: Any) -> None:
        super().__init__(*arguments, **sizes)
        self._records = True

    def _record(self, *arguments: Any) -> Any:
        recorded = super()._record(*arguments)
        if recorded is None:
            return None
        on = adapters(self._model)

        def replay() -> None:
            assert adapters(self._model) == on, "a graph goes on with the adapters that it was recorded with"
            hidden = self._run(recorded.inputs)
            for one in self._recorded.values():
                one.hidden.fill_(torch.nan)
            recorded.hidden.copy_(hidden)

        recorded.graph.replay = replay
        return recorded


def adapters(model: Any) -> list[Any]:
    """Which of PEFT's are on, layer by layer."""
    layers = [one for one in model.modules() if hasattr(one, "merged_adapters")]
    return [(one.active_adapters, one.disable_adapters, [*one.merged_adapters]) for one in layers]


def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let execution "compiled" record its forwards on a CPU, attention read how many columns there are from a tensor,
    and the next forward be launched ahead. Layers are not compiled."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr(runner, "GraphedBody", GraphedOnCPU)
    monkeypatch.setattr(attention, "uses_kernel", in_place)
    monkeypatch.setattr(canvas, "read_flags", read)


def in_place(shapes: Any, dtype: torch.dtype, columns: torch.Tensor, mask: torch.Tensor | None) -> bool:
    """As the kernel's, whatever the size: no mask that says what each query sees."""
    return mask is None or mask.shape[2] == 1


def read(flags: torch.Tensor, overlap_with: Callable[[], None]) -> list[bool]:
    answer = list(flags.tolist())
    overlap_with()
    return answer

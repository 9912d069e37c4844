"""The lattice's kernels against its operations in PyTorch: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytest.importorskip("triton")
pytestmark = pytest.mark.gpu(optional=True)

from dlm_bridge.structured import kernels  # noqa: E402
from dlm_bridge.structured.lattice import Graph, Lattice  # noqa: E402
from tests.structured.automata import automaton  # noqa: E402

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
WIDTH = 6


def lattice(seed: int) -> Lattice:
    """Four rows of two automata, with masks, tokens, and columns outside the text."""
    generator = torch.Generator().manual_seed(seed)
    first = automaton({0: {0: 1, 3: 2, 1: 2}, 1: {0: 0, 4: 2}, 2: {2: 0}}, [0, 2], 8, [6])
    table = {state: {token: (state + token) % 9 for token in range(state % 3, 6)} for state in range(9)}
    graph = Graph.of([first, automaton(table, [4], 8, [6]), first, first], 8, DEVICE)
    masked = torch.rand(4, WIDTH, generator=generator) < 0.8
    tokens = torch.randint(0, 7, (4, WIDTH), generator=generator).to(DEVICE)
    allowed = torch.nn.functional.one_hot(graph.class_of(tokens), graph.classes).bool() | masked[..., None].to(DEVICE)
    allowed = torch.where(allowed, 0.0, -torch.inf).transpose(0, 1).contiguous()
    outside = torch.zeros(4, WIDTH, dtype=torch.bool)
    outside[2, :2] = outside[3, 4:] = True
    final = torch.where(graph.distances <= 1, 0.0, -torch.inf)
    starts = torch.tensor([0, 2, 1, 0], device=DEVICE)
    return Lattice(graph, starts, final, outside.to(DEVICE), allowed)


@pytest.fixture
def in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dlm_bridge.structured.lattice._kernels", lambda device: None)


@pytest.mark.usefixtures("in_torch")
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.fast("1", "3")
def test_feasible_classes(seed: int) -> None:
    one = lattice(seed)
    assert torch.equal(kernels.feasible(one), one.feasible())
    assert torch.equal(kernels.completes(one, one.open), one.completes(one.open))


@pytest.mark.usefixtures("in_torch")
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.fast("1", "3")
def test_paths(seed: int) -> None:
    one = lattice(seed)
    one = replace(one, open=one.open.masked_fill(one.open == -torch.inf, 0.0))  # every row has a text
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(one.open.shape, generator=generator, dtype=torch.float64).to(DEVICE)
    uniform = torch.rand(4, WIDTH, generator=generator, dtype=torch.float64).to(DEVICE)
    drawn = (torch.rand(4, WIDTH, generator=generator) < 0.7).to(DEVICE)
    inside = ~one.outside
    found, expected = kernels.path(one, weights, None, None), one.best_path(weights)
    assert torch.equal(found[inside], expected[inside])
    found, expected = kernels.path(one, weights, drawn, uniform), one.drawn_path(weights, drawn, uniform)
    assert torch.equal(found[inside], expected[inside])

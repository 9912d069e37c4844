"""Compiled decoder layers of every family: one graph for all that are alike, no break in it, the same numbers."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from dlm_bridge.train.accelerate.transforms import compile_layers
from tests.families.case import FamilyCase


@pytest.mark.slow
def test_layers_share_one_graph_without_breaks(
    case: FamilyCase, model: Any, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    counters.clear()
    compiled = copy.deepcopy(model).train()
    assert compile_layers(compiled) == compiled.config.num_hidden_layers
    with torch.no_grad():
        expected = model(ids).logits
    for _ in range(2):
        logits = compiled(ids).logits
        logits.sum().backward()
    assert torch.equal(logits, expected)
    assert not counters["graph_break"]
    kinds = len({type(layer.mlp) for layer in compiled.model.layers})  # some layers may have experts
    assert counters["stats"]["unique_graphs"] == kinds + 1  # and the last norm's

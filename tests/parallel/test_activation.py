"""Transformer Engine's activation function has nothing to save."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from dlm_bridge.parallel.mcore_patches.modules import stateless


class Operation(nn.Module):
    """As Transformer Engine's operations are: an extra state that strict loading asks for, no sharded one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    def get_extra_state(self) -> torch.Tensor:
        return torch.empty(0)

    def set_extra_state(self, state: Any) -> None:
        raise AssertionError("nobody has a state for it")


def test_it_computes_and_saves_nothing() -> None:
    block = nn.Sequential(Operation())
    assert list(block.state_dict()) == ["0._extra_state"]
    operation: Any = stateless(block[0])
    assert operation is block[0]
    assert isinstance(operation, Operation)
    assert operation.sharded_state_dict("mlp.activation_func.", (), {}) == {}
    assert not block.state_dict()
    block.load_state_dict({}, strict=True)
    assert block(torch.ones(1)).item() == 2
    assert list(nn.Sequential(Operation()).state_dict()) == ["0._extra_state"]  # others are as they were

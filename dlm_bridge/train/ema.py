"""Exponential moving average (EMA) of the weights, in fp32 beside them, of the shards that each process updates.

What an engine holds of the weights, and how it writes the averages, is the engine's: accelerate/ema.py saves them as a
model of its own in each checkpoint, megatron/ema.py as further tensors of each iteration.
"""

from __future__ import annotations

import abc
from collections.abc import Iterable

import torch


class AveragedWeights(abc.ABC):
    """average <- decay average + (1 - decay) weight after each step, as torch.optim.swa_utils.AveragedModel: from the
    weights after the first step on."""

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self.averages: list[torch.Tensor] = []  # from the first step on

    @property
    @abc.abstractmethod
    def weights(self) -> list[torch.Tensor]:
        """What this process updates, always in the same order, in fp32."""

    @torch.no_grad()
    def update(self) -> None:
        """Take in the weights as they are after a step."""
        if not self.averages:
            self.averages = [weight.clone() for weight in self.weights]
            return
        torch._foreach_lerp_(self.averages, self.weights, 1 - self.decay)

    def load(self, parts: Iterable[torch.Tensor]) -> None:
        """Continue from the averages of a checkpoint: this process's parts of them, in the order of the weights."""
        self.averages = [
            part.detach().to(weight.device, copy=True) for part, weight in zip(parts, self.weights, strict=True)
        ]

"""Exponential moving average (EMA) of the weights, in fp32 beside them, of the shards that each process updates.

What an engine holds of the weights, and how it writes the averages, is the engine's: those of a Hub model
(`AveragedModel`) are a model of its own in each checkpoint, megatron/ema.py saves further tensors of each iteration.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from dlm_bridge.convert.checkpoints.huggingface import publish_config
from dlm_bridge.convert.optimizer_state import AVERAGED
from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.train.checkpoints import save_tokenizer


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


class AveragedModel(AveragedWeights):
    """That of a Hub model, of its shards under FSDP2."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        """`model` may be sharded already; its parameters stay the same tensors."""
        super().__init__(decay)
        self.parameters = list(model.parameters())

    @property
    def weights(self) -> list[torch.Tensor]:
        """What this process holds, in the same memory; FSDP moves shards at the first forward pass."""
        return [_local(weight.detach()) for weight in self.parameters]

    def save(self, folder: Path, write: Callable[[Path], None], tokenizer: Any, main: bool) -> None:
        """Write a checkpoint's averaged model to a folder in it by `write`, while they stand in the weights' place.
        Every process that holds a part of them calls this."""
        if main:
            (folder / AVERAGED).mkdir()
        with self._in_place():
            write(folder / AVERAGED)
        if main:
            publish_config(folder / AVERAGED)
        if main and tokenizer is not None:
            save_tokenizer(tokenizer, folder / AVERAGED)

    @contextlib.contextmanager
    def _in_place(self) -> Iterator[None]:
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for weight, average in zip(self.weights, self.averages, strict=True):
            kept = weight.clone()
            weight.copy_(average)
            average.copy_(kept)


def averaged_folder(checkpoint: Path) -> Path:
    """The averaged model in a checkpoint. Raises DlmBridgeError where it has none."""
    folder = checkpoint / AVERAGED
    if not folder.is_dir():
        raise DlmBridgeError(f"--ema-decay: {checkpoint} has no averaged weights to go on with: leave it out")
    return folder


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor

"""Exponential moving average (EMA) of the weights, in fp32, of the shards that each process updates.

The averages of a Hub model (`AveragedModel`) are a complete model in each checkpoint. The Megatron engine saves its
averages as additional tensors.
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
from dlm_bridge.errors import CheckpointError
from dlm_bridge.train.checkpoints import save_tokenizer


class AveragedWeights(abc.ABC):
    """Averages that become decay * average + (1 - decay) * weight after each step, as in
    torch.optim.swa_utils.AveragedModel. They start as the weights after the first step."""

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self.averages: list[torch.Tensor] = []  # empty before the first step

    @property
    @abc.abstractmethod
    def weights(self) -> list[torch.Tensor]:
        """fp32 weights that this process updates, always in the same order."""

    @torch.no_grad()
    def update(self) -> None:
        """Update the averages after a step."""
        if not self.averages:
            self.averages = [weight.clone() for weight in self.weights]
            return
        torch._foreach_lerp_(self.averages, self.weights, 1 - self.decay)

    def load(self, parts: Iterable[torch.Tensor]) -> None:
        """Set the averages to this process's shards `parts` of a checkpoint, in the order of the weights."""
        self.averages = [
            part.detach().to(weight.device, copy=True) for part, weight in zip(parts, self.weights, strict=True)
        ]


class AveragedModel(AveragedWeights):
    """Averages of a Hub model, or of its shards under FSDP2."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        """`model` may be sharded already; its parameters stay the same tensors."""
        super().__init__(decay)
        self.parameters = list(model.parameters())

    @property
    def weights(self) -> list[torch.Tensor]:
        """Local tensors of the parameters, read anew each time: FSDP moves shards at the first forward pass."""
        return [_local(weight.detach()) for weight in self.parameters]

    def save(self, folder: Path, write: Callable[[Path], None], tokenizer: Any, main: bool) -> None:
        """Write the averaged model to a subfolder of a checkpoint: `write` runs while the averages replace the
        weights. Called by every process with a shard of them."""
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
    """Folder of the averaged model in a checkpoint. Raises CheckpointError if there is none."""
    folder = checkpoint / AVERAGED
    if not folder.is_dir():
        raise CheckpointError(
            checkpoint, "has no averaged weights, which `ema_decay` continues: resume from an earlier checkpoint"
        )
    return folder


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor

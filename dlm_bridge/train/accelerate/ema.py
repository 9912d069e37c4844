"""The moving average of a Hub model's weights, a model of its own in each checkpoint, on its shards under FSDP2."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from dlm_bridge.convert.optimizer_state import AVERAGED
from dlm_bridge.convert.side_files import publish_config
from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.train.checkpoints import save_tokenizer
from dlm_bridge.train.ema import AveragedWeights


class AveragedModel(AveragedWeights):
    """That of a model."""

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

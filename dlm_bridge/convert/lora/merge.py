"""A base checkpoint with an adapter merged into its weights: W + scale * B @ A, computed in fp32 and rounded once."""

from __future__ import annotations

from pathlib import Path

import torch

from dlm_bridge.convert.checkpoint import Checkpoint, TensorSpec
from dlm_bridge.convert.lora.adapter import Adapter
from dlm_bridge.convert.mapping import Link


class MergedCheckpoint(Checkpoint):
    """Reads as the base does, but for the weights that the adapter changes."""

    format = "merged"

    def __init__(self, base: Checkpoint, adapter: Adapter) -> None:
        super().__init__(base.where, base.hub)
        self.dims = base.dims
        self._base, self._adapter = base, adapter

    @property
    def derived(self) -> dict[str, str]:
        return self._base.derived

    def spec(self, name: str) -> TensorSpec:
        return self._base.spec(name)

    def read_link(self, link: Link) -> tuple[torch.Tensor, ...]:
        tensors = self._base.read_link(link)
        return tuple(self._merged(name, tensor) for name, tensor in zip(link.hub_names, tensors, strict=True))

    def read_carried(self, name: str) -> torch.Tensor:
        return self._base.read_carried(name)

    def check(self) -> list[str]:
        changed = len(self._adapter.facts.modules)
        return [*self._base.check(), f"the adapter {self._adapter.facts.where} is merged into {changed} weights"]

    def folders(self) -> list[Path]:
        own = self._adapter.facts.folder
        return [*self._base.folders(), *([own] if own else [])]

    def _merged(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if name not in self._adapter.facts.modules:
            return tensor
        return (tensor.float() + self._adapter.delta(name)).to(tensor.dtype)

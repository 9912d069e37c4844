"""Where the shards of a model under FSDP2 come from: the checkpoint, or the first process's whole model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.train.lazy_weights import LazyWeights
from dlm_bridge.train.lora import magnitude_of


def shard_source(model: nn.Module, weights: LazyWeights | None, device: torch.device) -> ShardSource:
    """The source of a model that is not sharded yet: `weights`, which every process reads, or where there are none the
    tensors of rank 0's model. Every process calls this together. Raises DlmBridgeError where they read different
    checkpoints."""
    own = None if weights is None else weights.digest()
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    if odd := next((rank for rank, digest in enumerate(found) if digest != found[0]), None):
        raise DlmBridgeError(
            f"--model: rank {odd} finds another checkpoint there than rank 0: give every node the same files"
        )
    return FirstProcess(model, device) if weights is None else OwnSlices(model, weights, device)


class ShardSource(ABC):
    """The tensors of a model before it was sharded; every process asks for the same ones in the same order."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.device = device
        self.tensors = dict(model.named_parameters()) | dict(model.named_buffers(remove_duplicate=False))

    @property
    @abstractmethod
    def dtypes(self) -> dict[str, torch.dtype]:
        """The dtype of each tensor."""

    @abstractmethod
    def shard(self, name: str, weight: DTensor) -> torch.Tensor:
        """This process's shard of the parameter `name`, on the device; `weight` says which it is."""

    @abstractmethod
    def buffer(self, name: str) -> torch.Tensor:
        """A whole buffer, on the device."""

    @torch.no_grad()
    def shards(self, model: nn.Module) -> Iterator[torch.Tensor]:
        """This process's shard of each parameter of a sharded model, one at a time."""
        for name, weight in model.named_parameters():
            assert isinstance(weight, DTensor)
            yield self.shard(name, weight)


class FirstProcess(ShardSource):
    """Rank 0's model, whose tensors the processes get one at a time; on other ranks it may be on the meta device."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        super().__init__(model, device)
        said: list[Any] = [{name: tensor.dtype for name, tensor in self.tensors.items()}]
        dist.broadcast_object_list(said, src=0, device=device)
        assert said[0].keys() == self.tensors.keys(), "the processes have different models"
        self._dtypes: dict[str, torch.dtype] = said[0]

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        return self._dtypes

    def shard(self, name: str, weight: DTensor) -> torch.Tensor:
        return distribute_tensor(self._mine(name), weight.device_mesh, weight.placements).to_local()

    def buffer(self, name: str) -> torch.Tensor:
        whole = self._mine(name)
        dist.broadcast(whole, src=0)
        return whole

    def _mine(self, name: str) -> torch.Tensor:
        """The tensor on rank 0, room for it on the others."""
        if dist.get_rank() == 0:
            return self.tensors[name].detach().to(self.device)
        return torch.empty(self.tensors[name].shape, dtype=self._dtypes[name], device=self.device)


class OwnSlices(ShardSource):
    """A checkpoint, of which each process reads the elements of its shards and nothing else. What is not there (an
    adapter, buffers that are computed) every process has whole, but for DoRA's new magnitudes: they are the norms of
    the rows of its shards."""

    def __init__(self, model: nn.Module, weights: LazyWeights, device: torch.device) -> None:
        super().__init__(model, device)
        self.weights = weights

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        return {name: tensor.dtype for name, tensor in self.tensors.items()}

    def shard(self, name: str, weight: DTensor) -> torch.Tensor:
        first, shape = first_row(weight), weight.to_local().shape
        own = self.tensors[name]
        if (base := magnitude_of(name, own)) is not None:
            rows = self._rows(base, first, torch.Size([*shape, *self.tensors[base].shape[1:]]))
            return torch.linalg.vector_norm(rows, dim=1, dtype=torch.float32).to(weight.dtype)
        if name not in self.weights:
            return own.detach()[first : first + shape[0]].to(self.device)
        return self._rows(name, first, shape)

    def _rows(self, name: str, first: int, shape: torch.Size) -> torch.Tensor:
        """Those of the checkpoint's tensor `name` from `first` on, in `shape`."""
        local = torch.empty(shape, dtype=self.tensors[name].dtype, device=self.device)
        start = first * prod(shape[1:])
        for place, values in self.weights.read(name, start, start + local.numel()):
            local.view(-1)[place : place + len(values)].copy_(values)
        return local

    def buffer(self, name: str) -> torch.Tensor:
        own = self.tensors[name]
        if name in self.weights:
            return self.weights.whole(name, own.shape).to(self.device, own.dtype)
        return own.detach().to(self.device)


def first_row(weight: DTensor) -> int:
    """The first row of this process's shard; all but the last shards have as many."""
    mesh = weight.device_mesh
    assert weight.placements[-1] == Shard(0), "FSDP2 cuts rows"
    rows = weight.shape[0]
    return min(mesh.get_local_rank(mesh.ndim - 1) * -(-rows // mesh.size(mesh.ndim - 1)), rows)

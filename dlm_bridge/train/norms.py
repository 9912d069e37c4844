"""Norms of the parameters and of each layer's gradients, for metrics.jsonl."""

from __future__ import annotations

import abc
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from dlm_bridge.loading.pretrained import decoder_layers

EMBEDDING, FINAL_NORM, HEAD, OTHER = "embedding", "norm", "head", "other"  # groups of parameters outside the layers
_ORDER = (EMBEDDING, r"\d+", r"mtp\.\d+", FINAL_NORM, HEAD, OTHER)  # layers are named by their index


@dataclass(frozen=True)
class MeasuredNorms:
    """L2 norms of one step over the whole model; None if a gradient overflowed."""

    param_norm: float | None  # all trained parameters, after the step
    layer_grad_norms: dict[str, float | None]  # by layer, before clipping


class LayerNorms(abc.ABC):
    """Computes norms without waiting for the device. Elements that are replicated on several processes count once.

    Args:
        names: layers of this process's trained parameters.
    """

    def __init__(self, names: Iterable[str], device: torch.device, cpu_group: Any = None) -> None:
        found = set(names)
        if dist.is_initialized() and dist.get_world_size() > 1:
            of_all: list[set[str]] = [set()] * dist.get_world_size()
            dist.all_gather_object(of_all, found, group=cpu_group)
            found = set().union(*of_all)
        self.layers = sorted(found, key=_rank)
        self.device = device

    @abc.abstractmethod
    def gradients(self) -> Iterable[tuple[str, torch.Tensor]]:
        """(layer, gradient) before clipping, for the elements that this process counts."""

    @abc.abstractmethod
    def weights(self) -> Iterable[torch.Tensor]:
        """Trained parameters, fp32 main params if there are any, for the elements that this process counts."""

    def gradient_scale(self) -> torch.Tensor | float:
        """Scale of the loss."""
        return 1.0

    @torch.no_grad()
    def gradient_squares(self) -> torch.Tensor:
        """[L] float64: sum of squares per layer on this process. Called between backward pass and optimizer step."""
        found = list(self.gradients())
        places = torch.tensor([self.layers.index(layer) for layer, _ in found], dtype=torch.long)
        if self.device.type == "cuda":
            places = places.pin_memory().to(self.device, non_blocking=True)
        squares_L = torch.zeros(len(self.layers), dtype=torch.float64, device=self.device)
        squares_L.index_add_(0, places, _squares([gradient for _, gradient in found], self.device))
        return squares_L / self.gradient_scale() ** 2

    @torch.no_grad()
    def norms(self, gradient_squares_L: torch.Tensor) -> torch.Tensor:
        """[L + 1] float64, equal on every process: norms of the gradients, from `gradient_squares`, and of the current
        parameters."""
        squares = torch.cat([gradient_squares_L, _squares(list(self.weights()), self.device).sum()[None]])
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(squares)
        return squares.sqrt()

    def named(self, norms: Sequence[float]) -> MeasuredNorms:
        """Convert `norms`, copied to the CPU, to named values."""
        *gradients, params = [norm if math.isfinite(norm) else None for norm in norms]
        return MeasuredNorms(params, dict(zip(self.layers, gradients, strict=True)))


class HubLayerNorms(LayerNorms):
    """Norms of a Hub model, replicated or sharded by FSDP2."""

    def __init__(self, model: nn.Module, device: torch.device, rank: int, cpu_group: Any, scaler: Any) -> None:
        self.model, self.rank, self.scaler = model, rank, scaler
        self.names = parameter_layers(model)
        super().__init__(self.names.values(), device, cpu_group)

    def gradients(self) -> Iterable[tuple[str, torch.Tensor]]:
        for name, weight in self.model.named_parameters():
            if weight.grad is not None and self._counts(weight):
                yield self.names[name], _local(weight.grad)

    def weights(self) -> Iterable[torch.Tensor]:
        return [_local(weight) for weight in self.model.parameters() if weight.requires_grad and self._counts(weight)]

    def gradient_scale(self) -> torch.Tensor | float:
        return 1.0 if self.scaler is None else float(self.scaler.get_scale())

    def _counts(self, weight: torch.Tensor) -> bool:
        if not isinstance(weight, DTensor):
            return self.rank == 0
        place = weight.device_mesh.get_coordinate()  # [replica, shard] or [shard]
        return place is not None and not any(place[:-1])


def parameter_layers(model: Any) -> Mapping[str, str]:
    """Layer of each trained parameter of a Hub model by the parameter's name. A tied head belongs to the embedding."""
    numbers = {
        id(weight): str(number) for number, layer in enumerate(decoder_layers(model)) for weight in layer.parameters()
    }
    outside = {id(weight): HEAD for weight in _weights(model.get_output_embeddings())}
    outside |= {id(weight): EMBEDDING for weight in _weights(model.get_input_embeddings())}
    return {
        name: numbers.get(id(weight)) or outside.get(id(weight)) or (FINAL_NORM if "norm" in name else OTHER)
        for name, weight in model.named_parameters()
        if weight.requires_grad
    }


def _weights(module: nn.Module | None) -> Iterable[nn.Parameter]:
    return () if module is None else module.parameters()


def _rank(layer: str) -> tuple[int, int]:
    """Sort key of a layer in the order of the forward pass."""
    kind = next(number for number, pattern in enumerate(_ORDER) if re.fullmatch(pattern, layer))
    return kind, int("0" + re.sub(r"\D", "", layer))


def _squares(tensors: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """[N] float64: sum of squares of each tensor, computed in fp32."""
    if not tensors:
        return torch.zeros(0, dtype=torch.float64, device=device)
    norms = torch._foreach_norm(tensors, dtype=torch.float32)
    return torch.stack([norm.to(device, torch.float64, non_blocking=True) for norm in norms]).square()


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor

"""Reading of a model's weights from its checkpoint by ranges of elements, and by shards.

Under FSDP2 no process has memory for a whole model: each reads, or initialises from scratch, the elements of its own
shards. If a checkpoint cannot be read in ranges, the shards come from the main process's whole model (`shard_source`).
"""

from __future__ import annotations

import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from dlm_bridge.convert.checkpoint import Checkpoint, TensorSpec
from dlm_bridge.convert.checkpoints.in_memory import hub_tensors, stored_tensors
from dlm_bridge.errors import CheckpointError

_DROPPED = (r"rotary_emb\.inv_freq", r"(^|\.)position_ids$")  # tensors of old checkpoints, as in transformers
MAGNITUDE = ".lora_magnitude_vector."  # part of the name of a DoRA magnitude
_BASE_LAYER = re.compile(r"(\.base_layer)+\.")  # part of the name of a weight with PEFT adapters


class NotInRangesError(Exception):
    """A checkpoint's tensors cannot be read as ranges of the model's; the message names the tensor."""


@dataclass(frozen=True)
class HubRange:
    """Hub tensor whose elements are the elements `start` to `start + size` of a model's tensor, in row-major order."""

    name: str
    start: int
    size: int


class LazyWeights:
    """Lazy reader of a model's tensors from `checkpoint`; creating it reads headers only.

    transformers merges some Hub tensors into one parameter (experts). Its own conversion, reversed on the row numbers
    of a parameter, gives the position of each Hub tensor in the parameter.

    Args:
        originals: names of tensors by those of their copies, which may not be stored: tied weights of a model can be
            listed under the copies' names.

    Attributes:
        unused: stored tensors that the model does not have, without those that its class ignores.

    Raises:
        NotInRangesError: a tensor is missing, has another shape, is not floating-point, or is stored in another order
            of elements than the model's.
    """

    def __init__(self, model: Any, checkpoint: Checkpoint, originals: Mapping[str, str] | None = None) -> None:
        self._checkpoint = checkpoint
        self._ranges: dict[str, tuple[HubRange, ...]] = {}
        stored = checkpoint.stored_specs()
        for name, tensor in stored_tensors(model):
            parts = []
            for part, shape in hub_ranges(model, name, tensor):
                if originals is not None and (original := originals.get(part.name)) in stored:
                    part = replace(part, name=original)
                _check_stored(part.name, shape, stored)
                parts.append(part)
            self._ranges[name] = tuple(sorted(parts, key=lambda part: part.start))
        used = {part.name for parts in self._ranges.values() for part in parts}
        dropped = re.compile(
            "|".join((*_DROPPED, *(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())))
        )
        self.unused = sorted(name for name in stored.keys() - used if not dropped.search(name))
        self._specs = {name: stored[name] for name in used}

    def __contains__(self, name: str) -> bool:
        """True if the checkpoint contains the model's tensor `name`, which may be below an adapter's `base_layer`."""
        return _plain(name) in self._ranges

    def leave_out(self, name: str) -> None:
        """Exclude the model's tensor `name`, whose values differ from the stored ones."""
        self._ranges.pop(name, None)

    def parts(self, name: str) -> tuple[HubRange, ...]:
        """Hub tensors of the model's tensor `name`, in the order of its elements."""
        return self._ranges[_plain(name)]

    def stored_dtype(self, name: str) -> torch.dtype:
        """Stored dtype of the model's tensor `name`; that of the first Hub tensor, if it has several."""
        return self._specs[self._ranges[_plain(name)][0].name][0]

    def read(self, name: str, start: int, stop: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Read the elements `start` to `stop` of the model's tensor `name`, in row-major order.

        Yields, per Hub tensor, (offset from `start`, elements in one dimension and the stored dtype). Raises
        CheckpointError.
        """
        for part in self._ranges[_plain(name)]:
            low, high = max(start, part.start), min(stop, part.start + part.size)
            if low < high:
                values = self._checkpoint.read_elements(part.name, low - part.start, high - part.start)
                yield low - start, values

    def whole(self, name: str, shape: torch.Size) -> torch.Tensor:
        """Read a tensor of the model in the stored dtype. Raises CheckpointError."""
        parts = [values for _, values in self.read(name, 0, prod(shape))]
        return torch.cat(parts).view(shape)

    def digest(self) -> str:
        """Digest of the names, dtypes and shapes of all tensors: equal in all processes that read the same
        checkpoint."""
        text = repr(sorted((name, str(dtype), shape) for name, (dtype, shape) in self._specs.items()))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def shard_source(model: nn.Module, weights: LazyWeights | None, device: torch.device) -> ShardSource:
    """Source of the shards of a model that is not sharded yet: `weights`, which every process reads, or rank 0's model
    if that is None. A collective call. Raises CheckpointError if processes read different checkpoints."""
    own = None if weights is None else weights.digest()
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    if odd := next((rank for rank, digest in enumerate(found) if digest != found[0]), None):
        raise CheckpointError(
            "model", f"rank {odd} reads another checkpoint than rank 0: copy the files to every node"
        )
    return FirstProcess(model, device) if weights is None else OwnSlices(model, weights, device)


class ShardSource(ABC):
    """Tensors of a model before it was sharded. All processes request the same tensors in the same order."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.device = device
        self.tensors = dict(model.named_parameters()) | dict(model.named_buffers(remove_duplicate=False))

    @property
    @abstractmethod
    def dtypes(self) -> dict[str, torch.dtype]:
        """Dtype of each tensor."""

    @abstractmethod
    def shard(self, name: str, weight: DTensor) -> torch.Tensor:
        """Return this process's shard of the parameter `name`, on the device. `weight`: the sharded parameter."""

    @abstractmethod
    def buffer(self, name: str) -> torch.Tensor:
        """Return a whole buffer, on the device."""

    @torch.no_grad()
    def shards(self, model: nn.Module) -> Iterator[torch.Tensor]:
        """Yield this process's shard of each parameter of a sharded model."""
        for name, weight in model.named_parameters():
            assert isinstance(weight, DTensor)
            yield self.shard(name, weight)


class FirstProcess(ShardSource):
    """Rank 0's model, scattered tensor by tensor; on other ranks the model may be on the meta device."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        super().__init__(model, device)
        sent: list[Any] = [{name: tensor.dtype for name, tensor in self.tensors.items()}]
        dist.broadcast_object_list(sent, src=0, device=device)
        assert sent[0].keys() == self.tensors.keys(), "the processes have different models"
        self._dtypes: dict[str, torch.dtype] = sent[0]

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
        """Return the tensor on rank 0, an uninitialised one on the other ranks."""
        if dist.get_rank() == 0:
            return self.tensors[name].detach().to(self.device)
        return torch.empty(self.tensors[name].shape, dtype=self._dtypes[name], device=self.device)


class OwnSlices(ShardSource):
    """Checkpoint of which each process reads only the elements of its shards. Tensors that are not in it (adapters,
    computed buffers) are whole in every process; new DoRA magnitudes are the row norms of the shards."""

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
        """Read rows of the checkpoint's tensor `name`, from `first` on, in `shape`."""
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
    """First row of this process's shard. Shards have equal numbers of rows, except the last."""
    mesh = weight.device_mesh
    assert weight.placements[-1] == Shard(0), "FSDP2 cuts rows"
    rows = weight.shape[0]
    return min(mesh.get_local_rank(mesh.ndim - 1) * -(-rows // mesh.size(mesh.ndim - 1)), rows)


def magnitude_of(name: str, parameter: torch.Tensor) -> str | None:
    """Name of the weight whose row norms initialise a new DoRA magnitude, which `add_adapter` created without weights;
    None for any other parameter."""
    return f"{name.partition(MAGNITUDE)[0]}.base_layer.weight" if getattr(parameter, "is_new", False) else None


def replace_parameters(model: nn.Module, others: Mapping[int, nn.Parameter]) -> None:
    """Replace the parameters whose `id` is in `others`; tied parameters stay tied."""
    for module in model.modules():
        for name, weight in module._parameters.items():
            if weight is not None and id(weight) in others:
                module._parameters[name] = others[id(weight)]


def _plain(name: str) -> str:
    return _BASE_LAYER.sub(".", name)


def hub_ranges(model: Any, name: str, tensor: torch.Tensor) -> Iterator[tuple[HubRange, tuple[int, ...]]]:
    """Yield the Hub tensors of a model's tensor (which may be on the meta device) and their shapes. Raises
    NotInRangesError for a Hub tensor with its elements in another order."""
    # The positions of rows do not depend on the last dimension.
    columns = tensor.shape[-1] if tensor.dim() > 1 else 1
    shape = (*tensor.shape[:-1], 1) if tensor.dim() > 1 else tuple(tensor.shape)
    parts = hub_tensors(model, {name: torch.empty(tensor.shape, device="meta")})
    try:
        numbers = hub_tensors(model, {name: torch.arange(prod(shape)).view(shape)})
    except (RuntimeError, ValueError, IndexError) as error:  # a conversion that needs the last dimension
        raise NotInRangesError(f"{name} is stored in another order of elements") from error
    if parts.keys() != numbers.keys() or sum(part.numel() for part in parts.values()) != tensor.numel():
        raise NotInRangesError(f"{name} is stored in another order of elements")
    for hub_name, part in parts.items():
        own = numbers[hub_name]
        whole_rows = (*part.shape[:-1], 1) if tensor.dim() > 1 else tuple(part.shape)
        flat = own.reshape(-1)
        in_order = bool((flat[1:] == flat[:-1] + 1).all())
        if tuple(own.shape) != whole_rows or own.numel() * columns != part.numel() or not in_order:
            raise NotInRangesError(f"{hub_name} is stored in another order of elements")
        yield HubRange(hub_name, int(flat[0]) * columns, part.numel()), tuple(part.shape)


def _check_stored(name: str, shape: tuple[int, ...], stored: dict[str, TensorSpec]) -> None:
    """Raise NotInRangesError for a Hub tensor that is missing, has another shape, or is not floating-point."""
    if name not in stored:
        raise NotInRangesError(f"{name} is not stored")
    dtype, found = stored[name]
    if tuple(found) != shape:
        raise NotInRangesError(f"{name} is stored with the shape {list(found)}, not {list(shape)}")
    if not dtype.is_floating_point:
        raise NotInRangesError(f"{name} is stored as {dtype}")

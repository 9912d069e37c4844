"""Rollout models: copies to sample from beside a sharded trained model, whole on each process or tensor parallel.

A rollout model has memory for weights only while it samples. The engine streams the trained weights to it one whole
tensor at a time, and each process keeps its part.
"""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dlm_bridge.convert.checkpoints.in_memory import stored_tensors
from dlm_bridge.distributed import raised_everywhere
from dlm_bridge.errors import LayoutError, ResourceError, SettingError
from dlm_bridge.generation.batch_size import free_memory
from dlm_bridge.generation.runtime.runner import release
from dlm_bridge.generation.runtime.tensor_parallel import Shard, cut_model
from dlm_bridge.loading.lazy import HubRange, NotInRangesError, hub_ranges, replace_parameters
from dlm_bridge.loading.placement import check_tensor_parallel_split
from dlm_bridge.replicas import ALONE, Replicas
from dlm_bridge.train.config import RLConfig

GIB = 2**30


class RolloutModel:
    """A copy of a model, in the run's compute dtype, that has memory for weights only while `allocated`."""

    def __init__(self, model: Any, dtype: torch.dtype, remedy: str, group: Any = None) -> None:
        """
        Args:
            model: the trained model, unsharded or without weights. What transformers keeps in fp32 (routers) stays so.
            remedy: how to free memory, for the error if there is not enough.
            group: processes that hold the copy together, tensor parallel; None: each one holds it whole.

        Raises:
            SettingError: the processes cannot share the model.
        """
        kept = tuple(model._get_dtype_plan(torch.bfloat16))
        empty: dict[int, Any] = {}
        for name, weight in model.named_parameters():
            own = torch.float32 if any(re.search(part, name) for part in kept) else dtype
            empty[id(weight)] = nn.Parameter(torch.empty_like(weight, device="meta", dtype=own), requires_grad=False)
        self.model = copy.deepcopy(model, memo=empty).eval()
        self.remedy, self.group = remedy, group
        self.shards = {name: Shard(tensor.shape) for name, tensor in stored_tensors(self.model)}
        self._places: dict[str, tuple[str, HubRange]] = {}  # parameter and range, by Hub tensor
        self._shapes: dict[str, tuple[int, ...]] = {}
        if group is not None:
            check_split(model, dist.get_world_size(group))
            self._find_places()
            self.shards |= cut_model(self.model, group)

    @contextlib.contextmanager
    def allocated(self, device: torch.device) -> Iterator[Any]:
        """Context manager of the model with memory for its weights, which the caller sets; all processes call it
        together. Raises ResourceError if the device has not enough memory."""
        with raised_everywhere():
            self._check_room(device)
        empty = dict(self.model.named_parameters())
        filled = {
            id(weight): nn.Parameter(torch.empty_like(weight, device=device), requires_grad=False)
            for weight in empty.values()
        }
        replace_parameters(self.model, filled)
        try:
            yield self.model
        finally:
            replace_parameters(self.model, {id(filled[id(weight)]): weight for weight in empty.values()})
            del filled
            release(self.model)  # KV cache, graphs, and the memory of fused weights

    def write(self, name: str, whole: torch.Tensor, start: int = 0) -> None:
        """Set this process's part of the parameter, or stored buffer, `name`, from its element `start` on."""
        owner, _, own_name = name.rpartition(".")
        module = self.model.get_submodule(owner)
        target = module._parameters[own_name] if own_name in module._parameters else module._buffers[own_name]
        with torch.no_grad():
            self.shards[name].write(target, whole, start)

    def hub_writer(self) -> ShardWriter:
        """Writer of Hub tensors into a model that processes share."""
        return ShardWriter(self, self._places, self._shapes)

    def _find_places(self) -> None:
        for name, tensor in stored_tensors(self.model):
            try:
                for part, shape in hub_ranges(self.model, name, tensor):
                    self._places[part.name], self._shapes[part.name] = (name, part), shape
            except NotInRangesError as error:
                raise SettingError("rollout_tp", f"{error}: omit it") from error

    def _check_room(self, device: torch.device) -> None:
        free = free_memory(device)
        needed = sum(weight.numel() * weight.itemsize for weight in self.model.parameters())
        if needed > free:
            raise no_room("the weights of the rollout model", needed, free, self.remedy)


class ShardWriter:
    """Writer of Hub tensors into a model that processes share; `InPlaceWriter` is the one for a whole model."""

    def __init__(
        self,
        model: RolloutModel,
        places: Mapping[str, tuple[str, HubRange]],
        shapes: dict[str, tuple[int, ...]],  # of every Hub tensor
    ) -> None:
        self._model, self._places, self.shapes = model, places, shapes

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Copy this process's part of a Hub tensor into the model."""
        parameter, part = self._places[name]
        self._model.write(parameter, tensor, part.start)


def sampler_ranks(config: RLConfig) -> tuple[Replicas, Any]:
    """The `rollout_tp` neighbouring processes that share a rollout model, and their group on the devices (None for one
    process). Every process calls it. Raises LayoutError if `rollout_tp` does not divide the number of processes."""
    size = config.rl.rollout_tp
    if size == 1:
        return ALONE, None
    processes = dist.get_world_size()
    check_divides(size, processes)
    own: Any = None
    for first in range(0, processes, size):
        ranks = list(range(first, first + size))
        groups = dist.new_group(ranks, backend="gloo"), dist.new_group(ranks)
        if dist.get_rank() in ranks:
            own = groups
    return Replicas.of_group(own[0]), own[1]


def check_divides(size: int, processes: int) -> None:
    """Raise LayoutError if `rollout_tp` does not divide the number of processes."""
    if processes % size:
        raise LayoutError("rollout_tp", f"{size} does not divide {processes} processes")


def check_split(model: Any, size: int) -> None:
    """Raise an error if `size` processes cannot share the model."""
    check_tensor_parallel_split(model.config, size, "rollout_tp", "use one process per copy")


def room_makers(config: RLConfig) -> str:
    """Settings that leave rollouts more memory and that the run does not use yet, as a sentence."""
    found = []
    if config.engine.engine == "megatron":
        if not config.optimizer.optimizer_cpu_offload and config.precision.precision != "fp32":
            found.append("offload the optimizer with `optimizer_cpu_offload`")
        found.append(f"shard the rollout model with `rollout_tp` above {config.rl.rollout_tp}")
        found.append("shard the trained model further with `tp` or `pp`")
    elif config.parallel.shards:
        if not config.parallel.cpu_offload:
            found.append("offload weights and optimizer with `cpu_offload`")
        found.append(f"shard the rollout model with `rollout_tp` above {config.rl.rollout_tp}")
    else:
        found.append("shard the training state with `sharding=fsdp`, offloaded with `cpu_offload`")
    if config.rl.has_reference and not config.model.lora_rank:
        found.append("train without a reference (`beta=0`)" if config.rl.reward else "train an adapter (`lora_rank`)")
    if config.precision.precision == "fp32":
        found.append("use `precision=bf16`")
    found.append("sample shorter completions (`gen_length`)")
    return "; or ".join(found)


def no_room(what: str, needed: int, free: int, remedy: str) -> ResourceError:
    """The error of a rollout that needs more memory than is free; sizes in bytes."""
    sizes = [(needed, "needed"), (free, "free"), (needed - free, "missing")]
    shown = ", ".join(f"{size / GIB:.2f} GiB {word}" for size, word in sizes if size > 0)
    return ResourceError("rollouts", f"do not fit beside the training state: {what}: {shown}: {remedy}")

"""Exponential moving average of a Megatron run's weights (`ema_decay`): of its fp32 main params, sharded as in the
optimizer. Run on CPU only.

An iteration stores the averages as separate tensors, `ema.decoder.layers...`, sharded like the weights: they are
loaded on any layout, and the export reads them instead of the weights with `ema`. Tensors that no optimizer updates
(an expert bias, layers that are not trained) are stored there unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from dlm_bridge.convert.optimizer_state import AVERAGED
from dlm_bridge.parallel.core import (
    ShardedTensor,
    ShardedTensorFactory,
    is_main_replica,
    make_sharded_optimizer_tensor,
    nested_values,
)
from dlm_bridge.parallel.mcore_patches.optimizers import float16_params, fp32_params, parts_of, shard_start
from dlm_bridge.train.ema import AveragedWeights


@dataclass(frozen=True)
class UpdatedShard:
    """fp32 values that this rank's optimizer updates: elements of the flat `parameter` from `start`."""

    parameter: torch.Tensor
    start: int
    values: torch.Tensor


class MegatronAverages(AveragedWeights):
    """Averages of the values that megatron-core's optimizer updates on this rank."""

    def __init__(self, optimizer: Any, decay: float) -> None:
        super().__init__(decay)
        self.parts = parts_of(optimizer)
        # Parameters of sharded optimizers -> the ranks that have their shards.
        self.group_of: dict[torch.Tensor, dist.ProcessGroup] = {
            parameter: part.data_parallel_group
            for part in self.parts
            for buffer in getattr(part, "buffers", ())
            for parameter in buffer.params
        }

    @property
    def weights(self) -> list[torch.Tensor]:
        return [shard.values.detach() for shard in self._shards()]

    def saved(self, states: Sequence[Any]) -> dict[str, Any]:
        """Sharded state dict of the averages, with the sharding of the weights in `states`. Each average is on the CPU
        of the rank that writes it; every rank calls this."""
        averages = {
            shard.parameter: (shard.start, average)
            for shard, average in zip(self._shards(), self.averages, strict=True)
        }
        found = {}
        for number, place in enumerate(_places(states)):
            weight = place.data
            if weight in self.group_of or weight in averages:
                values = self._gathered(weight, averages.get(weight))
            else:
                values = weight.detach()
            if is_main_replica(place.replica_id):
                found[str(number)] = make_sharded_optimizer_tensor(place, values.to("cpu", copy=True), AVERAGED)
        return {AVERAGED: found}

    def requested(self, states: Sequence[Any]) -> dict[str, Any]:
        """Sharded state dict to load from a checkpoint, for `take`."""
        updated = {*self.group_of, *(shard.parameter for shard in self._shards())}
        self._loaded: dict[str, torch.Tensor] = {}  # key -> weight
        request = {}
        for number, place in enumerate(_places(states)):
            if place.data in updated:
                self._loaded[str(number)] = place.data
                empty = torch.zeros(place.data.shape, dtype=torch.float32)
                request[str(number)] = make_sharded_optimizer_tensor(place, empty, AVERAGED)
        return {AVERAGED: request}

    def take(self, state: dict[str, Any]) -> None:
        """Set the averages to the loaded state of `requested`."""
        wholes = {weight: state[AVERAGED][name] for name, weight in self._loaded.items()}
        shards = list(self._shards())
        self.load(
            wholes[shard.parameter].reshape(-1)[shard.start :][: shard.values.numel()].view_as(shard.values)
            for shard in shards
        )

    def _gathered(self, parameter: torch.Tensor, own: tuple[int, torch.Tensor] | None) -> torch.Tensor:
        """Gather the average of a parameter from the shards of all ranks that have one."""
        if parameter not in self.group_of:
            assert own is not None
            return own[1]
        flat = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
        if own is not None:
            start, values = own
            flat[start : start + values.numel()] = values.reshape(-1)
        # Integers, whose sum with zeros is exact.
        dist.all_reduce(flat.view(torch.int32), group=self.group_of[parameter])
        return flat.view(parameter.shape)

    def _shards(self) -> Iterator[UpdatedShard]:
        for part in self.parts:
            if getattr(part, "is_stub_optimizer", False):  # on a rank without parameters
                continue
            for parameter, values in (*float16_params(part), *fp32_params(part)):
                yield UpdatedShard(parameter, shard_start(part, parameter), values)


def _places(states: Sequence[Any]) -> Iterator[Any]:
    """Iterate over the tensors in sharded state dicts, in the same order on all ranks that share a parameter."""
    for state in states:
        yield from (each for each in nested_values(state) if isinstance(each, ShardedTensor | ShardedTensorFactory))

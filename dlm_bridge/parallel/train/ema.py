"""The moving average of a Megatron run's weights: of its fp32 main params, sharded as the optimizer has them. For runs
that release their averaged weights (`--ema-decay`); run on CPU only.

An iteration holds the averages as tensors of their own, `ema.decoder.layers...`, cut as the weights are: they are
loaded on any layout, and `dlm-bridge export --ema` reads them in the weights' place. What no optimizer updates (an
expert bias, layers that are not trained) stands there too, as it is.
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
    """The fp32 values, from `start` on of the flat `parameter`, that this rank's optimizer updates."""

    parameter: torch.Tensor
    start: int
    values: torch.Tensor


class MegatronAverages(AveragedWeights):
    """That of what one of megatron-core's optimizers updates on this rank."""

    def __init__(self, optimizer: Any, decay: float) -> None:
        super().__init__(decay)
        self.parts = parts_of(optimizer)
        # Parameters of sharded optimizers: the ranks that have their shards.
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
        """The averages as megatron-core saves them, in the places of the weights in `states`, which it saves too. Each
        is on the CPU of the rank that writes it; every rank calls this."""
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
        """What to load of a checkpoint, for `take`."""
        updated = {*self.group_of, *(shard.parameter for shard in self._shards())}
        self._loaded: dict[str, torch.Tensor] = {}  # the weight of each tensor
        request = {}
        for number, place in enumerate(_places(states)):
            if place.data in updated:
                self._loaded[str(number)] = place.data
                empty = torch.zeros(place.data.shape, dtype=torch.float32)
                request[str(number)] = make_sharded_optimizer_tensor(place, empty, AVERAGED)
        return {AVERAGED: request}

    def take(self, state: dict[str, Any]) -> None:
        """Continue from what was loaded as `requested`."""
        wholes = {weight: state[AVERAGED][name] for name, weight in self._loaded.items()}
        shards = list(self._shards())
        self.load(
            wholes[shard.parameter].reshape(-1)[shard.start :][: shard.values.numel()].view_as(shard.values)
            for shard in shards
        )

    def _gathered(self, parameter: torch.Tensor, own: tuple[int, torch.Tensor] | None) -> torch.Tensor:
        """The average of a parameter from the shards of all ranks that have one."""
        if parameter not in self.group_of:
            assert own is not None
            return own[1]
        flat = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
        if own is not None:
            start, values = own
            flat[start : start + values.numel()] = values.reshape(-1)
        # As integers the sum with the others' zeros is exact.
        dist.all_reduce(flat.view(torch.int32), group=self.group_of[parameter])
        return flat.view(parameter.shape)

    def _shards(self) -> Iterator[UpdatedShard]:
        for part in self.parts:
            if getattr(part, "is_stub_optimizer", False):  # of a rank without parameters
                continue
            for parameter, values in (*float16_params(part), *fp32_params(part)):
                yield UpdatedShard(parameter, shard_start(part, parameter), values)


def _places(states: Sequence[Any]) -> Iterator[Any]:
    """The tensors in what megatron-core saves, in an order that is the same on all ranks that share a parameter."""
    for state in states:
        yield from (each for each in nested_values(state) if isinstance(each, ShardedTensor | ShardedTensorFactory))

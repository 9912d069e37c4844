"""The fp32 weights that megatron-core's optimizers keep beside half-precision parameters: they begin with what the
source stores, not with the parameters' rounding of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch

from dlm_bridge.convert.checkpoint import Checkpoint
from dlm_bridge.convert.mapping import Link
from dlm_bridge.convert.pool import run_tasks, worker_count
from dlm_bridge.parallel.core import unwrap_model
from dlm_bridge.parallel.fsdp import Held, held, original
from dlm_bridge.parallel.inner_masters import inner_masters, keeps_masters, parts_of, write_master
from dlm_bridge.parallel.weights import link_bytes, live_tensors, places, shard_of


@dataclass(frozen=True)
class Master:
    """The fp32 values of `size` elements from `start` on of a flattened parameter: all of them, or a data parallel
    rank's share. `write` takes them, flat."""

    start: int
    size: int
    write: Callable[[torch.Tensor], Any]

    @classmethod
    def of(cls, values: torch.Tensor, start: int) -> Master:
        """A master that is a tensor."""
        return cls(start, values.numel(), values.copy_)


def start_masters(chunks: Sequence[Any], optimizer: Any, checkpoint: Checkpoint) -> None:
    """Set the masters of a rank's wrapped chunks to the values in `checkpoint`, from which the chunks were loaded.

    Read are only tensors that are stored in another dtype than the parameters', of which this rank has masters.
    """
    sharded = chunks[0].ddp_config.use_megatron_fsdp
    live = live_tensors([chunk.module.module for chunk in chunks] if sharded else unwrap_model(list(chunks)))
    masters = dict(_fsdp_masters(chunks, live) if sharded else _masters(optimizer))
    if not masters:
        return
    tasks = []
    for link in checkpoint.links:
        targets = [live[name] for name in places(link) if name in live and live[name] in masters]
        stored = {checkpoint.spec(name)[0] for name in link.hub_names}
        targets = [target for target in targets if stored != {original(target).dtype} and masters[target].size]
        if targets:
            pairs = [(original(target), masters[target]) for target in targets]
            tasks.append((link_bytes(checkpoint, link), partial(_start, checkpoint, link, pairs)))
    run_tasks(tasks, worker_count(None))


def _masters(optimizer: Any) -> Iterator[tuple[torch.Tensor, Master]]:
    for part in parts_of(optimizer):
        if keeps_masters(part):
            for parameter, share in inner_masters(part):
                write = partial(write_master, part.optimizer, share)
                yield (
                    parameter,
                    Master(part._get_model_param_range_map(parameter)["param"].start, share.numel(), write),
                )
        elif hasattr(part, "shard_fp32_from_float16_groups"):  # the distributed optimizer
            for parameters, shards in zip(part.model_float16_groups, part.shard_fp32_from_float16_groups, strict=True):
                for parameter, shard in zip(parameters, shards, strict=True):
                    if shard is not None:
                        yield parameter, Master.of(shard, part._get_model_param_range_map(parameter)["param"].start)
        elif hasattr(part, "fp32_from_float16_groups"):
            for parameters, wholes in zip(part.float16_groups, part.fp32_from_float16_groups, strict=True):
                for parameter, whole in zip(parameters, wholes, strict=True):
                    yield parameter, Master.of(whole.view(-1), 0)


def _fsdp_masters(chunks: Sequence[Any], live: dict[str, torch.Tensor]) -> Iterator[tuple[torch.Tensor, Master]]:
    """Megatron FSDP's optimizer updates fp32 rows in place of the parameters, as whose they are known to the model."""
    parts: dict[int, Held] = {}
    for chunk in chunks:
        for part in held(chunk):
            parts |= {id(part.parameter): part, id(original(part.parameter)): part}
    for tensor in live.values():
        if (found := parts.get(id(tensor))) is None:
            continue
        rows = found.parameter._local_tensor.detach()
        if rows.dtype == torch.float32:
            yield tensor, Master.of(rows.view(-1), found.start * prod(found.part[1:]))


@torch.no_grad()
def _start(checkpoint: Checkpoint, link: Link, pairs: Sequence[tuple[torch.Tensor, Master]]) -> None:
    whole = link.to_megatron(checkpoint.read_link(link))
    for target, master in pairs:
        flat = shard_of(link, whole, target).reshape(-1)
        values = flat[master.start : master.start + master.size]
        values = torch.nn.functional.pad(values, (0, master.size - len(values)))  # rows of a padded vocabulary
        with torch.accelerator.device_index(target.device.index):  # a new thread's is the first device
            master.write(values)

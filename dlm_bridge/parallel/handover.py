"""Weights of a live, distributed megatron-core model back in the Hub's layout, one tensor at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from dlm_bridge.convert.mapping import Link
from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.parallel.core import parallel_state, unwrap_model
from dlm_bridge.parallel.weights import OUTPUT, is_vocabulary, live_tensors

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from dlm_bridge.bridge import Bridge


@torch.no_grad()
def stream_hf_weights(bridge: Bridge, megatron_model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every Hub tensor of a live model as (Hub name, whole tensor), in the mapping's order.

    Collective: every rank iterates to the end, and every rank gets every tensor, on the model's device and in the
    model's dtype. At most one tensor is gathered at a time, and what is yielded is a copy. `megatron_model` is this
    rank's chunks (a GPTModel or a list, wrapped for data parallelism or not). Padded vocabulary rows are left out.
    Raises DlmBridgeError where the model and the mapping do not cover each other.
    """
    chunks = unwrap_model(list(megatron_model) if isinstance(megatron_model, Sequence | torch.nn.ModuleList) else [megatron_model])
    gather = _Gather(live_tensors(chunks))
    links = list(bridge.mapping.links(bridge.dims))
    gather.check(links, tied=bridge.dims.tied)
    hub_names = set(bridge.hub_names())
    carried = {
        name: entry for name, entry in bridge.mapping.carried_names(bridge.dims).items() if name in hub_names
    }
    for link in links:
        for name, tensor in zip(link.hub_names, link.to_hub(gather(link)), strict=True):
            yield name, tensor.contiguous()
            for copy, entry in carried.items():
                if entry.copy_of == name:
                    yield copy, tensor.contiguous()
    for name, entry in carried.items():
        if not entry.copy_of:
            yield name, bridge.read(name)


class _Gather:
    """Gathers one link's unsharded Megatron tensor from the tensor parallel ranks of the stage that holds it, and
    hands it to all other stages."""

    def __init__(self, live: dict[str, torch.Tensor]) -> None:
        self.live = live
        self.tp_group = parallel_state.get_tensor_model_parallel_group()
        self.tp = parallel_state.get_tensor_model_parallel_world_size()
        self.pp_group = parallel_state.get_pipeline_model_parallel_group()
        self.pp_rank = parallel_state.get_pipeline_model_parallel_rank()
        described: list[Any] = [None] * parallel_state.get_pipeline_model_parallel_world_size()
        dist.all_gather_object(
            described, {name: tensor.dtype for name, tensor in live.items()}, group=self.pp_group
        )
        # A tied output layer repeats the embedding on the last stage: the first stage that has a name owns it.
        self.owners: dict[str, int] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        for stage in reversed(range(len(described))):
            self.owners |= dict.fromkeys(described[stage], stage)
            self.dtypes |= described[stage]

    def check(self, links: list[Link], tied: bool) -> None:
        """Raise DlmBridgeError unless the links cover the live model exactly, over all stages."""
        wanted = {link.megatron_name for link in links}
        if missing := sorted(wanted - self.owners.keys()):
            raise DlmBridgeError(f"{missing[0]}: the live Megatron model does not have this parameter")
        if extra := sorted(self.owners.keys() - wanted - ({OUTPUT} if tied else set())):
            raise DlmBridgeError(f"{extra[0]}: the live Megatron model has this parameter, but the mapping does not know it")

    def __call__(self, link: Link) -> torch.Tensor:
        owner = self.owners[link.megatron_name]
        device = next(iter(self.live.values())).device
        whole = torch.empty(link.megatron_shape, dtype=self.dtypes[link.megatron_name], device=device)
        if self.pp_rank == owner:
            self._from_tensor_parallel(link, self.live[link.megatron_name].detach(), whole)
        if self.pp_group.size() > 1:
            dist.broadcast(whole, group=self.pp_group, group_src=owner)
        return whole

    def _from_tensor_parallel(self, link: Link, shard: torch.Tensor, whole: torch.Tensor) -> None:
        axis = link.rule.tp_axis
        if axis is None:
            whole.copy_(shard)
            return
        shards = [shard]
        if self.tp > 1:
            shards = [torch.empty_like(shard) for _ in range(self.tp)]
            dist.all_gather(shards, shard.contiguous(), group=self.tp_group)
        for rank, part in enumerate(shards):
            offset = 0
            for start, length in link.tp_slices(rank, self.tp):
                whole.narrow(axis, start, length).copy_(part.narrow(axis, offset, length))
                offset += length
            if offset != part.shape[axis] and not is_vocabulary(link):
                raise DlmBridgeError(
                    f"{link.megatron_name}: rank {rank} holds {part.shape[axis]} rows along axis {axis}, not {offset}"
                )

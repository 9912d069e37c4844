"""Weights of a live, distributed megatron-core model back in the Hub's layout, one tensor at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from dlm_bridge.convert.mapping import Carried, Link
from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.parallel import platform
from dlm_bridge.parallel.core import parallel_state
from dlm_bridge.parallel.fsdp import original, unwrapped
from dlm_bridge.parallel.hub_writer import HubWriter
from dlm_bridge.parallel.weights import (
    OUTPUT,
    is_vocabulary,
    live_tensors,
    tensor_parallel,
    values,
    vocabulary_range,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from dlm_bridge.bridge import Bridge


@torch.no_grad()
def stream_hf_weights(bridge: Bridge, megatron_model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every Hub tensor of a live model as (Hub name, whole tensor), in the mapping's order.

    Collective: every rank iterates to the end, and every rank gets every tensor, on the model's device and in the
    model's dtype. At most one tensor is gathered at a time, and what is yielded is a copy. `megatron_model` is this
    rank's chunks (a GPTModel or a list, wrapped for data parallelism or not). Padded vocabulary rows are left out.
    What the live model does not have (carried tensors, multi-token prediction layers) comes last, as the bridge's
    source has it. Raises DlmBridgeError where the model and the mapping do not cover each other.
    """
    yield from stream_live_weights(bridge, megatron_model)
    for link in bridge.checkpoint.links:
        if link.is_mtp:
            yield from zip(link.hub_names, bridge.checkpoint.read_link(link), strict=True)
    for name, entry in _carried(bridge).items():
        if not entry.copy_of:
            yield name, bridge.read(name)


@torch.no_grad()
def stream_live_weights(bridge: Bridge, megatron_model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """`stream_hf_weights` without what the live model does not have: nothing is read."""
    chunks = list(megatron_model) if isinstance(megatron_model, Sequence | torch.nn.ModuleList) else [megatron_model]
    gather = _Gather(unwrapped(chunks))
    links = _live_links(bridge)
    gather.check(links, tied=bridge.dims.tied)
    carried = _carried(bridge)
    for link in links:
        for name, tensor in zip(link.hub_names, link.to_hub(gather(link)), strict=True):
            yield name, tensor.contiguous()
            for copy, entry in carried.items():
                if entry.copy_of == name:
                    yield copy, tensor.contiguous()


@torch.no_grad()
def refresh_hf_model(bridge: Bridge, hf_model: PreTrainedModel, megatron_model: Any) -> None:
    """Copy a live Megatron model's weights into `hf_model` in place, so that optimizers and tied weights keep theirs.

    Collective, as `stream_hf_weights`; the Hub model keeps its own dtype and device. Raises DlmBridgeError, before
    anything is written, where the two models do not have the same tensors.
    """
    writer = HubWriter(hf_model)
    wanted = {
        name: shape
        for link in _live_links(bridge)
        for name, shape in zip(link.hub_names, link.hub_shapes, strict=True)
    }
    for name, shape in wanted.items():
        if name not in writer.shapes:
            raise DlmBridgeError(f"{name}: the Hub model does not have this tensor")
        if writer.shapes[name] != shape:
            raise DlmBridgeError(f"{name} has shape {writer.shapes[name]} in the Hub model, but {shape} here")
    if extra := sorted(writer.shapes.keys() - wanted.keys() - bridge.mapping.carried_names(bridge.dims).keys()):
        raise DlmBridgeError(f"{extra[0]}: the Hub model has this tensor, but the mapping does not know it")
    for name, tensor in stream_live_weights(bridge, megatron_model):
        if name in wanted:
            writer.write(name, tensor)


def _live_links(bridge: Bridge) -> list[Link]:
    """Those of a live model, which has no multi-token prediction layers, nor has transformers' model."""
    return [link for link in bridge.mapping.links(bridge.dims) if not link.is_mtp]


def _carried(bridge: Bridge) -> dict[str, Carried]:
    names = set(bridge.hub_names())
    return {name: entry for name, entry in bridge.mapping.carried_names(bridge.dims).items() if name in names}


class _Gather:
    """Gathers one link's unsharded Megatron tensor from the (expert) tensor parallel ranks that hold it, and hands it
    to all other expert parallel ranks and then to all other pipeline stages."""

    def __init__(self, chunks: Sequence[Any]) -> None:
        self.tied = any(chunk.share_embeddings_and_output_weights for chunk in chunks)
        self.live = live_tensors(chunks)
        self.pp_group = parallel_state.get_pipeline_model_parallel_group()
        self.pp_rank = parallel_state.get_pipeline_model_parallel_rank()
        self.ep_group = parallel_state.get_expert_model_parallel_group()
        self.ep_rank = parallel_state.get_expert_model_parallel_rank()
        self.owners: dict[str, tuple[int, int]] = {}  # the pipeline stage and the expert parallel rank
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        for stage, ranks in enumerate(self._described()):
            for rank, names in enumerate(ranks):
                for name, (shape, dtype) in names.items():
                    self.owners.setdefault(name, (stage, rank))
                    self.shapes[name], self.dtypes[name] = shape, dtype

    def _described(self) -> list[list[dict[str, Any]]]:
        """By pipeline stage and expert parallel rank: name -> shape and dtype of what is held there."""
        mine = {name: (tuple(original(held).shape), original(held).dtype) for name, held in self.live.items()}
        of_stage: list[Any] = [None] * self.ep_group.size()
        dist.all_gather_object(of_stage, mine, group=self.ep_group)
        of_all: list[Any] = [None] * self.pp_group.size()
        dist.all_gather_object(of_all, of_stage, group=self.pp_group)
        return of_all

    def check(self, links: list[Link], tied: bool) -> None:
        """Raise DlmBridgeError, on every rank alike, unless the links cover the live model exactly."""
        if tied != self.tied:
            raise DlmBridgeError(
                f"the live Megatron model's output layer is {'' if self.tied else 'not '}tied to its embedding, but "
                f"the Hub config's is{'' if tied else ' not'}"
            )
        names = {link.megatron_name for link in links}
        if missing := sorted(names - self.owners.keys()):
            raise DlmBridgeError(f"{missing[0]}: the live Megatron model does not have this parameter")
        # A tied output layer on the last stage repeats the embedding of the first.
        if extra := sorted(self.owners.keys() - names - ({OUTPUT} if tied else set())):
            raise DlmBridgeError(f"{extra[0]}: the mapping does not know this parameter of the live Megatron model")
        for link in links:
            wanted, found = list(link.megatron_shape), list(self.shapes[link.megatron_name])
            if link.rule.tp_axis is not None:
                wanted[link.rule.tp_axis] = sum(length for _, length in link.tp_slices(0, tensor_parallel(link)[1]))
            padded = is_vocabulary(link) and found[1:] == wanted[1:] and found[0] >= wanted[0]
            if found != wanted and not padded:
                raise DlmBridgeError(
                    f"{link.megatron_name} has shape {tuple(found)} in the live Megatron model at tp "
                    f"{tensor_parallel(link)[1]}, but the Hub config asks for {tuple(wanted)}"
                )

    def __call__(self, link: Link) -> torch.Tensor:
        name = link.megatron_name
        whole = torch.empty(link.megatron_shape, dtype=self.dtypes[name], device=platform.current().device())
        stage, ep_rank = self.owners[name]
        of_expert = link.expert is not None
        if self.pp_rank == stage and (not of_expert or self.ep_rank == ep_rank):
            self._from_tensor_parallel(link, values(self.live[name]), whole)
        if self.pp_rank == stage and of_expert and self.ep_group.size() > 1:
            dist.broadcast(whole, group=self.ep_group, group_src=ep_rank)
        if self.pp_group.size() > 1:
            dist.broadcast(whole, group=self.pp_group, group_src=stage)
        return whole

    def _from_tensor_parallel(self, link: Link, shard: torch.Tensor, whole: torch.Tensor) -> None:
        """The inverse of `Link.shard`: each rank's ranges go back to their places, padding rows to none."""
        axis = link.rule.tp_axis
        if axis is None:
            whole.copy_(shard)
            return
        _, size = tensor_parallel(link)
        shards = [shard]
        if size > 1:
            shards = [torch.empty_like(shard) for _ in range(size)]
            dist.all_gather(shards, shard.contiguous(), group=_tensor_parallel_group(link))
        for rank, part in enumerate(shards):
            offset = 0
            ranges = link.tp_slices(rank, size)
            if is_vocabulary(link):
                ranges = (vocabulary_range(link, rank, len(part)),)
            for start, length in ranges:
                whole.narrow(axis, start, length).copy_(part.narrow(axis, offset, length))
                offset += length


def _tensor_parallel_group(link: Link) -> dist.ProcessGroup:
    if link.expert is not None:
        return parallel_state.get_expert_tensor_parallel_group()
    return parallel_state.get_tensor_model_parallel_group()

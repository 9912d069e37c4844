"""Weights of a live, distributed megatron-core model back in the Hub's layout, one tensor at a time."""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

from dlm_bridge.convert.checkpoint import Checkpoint
from dlm_bridge.convert.checkpoints.in_memory import hub_tensors, stored_tensors
from dlm_bridge.convert.lora.peft import LORA_FACTORS, LoraFactor, merged_weight
from dlm_bridge.convert.lora.tensors import AdapterTensor
from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.mapping.rules import ParamMapping, Passthrough
from dlm_bridge.parallel import platform
from dlm_bridge.parallel.core import parallel_state
from dlm_bridge.parallel.lora import ADAPTER, LiveFactor
from dlm_bridge.parallel.mcore_patches.fsdp import original, unwrapped
from dlm_bridge.parallel.weights import (
    OUTPUT,
    gather_shards,
    is_vocabulary,
    live_tensors,
    tensor_parallel,
    values,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@torch.no_grad()
def stream_hf_weights(checkpoint: Checkpoint, megatron_model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every Hub tensor of a live model as (Hub name, whole tensor), in the mapping's order.

    Collective: every rank iterates to the end, and every rank gets every tensor, on the model's device and in the
    model's dtype. At most one tensor is gathered at a time, and what is yielded is a copy. `megatron_model` is this
    rank's chunks (a GPTModel or a list, wrapped for data parallelism or not). Padded vocabulary rows are left out.
    What the live model lacks (passthrough tensors, multi-token prediction layers unless it was built with them) comes
    last, from `checkpoint`, which it was built from. Raises DlmBridgeError where the model and the mapping do not
    cover each other.
    """
    seen = set()
    for name, tensor in stream_live_weights(checkpoint, megatron_model):
        seen.add(name)
        yield name, tensor
    for param in checkpoint.params:
        if param.is_mtp and seen.isdisjoint(param.hub_names):
            yield from zip(param.hub_names, checkpoint.read_param(param), strict=True)
    for name, entry in _passthrough(checkpoint).items():
        if not entry.copy_of and name not in seen:
            yield name, checkpoint.read(name)


@torch.no_grad()
def stream_live_weights(
    checkpoint: Checkpoint, megatron_model: Any, adapter: LiveAdapter | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """`stream_hf_weights` without what the live model lacks: nothing is read. With its `adapter` merged, else without
    one."""
    chunks = list(megatron_model) if isinstance(megatron_model, Sequence | torch.nn.ModuleList) else [megatron_model]
    chunks = unwrapped(chunks)
    gather = _Gather({name: tensor for name, tensor in live_tensors(chunks).items() if ADAPTER not in name})
    params = _live_params(checkpoint) + [
        param for param in checkpoint.params if param.is_mtp and param.megatron_name in gather.owners
    ]
    gather.check(params, checkpoint.dims.tied, any(chunk.share_embeddings_and_output_weights for chunk in chunks))
    copies = {copy: entry.copy_of for copy, entry in _passthrough(checkpoint).items() if entry.copy_of}
    copies |= checkpoint.shared if any(param.is_mtp for param in params) else {}
    for param in params:
        whole = gather(param) if param.pieces == (param,) else torch.cat([gather(piece) for piece in param.pieces])
        for name, tensor in zip(param.hub_names, param.to_hub(whole), strict=True):
            if adapter is not None and name in adapter:
                tensor = adapter.merged(name, tensor)
            yield name, tensor.contiguous()
            for copy, of in copies.items():
                if of == name:
                    yield copy, tensor.contiguous()


@torch.no_grad()
def refresh_hf_model(checkpoint: Checkpoint, hf_model: PreTrainedModel, megatron_model: Any) -> None:
    """Copy a live Megatron model's weights into `hf_model` in place, so that optimizers and tied weights keep theirs.

    Collective, as `stream_hf_weights`; the Hub model keeps its own dtype and device. Raises DlmBridgeError, before
    anything is written, where the two models do not have the same tensors.
    """
    write_hf_weights(checkpoint, InPlaceWriter(hf_model), megatron_model)


class HubTensorWriter(Protocol):
    """What writes Hub tensors into a model."""

    shapes: dict[str, tuple[int, ...]]  # of every Hub tensor that the model has

    def write(self, name: str, tensor: torch.Tensor) -> None: ...


@torch.no_grad()
def write_hf_weights(
    checkpoint: Checkpoint, writer: HubTensorWriter, megatron_model: Any, adapter: LiveAdapter | None = None
) -> None:
    """`refresh_hf_model` of the model that `writer` writes to; as `stream_live_weights` with an `adapter` merged."""
    wanted = {
        name: shape
        for param in _live_params(checkpoint)
        for name, shape in zip(param.hub_names, param.hub_shapes, strict=True)
    }
    for name, shape in wanted.items():
        if name not in writer.shapes:
            raise DlmBridgeError(f"{name}: the Hub model does not have this tensor")
        if writer.shapes[name] != shape:
            raise DlmBridgeError(f"{name} has shape {writer.shapes[name]} in the Hub model, but {shape} here")
    if extra := sorted(
        writer.shapes.keys() - wanted.keys() - checkpoint.mapping.passthrough_names(checkpoint.dims).keys()
    ):
        raise DlmBridgeError(f"{extra[0]}: the Hub model has this tensor, but the mapping does not know it")
    for name, tensor in stream_live_weights(checkpoint, megatron_model, adapter):
        if name in wanted:
            writer.write(name, tensor)


def _live_params(checkpoint: Checkpoint) -> list[ParamMapping]:
    """The parameters of a live model, without multi-token prediction layers, which transformers' models lack."""
    return [param for param in checkpoint.mapping.params(checkpoint.dims) if not param.is_mtp]


def _passthrough(checkpoint: Checkpoint) -> dict[str, Passthrough]:
    names = set(checkpoint.hub_names())
    return {
        name: entry for name, entry in checkpoint.mapping.passthrough_names(checkpoint.dims).items() if name in names
    }


class _Gather:
    """Gathers one param's unsharded Megatron tensor from the (expert) tensor parallel ranks that hold it, and hands it
    to all other expert parallel ranks and then to all other pipeline stages."""

    def __init__(self, live: Mapping[str, torch.Tensor], uncut: Container[str] = ()) -> None:
        """Of this rank's tensors, of which tensor parallel ranks have the `uncut` ones whole."""
        self.live, self.uncut = live, uncut
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

    def check(self, params: list[ParamMapping], tied: bool, live_tied: bool) -> None:
        """Raise DlmBridgeError, on every rank alike, unless the params cover the live model exactly."""
        if tied != live_tied:
            raise DlmBridgeError(
                f"the live Megatron model's output layer is {'' if live_tied else 'not '}tied to its embedding, but "
                f"the Hub config's is{'' if tied else ' not'}"
            )
        params = [piece for param in params for piece in param.pieces]
        names = {param.megatron_name for param in params}
        if missing := sorted(names - self.owners.keys()):
            raise DlmBridgeError(f"{missing[0]}: the live Megatron model does not have this parameter")
        # A tied output layer on the last stage repeats the embedding of the first.
        if extra := sorted(self.owners.keys() - names - ({OUTPUT} if tied else set())):
            raise DlmBridgeError(f"{extra[0]}: the mapping does not know this parameter of the live Megatron model")
        for param in params:
            wanted, found = list(param.megatron_shape), list(self.shapes[param.megatron_name])
            if param.rule.tp_axis is not None:
                wanted[param.rule.tp_axis] = sum(length for _, length in param.tp_slices(0, tensor_parallel(param)[1]))
            padded = is_vocabulary(param) and found[1:] == wanted[1:] and found[0] >= wanted[0]
            if found != wanted and not padded:
                raise DlmBridgeError(
                    f"{param.megatron_name} has shape {tuple(found)} in the live Megatron model at tp "
                    f"{tensor_parallel(param)[1]}, but the Hub config asks for {tuple(wanted)}"
                )

    def __call__(self, param: ParamMapping) -> torch.Tensor:
        name = param.megatron_name
        whole = torch.empty(param.megatron_shape, dtype=self.dtypes[name], device=platform.current().device())
        stage, ep_rank = self.owners[name]
        of_expert = param.expert is not None
        if self.pp_rank == stage and (not of_expert or self.ep_rank == ep_rank):
            if name in self.uncut:
                whole.copy_(values(self.live[name]))
            else:
                gather_shards(param, values(self.live[name]), whole)
        if self.pp_rank == stage and of_expert and self.ep_group.size() > 1:
            dist.broadcast(whole, group=self.ep_group, group_src=ep_rank)
        if self.pp_group.size() > 1:
            dist.broadcast(whole, group=self.pp_group, group_src=stage)
        return whole


class LiveAdapter:
    """The adapter of a live model. Its factors are gathered where a weight needs them: collective, as
    `stream_live_weights`."""

    def __init__(
        self, tensors: Sequence[AdapterTensor], factors: Sequence[Sequence[LiveFactor]], scale: float
    ) -> None:
        """Of all its `tensors`, of which this rank's chunks have `factors`."""
        held = {factor.tensor.param.megatron_name: factor for chunk in factors for factor in chunk}
        uncut = {name for name, factor in held.items() if factor.axis is None}
        self._gather = _Gather({name: factor.parameter for name, factor in held.items()}, uncut)
        self._scale = scale
        self._places = {
            (weight, tensor.part): (tensor.param, 0 if tensor.shared else number)
            for tensor in tensors
            for number, weight in enumerate(tensor.weights)
        }

    def __contains__(self, weight: str) -> bool:
        """Whether it changes a Hub weight."""
        return (weight, "A") in self._places

    def merged(self, weight: str, tensor: torch.Tensor) -> torch.Tensor:
        """The base's `tensor` of a Hub weight with the adapter in it, in its dtype."""
        a, b = (self._factor(weight, part).float() for part in LORA_FACTORS)
        magnitude = self._factor(weight, "magnitude") if (weight, "magnitude") in self._places else None
        return merged_weight(tensor, self._scale * (b @ a), magnitude).to(tensor.dtype)

    def _factor(self, weight: str, part: LoraFactor) -> torch.Tensor:
        param, number = self._places[weight, part]
        return param.to_hub(self._gather(param))[number]


_LAYER = re.compile(r"(?:^|\.)layers\.\d+\.")


class InPlaceWriter:
    """Writes Hub tensors into a live model's parameters in place.

    transformers merges some Hub tensors into one parameter (experts), and only its own conversion knows how. Run
    backwards on a parameter it gives the Hub tensors, as views or as copies; run backwards on the indices of the
    parameter's elements it says where each element of a copy came from. Memory is bounded by a layer.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._groups: dict[str, dict[str, torch.Tensor]] = {}  # by layer: what the model names its tensors
        for name, tensor in stored_tensors(model):
            match = _LAYER.search(name)
            self._groups.setdefault(name[: match.end()] if match else "", {})[name] = tensor.data
        self._group_of: dict[str, str] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}  # of every Hub tensor
        for group, tensors in self._groups.items():
            for name, tensor in tensors.items():
                for hub_name, part in hub_tensors(model, {name: torch.empty_like(tensor, device="meta")}).items():
                    self._group_of[hub_name], self.shapes[hub_name] = group, tuple(part.shape)
        self._open: str | None = None
        self._views: dict[str, torch.Tensor] = {}
        self._places: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}  # a tensor, and which of its elements

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Copy a Hub tensor into the model, in the model's dtype. Fastest where a layer's tensors come together."""
        if self._group_of[name] != self._open:
            self._load(self._group_of[name])
        if name in self._views:
            self._views[name].copy_(tensor)
        else:
            merged, elements = self._places[name]
            merged.view(-1)[elements] = tensor.to(merged).view(-1)

    def _load(self, group: str) -> None:
        self._open, self._views, self._places = group, {}, {}
        for name, tensor in self._groups[group].items():
            parts = hub_tensors(self._model, {name: tensor})
            if all(
                part.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr() for part in parts.values()
            ):
                self._views |= parts
                continue
            numbers = torch.arange(tensor.numel(), device=tensor.device).view(tensor.shape)
            for hub_name, elements in hub_tensors(self._model, {name: numbers}).items():
                self._places[hub_name] = (tensor, elements.reshape(-1))

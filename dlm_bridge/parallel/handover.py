"""Weights of a live, distributed megatron-core model in the Hub's layout, one tensor at a time."""

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
from dlm_bridge.errors import CheckpointError
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
    """Yield every Hub tensor of a live model as (Hub name, unsharded tensor), in the mapping's order.

    Collective: every rank must iterate to the end, and receives every tensor, on the model's device and in the model's
    dtype. One tensor is gathered at a time, and tensors are copies. Padded vocabulary rows are omitted. Tensors that
    the live model lacks (passthrough tensors, multi-token prediction layers unless it was built with them) come last,
    from `checkpoint`.

    Args:
        checkpoint: from which the model was built.
        megatron_model: this rank's chunks: a GPTModel or a list, with or without data parallel wrappers.

    Raises CheckpointError if the model's and the mapping's parameters differ.
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
    """Same as `stream_hf_weights` without the tensors that the live model lacks; the checkpoint is not read. `adapter`
    is merged; None for the base."""
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
    """Copy a live Megatron model's weights into the parameters of `hf_model` in place, which optimizers and tied
    weights refer to.

    Collective, as in `stream_hf_weights`. The Hub model keeps its dtype and device. Raises CheckpointError, before
    anything is written, if the two models' tensors differ.
    """
    write_hf_weights(checkpoint, InPlaceWriter(hf_model), megatron_model)


class HubTensorWriter(Protocol):
    """Interface for writing Hub tensors into a model."""

    shapes: dict[str, tuple[int, ...]]  # of every Hub tensor of the model

    def write(self, name: str, tensor: torch.Tensor) -> None: ...


@torch.no_grad()
def write_hf_weights(
    checkpoint: Checkpoint, writer: HubTensorWriter, megatron_model: Any, adapter: LiveAdapter | None = None
) -> None:
    """`refresh_hf_model` for the model of a `writer`; `adapter` as in `stream_live_weights`."""
    wanted = {
        name: shape
        for param in _live_params(checkpoint)
        for name, shape in zip(param.hub_names, param.hub_shapes, strict=True)
    }
    found = {
        name: writer.shapes[name]
        for name in writer.shapes.keys() - checkpoint.mapping.passthrough_names(checkpoint.dims).keys()
    }
    _check_same(wanted, found, "Hub")
    for name, tensor in stream_live_weights(checkpoint, megatron_model, adapter):
        if name in wanted:
            writer.write(name, tensor)


def _check_same(wanted: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]], model: str) -> None:
    """Raise CheckpointError for the first tensor that only the mapping (`wanted`) or the live model has, or whose
    shapes differ."""
    for name in sorted(wanted.keys() | found.keys()):
        if wanted.get(name) != found.get(name):
            raise CheckpointError(
                name,
                f"has shape {found.get(name, 'none')} in the live {model} model, but {wanted.get(name, 'none')} in "
                "the mapping of its config",
            )


def _live_params(checkpoint: Checkpoint) -> list[ParamMapping]:
    """Parameters of a live model, without multi-token prediction layers, which transformers' models lack."""
    return [param for param in checkpoint.mapping.params(checkpoint.dims) if not param.is_mtp]


def _passthrough(checkpoint: Checkpoint) -> dict[str, Passthrough]:
    names = set(checkpoint.hub_names())
    return {
        name: entry for name, entry in checkpoint.mapping.passthrough_names(checkpoint.dims).items() if name in names
    }


class _Gather:
    """Gathers a parameter's unsharded Megatron tensor from the (expert) tensor parallel ranks that hold it, and
    broadcasts it to the other expert parallel ranks and then to the other pipeline stages.

    Args:
        live: this rank's tensors.
        replicated: names of tensors that every tensor parallel rank holds whole.
    """

    def __init__(self, live: Mapping[str, torch.Tensor], replicated: Container[str] = ()) -> None:
        self.live, self.replicated = live, replicated
        self.pp_group = parallel_state.get_pipeline_model_parallel_group()
        self.pp_rank = parallel_state.get_pipeline_model_parallel_rank()
        self.ep_group = parallel_state.get_expert_model_parallel_group()
        self.ep_rank = parallel_state.get_expert_model_parallel_rank()
        self.owners: dict[str, tuple[int, int]] = {}  # pipeline stage and expert parallel rank
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        for stage, ranks in enumerate(self._specs()):
            for rank, names in enumerate(ranks):
                for name, (shape, dtype) in names.items():
                    self.owners.setdefault(name, (stage, rank))
                    self.shapes[name], self.dtypes[name] = shape, dtype

    def _specs(self) -> list[list[dict[str, Any]]]:
        """By pipeline stage and expert parallel rank: name -> shape and dtype of the tensors there."""
        mine = {name: (tuple(original(held).shape), original(held).dtype) for name, held in self.live.items()}
        of_stage: list[Any] = [None] * self.ep_group.size()
        dist.all_gather_object(of_stage, mine, group=self.ep_group)
        of_all: list[Any] = [None] * self.pp_group.size()
        dist.all_gather_object(of_all, of_stage, group=self.pp_group)
        return of_all

    def check(self, params: list[ParamMapping], tied: bool, live_tied: bool) -> None:
        """Raise CheckpointError, on every rank, unless the parameters and the live model match exactly."""
        if tied != live_tied:
            raise CheckpointError(
                "tie_word_embeddings", f"is {tied} in the Hub config, but {live_tied} in the live Megatron model"
            )
        wanted, found = {}, dict(self.shapes)
        if tied:
            found.pop(OUTPUT, None)  # on the last stage it repeats the embedding of the first
        for param in [piece for whole in params for piece in whole.pieces]:
            shape, live = list(param.megatron_shape), found.get(param.megatron_name, ())
            if param.rule.tp_axis is not None:
                shape[param.rule.tp_axis] = sum(length for _, length in param.tp_slices(0, tensor_parallel(param)[1]))
            padded = is_vocabulary(param) and live[1:] == tuple(shape[1:]) and live[0] >= shape[0]
            wanted[param.megatron_name] = live if padded else tuple(shape)
        _check_same(wanted, found, "Megatron")

    def __call__(self, param: ParamMapping) -> torch.Tensor:
        name = param.megatron_name
        whole = torch.empty(param.megatron_shape, dtype=self.dtypes[name], device=platform.current().device())
        stage, ep_rank = self.owners[name]
        of_expert = param.expert is not None
        if self.pp_rank == stage and (not of_expert or self.ep_rank == ep_rank):
            if name in self.replicated:
                whole.copy_(values(self.live[name]))
            else:
                gather_shards(param, values(self.live[name]), whole)
        if self.pp_rank == stage and of_expert and self.ep_group.size() > 1:
            dist.broadcast(whole, group=self.ep_group, group_src=ep_rank)
        if self.pp_group.size() > 1:
            dist.broadcast(whole, group=self.pp_group, group_src=stage)
        return whole


class LiveAdapter:
    """Adapter of a live model. Its factors are gathered for each weight: collective, as in `stream_live_weights`.

    Args:
        tensors: all adapter tensors.
        factors: the factors in this rank's chunks.
        scale: factor of B A.
    """

    def __init__(
        self, tensors: Sequence[AdapterTensor], factors: Sequence[Sequence[LiveFactor]], scale: float
    ) -> None:
        held = {factor.tensor.param.megatron_name: factor for chunk in factors for factor in chunk}
        replicated = {name for name, factor in held.items() if factor.axis is None}
        self._gather = _Gather({name: factor.parameter for name, factor in held.items()}, replicated)
        self._scale = scale
        self._places = {
            (weight, tensor.part): (tensor.param, 0 if tensor.shared else number)
            for tensor in tensors
            for number, weight in enumerate(tensor.weights)
        }

    def __contains__(self, weight: str) -> bool:
        """True if it changes a Hub weight."""
        return (weight, "A") in self._places

    def merged(self, weight: str, tensor: torch.Tensor) -> torch.Tensor:
        """Merge the adapter into the base's `tensor` of a Hub weight, in its dtype."""
        a, b = (self._factor(weight, part).float() for part in LORA_FACTORS)
        magnitude = self._factor(weight, "magnitude") if (weight, "magnitude") in self._places else None
        return merged_weight(tensor, self._scale * (b @ a), magnitude).to(tensor.dtype)

    def _factor(self, weight: str, part: LoraFactor) -> torch.Tensor:
        param, number = self._places[weight, part]
        return param.to_hub(self._gather(param))[number]


_LAYER = re.compile(r"(?:^|\.)layers\.\d+\.")


class InPlaceWriter:
    """Writes Hub tensors into a live model's parameters in place.

    transformers merges some Hub tensors into one parameter (experts) by its own conversion. Its inverse on a parameter
    gives the Hub tensors, as views or as copies; on the indices of the parameter's elements it gives the source of
    each element of a copy. Memory is bounded by one layer.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._groups: dict[str, dict[str, torch.Tensor]] = {}  # by layer: the tensors by their names in the model
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
        self._places: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}  # a tensor, and indices of its elements

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Copy a Hub tensor into the model, in the model's dtype. Fastest if a layer's tensors come in sequence."""
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

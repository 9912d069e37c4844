"""Megatron FSDP's own checkpoints, `fsdp_dtensor`: each rank writes the rows that it holds, by parameter.

Names and boxes are Megatron-LM's: `model.module.decoder.layers.0...`, the gate and up matrices of a SwiGLU as
`weight_w` and `weight_v`, experts by their global number. Unlike there, no rank communicates which rows it holds, and
the optimizer's step is one number. The saved weights are the optimizer's fp32 main params.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from dlm_bridge.convert.formats.dcp_reader import RestrictedReader
from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.mapping.rules import ParamMapping
from dlm_bridge.parallel.core import parallel_state
from dlm_bridge.parallel.mcore_patches.fsdp import FSDPShard, buffers, fsdp_shards, init_optimizer_state
from dlm_bridge.parallel.weights import EMBEDDING, OUTPUT
from dlm_bridge.train.checkpoints import raised_everywhere
from dlm_bridge.train.megatron import loaded_state

RUN = "dlm_bridge_run"  # the key of our own values, JSON
MODEL, OPTIMIZER = "model.module.", "optimizer.state.module.module."
STATES = ("exp_avg", "exp_avg_sq")
_VOCABULARY = re.compile(rf"\.({re.escape(EMBEDDING)}|{re.escape(OUTPUT)})(\.exp_avg(_sq)?)?$")
_EXPERT = re.compile(r"(mlp\.experts\.(?:linear_fc[12]\.(?:weight|bias)|local_experts\.))(\d+)")
_GATED_MLP = re.compile(r"\.mlp\.(experts\.(local_experts\.\d+\.)?|shared_experts\.)?linear_fc1\.(weight|bias)\d*$")


def save(
    folder: Path,
    step: int,
    values: dict[str, Any],
    chunk: Any,
    optimizer: Any,
    mtp: Mapping[ParamMapping, torch.Tensor],
) -> None:
    """Write the iteration `step` into `folder`. Every process calls it, with its part `mtp` of the layers that are not
    trained."""
    run = {**values, **_optimizer_counters(optimizer)}
    kept = {
        MODEL + param.megatron_name: TensorBox(tensor, (0,) * tensor.dim(), tuple(tensor.shape))
        for param, tensor in mtp.items()
    }
    numbers = {"iteration": step, "checkpoint_version": 3.0, RUN: json.dumps(run)}
    state = {**_local_boxes(chunk, optimizer), **kept, **_scaling(chunk), **numbers}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(str(folder)), planner=_SavePlanner(flatten_state_dict=False))


def load(folder: Path, chunk: Any, optimizer: Any) -> dict[str, Any]:
    """Set weights and optimizer state to those of an iteration, on any number of data and tensor parallel ranks, and
    return our own values. Raises DlmBridgeError for another expert parallel size where there are scales of FP8."""
    with raised_everywhere():
        reader = RestrictedReader(folder)
    run = _read_run(reader)
    run.pop("tp", None)  # of versions that resumed at the same size only
    init_optimizer_state(optimizer)  # what is loaded has to exist
    state = dict(_padded_as_stored(_local_boxes(chunk, optimizer), reader.read_metadata()))
    dcp.load(state, storage_reader=reader, planner=_LoadPlanner(flatten_state_dict=False))
    _set_optimizer_counters(optimizer, run)
    _set_scaling(chunk, reader, folder)
    chunk.module.install_optimized_model_weights()
    chunk.start_param_sync()
    return run


def check_readable(folder: Path) -> None:
    """Raise what torch's reader raises for an iteration whose metadata or own values are damaged."""
    _read_run(RestrictedReader(folder))


def _padded_as_stored(state: dict[str, Any], metadata: Metadata) -> Iterator[tuple[str, Any]]:
    """The boxes of a vocabulary, which tensor parallelism pads to a multiple of its size, with as many rows as are
    stored; what the stored tensor has no rows for is padding here, and zero."""
    for key, box in state.items():
        stored = metadata.state_dict_metadata.get(key)
        size = tuple(stored.size) if isinstance(stored, TensorStorageMetadata) else ()
        padded = isinstance(box, TensorBox) and _VOCABULARY.search(key) and size[1:] == box.shape[1:]
        if not padded or size == box.shape:
            yield key, box
            continue
        rows = min(max(size[0] - box.offsets[0], 0), len(box.tensor))
        box.tensor[rows:].zero_()
        if rows:
            yield key, TensorBox(box.tensor[:rows], box.offsets, size)


def _read_run(reader: RestrictedReader) -> dict[str, Any]:
    """Our own values, and what the optimizer counts; each process reads them for itself."""
    state: dict[str, Any] = {RUN: ""}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # on purpose: each process reads for itself
        dcp.load(state, storage_reader=reader, no_dist=True)
    found: dict[str, Any] = json.loads(state[RUN])
    return found


@dataclass(frozen=True)
class TensorBox:
    """A box of a global tensor, with the methods that torch's checkpoint writer and reader call."""

    tensor: torch.Tensor
    offsets: tuple[int, ...]
    shape: tuple[int, ...]  # of the global tensor

    @property
    def chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size(self.offsets), self.tensor.size())

    def size(self) -> torch.Size:
        return torch.Size(self.shape)

    def __create_write_items__(self, name: str, _: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.tensor)
        data = TensorWriteData(self.chunk, properties, self.size())
        return [WriteItem(MetadataIndex(name, self.chunk.offsets), WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [self.chunk]


def tensor_boxes(part: FSDPShard, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, TensorBox]]:
    """A rank's rows `tensor` of a parameter as boxes on disk: one, or one each of gate and up, which lie one after the
    other in a tensor parallel rank's part."""
    assert len(tensor) == part.rows, (name, tensor.shape, part)
    if not part.rows:
        return
    if not _GATED_MLP.search(name):
        yield name, TensorBox(tensor, *_box(part, part.part, part.start))
        return
    half = part.part[0] // 2
    shape = (half, *part.part[1:])
    for suffix, first in (("_w", 0), ("_v", half)):
        begin, end = max(part.start, first), min(part.start + part.rows, first + half)
        if begin < end:
            rows = tensor[begin - part.start : end - part.start]
            yield name + suffix, TensorBox(rows, *_box(part, shape, begin - first))


def _box(part: FSDPShard, shape: tuple[int, ...], start: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(offsets, global shape) of rows from `start` on of a tensor parallel rank's part of `shape`."""
    offsets, whole = [start, *(0 for _ in shape[1:])], list(shape)
    if part.axis is not None:
        offsets[part.axis] += part.rank * shape[part.axis]
        whole[part.axis] *= part.ranks
    return tuple(offsets), tuple(whole)


def _local_boxes(chunk: Any, optimizer: Any) -> dict[str, Any]:
    """Everything that this rank holds, by key; the tensors are the live ones."""
    first = 0
    if chunk.config.num_moe_experts:
        ranks = parallel_state.get_expert_model_parallel_world_size()
        first = parallel_state.get_expert_model_parallel_rank() * chunk.config.num_moe_experts // ranks
    found: dict[str, Any] = {
        MODEL + name: TensorBox(buffer, (0,) * buffer.dim(), tuple(buffer.shape)) for name, buffer in buffers(chunk)
    }
    for part in fsdp_shards(chunk):
        name = _EXPERT.sub(lambda match: f"{match[1]}{int(match[2]) + first}", part.name)
        for key, piece in tensor_boxes(part, name, _local(part.parameter)):
            found[MODEL + key] = piece
        for kind, tensor in optimizer.optimizer.state.get(part.parameter, {}).items():
            if kind in STATES:
                for key, piece in tensor_boxes(part, name, _local(tensor)):
                    found[f"{OPTIMIZER}{key}.{kind}"] = piece
    return found


def _scaling(chunk: Any) -> dict[str, list[torch.Tensor]]:
    """What Transformer Engine keeps for FP8, by key: objects, which are the same on every rank but for experts'."""
    found = {_scaling_key(name): module.get_extra_state() for name, module in _scaled(chunk).items()}
    return {key: [state] for key, state in found.items() if isinstance(state, torch.Tensor) and state.numel()}


def _set_scaling(chunk: Any, reader: RestrictedReader, folder: Path) -> None:
    scaled = _scaled(chunk)
    if not scaled:
        return
    stored = reader.read_metadata().state_dict_metadata.keys()
    state: dict[str, Any] = {key: "" for name in scaled if (key := _scaling_key(name)) in stored}
    experts = [key for key in stored if ".experts." in key and "._extra_state/" in key]
    if experts and not state.keys() & set(experts):
        raise DlmBridgeError(
            f"{folder}: FP8's scales of experts are resumed at their own --ep only, which was "
            f"{experts[0].rpartition('_')[2]}: export it and start from that"
        )
    dcp.load(state, storage_reader=reader)
    for name, module in scaled.items():
        if (key := _scaling_key(name)) in state:
            module.set_extra_state(loaded_state.rewrite_extra_states({name: state[key][0]}, chunk.config)[name])


def _scaled(chunk: Any) -> dict[str, Any]:
    return loaded_state.scaled_modules(chunk.module.module, chunk.config)


def _scaling_key(name: str) -> str:
    """The key of a module's state; those of experts name the expert parallel rank."""
    if ".experts." not in name:
        return MODEL + name
    rank = parallel_state.get_expert_model_parallel_rank()
    return f"{MODEL}{name}/{rank}_{parallel_state.get_expert_model_parallel_world_size()}"


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """The rows themselves, in the memory that the optimizer updates."""
    return getattr(tensor, "_local_tensor", tensor).detach()


def _optimizer_counters(optimizer: Any) -> dict[str, Any]:
    """What an optimizer counts: its steps, and the loss scale of fp16."""
    groups = optimizer.optimizer.param_groups
    step = max((float(group.get("step", 0)) for group in groups), default=0.0)
    for state in optimizer.optimizer.state.values():
        step = max(step, float(state.get("step", 0)))
    scaler = getattr(optimizer, "grad_scaler", None)
    scale = {name: float(value) for name, value in scaler.state_dict().items()} if scaler is not None else {}
    return {"optimizer_step": step, "loss_scale": scale}


def _set_optimizer_counters(optimizer: Any, run: dict[str, Any]) -> None:
    step, scale = run.pop("optimizer_step"), run.pop("loss_scale")
    for group in optimizer.optimizer.param_groups:
        if isinstance(group.get("step"), torch.Tensor):
            group["step"].fill_(step)
        elif "step" in group:
            group["step"] = int(step)
    for state in optimizer.optimizer.state.values():
        if isinstance(state.get("step"), torch.Tensor):
            state["step"].fill_(step)
        elif "step" in state:
            state["step"] = int(step)
    scaler = getattr(optimizer, "grad_scaler", None)
    if scaler is not None and scale:
        now = scaler.state_dict()
        scaler.load_state_dict(
            {
                name: torch.full_like(now[name], value) if isinstance(now[name], torch.Tensor) else int(value)
                for name, value in scale.items()
            }
        )


class _SavePlanner(DefaultSavePlanner):
    def lookup_object(self, index: MetadataIndex) -> Any:
        found = self.state_dict[index.fqn]
        return found.tensor if isinstance(found, TensorBox) else super().lookup_object(index)


class _LoadPlanner(DefaultLoadPlanner):
    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        # torch's own would look into the pieces for tensors without memory, and copy what it does not know.
        self.state_dict = self.original_state_dict = state_dict
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        found = self.state_dict[index.fqn]
        return found.tensor if isinstance(found, TensorBox) else super().lookup_tensor(index)

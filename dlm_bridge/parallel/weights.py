"""Weights of a live megatron-core model by their Megatron names, and loading of parameters and fp32 main params."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from dlm_bridge.convert.checkpoint import Checkpoint
from dlm_bridge.convert.streaming import SliceRange, read_rows
from dlm_bridge.convert.workers import run_tasks, worker_count
from dlm_bridge.errors import CheckpointError, SettingError
from dlm_bridge.mapping.dtypes import dtype_name
from dlm_bridge.mapping.rules import ParamMapping, Vocabulary
from dlm_bridge.parallel.core import dequantize_fp8_tensor, is_float8tensor, parallel_state, unwrap_model
from dlm_bridge.parallel.mcore_compat import PREDICTED_LAYER
from dlm_bridge.parallel.mcore_patches.fsdp import FSDPShard, allocate, fsdp_shards, is_sharded, original, whole
from dlm_bridge.parallel.mcore_patches.optimizers import (
    float16_params,
    inner_main_params,
    keeps_inner_main_params,
    param_range,
    parts_of,
    shard_start,
    write_main_param,
)
from dlm_bridge.parallel.value_head import ValueHead

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"
MTP_LAYERS = "mtp.layers."
_LAYER = re.compile(rf"(decoder\.layers\.|mtp\.layers\.)(\d+)(\.{PREDICTED_LAYER}\.|\.)(.+)")
_SEQUENTIAL = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(.+)")
_GROUPED = re.compile(r"mlp\.experts\.(linear_fc[12]\.(?:weight|bias))(\d+)")


def live_tensors(chunks: Sequence[Any]) -> dict[str, torch.Tensor]:
    """Every stored tensor of this rank's GPTModel chunks by `ParamMapping.megatron_name`, except a value head, which
    is in no mapping.

    Layers and experts have global numbers, and norms have their Transformer Engine name, for every layer spec.
    """
    return {
        _global_name(chunk, name): tensor
        for chunk in chunks
        for name, tensor in chunk.state_dict(keep_vars=True).items()
        if isinstance(tensor, torch.Tensor) and not name.endswith("._extra_state")
        if name != OUTPUT or not isinstance(chunk.output_layer, ValueHead)
    }


def _global_name(chunk: Any, name: str) -> str:
    match = _LAYER.fullmatch(name)
    if match is None or (match[1] == MTP_LAYERS and match[3] == "."):  # prediction layers' norms and projection
        return name
    in_decoder, index, rest = match[1] != MTP_LAYERS, int(match[2]), match[4]
    layer = chunk.decoder.layers[index] if in_decoder else getattr(chunk.mtp.layers[index], PREDICTED_LAYER)
    for local, stored in layer.submodules_config.sharded_state_dict_keys_map.items():
        if rest.startswith(local):
            rest = stored + rest.removeprefix(local)
    if rest.startswith("mlp.experts."):
        rest = expert_name(rest, layer.mlp.local_expert_indices[0])
    number = layer.layer_number - 1 if in_decoder else index  # all prediction layers are on one stage
    return f"{match[1]}{number}{'.' if in_decoder else '.transformer_layer.'}{rest}"


def expert_name(name: str, first: int) -> str:
    """The mapping's name of an expert's tensor, whose name in a layer is `mlp.experts.local_experts.{i}.…` (one module
    per expert) or `mlp.experts.….weight{i}` (grouped). `first` is the global number of the layer's first expert."""
    if match := _SEQUENTIAL.fullmatch(name):
        return f"mlp.experts.experts.{first + int(match[1])}.{match[2]}"
    if match := _GROUPED.fullmatch(name):
        return f"mlp.experts.experts.{first + int(match[2])}.{match[1]}"
    return name


def tensor_parallel(param: ParamMapping) -> tuple[int, int]:
    """Rank of this process in the tensor parallel group of a parameter (experts have their own), and the group's
    size."""
    if param.expert is not None:
        return (
            parallel_state.get_expert_tensor_parallel_rank(),
            parallel_state.get_expert_tensor_parallel_world_size(),
        )
    return parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()


def check_source(checkpoint: Checkpoint) -> None:
    """Raise CheckpointError unless the source's tensors and the mapping match exactly, and every redundant tensor
    equals the tensor that it copies."""
    checkpoint.check()
    for name, entry in checkpoint.passthrough.items():
        if not entry.copy_of or name in checkpoint.derived:
            continue
        if not torch.equal(checkpoint.read(name), checkpoint.read(entry.copy_of)):
            raise CheckpointError(checkpoint.where, f"{name} differs from {entry.copy_of}, which it must equal")


def stored_dtype(checkpoint: Checkpoint) -> torch.dtype:
    """Common dtype of the source's weights, except those with a dtype of their own. Raises SettingError if they
    differ."""
    first: dict[torch.dtype, str] = {}
    for name, param in checkpoint.param_of.items():
        if not param.rule.own_dtype:
            first.setdefault(checkpoint.spec(name)[0], name)
    if len(first) > 1:
        (one, one_name), (two, two_name), *_ = first.items()
        raise SettingError(
            "dtype",
            f"is needed: in {checkpoint.where} {one_name} is {dtype_name(one)} and {two_name} {dtype_name(two)}",
        )
    return next(iter(first))


@dataclass(frozen=True)
class AbsentWeights:
    """Parameters without memory, which `fill` allocates and loads."""

    nbytes: Mapping[torch.Tensor, int]  # size of the storage of each parameter without memory
    loads: dict[torch.Tensor, _Load] = field(default_factory=dict)  # several parameters may share one

    def fill(self, ranges: Mapping[torch.Tensor, tuple[int, int]]) -> None:
        """Allocate and load the absent parameters among those in `ranges`, and the parameters loaded together with
        them. Of a parameter with a range (start, stop) only those elements are defined, of others all."""
        loads = {id(load): load for load in map(self.loads.get, ranges) if load is not None}
        for parameter in [parameter for parameter, load in self.loads.items() if id(load) in loads]:
            if parameter in self.nbytes:
                allocate(parameter, self.nbytes[parameter])
            del self.loads[parameter]
        run_tasks([(load.nbytes, partial(load, ranges)) for load in loads.values()], worker_count(None))


def load(
    chunks: Sequence[Any],
    checkpoint: Checkpoint,
    values: bool = True,
    unallocated: Mapping[torch.Tensor, int] | None = None,
) -> AbsentWeights:
    """Load this rank's chunks, a few parameters at a time, reading each tensor of its stages and experts once.

    Values are converted to the parameters' dtype, except that a tensor with a dtype of its own (a router in fp32) is
    never narrowed. Padded vocabulary rows are zero.

    Args:
        values: False to set all values to zero and read only the tensors with a dtype of their own.
        unallocated: size in bytes of each parameter without memory. The result's `fill` loads them and all other
            parameters, except those with a dtype of their own.

    Raises CheckpointError if the mapping does not set each tensor of the model once, or if a shape differs.
    """
    live = live_tensors(chunks)
    unset = set(live)
    tasks = []
    absent = AbsentWeights(unallocated or {})
    for param in checkpoint.params:
        targets = {name: (piece, live[name]) for piece, name in pieces_at(param) if name in live}
        if twice := targets.keys() - unset:
            raise CheckpointError(min(twice), "is a parameter of the Megatron model that the mapping sets twice")
        unset -= targets.keys()
        one = _Load(checkpoint, param, targets)
        parameters = [target for _, target in targets.values() if isinstance(target, torch.nn.Parameter)]
        if values and unallocated and parameters and not param.rule.own_dtype:
            absent.loads.update(dict.fromkeys(parameters, one))
            continue
        for parameter in parameters:
            if parameter in absent.nbytes:
                allocate(parameter, absent.nbytes[parameter])
        if targets and (values or param.rule.own_dtype):
            tasks.append((one.nbytes, partial(one, {})))
        else:
            for _, target in targets.values():
                target.data.zero_()
    if unset:
        raise CheckpointError(min(unset), "is a parameter of the Megatron model that the mapping does not set")
    run_tasks(tasks, worker_count(None))
    return absent


@dataclass(frozen=True)
class _Load:
    """Task that loads a parameter into the model's tensors for it."""

    checkpoint: Checkpoint
    param: ParamMapping
    targets: dict[str, tuple[ParamMapping, torch.Tensor]]  # by name: the parameter's piece, and the tensor

    @property
    def nbytes(self) -> int:
        """Size of the stored tensors in bytes."""
        return param_bytes(self.checkpoint, self.param)

    @torch.no_grad()
    def __call__(self, ranges: Mapping[torch.Tensor, tuple[int, int]]) -> None:
        """Set the targets. Of a target with a range at least the elements in it are set, and only those if the
        checkpoint can read slices."""
        cut = any(target in ranges and ranges[target] != (0, target.numel()) for _, target in self.targets.values())
        if cut and self.checkpoint.streams(self.param):
            self._set(ranges)
            return
        stored = self.checkpoint.read_param(self.param)
        for name, (piece, target) in self.targets.items():
            shard = shard_of(piece, _unsharded(piece, self.param, stored), target)
            with torch.accelerator.device_index(target.device.index):  # a new thread uses the first device
                _fill(name, target, shard, piece)

    def _set(self, ranges: Mapping[torch.Tensor, tuple[int, int]]) -> None:
        for name, (piece, target) in self.targets.items():
            _check_shape(name, target, _shard_shape(piece, target), piece)
            start, stop = ranges.get(target, (0, target.numel()))
            values = read_shard(self.checkpoint, self.param, piece, target, start, stop)
            with torch.accelerator.device_index(target.device.index):
                target.data.view(-1)[start:stop].copy_(values)


def read_shard(
    checkpoint: Checkpoint, param: ParamMapping, piece: ParamMapping, target: torch.Tensor, start: int, stop: int
) -> torch.Tensor:
    """Elements `start` to `stop`, in row-major order, of this tensor parallel rank's shard (see `shard_of`) of one
    piece of a parameter that the checkpoint `streams`. Rows of a padded vocabulary are zero.

    Only the rows that contain these elements are read, but over all columns.
    """
    dtype = checkpoint.spec(param.hub_names[0])[0]
    if start == stop:
        return torch.empty(0, dtype=dtype)
    rank, size = tensor_parallel(piece)
    own, axis = _rank_ranges(piece, rank, size, target.shape[0]), piece.rule.tp_axis
    rows = own if axis == 0 else ((0, piece.megatron_shape[0]),)
    columns = own if axis == 1 and size > 1 else ()
    own_width, width = prod(target.shape[1:]), prod(piece.megatron_shape[1:])
    first, last = start // own_width, -(-stop // own_width)
    before = sum(each.megatron_shape[0] for each in param.pieces[: param.pieces.index(piece)])
    runs = SliceRange(rows).moved(before).subset(first, last)
    found = read_rows(checkpoint.regions(param), runs, width * dtype.itemsize).view(-1).view(dtype)
    if columns:
        whole_rows = found.view(-1, *piece.megatron_shape[1:])
        found = torch.cat([whole_rows.narrow(1, *each) for each in columns], dim=1).reshape(-1)
    values = found[start - first * own_width : stop - first * own_width]
    return torch.nn.functional.pad(values, (0, stop - start - len(values)))


def _shard_shape(piece: ParamMapping, target: torch.Tensor) -> tuple[int, ...]:
    """Shape of the result of `shard_of`."""
    shape, axis = list(piece.megatron_shape), piece.rule.tp_axis
    if axis is not None:
        own = _rank_ranges(piece, *tensor_parallel(piece), target.shape[0])
        shape[axis] = sum(length for _, length in own)
    return tuple(shape)


def _unsharded(piece: ParamMapping, param: ParamMapping, stored: Sequence[torch.Tensor]) -> torch.Tensor:
    """Unsharded Megatron tensor of one piece of a parameter whose Hub tensors are `stored`."""
    return piece.to_megatron(stored if piece is param else [tensor[piece.expert] for tensor in stored])


def shard_of(param: ParamMapping, whole: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """This tensor parallel rank's shard of a parameter's unsharded tensor, without the padded vocabulary rows that
    `target` may have."""
    rank, size = tensor_parallel(param)
    if is_vocabulary(param):
        return whole.narrow(0, *vocabulary_range(param, rank, target.shape[0]))
    return param.shard(whole, rank, size)


def gather_shards(param: ParamMapping, shard: torch.Tensor, whole: torch.Tensor) -> None:
    """Inverse of `shard_of`: copy the ranges of all tensor parallel ranks into `whole`, without padding rows.
    Collective over the ranks that hold shards of the parameter."""
    axis = param.rule.tp_axis
    if axis is None:
        whole.copy_(shard)
        return
    _, size = tensor_parallel(param)
    shards = [shard]
    if size > 1:
        shards = [torch.empty_like(shard, memory_format=torch.contiguous_format) for _ in range(size)]
        dist.all_gather(shards, shard.contiguous(), group=_tensor_parallel_group(param))
    for rank, part in enumerate(shards):
        offset = 0
        for start, length in _rank_ranges(param, rank, size, len(part)):
            whole.narrow(axis, start, length).copy_(part.narrow(axis, offset, length))
            offset += length


def _rank_ranges(param: ParamMapping, rank: int, size: int, rows: int) -> tuple[tuple[int, int], ...]:
    """Ranges (start, length) along the tensor parallel axis that a rank with `rows` rows holds: `tp_slices`, or for a
    vocabulary the slice as Megatron pads it."""
    return (vocabulary_range(param, rank, rows),) if is_vocabulary(param) else param.tp_slices(rank, size)


def _tensor_parallel_group(param: ParamMapping) -> dist.ProcessGroup:
    if param.expert is not None:
        return parallel_state.get_expert_tensor_parallel_group()
    return parallel_state.get_tensor_model_parallel_group()


def param_bytes(checkpoint: Checkpoint, param: ParamMapping) -> int:
    """Size of a parameter's stored tensors in bytes."""
    specs = [checkpoint.spec(name) for name in param.hub_names]
    return sum(dtype.itemsize * math.prod(shape) for dtype, shape in specs)


def values(tensor: torch.Tensor) -> torch.Tensor:
    """Values of a live tensor, dequantised from FP8. Collective over data parallel ranks if FSDP shards it."""
    if is_sharded(tensor):
        return whole(tensor)
    return dequantize_fp8_tensor(tensor) if is_float8tensor(tensor) else tensor.detach()


def live_names(param: ParamMapping) -> tuple[str, ...]:
    """Names of a parameter in a model: a tied embedding is also the last pipeline stage's output layer."""
    if param.dims.tied and param.megatron_name == EMBEDDING:
        return (EMBEDDING, OUTPUT)
    return (param.megatron_name,)


def pieces_at(param: ParamMapping) -> Iterator[tuple[ParamMapping, str]]:
    """Pieces of a parameter, one per expert, with their names in a model."""
    return ((piece, name) for piece in param.pieces for name in live_names(piece))


def _fill(name: str, target: torch.Tensor, shard: torch.Tensor, param: ParamMapping) -> None:
    """Copy a shard into a parameter, which has more rows if it is a padded vocabulary."""
    rows = shard.shape[0]
    _check_shape(name, target, shard.shape, param)
    if param.rule.own_dtype:
        target.data = target.data.to(torch.promote_types(target.dtype, shard.dtype))
    if rows < len(target):
        target.data[:rows].copy_(shard)
        target.data[rows:].zero_()
    else:
        target.copy_(shard)  # not a slice, which for FP8 weights may be a copy
    if hasattr(target, "get_high_precision_init_val"):  # FP8 weights: initialises the main params
        target.get_high_precision_init_val().copy_(shard)


def _check_shape(name: str, target: torch.Tensor, shape: Sequence[int], param: ParamMapping) -> None:
    padded = is_vocabulary(param) and target.shape[1:] == tuple(shape)[1:] and target.shape[0] > shape[0]
    if target.shape != tuple(shape) and not padded:
        raise CheckpointError(
            name, f"has shape {tuple(target.shape)} in the Megatron model, but {tuple(shape)} in the mapping"
        )


def is_vocabulary(param: ParamMapping) -> bool:
    """True if rows are tokens, which Megatron may pad."""
    return isinstance(param.rule, Vocabulary)


def vocabulary_range(param: ParamMapping, tp_rank: int, rows: int) -> tuple[int, int]:
    """Range (start, length) of the unpadded vocabulary on a tensor parallel rank with `rows` rows; the remaining rows,
    only on the last ranks, are padding."""
    vocab = param.megatron_shape[0]
    start = min(tp_rank * rows, vocab)
    return start, min(rows, vocab - start)


@dataclass(frozen=True)
class MainParamShard:
    """fp32 main param of `size` elements of a flattened parameter, from `start`: all of it, or a data parallel rank's
    shard. `write` sets it from flat values."""

    start: int
    size: int
    write: Callable[[torch.Tensor], Any]

    @classmethod
    def of(cls, values: torch.Tensor, start: int) -> MainParamShard:
        """Main param that is a tensor."""
        return cls(start, values.numel(), values.copy_)


def load_main_params(chunks: Sequence[Any], optimizer: Any, checkpoint: Checkpoint) -> None:
    """Set the fp32 main params of a rank's wrapped chunks to the unrounded values in `checkpoint`. Only tensors stored
    in another dtype than the parameters' are read."""
    sharded = chunks[0].ddp_config.use_megatron_fsdp
    live = live_tensors([chunk.module.module for chunk in chunks] if sharded else unwrap_model(list(chunks)))
    main_params = dict(_fsdp_main_params(chunks, live) if sharded else _main_params(optimizer))
    if not main_params:
        return
    tasks = []
    for param in checkpoint.params:
        targets = [(piece, live[name]) for piece, name in pieces_at(param) if name in live]
        stored = {checkpoint.spec(name)[0] for name in param.hub_names}
        parts = [
            (piece, original(target), main_params[target])
            for piece, target in targets
            if target in main_params and stored != {original(target).dtype} and main_params[target].size
        ]
        if parts:
            tasks.append((param_bytes(checkpoint, param), partial(_load_main_param, checkpoint, param, parts)))
    run_tasks(tasks, worker_count(None))


def _main_params(optimizer: Any) -> Iterator[tuple[torch.Tensor, MainParamShard]]:
    for part in parts_of(optimizer):
        if keeps_inner_main_params(part):
            for parameter, shard in inner_main_params(part):
                write = partial(write_main_param, part.optimizer, shard)
                yield parameter, MainParamShard(param_range(part, parameter).start, shard.numel(), write)
        else:
            for parameter, main in float16_params(part):
                yield parameter, MainParamShard.of(main.view(-1), shard_start(part, parameter))


def _fsdp_main_params(
    chunks: Sequence[Any], live: dict[str, torch.Tensor]
) -> Iterator[tuple[torch.Tensor, MainParamShard]]:
    """Main params with Megatron FSDP, whose optimizer updates fp32 rows that are the model's parameters."""
    parts: dict[int, FSDPShard] = {}
    for chunk in chunks:
        for part in fsdp_shards(chunk):
            parts |= {id(part.parameter): part, id(original(part.parameter)): part}
    for tensor in live.values():
        if (found := parts.get(id(tensor))) is None:
            continue
        rows = found.parameter.to_local().detach()
        if rows.dtype == torch.float32:
            yield tensor, MainParamShard.of(rows.view(-1), found.start * prod(found.part[1:]))


@torch.no_grad()
def _load_main_param(
    checkpoint: Checkpoint, param: ParamMapping, parts: Sequence[tuple[ParamMapping, torch.Tensor, MainParamShard]]
) -> None:
    streams = checkpoint.streams(param)
    stored = () if streams else checkpoint.read_param(param)
    for piece, target, main_param in parts:
        stop = main_param.start + main_param.size
        if streams:
            values = read_shard(checkpoint, param, piece, target, main_param.start, stop)
        else:
            flat = shard_of(piece, _unsharded(piece, param, stored), target).reshape(-1)[main_param.start : stop]
            values = torch.nn.functional.pad(flat, (0, main_param.size - len(flat)))  # rows of a padded vocabulary
        with torch.accelerator.device_index(target.device.index):  # a new thread uses the first device
            main_param.write(values)

"""Megatron FSDP: the models inside its wrappers, each rank's rows of every parameter, layers that are allocated only
when they are sharded, one exchange of the locations of all shards, and a patch of its gradient reduction. For models
whose weights and optimizer do not fit without FSDP.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.tensor import DTensor, Shard

from dlm_bridge.parallel import mcore_compat, platform
from dlm_bridge.parallel.core import TransformerLayer, parallel_state, unwrap_model
from dlm_bridge.parallel.mcore_patches import is_needed

SHARDED = "dp_cp"  # megatron-core's name of the mesh dimension over which FSDP shards


def unwrapped(chunks: Sequence[Any]) -> list[Any]:
    """The GPTModels inside any wrappers. megatron-core's own function does not remove FSDP's inner wrapper."""
    return [_inner(chunk) for chunk in unwrap_model(list(chunks))]


def is_sharded(tensor: torch.Tensor) -> bool:
    """True if FSDP shards a parameter by rows over data parallel ranks."""
    return isinstance(tensor, DTensor)


def original(parameter: torch.Tensor) -> torch.Tensor:
    """The parameter as it was before FSDP: the whole tensor parallel shard, in the model's dtype."""
    return getattr(parameter, "orig_param", parameter)


def whole(parameter: torch.Tensor) -> torch.Tensor:
    """Gather the tensor parallel shard of an FSDP parameter, in the optimizer's precision and the shape of `original`.
    Collective over the data parallel ranks that share it."""
    assert isinstance(parameter, DTensor)
    local = parameter.to_local().detach()
    # With several optimizer instances the mesh has one more dimension before it, over which shards are replicated.
    dim = (parameter.device_mesh.mesh_dim_names or ()).index(SHARDED)
    if not isinstance(parameter.placements[dim], Shard):
        return local
    group = parameter.device_mesh.get_group(dim)
    rows = local.new_zeros(group.size(), dtype=torch.int64)
    dist.all_gather_into_tensor(rows, rows.new_tensor([len(local)]), group=group)
    most = int(rows.max())
    mine = local.new_zeros(most, *local.shape[1:])
    mine[: len(local)] = local
    found = local.new_empty(group.size() * most, *local.shape[1:])
    dist.all_gather_into_tensor(found, mine, group=group)
    parts = [part[:count] for part, count in zip(found.split(most), rows.tolist(), strict=True)]
    return torch.cat(parts).view(original(parameter).shape)


@dataclass(frozen=True)
class FSDPShard:
    """Rows of a parameter on this rank, as a box of the unsharded tensor."""

    name: str  # in the GPTModel of this rank
    parameter: Any  # the tensor that the optimizer updates
    start: int  # its first row in the tensor parallel shard
    rows: int
    part: tuple[int, ...]  # shape of the tensor parallel shard
    axis: int | None  # tensor parallel axis
    rank: int  # in the tensor parallel group
    ranks: int


def fsdp_shards(chunk: Any) -> Iterator[FSDPShard]:
    """Iterate over this rank's shard of every parameter of a model in FullyShardedDataParallel; some have no rows."""
    for name, parameter in chunk.param_and_grad_buffer.optimizer_named_parameters:
        part = tuple(original(parameter).shape)
        row = prod(part[1:])
        where = getattr(parameter, "megatron_fsdp_slice", slice(0, prod(part)))
        axis, rank, ranks = _tensor_parallel(name, original(parameter))
        start, rows = where.start // row, (where.stop - where.start) // row
        yield FSDPShard(name, parameter, start, rows, part, axis, rank, ranks)


def buffers(chunk: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Buffers of a model in FullyShardedDataParallel, such as an expert bias: replicated on each rank."""
    for path, module in chunk.module.module.named_modules():
        for name, buffer in module.named_buffers(prefix=path, recurse=False):
            if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                yield name, buffer


@contextmanager
def unallocated_layers() -> Iterator[dict[torch.Tensor, int]]:
    """Context manager that frees the memory of each transformer layer's parameters when the layer is built. Yields the
    size in bytes of each parameter's storage, for `allocate`."""
    build, device = TransformerLayer.__init__, platform.current().device()
    found: dict[torch.Tensor, int] = {}

    def build_without(self: Any, *arguments: Any, **options: Any) -> None:
        build(self, *arguments, **options)
        own = [parameter for parameter in self.parameters() if parameter.device == device]
        found.update({parameter: parameter.untyped_storage().nbytes() for parameter in own})
        for parameter in own:
            parameter.untyped_storage().resize_(0)

    TransformerLayer.__init__ = build_without
    try:
        yield found
    finally:
        TransformerLayer.__init__ = build


def allocate(parameter: torch.Tensor, nbytes: int) -> None:
    """Allocate the `nbytes` of a parameter's storage that `unallocated_layers` freed; no-op if it is allocated, as a
    storage shared by several parameters may be."""
    storage = parameter.untyped_storage()
    if not storage.nbytes():
        storage.resize_(nbytes)


@contextmanager
def filled_when_sharded(fill: Callable[[Mapping[torch.Tensor, tuple[int, int]]], None]) -> Iterator[None]:
    """Context manager that calls `fill` with the parameters of a unit just before Megatron FSDP copies them to its
    buffers, each with the range (start, stop) of this rank's elements. Megatron FSDP frees parameters after the copy.

    A unit's weights and main params are two buffers with the same sharding: the first buffer's ranges apply to both.
    """
    from megatron.core.distributed.fsdp.src.megatron_fsdp.param_and_grad_buffer import DataParallelBuffer

    set_item = DataParallelBuffer.set_item
    seen: set[Any] = set()  # buffers
    filled: dict[torch.Tensor, tuple[int, int]] = {}

    def set_filled(self: Any, item_id: int, item_data: torch.Tensor) -> None:
        if self not in seen:
            seen.add(self)
            ranges = {each: self.locate_item_in_global_item(number) for number, each in enumerate(self.params)}
            fill(ranges)
            for each, (start, stop) in ranges.items():
                low, high = filled.setdefault(each, (start, stop))
                assert start == stop or low <= start <= stop <= high, "two buffers of a unit are sharded differently"
        set_item(self, item_id, item_data)

    DataParallelBuffer.set_item = set_filled
    try:
        yield
    finally:
        DataParallelBuffer.set_item = set_item


@contextmanager
def located_at_once() -> Iterator[None]:
    """Context manager in which Megatron FSDP exchanges the locations of all parameters' shards at once
    (`locate_shards`) when it creates DTensors. megatron-core itself runs five collectives for each parameter, and a
    model with experts has ten thousand parameters."""
    from megatron.core.distributed.fsdp.src.megatron_fsdp import param_and_grad_buffer, uneven_dtensor

    buffer, make = param_and_grad_buffer.ParamAndGradBuffer, param_and_grad_buffer.make_fsdp_dtensor
    init, locate = buffer._init_distributed_params, uneven_dtensor.gather_and_compute_chunk_metadata

    def init_at_once(self: Any) -> None:
        made: list[DTensor] = []

        def make_unlocated(*arguments: Any, **options: Any) -> DTensor:
            uneven = options.pop("update_uneven_dtensor_chunk_meta")
            found: DTensor = make(*arguments, **(options if not uneven else options | {"run_check": False}))
            if uneven:
                made.append(found)
            return found

        param_and_grad_buffer.make_fsdp_dtensor = make_unlocated
        try:
            init(self)
        finally:
            param_and_grad_buffer.make_fsdp_dtensor = make
        located = dict(zip(map(id, made), locate_shards(made), strict=True))
        uneven_dtensor.gather_and_compute_chunk_metadata = lambda tensor: located[id(tensor)]
        try:
            for tensor in made:
                uneven_dtensor.update_uneven_dtensor_chunk_metadata(tensor)
        finally:
            uneven_dtensor.gather_and_compute_chunk_metadata = locate

    buffer._init_distributed_params = init_at_once
    try:
        yield
    finally:
        buffer._init_distributed_params = init


def locate_shards(tensors: Sequence[DTensor]) -> list[ChunkStorageMetadata]:
    """Offsets and sizes of this rank's shard in each whole tensor. Shards may differ in size.

    Collective over the ranks that share a tensor, which must pass the same list: one exchange for each process group
    and each sharded mesh dimension. Raises AssertionError if the shards do not add up to their tensor.
    """
    local = [tensor.to_local().shape for tensor in tensors]
    sizes, offsets = [list(shape) for shape in local], [[0] * len(shape) for shape in local]
    turns = [_sharded_mesh_dims(tensor) for tensor in tensors]
    for turn in range(max(map(len, turns), default=0)):
        together: dict[Any, list[int]] = {}  # by process group
        for number, dims in enumerate(turns):
            if turn < len(dims):
                together.setdefault(tensors[number].device_mesh.get_group(dims[turn]), []).append(number)
        for group, numbers in together.items():
            everyones: list[Any] = [None] * group.size()
            dist.all_gather_object(everyones, [sizes[number] for number in numbers], group=group)
            for place, number in enumerate(numbers):
                placement = tensors[number].placements[turns[number][turn]]
                assert isinstance(placement, Shard)
                rows = [each[place][placement.dim] for each in everyones]
                offsets[number][placement.dim] += sum(rows[: group.rank()])
                sizes[number][placement.dim] = sum(rows)
    for tensor, found in zip(tensors, sizes, strict=True):
        assert tuple(found) == tuple(tensor.shape), f"shards of {tuple(found)} in a tensor of {tuple(tensor.shape)}"
    return [
        ChunkStorageMetadata(torch.Size(offset), torch.Size(shape))
        for offset, shape in zip(offsets, local, strict=True)
    ]


def _sharded_mesh_dims(tensor: DTensor) -> list[int]:
    """Mesh dimensions over which the tensor is sharded, innermost first."""
    order = getattr(tensor.device_mesh, "_shard_order", None)  # set if a tensor dimension is sharded twice
    dims = range(len(tensor.placements)) if order is None else reversed(order)
    return [dim for dim in dims if isinstance(tensor.placements[dim], Shard)]


def patch_unshared_gradients(wrapped: Any) -> None:
    """Skip a MegatronFSDP's reduction of gradients that only one data parallel rank has.

    These are the experts' gradients if expert parallelism uses all data parallel ranks, and all gradients if there is
    one rank. They accumulate in place: each reduction would add them to themselves, doubling the sum over earlier
    micro-batches. No-op with a version that accumulates only gradients that several ranks share.
    """
    if not is_needed(patch_unshared_gradients):
        return
    pipeline = wrapped.grad_reduce_pipeline
    reduce = pipeline._bucket_group_gradient_reduce

    def reduce_shared(bucket_group: list[int], *arguments: Any, **options: Any) -> bool:
        if pipeline.get_fsdp_buffer(bucket_group[0]).data_parallel_group.size() > 1:
            return bool(reduce(bucket_group, *arguments, **options))
        for bucket in bucket_group:
            pipeline.bucket_grad_ready_params[bucket] = set()
        return True

    pipeline._bucket_group_gradient_reduce = reduce_shared


def init_optimizer_state(optimizer: Any) -> None:
    """Allocate the state of a distributed optimizer, so that a checkpoint can be loaded into it."""
    optimizer._init_optimizer_states_with_dummy_values()


def _tensor_parallel(name: str, parameter: torch.Tensor) -> tuple[int | None, int, int]:
    """Tensor parallel axis (None: replicated), this rank and the number of ranks."""
    if ".experts." in name:
        rank = parallel_state.get_expert_tensor_parallel_rank()
        ranks = parallel_state.get_expert_tensor_parallel_world_size()
    else:
        rank = parallel_state.get_tensor_model_parallel_rank()
        ranks = parallel_state.get_tensor_model_parallel_world_size()
    return None if ranks == 1 else mcore_compat.tensor_parallel_axis(parameter), rank, ranks


def _inner(chunk: Any) -> Any:
    return chunk.module if type(chunk).__name__ == "MegatronFSDP" else chunk

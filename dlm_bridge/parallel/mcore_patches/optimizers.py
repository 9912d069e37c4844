"""megatron-core's optimizers: access to the fp32 main params inside them, and patches of their checkpoints.

The precision-aware optimizer stores its fp32 main params in the optimizer inside it: Transformer Engine's Adam, or
with CPU offload megatron-core's HybridDeviceOptimizer. For bf16 weights Adam may store only the lower 16 bits of the
main params (`store_param_remainders`): the weight is the upper half, rounded up if the lower half is 32768 or more.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

MAIN_PARAM = "master_param"  # key in Adam's state


def parts_of(optimizer: Any) -> list[Any]:
    """The optimizers in megatron-core's `optimizer`: those of a chain, or with FSDP the optimizer itself."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def keeps_inner_main_params(part: Any) -> bool:
    """True if `part`, one of megatron-core's optimizers, stores its main params in the optimizer inside."""
    settings = getattr(part, "config", None)
    inside = getattr(settings, "use_precision_aware_optimizer_no_fp8_or_ds_fp8", False)
    return bool(inside) and hasattr(part, "shard_float16_groups")


def param_range(part: Any, parameter: torch.Tensor, of: str = "param") -> slice:
    """Range of a rank's shard of a parameter in the distributed optimizer `part`: in the flat parameter, or in its
    bucket (`of` "gbuf_world_in_bucket")."""
    found = part._get_model_param_range_map(parameter)[of]
    return slice(found.start, found.end)


def float16_params(part: Any) -> list[tuple[Any, Any]]:
    """The model's bf16 or fp16 params with this rank's fp32 main params, in the distributed optimizer flat shards."""
    if is_distributed(part):
        return _pairs(part.model_float16_groups, part.shard_fp32_from_float16_groups)
    return _pairs(getattr(part, "float16_groups", []), getattr(part, "fp32_from_float16_groups", []))


def fp32_params(part: Any) -> list[tuple[Any, Any]]:
    """The model's fp32 params with the tensors that this rank updates: the params themselves, or flat shards."""
    if is_distributed(part):
        return _pairs(part.model_fp32_groups, part.shard_fp32_groups)
    groups = getattr(part, "fp32_from_fp32_groups", None)
    groups = [group["params"] for group in part.param_groups] if groups is None else groups
    return _pairs(groups, groups)


def is_distributed(part: Any) -> bool:
    """True if `part` is the distributed optimizer with shards of main params of its own."""
    return hasattr(part, "shard_fp32_from_float16_groups")


def shard_start(part: Any, parameter: torch.Tensor) -> int:
    """Start of this rank's main param in the flat parameter."""
    return int(param_range(part, parameter).start) if is_distributed(part) else 0


def _pairs(models: list[list[Any]], mains: list[list[Any]]) -> list[tuple[Any, Any]]:
    groups = zip(models, mains, strict=True)
    return [pair for group in groups for pair in zip(*group, strict=True) if pair[1] is not None]


def inner_main_params(part: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Iterate over the model's bf16 or fp16 params with the rank's flat shard of each in the inner optimizer."""
    for parameters, shards in zip(part.model_float16_groups, part.shard_float16_groups, strict=True):
        yield from zip(parameters, shards, strict=True)


def read_main_param(inner: Any, shard: torch.Tensor) -> torch.Tensor:
    """fp32 values of a shard, or of an fp32 parameter."""
    if offloads(inner):
        return inner.param_to_inner_param[shard].detach()
    if shard.dtype == torch.float32:  # Adam's copy of it is never updated
        return shard.detach()
    stored = inner.state[shard][MAIN_PARAM]
    return joined(shard, stored) if stored.dtype == torch.int16 else inner.get_unscaled_state(shard, MAIN_PARAM)


@torch.no_grad()
def write_main_param(inner: Any, shard: torch.Tensor, values: torch.Tensor) -> None:
    """Set the main param of a shard to fp32 `values`, which the shard holds rounded."""
    if offloads(inner):
        inner.param_to_inner_param[shard].copy_(values)
        return
    values = values.to(shard.device, torch.float32)
    remainders = inner.store_param_remainders and shard.dtype == torch.bfloat16
    if not inner.state[shard]:
        inner.initialize_state(shard, remainders)
    # Cloned, because Adam scales its argument in place.
    inner.set_scaled_state(shard, MAIN_PARAM, remainder(values, shard) if remainders else values.clone())


def joined(upper: torch.Tensor, lower: torch.Tensor) -> torch.Tensor:
    """Combine bf16 weights and their int16 remainders into fp32 values."""
    return ((upper.detach().view(torch.int16).int() << 16) + lower.int()).view(torch.float32)


def remainder(values: torch.Tensor, rounded: torch.Tensor) -> torch.Tensor:
    """int16 remainders of fp32 `values` after rounding to bf16. `joined` restores the values, except the last bit of
    one that is halfway between two bf16 numbers and was rounded down."""
    lower = values.contiguous().view(torch.int32) - (rounded.detach().view(torch.int16).int() << 16)
    return lower.clamp(max=32767).to(torch.int16)


@contextlib.contextmanager
def whole_main_params(optimizer: Any) -> Iterator[None]:
    """Context manager in which checkpoints contain the main params inside Adam as fp32 values, so that a resume may
    change the optimizer's settings. Unpatched, the 16 bits that Adam stores are saved, and an assertion fails when
    they are loaded."""
    parts = [part for part in parts_of(optimizer) if keeps_inner_main_params(part) and not offloads(part.optimizer)]
    try:
        for part in parts:
            part._get_main_param_and_optimizer_states = partial(_states, part)
            part._set_main_param_and_optimizer_states = partial(_set_states, part)
        yield
    finally:
        for part in parts:
            del part._get_main_param_and_optimizer_states, part._set_main_param_and_optimizer_states


def _states(part: Any, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = type(part)._get_main_param_and_optimizer_states(part, parameter)
    return {**found, "param": read_main_param(part.optimizer, _main_shard(part, parameter))}


def _set_states(part: Any, parameter: torch.Tensor, states: dict[str, torch.Tensor]) -> None:
    others = {name: tensor for name, tensor in states.items() if name != "param"}
    type(part)._set_main_param_and_optimizer_states(part, parameter, others)
    write_main_param(part.optimizer, _main_shard(part, parameter), states["param"])


def _main_shard(part: Any, parameter: torch.Tensor) -> torch.Tensor:
    group, place = part.model_param_group_index_map[parameter]
    shard: torch.Tensor = part.optimizer.param_groups[group]["params"][place]
    return shard


def offloads(inner: Any) -> bool:
    """True for megatron-core's HybridDeviceOptimizer, which has copies of the parameters that it updates."""
    return hasattr(inner, "param_to_inner_param")


def patch_offloading_resume(optimizer: Any) -> None:
    """Make the offloading optimizers in `optimizer` load every main param from a checkpoint. Unpatched, a resume fails
    at the first parameter that is fp32 in the model, of which `HybridDeviceOptimizer` has no second copy."""
    for part in parts_of(optimizer):
        inner: Any = getattr(part, "optimizer", None)
        if offloads(inner):
            inner._update_fp32_params_by_new_state = partial(_take_main_params, inner)


@torch.no_grad()
def _take_main_params(inner: Any) -> None:
    for parameter, state in inner.state.items():
        inner.param_to_inner_param[parameter].copy_(state[MAIN_PARAM])


def patch_optimizer(optimizer: Any) -> None:
    """Apply the permanent patches to a new optimizer of megatron-core."""
    patch_offloading_resume(optimizer)
    patch_param_order(optimizer)
    patch_sgd_resume(optimizer)


@contextlib.contextmanager
def patched_checkpoints(optimizer: Any) -> Iterator[None]:
    """Context manager in which checkpoints of megatron-core's `optimizer` contain all main params and fp32 params."""
    with fp32_params_included(optimizer), whole_main_params(optimizer):
        yield


def drop_offload_settings(optimizer: Any, state: dict[Any, Any]) -> None:
    """Remove the offloading settings from an optimizer's `state` before it is saved: two classes, which a reader would
    have to import, and switches. A resumed run has its own."""
    parts = parts_of(optimizer)
    states = [state] if len(parts) == 1 else [state[number] for number in range(len(parts))]
    for part, saved in zip(parts, states, strict=True):
        inner = part.optimizer
        if offloads(inner):
            for group in saved.get("optimizer", saved)["param_groups"]:
                for name in inner.defaults.keys() - inner.sub_optimizer_kwargs.keys():
                    group.pop(name, None)


@contextlib.contextmanager
def unpadded_param_index_map(optimizer: Any) -> Iterator[None]:
    """Context manager in which parameters' offsets in the optimizer's buffers exclude the padding between buckets.

    megatron-core gathers the state of a sharded optimizer without the padding at the end of each bucket, but splits it
    at offsets with padding: after the first padding each parameter would be saved with a neighbour's weights and
    moments (`DistributedOptimizer.sharded_param_state_fully_reshardable`, which warns of the last one).
    """
    buffers = [buffer for part in parts_of(optimizer) for buffer in getattr(part, "buffers", [])]
    padded = [buffer.param_index_map for buffer in buffers]
    try:
        for buffer in buffers:
            buffer.param_index_map = _without_padding(buffer)
        yield
    finally:
        for buffer, known in zip(buffers, padded, strict=True):
            buffer.param_index_map = known


def _without_padding(buffer: Any) -> dict[Any, tuple[int, int, int]]:
    """(start, end, bucket) of each parameter in the buffer, without the padding of earlier buckets."""
    padding, seen = [], 0
    for bucket in buffer.buckets:
        padding.append(seen)
        seen += bucket.grad_data.numel() - bucket.numel_unpadded
    return {
        parameter: (start - padding[number], end - padding[number], number)
        for parameter, (start, end, number) in buffer.param_index_map.items()
    }


def patch_param_order(optimizer: Any) -> None:
    """Correct the order of main params in sharded optimizers for a model whose parameters differ in dtype, such as one
    with routers in fp32.

    megatron-core records a main param's index in its group in the order of its buffers, then moves fp32 params first
    (`DistributedOptimizer._build_model_and_main_param_groups`): each would be saved and loaded with another's state.
    """
    for part in parts_of(optimizer):
        if not hasattr(part, "model_param_group_index_map"):
            continue
        for number, group in enumerate(zip(part.model_fp32_groups, part.model_float16_groups, strict=True)):
            for place, parameter in enumerate(itertools.chain(*group)):
                part.model_param_group_index_map[parameter] = (number, place)


def patch_sgd_resume(optimizer: Any) -> None:
    """Make SGD resumable: megatron-core initialises the optimizer's state before it is loaded by calling
    `init_state_fn`, which is None for SGD."""
    for part in parts_of(optimizer):
        if getattr(part, "init_state_fn", patch_sgd_resume) is None:
            part.init_state_fn = _init_momentum


def _init_momentum(optimizer: torch.optim.Optimizer | None, _: Any = None) -> None:
    if optimizer is None:  # on a rank without parameters
        return
    for group in optimizer.param_groups:
        for parameter in group["params"] if group["momentum"] else ():
            optimizer.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter.data))


@contextlib.contextmanager
def fp32_params_included(optimizer: Any) -> Iterator[None]:
    """Context manager in which checkpoints of optimizers that are not sharded contain fp32 params as well as the main
    params of the others. megatron-core assumes that there are none (`Float16OptimizerWithFloat16Params`)."""
    mixed = [
        part
        for part in parts_of(optimizer)
        if any(getattr(part, "fp32_from_fp32_groups", [])) and any(part.float16_groups)
    ]
    known = [(part.float16_groups, part.fp32_from_float16_groups) for part in mixed]
    try:
        for part, (models, mains) in zip(mixed, known, strict=True):
            model_of = dict(zip(map(id, itertools.chain(*mains)), itertools.chain(*models), strict=True))
            part.fp32_from_float16_groups = [list(group["params"]) for group in part.optimizer.param_groups]
            part.float16_groups = [
                [model_of.get(id(parameter), parameter) for parameter in group]
                for group in part.fp32_from_float16_groups
            ]
        yield
    finally:
        for part, (models, mains) in zip(mixed, known, strict=True):
            part.float16_groups, part.fp32_from_float16_groups = models, mains

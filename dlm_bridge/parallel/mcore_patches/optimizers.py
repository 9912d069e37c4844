"""megatron-core's optimizers: access to the fp32 main params inside them, and patches of their checkpoints.

The precision-aware optimizer leaves its fp32 main params to the optimizer inside it: Transformer Engine's Adam, or
with its state on the CPU megatron-core's own offloading one. Of a bf16 weight Adam may keep but the 16 bits that bf16
lacks (`store_param_remainders`): the weight is the upper half of its main param, rounded up where the lower half is
32768 or more.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

MAIN_PARAM = "master_param"  # of Adam's state


def parts_of(optimizer: Any) -> list[Any]:
    """The optimizers in megatron-core's `optimizer`: itself alone under FSDP, otherwise those of a chain."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def keeps_inner_main_params(part: Any) -> bool:
    """Whether `part`, one of megatron-core's optimizers, leaves its main params to the optimizer inside."""
    settings = getattr(part, "config", None)
    inside = getattr(settings, "use_precision_aware_optimizer_no_fp8_or_ds_fp8", False)
    return bool(inside) and hasattr(part, "shard_float16_groups")


def param_range(part: Any, parameter: torch.Tensor, of: str = "param") -> slice:
    """The elements that a rank's shard of a parameter has in the distributed optimizer `part`: of the flat parameter,
    or of its bucket (`of` "gbuf_world_in_bucket")."""
    found = part._get_model_param_range_map(parameter)[of]
    return slice(found.start, found.end)


def float16_params(part: Any) -> list[tuple[Any, Any]]:
    """The model's bf16 or fp16 params with this rank's fp32 main params, of the distributed optimizer flat shards."""
    if is_distributed(part):
        return _pairs(part.model_float16_groups, part.shard_fp32_from_float16_groups)
    return _pairs(getattr(part, "float16_groups", []), getattr(part, "fp32_from_float16_groups", []))


def fp32_params(part: Any) -> list[tuple[Any, Any]]:
    """The model's fp32 params with what this rank updates of them: themselves, or a flat shard."""
    if is_distributed(part):
        return _pairs(part.model_fp32_groups, part.shard_fp32_groups)
    groups = getattr(part, "fp32_from_fp32_groups", None)
    groups = [group["params"] for group in part.param_groups] if groups is None else groups
    return _pairs(groups, groups)


def is_distributed(part: Any) -> bool:
    """Whether `part` is the distributed optimizer, with its main params in shards of its own."""
    return hasattr(part, "shard_fp32_from_float16_groups")


def shard_start(part: Any, parameter: torch.Tensor) -> int:
    """The first element of the flat parameter in this rank's main param."""
    return int(param_range(part, parameter).start) if is_distributed(part) else 0


def _pairs(models: list[list[Any]], mains: list[list[Any]]) -> list[tuple[Any, Any]]:
    groups = zip(models, mains, strict=True)
    return [pair for group in groups for pair in zip(*group, strict=True) if pair[1] is not None]


def inner_main_params(part: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The model's bf16 or fp16 params with a rank's shard of each, flat, as the inner optimizer has it."""
    for parameters, shards in zip(part.model_float16_groups, part.shard_float16_groups, strict=True):
        yield from zip(parameters, shards, strict=True)


def read_main_param(inner: Any, shard: torch.Tensor) -> torch.Tensor:
    """The fp32 values of a shard, or of an fp32 parameter itself."""
    if offloads(inner):
        return inner.param_to_inner_param[shard].detach()
    if shard.dtype == torch.float32:  # what Adam keeps beside it is as old as the run
        return shard.detach()
    kept = inner.state[shard][MAIN_PARAM]
    return joined(shard, kept) if kept.dtype == torch.int16 else inner.get_unscaled_state(shard, MAIN_PARAM)


@torch.no_grad()
def write_main_param(inner: Any, shard: torch.Tensor, values: torch.Tensor) -> None:
    """Set the main param of a shard, which is the rounding of these fp32 `values`, to them."""
    if offloads(inner):
        inner.param_to_inner_param[shard].copy_(values)
        return
    values = values.to(shard.device, torch.float32)
    lacks = inner.store_param_remainders and shard.dtype == torch.bfloat16
    if not inner.state[shard]:
        inner.initialize_state(shard, lacks)
    # A copy: Adam scales what it is given in place.
    inner.set_scaled_state(shard, MAIN_PARAM, remainder(values, shard) if lacks else values.clone())


def joined(upper: torch.Tensor, lower: torch.Tensor) -> torch.Tensor:
    """fp32 of bf16 weights and the int16 that they lack."""
    return ((upper.detach().view(torch.int16).int() << 16) + lower.int()).view(torch.float32)


def remainder(values: torch.Tensor, rounded: torch.Tensor) -> torch.Tensor:
    """The int16 that bf16 weights lack of fp32 `values`, whose rounding they are; `joined` gives the values back, but
    for the last bit of one that is halfway between two bf16 numbers and was rounded down."""
    lower = values.contiguous().view(torch.int32) - (rounded.detach().view(torch.int16).int() << 16)
    return lower.clamp(max=32767).to(torch.int16)


@contextlib.contextmanager
def whole_main_params(optimizer: Any) -> Iterator[None]:
    """Save and load the main params inside Adam as fp32 values in checkpoints inside this context, which any setting
    of the optimizer resumes from. Unpatched, the bits that Adam keeps instead are saved, and loading them asserts."""
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
    """Whether this is megatron-core's HybridDeviceOptimizer, which keeps copies of what it updates."""
    return hasattr(inner, "param_to_inner_param")


def patch_offloading_resume(optimizer: Any) -> None:
    """Let the offloading optimizers in `optimizer` take every main param from a checkpoint. Unpatched, a resume ends
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
    """Apply the patches that last as long as megatron-core's `optimizer`, which has just been built."""
    patch_offloading_resume(optimizer)
    patch_param_order(optimizer)
    patch_sgd_resume(optimizer)


@contextlib.contextmanager
def patched_checkpoints(optimizer: Any) -> Iterator[None]:
    """Save or load checkpoints of megatron-core's `optimizer` inside, with main params and fp32 params whole."""
    with fp32_params_included(optimizer), whole_main_params(optimizer):
        yield


def drop_offload_settings(optimizer: Any, state: dict[Any, Any]) -> None:
    """Remove the settings of offloading from an optimizer's `state` before it is saved: two classes, which a reader
    would have to import, and switches. They are no state, and a resumed run has its own."""
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
    """Give each parameter's place in the optimizer's buffers without the padding between buckets, inside this context.

    megatron-core gathers the state of a sharded optimizer without the padding that ends each bucket, and cuts
    parameters out at their places with it: after the first padding each would be saved with a neighbour's weights and
    moments (`DistributedOptimizer.sharded_param_state_fully_reshardable`, where a warning tells of the last one).
    """
    buffers = [buffer for part in parts_of(optimizer) for buffer in getattr(part, "buffers", [])]
    places = [buffer.param_index_map for buffer in buffers]
    try:
        for buffer in buffers:
            buffer.param_index_map = _without_padding(buffer)
        yield
    finally:
        for buffer, known in zip(buffers, places, strict=True):
            buffer.param_index_map = known


def _without_padding(buffer: Any) -> dict[Any, tuple[int, int, int]]:
    """Each parameter's (start, end, bucket) in the buffer, less the padding of the buckets before its own."""
    padding, seen = [], 0
    for bucket in buffer.buckets:
        padding.append(seen)
        seen += bucket.grad_data.numel() - bucket.numel_unpadded
    return {
        parameter: (start - padding[number], end - padding[number], number)
        for parameter, (start, end, number) in buffer.param_index_map.items()
    }


def patch_param_order(optimizer: Any) -> None:
    """Let sharded optimizers find the main params of a model whose parameters differ in dtype, such as one with its
    routers in fp32.

    megatron-core notes a main param's place in its group in the order of its buffers, and then puts fp32 params first
    (`DistributedOptimizer._build_model_and_main_param_groups`): each would be saved and loaded with another's state.
    """
    for part in parts_of(optimizer):
        if not hasattr(part, "model_param_group_index_map"):
            continue
        for number, group in enumerate(zip(part.model_fp32_groups, part.model_float16_groups, strict=True)):
            for place, parameter in enumerate(itertools.chain(*group)):
                part.model_param_group_index_map[parameter] = (number, place)


def patch_sgd_resume(optimizer: Any) -> None:
    """Let SGD be resumed: megatron-core initialises the optimizer's state before it is loaded, and calls None for
    SGD."""
    for part in parts_of(optimizer):
        if getattr(part, "init_state_fn", patch_sgd_resume) is None:
            part.init_state_fn = _init_momentum


def _init_momentum(optimizer: torch.optim.Optimizer | None, _: Any = None) -> None:
    if optimizer is None:  # of a rank without parameters
        return
    for group in optimizer.param_groups:
        for parameter in group["params"] if group["momentum"] else ():
            optimizer.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter.data))


@contextlib.contextmanager
def fp32_params_included(optimizer: Any) -> Iterator[None]:
    """Save and load fp32 params beside the main params of the others, in checkpoints of optimizers that are not
    sharded, inside this context. megatron-core counts on there being none (`Float16OptimizerWithFloat16Params`)."""
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

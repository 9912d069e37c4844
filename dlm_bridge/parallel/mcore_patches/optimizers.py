"""megatron-core's optimizers: access to the fp32 main params inside them, and patches of their checkpoints.

The precision-aware optimizer leaves its fp32 main params to the optimizer inside it: Transformer Engine's Adam, or with
its state on the CPU megatron-core's own offloading one. Of a bf16 weight Adam may keep but the 16 bits that bf16 lacks
(`store_param_remainders`): the weight is the upper half of its main param, rounded up where the lower half is 32768 or
more.
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
    """megatron-core's optimizers: under FSDP one alone, otherwise a chain, of one or more."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def keeps_inner_main_params(part: Any) -> bool:
    """Whether `part`, one of megatron-core's optimizers, leaves its masters to Adam and has none itself."""
    settings = getattr(part, "config", None)
    inside = getattr(settings, "use_precision_aware_optimizer_no_fp8_or_ds_fp8", False)
    return bool(inside) and hasattr(part, "shard_float16_groups")


def inner_main_params(part: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The model's half-precision parameters with a rank's share of each, flat, as the inner optimizer has it."""
    for parameters, shares in zip(part.model_float16_groups, part.shard_float16_groups, strict=True):
        yield from zip(parameters, shares, strict=True)


def read_main_param(inner: Any, share: torch.Tensor) -> torch.Tensor:
    """The fp32 values of a share, or of an fp32 parameter itself."""
    if offloads(inner):
        return inner.param_to_inner_param[share].detach()
    if share.dtype == torch.float32:  # what Adam keeps beside it is as old as the run
        return share.detach()
    kept = inner.state[share][MAIN_PARAM]
    return joined(share, kept) if kept.dtype == torch.int16 else inner.get_unscaled_state(share, MAIN_PARAM)


@torch.no_grad()
def write_main_param(inner: Any, share: torch.Tensor, values: torch.Tensor) -> None:
    """Set the master of a share, which is the rounding of these fp32 `values`, to them."""
    if offloads(inner):
        inner.param_to_inner_param[share].copy_(values)
        return
    values = values.to(share.device, torch.float32)
    lacks = inner.store_param_remainders and share.dtype == torch.bfloat16
    if not inner.state[share]:
        inner.initialize_state(share, lacks)
    # A copy: Adam scales what it is given in place.
    inner.set_scaled_state(share, MAIN_PARAM, remainder(values, share) if lacks else values.clone())


def joined(half: torch.Tensor, lower: torch.Tensor) -> torch.Tensor:
    """fp32 of bf16 weights and the int16 that they lack."""
    return ((half.detach().view(torch.int16).int() << 16) + lower.int()).view(torch.float32)


def remainder(values: torch.Tensor, half: torch.Tensor) -> torch.Tensor:
    """The int16 that bf16 weights lack of fp32 `values`, whose rounding they are; `joined` gives the values back, but
    for the last bit of one that is halfway between two bf16 numbers and was rounded down."""
    lower = values.contiguous().view(torch.int32) - (half.detach().view(torch.int16).int() << 16)
    return lower.clamp(max=32767).to(torch.int16)


@contextlib.contextmanager
def whole_main_params(optimizer: Any) -> Iterator[None]:
    """While this lasts, checkpoints of megatron-core's `optimizer` save and load the masters in Adam as the fp32
    values that they are, which any setting of the optimizer resumes from. Its own way would save the bits that Adam
    keeps in their place, and asserts on what it then loads."""
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
    share: torch.Tensor = part.optimizer.param_groups[group]["params"][place]
    return share


def offloads(inner: Any) -> bool:
    """Whether this is megatron-core's HybridDeviceOptimizer, which keeps copies of what it updates."""
    return hasattr(inner, "param_to_inner_param")


def patch_offloading_resume(optimizer: Any) -> None:
    """Let the offloading optimizers within megatron-core's `optimizer` take the masters of every parameter from a
    checkpoint. In megatron-core 0.16.1 (`HybridDeviceOptimizer._update_fp32_params_by_new_state`) a resume ends at the
    first parameter that is fp32 in the model, of which it has no second copy."""
    for part in parts_of(optimizer):
        inner: Any = getattr(part, "optimizer", None)
        if offloads(inner):
            inner._update_fp32_params_by_new_state = partial(_take_main_params, inner)


@torch.no_grad()
def _take_main_params(inner: Any) -> None:
    for parameter, state in inner.state.items():
        inner.param_to_inner_param[parameter].copy_(state[MAIN_PARAM])


@contextlib.contextmanager
def unpadded_param_index_map(optimizer: Any) -> Iterator[None]:
    """While this lasts, the optimizer's buffers name each parameter's place as if nothing were between their buckets.

    megatron-core 0.16.1 gathers the state of a sharded optimizer without the padding that ends each bucket, and cuts
    out the parameters at their places with it: after the first padding each would be saved with a neighbour's weights
    and moments (`DistributedOptimizer.sharded_param_state_fully_reshardable`, where a warning tells of the last one).
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
    """Each parameter's (start, end, bucket) in the buffer's elements, less what pads the buckets before its own."""
    padding, seen = [], 0
    for bucket in buffer.buckets:
        padding.append(seen)
        seen += bucket.grad_data.numel() - bucket.numel_unpadded
    return {
        parameter: (start - padding[number], end - padding[number], number)
        for parameter, (start, end, number) in buffer.param_index_map.items()
    }


def patch_param_order(optimizer: Any) -> None:
    """Let sharded optimizers find the masters of a model whose parameters differ in dtype, such as one with its
    routers in fp32.

    megatron-core 0.16.1 notes where a parameter's master stands in its group as its buffers have the parameters, and
    then puts those that are fp32 first (`DistributedOptimizer._build_model_and_main_param_groups`): each would be
    saved and loaded with another's state."""
    for part in parts_of(optimizer):
        if not hasattr(part, "model_param_group_index_map"):
            continue
        for number, group in enumerate(zip(part.model_fp32_groups, part.model_float16_groups, strict=True)):
            for place, parameter in enumerate(itertools.chain(*group)):
                part.model_param_group_index_map[parameter] = (number, place)


def patch_sgd_resume(optimizer: Any) -> None:
    """Let gradient descent be resumed: megatron-core 0.16.1 makes Adam's state before it is loaded, and of descent
    calls the None that stands in its place."""
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
    """While this lasts, checkpoints of optimizers that are not sharded hold parameters in fp32 beside the masters of
    those in half precision. megatron-core 0.16.1 counts on there being none (`Float16OptimizerWithFloat16Params`)."""
    mixed = [
        part
        for part in parts_of(optimizer)
        if any(getattr(part, "fp32_from_fp32_groups", [])) and any(part.float16_groups)
    ]
    known = [(part.float16_groups, part.fp32_from_float16_groups) for part in mixed]
    try:
        for part, (models, masters) in zip(mixed, known, strict=True):
            of_master = dict(zip(map(id, itertools.chain(*masters)), itertools.chain(*models), strict=True))
            part.fp32_from_float16_groups = [list(group["params"]) for group in part.optimizer.param_groups]
            part.float16_groups = [
                [of_master.get(id(parameter), parameter) for parameter in group]
                for group in part.fp32_from_float16_groups
            ]
        yield
    finally:
        for part, (models, masters) in zip(mixed, known, strict=True):
            part.float16_groups, part.fp32_from_float16_groups = models, masters

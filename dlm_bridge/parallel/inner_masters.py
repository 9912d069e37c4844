"""The fp32 weights that megatron-core's precision-aware optimizer leaves to the optimizer inside it: Transformer
Engine's Adam, or with their state on the CPU megatron-core's own offloading one.

Of a bf16 weight Adam may keep but the 16 bits that bf16 lacks (`store_param_remainders`): the weight is the upper half
of its master, rounded up where the lower half is 32768 or more.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

MASTER = "master_param"  # of Adam's state


def parts_of(optimizer: Any) -> list[Any]:
    """megatron-core's optimizers: under FSDP one alone, otherwise a chain, of one or more."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def keeps_masters(part: Any) -> bool:
    """Whether `part`, one of megatron-core's optimizers, leaves its masters to Adam and has none itself."""
    settings = getattr(part, "config", None)
    inside = getattr(settings, "use_precision_aware_optimizer_no_fp8_or_ds_fp8", False)
    return bool(inside) and hasattr(part, "shard_float16_groups")


def inner_masters(part: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The model's half-precision parameters with a rank's share of each, flat, as the inner optimizer has it."""
    for parameters, shares in zip(part.model_float16_groups, part.shard_float16_groups, strict=True):
        yield from zip(parameters, shares, strict=True)


def read_master(inner: Any, share: torch.Tensor) -> torch.Tensor:
    """The fp32 values of a share, or of an fp32 parameter itself."""
    if offloads(inner):
        return inner.param_to_inner_param[share].detach()
    if share.dtype == torch.float32:  # what Adam keeps beside it is as old as the run
        return share.detach()
    kept = inner.state[share][MASTER]
    return joined(share, kept) if kept.dtype == torch.int16 else inner.get_unscaled_state(share, MASTER)


@torch.no_grad()
def write_master(inner: Any, share: torch.Tensor, values: torch.Tensor) -> None:
    """Set the master of a share, which is the rounding of these fp32 `values`, to them."""
    if offloads(inner):
        inner.param_to_inner_param[share].copy_(values)
        return
    values = values.to(share.device, torch.float32)
    lacks = inner.store_param_remainders and share.dtype == torch.bfloat16
    if not inner.state[share]:
        inner.initialize_state(share, lacks)
    # A copy: Adam scales what it is given in place.
    inner.set_scaled_state(share, MASTER, remainder(values, share) if lacks else values.clone())


def joined(half: torch.Tensor, lower: torch.Tensor) -> torch.Tensor:
    """fp32 of bf16 weights and the int16 that they lack."""
    return ((half.detach().view(torch.int16).int() << 16) + lower.int()).view(torch.float32)


def remainder(values: torch.Tensor, half: torch.Tensor) -> torch.Tensor:
    """The int16 that bf16 weights lack of fp32 `values`, whose rounding they are; `joined` gives the values back, but
    for the last bit of one that is halfway between two bf16 numbers and was rounded down."""
    lower = values.contiguous().view(torch.int32) - (half.detach().view(torch.int16).int() << 16)
    return lower.clamp(max=32767).to(torch.int16)


@contextlib.contextmanager
def whole_masters(optimizer: Any) -> Iterator[None]:
    """While this lasts, checkpoints of megatron-core's `optimizer` save and load the masters in Adam as the fp32
    values that they are, which any setting of the optimizer resumes from. Its own way would save the bits that Adam
    keeps in their place, and asserts on what it then loads."""
    parts = [part for part in parts_of(optimizer) if keeps_masters(part) and not offloads(part.optimizer)]
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
    return {**found, "param": read_master(part.optimizer, _share(part, parameter))}


def _set_states(part: Any, parameter: torch.Tensor, states: dict[str, torch.Tensor]) -> None:
    others = {name: tensor for name, tensor in states.items() if name != "param"}
    type(part)._set_main_param_and_optimizer_states(part, parameter, others)
    write_master(part.optimizer, _share(part, parameter), states["param"])


def _share(part: Any, parameter: torch.Tensor) -> torch.Tensor:
    group, place = part.model_param_group_index_map[parameter]
    share: torch.Tensor = part.optimizer.param_groups[group]["params"][place]
    return share


def offloads(inner: Any) -> bool:
    """Whether this is megatron-core's HybridDeviceOptimizer, which keeps copies of what it updates."""
    return hasattr(inner, "param_to_inner_param")


def mend_offloading(optimizer: Any) -> None:
    """Let the offloading optimizers within megatron-core's `optimizer` take the masters of every parameter from a
    checkpoint. In megatron-core 0.16.1 (`HybridDeviceOptimizer._update_fp32_params_by_new_state`) a resume ends at the
    first parameter that is fp32 in the model, of which it has no second copy."""
    for part in parts_of(optimizer):
        inner: Any = getattr(part, "optimizer", None)
        if offloads(inner):
            inner._update_fp32_params_by_new_state = partial(_take_masters, inner)


@torch.no_grad()
def _take_masters(inner: Any) -> None:
    for parameter, state in inner.state.items():
        inner.param_to_inner_param[parameter].copy_(state[MASTER])

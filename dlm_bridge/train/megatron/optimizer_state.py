"""The optimizer's state out of a checkpoint of any layout: megatron-core makes an optimizer of their own for experts
that are cut apart, and lays down what its optimizers count (steps, settings) as many times as there are of them.

The tensors are global ones under names that no layout changes. What is counted is the same for all parameters; it lies
in groups, which are told apart by how they decay and by whether they are of experts that are cut apart.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.parallel.core import LocalNonpersistentObject, ShardedBase
from dlm_bridge.parallel.inner_masters import offloads, parts_of

SAVED, WANTED = "optimizer", "wanted_optimizer"  # keys in a checkpoint, and of what is asked of it
_EXPERTS = "is_expert_parallel"
_KINDS = ("wd_mult", "lr_mult", "is_decoupled_lr")  # what else tells megatron-core's groups apart


@contextlib.contextmanager
def packed_places(optimizer: Any) -> Iterator[None]:
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


def mend_order(optimizer: Any) -> None:
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


def mend_descent(optimizer: Any) -> None:
    """Let gradient descent be resumed: megatron-core 0.16.1 makes Adam's state before it is loaded, and of descent
    calls the None that stands in its place."""
    for part in parts_of(optimizer):
        if getattr(part, "init_state_fn", mend_descent) is None:
            part.init_state_fn = _make_velocities


def _make_velocities(optimizer: torch.optim.Optimizer | None, _: Any = None) -> None:
    if optimizer is None:  # of a rank without parameters
        return
    for group in optimizer.param_groups:
        for parameter in group["params"] if group["momentum"] else ():
            optimizer.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter.data))


@contextlib.contextmanager
def all_parameters(optimizer: Any) -> Iterator[None]:
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


def request(optimizer: Any, state: dict[Any, Any]) -> dict[int, Any]:
    """What to load for each of a rank's optimizers, from their `sharded_state_dict`."""
    parts = parts_of(optimizer)
    return {0: state} if len(parts) == 1 else {number: state[number] for number in range(len(parts))}


def drop_settings(optimizer: Any, state: dict[Any, Any]) -> None:
    """Take out of what is to be saved of an optimizer how it offloads: two classes, which a reader would have to
    import, and switches. They are no state, and a run that goes on has its own."""
    for number, saved in request(optimizer, state).items():
        inner = parts_of(optimizer)[number].optimizer
        if offloads(inner):
            for group in _inner(saved)["param_groups"]:
                for name in inner.defaults.keys() - inner.sub_optimizer_kwargs.keys():
                    group.pop(name, None)


def outline(state: Any) -> Any:
    """The same tree, whose leaves are shared: loading replaces what a request holds."""
    if isinstance(state, Mapping):
        return {key: outline(value) for key, value in state.items()}
    return [outline(value) for value in state] if isinstance(state, list) else state


def restore(optimizer: Any, wanted: dict[int, Any], loaded: Mapping[str, Any]) -> None:
    """Set every optimizer of a rank to what was `loaded` of a `request`, whose outline is `wanted`. Raises
    DlmBridgeError where the checkpoint's optimizer has no such groups."""
    saved = _parts(loaded[SAVED])
    found = loaded.get(WANTED, {})
    states = {number: _filled(part, found.get(number)) for number, part in wanted.items()}
    for state in states.values():
        inner = _inner(state)
        inner["param_groups"] = [_counted(group, saved) for group in inner["param_groups"]]
        counts = [_inner(part).get("state", {}) for part in saved]
        if steps := [count["common_step"] for count in counts if "common_step" in count]:
            inner["state"]["common_step"] = steps[0]
        if scalers := [part["grad_scaler"] for part in saved if "grad_scaler" in part]:
            state["grad_scaler"] = scalers[0]
    optimizer.load_state_dict(states if len(states) != 1 else states[0])


def _parts(saved: Any) -> list[Any]:
    """The states of the optimizers of the rank that wrote what is counted."""
    if "optimizer" in saved or "param_groups" in saved:
        return [saved]
    return [part for key, part in sorted(saved.items(), key=lambda item: str(item[0])) if isinstance(part, Mapping)]


def _inner(state: Any) -> Any:
    """The state of torch's optimizer within that of megatron-core's around it."""
    return state.get("optimizer", state)


def _counted(group: dict[str, Any], saved: list[Any]) -> dict[str, Any]:
    """A group with the settings and the steps of the saved one of its kind, whether that is of experts or not."""
    groups = [known for part in saved for known in _inner(part)["param_groups"]]
    alike = [known for known in groups if all(known[name] == group[name] for name in _KINDS)]
    alike.sort(key=lambda known: known[_EXPERTS] != group[_EXPERTS])
    if not alike:
        kind = ", ".join(f"{name} {group[name]}" for name in _KINDS)
        raise DlmBridgeError(f"its optimizer has no parameters with {kind}")
    kept = {name: group[name] for name in (*_KINDS, _EXPERTS, "params") if name in group}
    return {**group, **{name: value for name, value in alike[0].items() if name != "params"}, **kept}


def _filled(wanted: Any, found: Any) -> Any:
    """`wanted` with what was loaded in the places where something is to be loaded; lists may come back as mappings
    from their indices."""
    if isinstance(wanted, ShardedBase | LocalNonpersistentObject):
        return found
    if isinstance(wanted, Mapping):
        return {key: _filled(value, _at(found, key)) for key, value in wanted.items()}
    if isinstance(wanted, list):
        return [_filled(value, _at(found, number)) for number, value in enumerate(wanted)]
    return wanted


def _at(found: Any, key: Any) -> Any:
    if isinstance(found, Mapping):
        return found.get(key)
    return found[key] if isinstance(found, list) and isinstance(key, int) and key < len(found) else None

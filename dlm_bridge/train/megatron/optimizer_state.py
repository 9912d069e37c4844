"""Optimizer state of a checkpoint, loaded on any layout.

megatron-core makes an optimizer of their own for experts that are sharded, and writes what its optimizers count
(steps, settings) as many times as there are of them. The tensors are global ones under names that no layout changes.
What is counted is the same for all parameters; it lies in param groups, which differ in weight decay and in whether
they are of sharded experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.parallel.core import LocalNonpersistentObject, ShardedBase
from dlm_bridge.parallel.mcore_patches.optimizers import parts_of

OPTIMIZER_KEY, REQUEST_KEY = "optimizer", "wanted_optimizer"  # in a checkpoint; in what is requested of it
_EXPERT_GROUP = "is_expert_parallel"
_GROUP_SETTINGS = ("wd_mult", "lr_mult", "is_decoupled_lr")  # the others that distinguish megatron-core's param groups


def optimizer_request(optimizer: Any, state: dict[Any, Any]) -> dict[int, Any]:
    """What to load for each of a rank's optimizers, from their `sharded_state_dict`."""
    parts = parts_of(optimizer)
    return {0: state} if len(parts) == 1 else {number: state[number] for number in range(len(parts))}


def copy_tree(state: Any) -> Any:
    """The same tree with the same leaves: loading replaces those of the request."""
    if isinstance(state, Mapping):
        return {key: copy_tree(value) for key, value in state.items()}
    return [copy_tree(value) for value in state] if isinstance(state, list) else state


def restore_optimizer(optimizer: Any, wanted: dict[int, Any], loaded: Mapping[str, Any]) -> None:
    """Set every optimizer of a rank to what was `loaded` of an `optimizer_request`, of which `wanted` is a copy.
    Raises DlmBridgeError where the checkpoint's optimizer has no such param groups."""
    saved = _saved_parts(loaded[OPTIMIZER_KEY])
    found = loaded.get(REQUEST_KEY, {})
    states = {number: _filled(part, found.get(number)) for number, part in wanted.items()}
    for state in states.values():
        inner = _inner(state)
        inner["param_groups"] = [_with_saved_settings(group, saved) for group in inner["param_groups"]]
        counts = [_inner(part).get("state", {}) for part in saved]
        if steps := [count["common_step"] for count in counts if "common_step" in count]:
            inner["state"]["common_step"] = steps[0]
        if scalers := [part["grad_scaler"] for part in saved if "grad_scaler" in part]:
            state["grad_scaler"] = scalers[0]
    optimizer.load_state_dict(states if len(states) != 1 else states[0])


def _saved_parts(saved: Any) -> list[Any]:
    """The states of the optimizers of the rank that wrote steps and settings."""
    if "optimizer" in saved or "param_groups" in saved:
        return [saved]
    return [part for key, part in sorted(saved.items(), key=lambda item: str(item[0])) if isinstance(part, Mapping)]


def _inner(state: Any) -> Any:
    """The state of torch's optimizer within that of megatron-core's around it."""
    return state.get("optimizer", state)


def _with_saved_settings(group: dict[str, Any], saved: list[Any]) -> dict[str, Any]:
    """A param group with the settings and the steps of the saved one of its kind, of experts or not."""
    groups = [known for part in saved for known in _inner(part)["param_groups"]]
    alike = [known for known in groups if all(known[name] == group[name] for name in _GROUP_SETTINGS)]
    alike.sort(key=lambda known: known[_EXPERT_GROUP] != group[_EXPERT_GROUP])
    if not alike:
        kind = ", ".join(f"{name} {group[name]}" for name in _GROUP_SETTINGS)
        raise DlmBridgeError(f"its optimizer has no parameters with {kind}")
    kept = {name: group[name] for name in (*_GROUP_SETTINGS, _EXPERT_GROUP, "params") if name in group}
    return {**group, **{name: value for name, value in alike[0].items() if name != "params"}, **kept}


def _filled(wanted: Any, found: Any) -> Any:
    """`wanted` with what was loaded where something was requested; lists may come back as mappings from their
    indices."""
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

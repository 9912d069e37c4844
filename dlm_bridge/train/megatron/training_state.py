"""What a training checkpoint holds beside the weights: optimizer state for any layout, multi-token prediction layers.

megatron-core makes an optimizer of their own for experts that are sharded, and writes what its optimizers count
(steps, settings) as many times as there are of them. The tensors are global ones under names that no layout changes.
What is counted is the same for all parameters; it lies in param groups, which differ in weight decay and in whether
they are of sharded experts.

Multi-token prediction (MTP) layers are not trained: every checkpoint of a run keeps them as they were. Each rank holds
a part of them on the CPU, from the start, because the source of the run may be gone when it saves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from dlm_bridge.convert.checkpoint import Checkpoint
from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.mapping.rules import ParamMapping
from dlm_bridge.parallel.core import LocalNonpersistentObject, ShardedBase, ShardedTensor
from dlm_bridge.parallel.mcore_patches.optimizers import offloads, parts_of

# Unsharded Megatron tensors of one layer (and expert), in their stored dtype.
MTPShard = dict[ParamMapping, torch.Tensor]
OPTIMIZER_KEY, REQUEST_KEY = "optimizer", "wanted_optimizer"  # in a checkpoint; in what is requested of it
_EXPERT_GROUP = "is_expert_parallel"
_GROUP_SETTINGS = ("wd_mult", "lr_mult", "is_decoupled_lr")  # the others that distinguish megatron-core's param groups


def optimizer_request(optimizer: Any, state: dict[Any, Any]) -> dict[int, Any]:
    """What to load for each of a rank's optimizers, from their `sharded_state_dict`."""
    parts = parts_of(optimizer)
    return {0: state} if len(parts) == 1 else {number: state[number] for number in range(len(parts))}


def drop_offload_settings(optimizer: Any, state: dict[Any, Any]) -> None:
    """Remove the settings of offloading from an optimizer state that is saved: two classes, which a reader would have
    to import, and switches. They are no state, and a resumed run has its own."""
    for number, saved in optimizer_request(optimizer, state).items():
        inner = parts_of(optimizer)[number].optimizer
        if offloads(inner):
            for group in _inner(saved)["param_groups"]:
                for name in inner.defaults.keys() - inner.sub_optimizer_kwargs.keys():
                    group.pop(name, None)


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


def read_mtp_shard(checkpoint: Checkpoint) -> MTPShard:
    """This rank's part of a checkpoint's multi-token prediction layers; empty where it has none."""
    params = [param for param in checkpoint.params if param.is_mtp]
    mine = params[dist.get_rank() :: dist.get_world_size()]
    return {param: param.to_megatron(checkpoint.read_param(param)) for param in mine}


def sharded_mtp(shard: MTPShard) -> dict[str, ShardedTensor]:
    """The shard as megatron-core saves it, under the names of its own multi-token prediction layers."""
    return {
        param.megatron_name: ShardedTensor.from_rank_offsets(
            param.megatron_key,
            tensor,
            *((axis, index, size) for axis, (index, size) in enumerate(param.stack)),
            prepend_axis_num=len(param.stack),
        )
        for param, tensor in shard.items()
    }


def describe_mtp(layers: int) -> str:
    """The line for the console about so many layers that are not trained."""
    many = "s are" if layers > 1 else " is"
    return f"{layers} multi-token prediction layer{many} not trained: every checkpoint keeps what it came with"

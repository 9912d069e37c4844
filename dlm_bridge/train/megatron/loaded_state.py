"""What a checkpoint holds beside the weights that are trained, loaded: the optimizer's state on any layout, layers of
multi-token prediction (MTP), the scaling of FP8.

megatron-core makes an optimizer of their own for experts that are sharded, and writes what its optimizers count
(steps, settings) as many times as there are of them. The tensors are global ones under names that no layout changes.
What is counted is the same for all parameters; it lies in param groups, which differ in weight decay and in whether
they are of sharded experts.

MTP layers that a run does not train are in every checkpoint as they were. Each rank holds a part of
them on the CPU, from the start, because the source of the run may be gone when it saves.

Transformer Engine saves what it keeps for delayed scaling (scales and histories of maxima) as a pickle in a byte
tensor, the `_extra_state` of a module, and since 2.20 refuses to load one. Here an unpickler that knows fp32 tensors
and plain values reads it; what Transformer Engine and megatron-core then load is a pickle made of those, with the
run's own recipe. Nothing of the checkpoint's own runs.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dlm_bridge.convert.checkpoint import Checkpoint
from dlm_bridge.convert.formats.dcp_reader import RestrictedReader
from dlm_bridge.convert.formats.unpickler import RestrictedUnpickler, restricted_loading
from dlm_bridge.errors import DlmBridgeError, one_line
from dlm_bridge.mapping.rules import ParamMapping
from dlm_bridge.parallel.core import LocalNonpersistentObject, ShardedBase, ShardedTensor
from dlm_bridge.parallel.mcore_patches.optimizers import parts_of
from dlm_bridge.parallel.mcore_patches.process_wide import distributed_reader
from dlm_bridge.train.checkpoints import raised_everywhere

OPTIMIZER_KEY, REQUEST_KEY = "optimizer", "wanted_optimizer"  # in a checkpoint; in what is requested of it
_EXPERT_GROUP = "is_expert_parallel"
_GROUP_SETTINGS = ("wd_mult", "lr_mult", "is_decoupled_lr")  # the others that distinguish megatron-core's param groups
_KEY = re.compile(r"(.*\.)?_extra_state\d*")  # numbered: of each of a layer's experts
_TENSORS = ("scale_fwd", "amax_history_fwd", "scale_bwd", "amax_history_bwd")
_VARIABLES = "extra_fp8_variables"
_GEMMS = "num_gemms"  # of the variables
_RECIPES = re.compile(r"(transformer_engine|megatron)(\.\w+)+|builtins\.getattr|copyreg\._reconstructor")
_LEGACY_MAGIC, _LEGACY_VERSION = 0x1950A86A20F9469CFC6C, 1001  # of torch.save's format within the pickle of a tensor
UNTRAINED_MTP = (
    "its multi-token prediction layers were not trained: resume with --mtp-loss-scaling-factor 0, or export it and "
    "start from that"
)

# Unsharded Megatron tensors of one layer (and expert), in their stored dtype.
MTPShard = dict[ParamMapping, torch.Tensor]


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


def describe_mtp(layers: int, factor: float) -> str:
    """The line for the console about so many multi-token prediction layers."""
    many = "s are" if layers > 1 else " is"
    what = (
        f"trained, with {factor:g} of the loss" if factor else "not trained: every checkpoint keeps what it came with"
    )
    return f"{layers} multi-token prediction layer{many} {what}"


@dataclass(frozen=True)
class DelayedScalingState:
    """A module's delayed scaling: fp32 scales [fp8 tensors] and histories [steps, fp8 tensors], forward and backward,
    and what Transformer Engine counts beside them."""

    tensors: dict[str, torch.Tensor]
    variables: dict[str, Any]


@contextlib.contextmanager
def restricted_reading(folder: Path) -> Iterator[None]:
    """While this lasts, megatron-core reads the checkpoint in `folder` through the restricted reader. Every process
    calls it. Raises DlmBridgeError."""
    with raised_everywhere():
        reader = RestrictedReader(folder)
    with restricted_loading(), distributed_reader(reader):
        yield


@contextlib.contextmanager
def rewritten_extra_states() -> Iterator[None]:
    """While this lasts, Transformer Engine loads extra states: the pickles that `rewrite_extra_states` made."""
    allow = "NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE"
    before = os.environ.get(allow)
    os.environ[allow] = "1"
    try:
        yield
    finally:
        os.environ.pop(allow) if before is None else os.environ.update({allow: before})


def scaled_modules(model: nn.Module, config: Any) -> dict[str, nn.Module]:
    """The modules of a model with delayed scaling that may have a state of it, by the names of their states."""
    if _recipe(config) is None:
        return {}
    return {
        f"{path}._extra_state": module
        for path, module in model.named_modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }


def rewrite_extra_states(state: Mapping[str, Any], config: Any) -> dict[str, Any]:
    """A chunk's loaded `state` with extra states that were made here, for a model of megatron-core's `config`: empty
    ones where it has no delayed scaling. Raises DlmBridgeError for one that is anything but a scaling state."""
    recipe = _recipe(config)
    return {
        key: _rewrite_extra_state(key, value, recipe) if _KEY.fullmatch(key) else value for key, value in state.items()
    }


def read_delayed_scaling(data: bytes) -> DelayedScalingState | None:
    """The scaling state in a module's extra state; None where its recipe keeps none.

    Raises DlmBridgeError where the pickle asks for anything else, or is damaged.
    """
    try:
        state, _ = _load(data)
        if not isinstance(state, dict) or not state.keys() & {*_TENSORS, "forward", "backward"}:
            return None
        tensors = {name: state[name] for name in _TENSORS}
        variables = {
            name: value
            for name, value in state[_VARIABLES].items()
            if isinstance(name, str) and isinstance(value, bool | int | float | str)
        }
        for way in ("fwd", "bwd"):
            scale, history = tensors[f"scale_{way}"], tensors[f"amax_history_{way}"]
            if scale.dim() != 1 or history.dim() != 2 or history.shape[1] != len(scale):
                raise ValueError(f"its scales are {list(scale.shape)}, their history {list(history.shape)}")
        gemms = variables.get(_GEMMS, 1)
        if not isinstance(gemms, int) or not 1 <= gemms <= len(tensors["scale_fwd"]):
            raise ValueError(f"{_GEMMS} is {gemms}")
    except DlmBridgeError:
        raise
    except Exception as error:  # a damaged pickle raises nearly anything
        raise DlmBridgeError(f"is no FP8 scaling state: {type(error).__name__}: {one_line(error)[:200]}") from None
    return DelayedScalingState(tensors, variables)


def _recipe(config: Any) -> Any:
    """The run's delayed scaling, None where it has another recipe or no FP8."""
    if not config.fp8:
        return None
    from megatron.core.fp8_utils import get_fp8_recipe  # there only where Transformer Engine is

    recipe = get_fp8_recipe(config)
    return recipe if recipe.delayed() else None


def _rewrite_extra_state(key: str, value: Any, recipe: Any) -> Any:
    if value is None:  # of a converted checkpoint
        return None
    if recipe is None or (isinstance(value, torch.Tensor) and value.numel() == 0):
        return torch.empty(0, dtype=torch.uint8)
    leave = "export the checkpoint and start from that, which leaves it out"
    if not isinstance(value, torch.Tensor) or value.dtype != torch.uint8:
        raise DlmBridgeError(f"{key} is a {type(value).__name__}, not Transformer Engine 2's bytes: {leave}")
    try:
        scaling = read_delayed_scaling(value.cpu().contiguous().numpy().tobytes())
    except DlmBridgeError as error:
        raise DlmBridgeError(f"{key}: {error}: {leave}") from None
    if scaling is None:
        return torch.empty(0, dtype=torch.uint8)
    tensors = {
        name: _resize_history(tensor, recipe.amax_history_len) if tensor.dim() == 2 else tensor
        for name, tensor in scaling.tensors.items()
    }
    made = pickle.dumps({"recipe": recipe, **tensors, _VARIABLES: scaling.variables})
    return torch.frombuffer(bytearray(made), dtype=torch.uint8)


def _resize_history(history: torch.Tensor, steps: int) -> torch.Tensor:
    """[steps, N], the newest first, as Transformer Engine cuts and pads what a recipe of another length left."""
    return torch.nn.functional.pad(history[:steps], (0, 0, 0, max(0, steps - len(history))))


def _load(data: bytes) -> tuple[Any, int]:
    """The first pickle of `data`, of fp32 tensors, plain values and a recipe (an inert object), and where it ends."""
    allowed = {
        "torch._utils._rebuild_tensor_v2": _tensor,
        "torch.storage._load_from_bytes": _storage,
        "torch.FloatStorage": torch.float32,
    }
    unpickler = RestrictedUnpickler(data, "the extra state", _RECIPES, allowed, _storage_size)
    return unpickler.load(), unpickler.position


def _storage_size(pid: Any) -> int:
    """The number of values of a storage."""
    kind, dtype, _, _, count, _ = pid
    if kind != "storage" or dtype != torch.float32 or type(count) is not int:
        raise pickle.UnpicklingError("not the pickle of fp32 values")
    return count


def _storage(data: Any) -> torch.Tensor:
    """[N] fp32 of a storage in torch.save's format before the archives: pickles one after the other, then the
    values. Read here because torch's own reader allocates as many values as the pickle claims."""
    parts, position = [], 0
    for _ in range(5):
        part, length = _load(data[position:])
        parts.append(part)
        position += length
    magic, version, system, count, keys = parts
    if (magic, version, system["little_endian"]) != (_LEGACY_MAGIC, _LEGACY_VERSION, True):
        raise pickle.UnpicklingError("not a storage of torch on a little-endian machine")
    values = data[position + 8 :]
    if type(count) is not int or len(keys) != 1 or len(values) != 4 * count:
        raise pickle.UnpicklingError(f"{count} fp32 values in {len(values)} bytes")
    return torch.frombuffer(bytearray(values), dtype=torch.float32) if count else torch.empty(0)


def _tensor(storage: Any, start: Any, shape: Any, stride: Any, *_: Any) -> torch.Tensor:
    """The tensor that a pickle describes, with memory of its own."""
    numbers = (start, *shape, *stride)
    if not isinstance(storage, torch.Tensor) or not all(type(number) is int and number >= 0 for number in numbers):
        raise pickle.UnpicklingError("not the pickle of a tensor")
    if len(shape) > 2 or prod(shape) > storage.numel():
        raise pickle.UnpicklingError(f"a tensor of shape {list(shape)} in {storage.numel()} values")
    within = torch.as_strided(storage, shape, stride, start)  # which checks that it is
    return within.clone(memory_format=torch.contiguous_format)

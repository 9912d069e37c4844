"""State of FP8's delayed scaling in a checkpoint, with which a resumed run continues with its own scales.

Transformer Engine saves the state of delayed scaling (scales and amax histories) as a pickle in a byte tensor, the
`_extra_state` of a module, and since 2.20 refuses to load it. A restricted unpickler reads fp32 tensors and plain
values from it; Transformer Engine and megatron-core then load a new pickle of these with the run's own recipe. No code
from the checkpoint is run.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import nn

from dlm_bridge.errors import CheckpointError, DlmBridgeError, one_line
from dlm_bridge.files.pickles import RestrictedUnpickler

_KEY = re.compile(r"(.*\.)?_extra_state\d*")  # with a number for each expert of a layer
_TENSORS = ("scale_fwd", "amax_history_fwd", "scale_bwd", "amax_history_bwd")
_VARIABLES = "extra_fp8_variables"
_GEMMS = "num_gemms"  # key in the variables
_RECIPES = re.compile(r"(transformer_engine|megatron)(\.\w+)+|builtins\.getattr|copyreg\._reconstructor")
_LEGACY_MAGIC, _LEGACY_VERSION = 0x1950A86A20F9469CFC6C, 1001  # torch.save's legacy format, inside a tensor's pickle


@dataclass(frozen=True)
class DelayedScalingState:
    """A module's delayed scaling: fp32 scales [fp8 tensors] and histories [steps, fp8 tensors], forward and backward,
    and Transformer Engine's variables."""

    tensors: dict[str, torch.Tensor]
    variables: dict[str, Any]


@contextlib.contextmanager
def rewritten_extra_states() -> Iterator[None]:
    """Context manager in which Transformer Engine loads extra states, namely those of `rewrite_extra_states`."""
    allow = "NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE"
    before = os.environ.get(allow)
    os.environ[allow] = "1"
    try:
        yield
    finally:
        os.environ.pop(allow) if before is None else os.environ.update({allow: before})


def scaled_modules(model: nn.Module, config: Any) -> dict[str, nn.Module]:
    """Modules of a model with delayed scaling that may have a state, by the names of their states."""
    if _recipe(config) is None:
        return {}
    return {
        f"{path}._extra_state": module
        for path, module in model.named_modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }


def rewrite_extra_states(state: Mapping[str, Any], config: Any) -> dict[str, Any]:
    """Replace the extra states in a chunk's loaded `state` by rewritten ones, or by empty ones if megatron-core's
    `config` has no delayed scaling. Raises CheckpointError for an extra state that is not a scaling state."""
    recipe = _recipe(config)
    return {
        key: _rewrite_extra_state(key, value, recipe) if _KEY.fullmatch(key) else value for key, value in state.items()
    }


def read_delayed_scaling(data: bytes) -> DelayedScalingState | None:
    """Read the scaling state in a module's extra state; None if its recipe has no state.

    Raises ValueError or pickle.UnpicklingError, or any other exception, if the pickle is damaged or contains other
    types.
    """
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
    return DelayedScalingState(tensors, variables)


def _recipe(config: Any) -> Any:
    """Recipe of the run's delayed scaling; None for another recipe or without FP8."""
    if not config.fp8:
        return None
    from megatron.core.fp8_utils import get_fp8_recipe  # exists only with Transformer Engine

    recipe = get_fp8_recipe(config)
    return recipe if recipe.delayed() else None


def _rewrite_extra_state(key: str, value: Any, recipe: Any) -> Any:
    if value is None:  # in a converted checkpoint
        return None
    if recipe is None or (isinstance(value, torch.Tensor) and value.numel() == 0):
        return torch.empty(0, dtype=torch.uint8)
    try:
        if not isinstance(value, torch.Tensor) or value.dtype != torch.uint8:
            raise TypeError(f"a {type(value).__name__}, not Transformer Engine 2's bytes")
        scaling = read_delayed_scaling(value.cpu().contiguous().numpy().tobytes())
    except Exception as error:  # a damaged pickle raises nearly anything
        kind = "" if isinstance(error, DlmBridgeError) else f"{type(error).__name__}: "
        raise CheckpointError(
            key,
            f"is not an FP8 scaling state: {kind}{one_line(error)[:200]}: export the checkpoint, which omits it, and "
            "start from that",
        ) from None
    if scaling is None:
        return torch.empty(0, dtype=torch.uint8)
    tensors = {
        name: _resize_history(tensor, recipe.amax_history_len) if tensor.dim() == 2 else tensor
        for name, tensor in scaling.tensors.items()
    }
    made = pickle.dumps({"recipe": recipe, **tensors, _VARIABLES: scaling.variables})
    return torch.frombuffer(bytearray(made), dtype=torch.uint8)


def _resize_history(history: torch.Tensor, steps: int) -> torch.Tensor:
    """Truncate or pad a history to [steps, N], newest first, as Transformer Engine does for a recipe of another
    length."""
    return torch.nn.functional.pad(history[:steps], (0, 0, 0, max(0, steps - len(history))))


def _load(data: bytes) -> tuple[Any, int]:
    """Load the first pickle in `data` (fp32 tensors, plain values and a recipe as an inert object), and return its end
    too."""
    allowed = {
        "torch._utils._rebuild_tensor_v2": _tensor,
        "torch.storage._load_from_bytes": _storage,
        "megatron.core.safe_globals.safe_load_from_bytes": _storage,  # megatron-core 0.19's substitute for it
        "torch.FloatStorage": torch.float32,
    }
    unpickler = RestrictedUnpickler(data, "the extra state", _RECIPES, allowed, _storage_size)
    return unpickler.load(), unpickler.position


def _storage_size(pid: Any) -> int:
    """Number of values in a storage."""
    kind, dtype, _, _, count, _ = pid
    if kind != "storage" or dtype != torch.float32 or type(count) is not int:
        raise pickle.UnpicklingError("not the pickle of fp32 values")
    return count


def _storage(data: Any) -> torch.Tensor:
    """Read a storage [N] fp32 in torch.save's legacy format: several pickles, then the values. torch's own reader
    would allocate the number of values that the pickle claims."""
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
    """Rebuild a tensor from a pickle, with its own memory."""
    numbers = (start, *shape, *stride)
    if not isinstance(storage, torch.Tensor) or not all(type(number) is int and number >= 0 for number in numbers):
        raise pickle.UnpicklingError("not the pickle of a tensor")
    if len(shape) > 2 or prod(shape) > storage.numel():
        raise pickle.UnpicklingError(f"a tensor of shape {list(shape)} in {storage.numel()} values")
    within = torch.as_strided(storage, shape, stride, start)  # checks the bounds
    return within.clone(memory_format=torch.contiguous_format)

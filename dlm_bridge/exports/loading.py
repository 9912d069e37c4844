"""Models with quantised weights for sampling: quantised Hub folders, and other folders that are quantised as read.

Tensors are read one at a time: the whole model is never in memory in high precision.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dlm_bridge.convert.checkpoint import Checkpoint
from dlm_bridge.convert.checkpoints.huggingface import open_hub
from dlm_bridge.convert.checkpoints.in_memory import stored_tensors
from dlm_bridge.convert.settings import HubSourceSettings
from dlm_bridge.errors import CheckpointError, LayoutError, SettingError
from dlm_bridge.exports.compressed import QuantizedCheckpoint
from dlm_bridge.exports.layers import QuantizedLinear, quantized_experts
from dlm_bridge.exports.quantized import quantized_names
from dlm_bridge.exports.schemes import SCHEMES, QuantizedWeight, Scheme
from dlm_bridge.exports.stacked import ExpertStack, expert_stacks
from dlm_bridge.files.reading import opening, reading
from dlm_bridge.hub import quantization_method
from dlm_bridge.loading.lazy import LazyWeights, NotInRangesError, replace_parameters
from dlm_bridge.loading.pretrained import (
    check_weights,
    find_config,
    log_unused,
    model_without_weights,
    read_generation_config,
)
from dlm_bridge.models.families import FamilySpec


def load_quantized(
    folder: Path, name: str, family: str | None, dtype: torch.dtype | None, quantize: str | None, **where: Any
) -> tuple[Any, FamilySpec | None]:
    """Load the model of a Hub folder with quantised linear layers and experts; returns it with its family.

    Args:
        name: the model's name in errors.
        family: name of the family, if the config does not identify it.
        dtype: dtype of activations and of all other weights; None: that of most stored weights.
        quantize: scheme for a folder in high precision; None: the folder is quantised.
        where: placement, as arguments of `from_pretrained`.

    Raises:
        CheckpointError: the folder is damaged, or quantised in a way that is not supported.
        SettingError: the folder is quantised already, or its family cannot be quantised.
        LayoutError: a placement other than one device.
    """
    device = _device(where)
    spec, config = find_config(folder, name, family)
    check_weights(folder, name)
    checkpoint: Checkpoint
    if quantization_method(folder) is not None:
        if quantize is not None:
            raise SettingError("quantize", f"{name} is quantised already")
        checkpoint = QuantizedCheckpoint(folder, family)
        source = _Source(checkpoint, set(checkpoint.reader.quantised), checkpoint.reader.stacks)
    else:
        if spec is None:
            raise SettingError("quantize", f"{name} is not of a family of dlm-bridge, whose linear layers are known")
        assert quantize is not None
        checkpoint = open_hub(folder, HubSourceSettings(family=family))
        stacks = expert_stacks(checkpoint.params)
        source = _Source(checkpoint, set(quantized_names(checkpoint)), stacks, SCHEMES[quantize])
    vars(config).pop("quantization_config", None)
    wanted = dtype or _common_dtype(checkpoint)
    model = _empty_model(folder, name, spec, config, wanted)
    try:
        weights = LazyWeights(model, checkpoint, {} if spec is None else _originals(checkpoint))
    except NotInRangesError as error:
        raise CheckpointError(name, f"quantised weights do not load: {error}") from None
    if spec is not None:
        checkpoint.check()
    elif weights.unused:
        log_unused(name, weights.unused)
    _fill(model, weights, source, wanted, device, name)
    return model.to(device), spec


def _originals(checkpoint: Checkpoint) -> dict[str, str]:
    """Names of tensors by those of copies that a checkpoint may omit."""
    known = checkpoint.mapping.passthrough_names(checkpoint.dims)
    return {name: entry.copy_of for name, entry in known.items() if entry.copy_of}


class _Source:
    """Hub tensors, of which `quantised` are stored quantised or quantised by `scheme` when they are read."""

    def __init__(
        self, checkpoint: Any, quantised: set[str], stacks: dict[str, ExpertStack], scheme: Scheme | None = None
    ) -> None:
        self.checkpoint, self.quantised, self.stacks, self.scheme = checkpoint, quantised, stacks, scheme

    def read(self, name: str, device: torch.device) -> QuantizedWeight:
        if self.scheme is None:
            found: QuantizedWeight = self.checkpoint.reader.read_quantized(name)
            return replace(found, values=found.values.to(device), scale=found.scale.to(device))
        tensor = self.checkpoint.read(name).to(device)
        return self.scheme.quantize(self.stacks[name].matrix(tensor) if name in self.stacks else tensor, name)


def _fill(
    model: Any, weights: LazyWeights, source: _Source, dtype: torch.dtype, device: torch.device, name: str
) -> None:
    """Give a model on the meta device its weights, and replace modules with quantised weights."""
    plan = model._get_dtype_plan(dtype)
    quantised: dict[str, dict[str, QuantizedWeight]] = {}
    values: dict[int, nn.Parameter] = {}
    for path, tensor in stored_tensors(model):
        holder, _, leaf = path.rpartition(".")
        parts = weights.parts(path)
        own = [part.name in source.quantised for part in parts]
        if all(own):
            found = [source.read(part.name, device) for part in parts]
            stack = source.stacks.get(parts[0].name)
            shape = tensor.shape if stack is None else torch.Size(stack.shape_by_expert)
            quantised.setdefault(holder, {})[leaf] = _joined(found, shape, name)
            continue
        if any(own):
            odd = parts[own.index(False)].name
            raise CheckpointError(name, f"tensor {odd} is not quantised, but {parts[own.index(True)].name} is")
        kept = next((kept for pattern, kept in plan.items() if re.search(pattern, path)), dtype)
        whole = weights.whole(path, tensor.shape)
        whole = whole.to(device, whole.dtype if kept is None else kept)
        if isinstance(tensor, nn.Parameter):
            values[id(tensor)] = nn.Parameter(whole, requires_grad=False)
        else:
            model.get_submodule(holder)._buffers[leaf] = whole
    replace_parameters(model, values)
    same = _modules_by_weights(model)
    for holder, found_weights in quantised.items():
        module = model.get_submodule(holder)
        made = _quantized_module(module, found_weights, dtype, holder, name)
        for path in same[_weights_of(module)]:
            model.set_submodule(path, made)
    left = [path for path, weight in model.named_parameters() if weight.is_meta]
    assert not left, f"{left[0]} has no values"


def _modules_by_weights(model: nn.Module) -> dict[tuple[int, ...], list[str]]:
    """Paths of the modules with the same parameters: a tower that shares its layers with another has them twice."""
    found: dict[tuple[int, ...], list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if weights := _weights_of(module):
            found.setdefault(weights, []).append(path)
    return found


def _weights_of(module: nn.Module) -> tuple[int, ...]:
    return tuple(id(weight) for weight in module.parameters(recurse=False))


def _joined(found: list[QuantizedWeight], shape: torch.Size, name: str) -> QuantizedWeight:
    """One weight of the model from Hub matrices that are its rows in order."""
    first = found[0]
    if len({(each.values.dtype, each.bits, each.group, each.scale.shape[1]) for each in found}) > 1:
        raise CheckpointError(name, f"matrices of one weight {list(shape)} are quantised in several ways")
    if len(found) == 1 and len(shape) == 2:
        return first
    values = torch.cat([each.values for each in found])
    scale = torch.cat([each.scale for each in found])
    return replace(first, values=values.view(*shape[:-1], -1), scale=scale.view(*shape[:-1], -1))


def _quantized_module(
    module: nn.Module, found: dict[str, QuantizedWeight], dtype: torch.dtype, path: str, name: str
) -> nn.Module:
    """Module with quantised weights in place of a linear layer or of experts."""
    if type(module) is nn.Linear and found.keys() == {"weight"}:
        return QuantizedLinear(found["weight"], module.bias, dtype)
    if found.keys() == {"gate_up_proj", "down_proj"}:
        experts = quantized_experts(module, found["gate_up_proj"], found["down_proj"], dtype)
        if experts is not None:
            return experts
    raise CheckpointError(name, f"{path}: a {type(module).__name__} with quantised weights is not supported")


def _empty_model(folder: Path, name: str, spec: FamilySpec | None, config: Any, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    model_class = AutoModelForCausalLM.from_config if spec is None else spec.load("model_class")
    with reading(name, "the model cannot be built from its config"):
        model = model_without_weights(model_class, config, dtype)
    with opening(folder, name, "does not load"):
        read_generation_config(model, folder)
    return model


def _common_dtype(checkpoint: Checkpoint) -> torch.dtype:
    """Dtype of most weights; of a quantised weight that of its scales."""
    sizes: Counter[torch.dtype] = Counter()
    for dtype, shape in checkpoint.stored_specs().values():
        sizes[dtype] += prod(shape)
    return sizes.most_common(1)[0][0]


def _device(where: dict[str, Any]) -> torch.device:
    """The one device of a placement. Raises LayoutError for another."""
    if "distributed_config" in where:
        raise LayoutError("tp", "does not shard quantised weights: use one device per copy")
    devices = where.get("device_map", {"": "cpu"})
    if not isinstance(devices, dict) or devices.keys() != {""}:
        raise LayoutError("device_map", "does not distribute quantised weights: use one device")
    return torch.device(devices[""])

"""Weights of a model on the meta device that are read from its checkpoint by ranges of elements.

Under FSDP no process has room for a whole model: each reads the elements of its own shards, and draws those of a model
that is trained from scratch.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import nn

from dlm_bridge.convert.checkpoint import Checkpoint, TensorSpec
from dlm_bridge.convert.checkpoints.in_memory import hub_tensors, stored_tensors

_DROPPED = (r"rotary_emb\.inv_freq", r"(^|\.)position_ids$")  # of old checkpoints, as in transformers
_BASE_LAYER = ".base_layer."  # in the name of a weight beside which PEFT has put an adapter


class NotInRangesError(Exception):
    """Why a checkpoint's tensors cannot be read as ranges of a model's: names the tensor."""


@dataclass(frozen=True)
class HubRange:
    """A whole Hub tensor, whose `size` elements are those of a model's tensor from `start` on, in row-major order."""

    name: str
    start: int
    size: int


class LazyWeights:
    """The tensors of `model`, on the meta device, in `checkpoint`: nothing but headers is read before they are asked
    for.

    transformers merges some Hub tensors into one parameter (experts). Its own conversion, run backwards on the numbers
    of a parameter's rows, says where each of them lies there.

    `unused` are the stored tensors that the model has no place for, but for those that its class is known to drop.

    Raises NotInRangesError where a tensor is missing, of another shape, no float, or stored in another order of
    elements than the model's.
    """

    def __init__(self, model: Any, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._ranges: dict[str, tuple[HubRange, ...]] = {}
        stored = checkpoint.stored_specs()
        for name, tensor in stored_tensors(model):
            parts = []
            for part, shape in hub_ranges(model, name, tensor):
                _check_stored(part.name, shape, stored)
                parts.append(part)
            self._ranges[name] = tuple(sorted(parts, key=lambda part: part.start))
        used = {part.name for parts in self._ranges.values() for part in parts}
        dropped = re.compile(
            "|".join((*_DROPPED, *(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())))
        )
        self.unused = sorted(name for name in stored.keys() - used if not dropped.search(name))
        self._specs = {name: stored[name] for name in used}

    def __contains__(self, name: str) -> bool:
        """Whether the checkpoint holds the model's tensor `name`, which an adapter may have moved."""
        return _plain(name) in self._ranges

    def leave_out(self, name: str) -> None:
        """Forget the model's tensor `name`, which has other values than those stored."""
        self._ranges.pop(name, None)

    def stored_dtype(self, name: str) -> torch.dtype:
        """The dtype that the model's tensor `name` is stored in; of several Hub tensors, the first one's."""
        return self._specs[self._ranges[_plain(name)][0].name][0]

    def read(self, name: str, start: int, stop: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Elements `start` to `stop` of the model's tensor `name` in row-major order, a Hub tensor's at a time: (where
        they begin, counted from `start`; they, in one dimension, in the stored dtype). Raises DlmBridgeError."""
        for part in self._ranges[_plain(name)]:
            low, high = max(start, part.start), min(stop, part.start + part.size)
            if low < high:
                values = self._checkpoint.read_elements(part.name, low - part.start, high - part.start)
                yield low - start, values

    def whole(self, name: str, shape: torch.Size) -> torch.Tensor:
        """One of the model's tensors, in the stored dtype. Raises DlmBridgeError."""
        parts = [values for _, values in self.read(name, 0, prod(shape))]
        return torch.cat(parts).view(shape)

    def digest(self) -> str:
        """Of the names, dtypes and shapes of all tensors: equal in all processes that read the same checkpoint."""
        text = repr(sorted((name, str(dtype), shape) for name, (dtype, shape) in self._specs.items()))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def replace_parameters(model: nn.Module, others: Mapping[int, nn.Parameter]) -> None:
    """Put another in place of each parameter that has one in `others`, by its `id`; tied ones stay tied."""
    for module in model.modules():
        for name, weight in module._parameters.items():
            if weight is not None and id(weight) in others:
                module._parameters[name] = others[id(weight)]


def _plain(name: str) -> str:
    return name.replace(_BASE_LAYER, ".")


def hub_ranges(model: Any, name: str, tensor: torch.Tensor) -> Iterator[tuple[HubRange, tuple[int, ...]]]:
    """The Hub tensors of a model's tensor, which may be on the meta device, and their shapes. Raises NotInRangesError
    where one of them has its elements in another order."""
    # A parameter's last dimension is not needed to tell where its rows are.
    columns = tensor.shape[-1] if tensor.dim() > 1 else 1
    shape = (*tensor.shape[:-1], 1) if tensor.dim() > 1 else tuple(tensor.shape)
    parts = hub_tensors(model, {name: torch.empty(tensor.shape, device="meta")})
    try:
        numbers = hub_tensors(model, {name: torch.arange(prod(shape)).view(shape)})
    except (RuntimeError, ValueError, IndexError) as error:  # a conversion that needs the last dimension
        raise NotInRangesError(f"{name} is stored in another order of elements") from error
    if parts.keys() != numbers.keys() or sum(part.numel() for part in parts.values()) != tensor.numel():
        raise NotInRangesError(f"{name} is stored in another order of elements")
    for hub_name, part in parts.items():
        own = numbers[hub_name]
        whole_rows = (*part.shape[:-1], 1) if tensor.dim() > 1 else tuple(part.shape)
        flat = own.reshape(-1)
        in_order = bool((flat[1:] == flat[:-1] + 1).all())
        if tuple(own.shape) != whole_rows or own.numel() * columns != part.numel() or not in_order:
            raise NotInRangesError(f"{hub_name} is stored in another order of elements")
        yield HubRange(hub_name, int(flat[0]) * columns, part.numel()), tuple(part.shape)


def _check_stored(name: str, shape: tuple[int, ...], stored: dict[str, TensorSpec]) -> None:
    """Raise NotInRangesError for a Hub tensor that is missing, of another shape, or no float."""
    if name not in stored:
        raise NotInRangesError(f"{name} is not stored")
    dtype, found = stored[name]
    if tuple(found) != shape:
        raise NotInRangesError(f"{name} is stored with the shape {list(found)}, not {list(shape)}")
    if not dtype.is_floating_point:
        raise NotInRangesError(f"{name} is stored as {dtype}")

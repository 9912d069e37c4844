"""Distributed checkpoints that name each layer (and expert) by itself: Megatron FSDP's `fsdp_dtensor`, and
`torch_dist` saved with `singleton_local_shards`.

Megatron FSDP saves with torch's own writer: keys start with `model.module.`, there is no `metadata.json`. Both keep a
SwiGLU's halves apart, as `linear_fc1.weight_w` (gate) and `linear_fc1.weight_v` (up).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from dlm_bridge.convert.formats.chunked_reader import ChunkedReader
from dlm_bridge.convert.formats.dcp_metadata import Contents, StoredTensor, read_metadata
from dlm_bridge.convert.formats.rank_names import rank_names
from dlm_bridge.convert.formats.unpickler import Inert, read_torch_item
from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.mapping.rules import GatedMLP, ParamMapping, Vocabulary

_MODEL = re.compile(r"model0?\.(?:module\.)*")
_MEGATRON = re.compile(r"(decoder\.|embedding\.word_embeddings\.|output_layer\.|mtp\.)")
_HALVES = ("_w", "_v")


class PerLayerReader(ChunkedReader):
    """The tensors of `params`, unsharded, under their `Link.megatron_name`; what belongs to none keeps its own name.

    `names` maps a stored key to the parameter's name. Raises DlmBridgeError for a tensor that its params do not fit.
    """

    def __init__(
        self,
        folder: Path,
        contents: Contents,
        common: dict[str, Any],
        names: dict[str, str],
        params: Iterable[ParamMapping],
    ) -> None:
        by_name = {name: key for key, name in names.items()}
        self._folder, self._raw = folder, contents.tensors
        self._fused_over = tensor_parallel_size(common)
        rest = dict(contents.tensors)
        tensors: dict[str, StoredTensor] = {}
        for param in params:
            keys, stored = self._store(param, by_name)
            if stored is not None:
                tensors[param.megatron_name] = stored
            for key in keys:
                rest.pop(key, None)
        super().__init__(folder, Contents({**rest, **tensors}, contents.objects), common)

    def _store(self, param: ParamMapping, by_name: dict[str, str]) -> tuple[tuple[str, ...], StoredTensor | None]:
        """The keys that hold a parameter's tensor, and the tensor."""
        for name in self._candidates(param):
            if name in by_name:
                key = by_name[name]
                stored = self._raw[key]
                if isinstance(param.rule, GatedMLP) and self._fused_over > 1:
                    raise DlmBridgeError(
                        f"{self._folder}: {key} has gate and up of {self._fused_over} tensor parallel ranks in turn, "
                        "which is not supported: save it with megatron-core 0.14 or later, which keeps them apart"
                    )
                self._check(param, key, stored, param.megatron_shape)
                return (key,), stored
            halves = tuple(by_name[name + half] for half in _HALVES if name + half in by_name)
            if len(halves) == 2 and isinstance(param.rule, GatedMLP):
                return halves, self._join(param, halves)
        return (), None

    def _candidates(self, param: ParamMapping) -> Iterator[str]:
        yield param.megatron_name
        mtp = param.layer - param.dims.layers if param.layer is not None and param.is_mtp else None
        yield from rank_names(param.rule.megatron, param.layer, param.expert, mtp)

    def _join(self, param: ParamMapping, halves: tuple[str, ...]) -> StoredTensor:
        """[gate; up] of the two halves' chunks."""
        rows = param.rule.segments(param.dims)[0]
        gate, up = (self._raw[key] for key in halves)
        for key in halves:
            self._check(param, key, self._raw[key], (rows, *param.megatron_shape[1:]))
        if gate.dtype != up.dtype:
            raise DlmBridgeError(f"{self._folder}: {halves[0]} is {gate.dtype_name}, {halves[1]} is {up.dtype_name}")
        moved = tuple(replace(chunk, offsets=(chunk.offsets[0] + rows, *chunk.offsets[1:])) for chunk in up.chunks)
        return StoredTensor(gate.dtype, gate.dtype_name, param.megatron_shape, (*gate.chunks, *moved))

    def _check(self, param: ParamMapping, key: str, stored: StoredTensor, shape: tuple[int, ...]) -> None:
        padded = isinstance(param.rule, Vocabulary) and stored.shape[1:] == shape[1:] and stored.shape[0] >= shape[0]
        if stored.shape != shape and not padded:
            raise DlmBridgeError(
                f"{self._folder}: tensor {key} has shape {list(stored.shape)}, the config asks for {list(shape)}"
            )


def fsdp_names(contents: Contents) -> dict[str, str]:
    """Stored key -> parameter's name, of every tensor of the model; empty where Megatron FSDP did not save it."""
    found = {}
    for key in contents.tensors:
        match = _MODEL.match(key)
        if match and _MEGATRON.match(key[match.end() :]):
            found[key] = key[match.end() :]
    return found


def singleton_names(contents: Contents) -> dict[str, str]:
    """Stored key -> parameter's name where `singleton_local_shards` was set: the keys are the names."""
    return {key: key for key in contents.tensors if _MEGATRON.match(key)}


def read_fsdp(folder: Path) -> tuple[Contents, dict[str, Any]]:
    """What lies in a folder that torch's own writer saved: (the model's and the optimizer's tensors, `args` and
    `iteration` where they were saved). Raises DlmBridgeError."""
    contents = read_metadata(folder)
    common: dict[str, Any] = {}
    for key in ("args", "iteration", "checkpoint_version"):
        if key in contents.objects:
            place = contents.objects[key]
            value = read_torch_item(folder / place.file, place.offset, place.length)
            common[key] = value.fields if isinstance(value, Inert) else value
    kept = {key: t for key, t in contents.tensors.items() if _MODEL.match(key) or key.startswith("optimizer.")}
    objects = {key: place for key, place in contents.objects.items() if key.startswith("optimizer.")}
    return Contents(kept, objects), common


def tensor_parallel_size(common: dict[str, Any]) -> int:
    """What the saved arguments say, 1 where they say nothing."""
    args = common.get("args")
    found = args.get("tensor_model_parallel_size") if isinstance(args, dict) else None
    return found if type(found) is int else 1

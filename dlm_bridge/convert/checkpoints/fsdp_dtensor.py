"""Distributed checkpoints with one key per layer and expert: Megatron FSDP's `fsdp_dtensor`, and `torch_dist` saved
with `singleton_local_shards`.

Megatron FSDP saves with torch's own writer: keys start with `model.module.`, and `metadata.json` is absent. Both store
a SwiGLU's halves as two tensors, `linear_fc1.weight_w` (gate) and `linear_fc1.weight_v` (up).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from dlm_bridge.convert.checkpoints.megatron import DistributedCheckpoint
from dlm_bridge.convert.formats.dcp import (
    BACKEND_FILE,
    DCP_METADATA,
    ChunkedReader,
    Contents,
    StoredTensor,
    read_contents,
    read_metadata,
)
from dlm_bridge.convert.formats.legacy_writer import rank_names
from dlm_bridge.errors import CheckpointError
from dlm_bridge.files.pickles import Inert, read_torch_item
from dlm_bridge.mapping.rules import GatedMLP, ParamMapping, Vocabulary

_MODEL = re.compile(r"model0?\.(?:module\.)*")
_MEGATRON = re.compile(r"(decoder\.|embedding\.word_embeddings\.|output_layer\.|mtp\.)")
# Names that identify Megatron: some Hub models' names begin with "model.decoder." as well.
_ONLY_MEGATRON = re.compile(
    r"decoder\.(layers\.\d+\.self_attention|final_layernorm)\.|embedding\.|output_layer\.|mtp\."
)
_HALVES = ("_w", "_v")


class FsdpDtensorCheckpoint(DistributedCheckpoint):
    """Checkpoint of Megatron FSDP."""

    format = "fsdp_dtensor"

    @classmethod
    def recognises(cls, folder: Path) -> bool:
        if not (folder / DCP_METADATA).is_file() or (folder / BACKEND_FILE).exists():
            return False
        return bool(_fsdp_names(read_contents(folder)))

    @classmethod
    def open(cls, path: Path, folder: Path, family: str | None = None) -> FsdpDtensorCheckpoint:
        contents = read_metadata(folder)
        common: dict[str, Any] = {}
        for key in ("args", "iteration", "checkpoint_version"):
            if place := contents.objects.get(key):
                value = read_torch_item(folder / place.file, place.offset, place.length)
                common[key] = value.fields if isinstance(value, Inert) else value
        kept = {key: t for key, t in contents.tensors.items() if _MODEL.match(key) or key.startswith("optimizer.")}
        objects = {key: place for key, place in contents.objects.items() if key.startswith("optimizer.")}
        checkpoint = cls(path, folder, common, family)
        checkpoint.contents = Contents(kept, objects)
        return checkpoint

    def _reader(self, params: Iterable[ParamMapping], tied: bool) -> ChunkedReader:
        size = (self.layout or {}).get("tp")
        # Unlike megatron-core's writer, torch's concatenates the gate and up halves of each tensor parallel rank.
        fused_over = size if type(size) is int else 1
        return PerLayerReader(self.folder, self.contents, _fsdp_names(self.contents), params, fused_over)


class PerLayerReader(ChunkedReader):
    """Reader of the unsharded tensors of `params` by `megatron_name`. Other tensors keep their stored keys.

    Args:
        names: parameter name by stored key.
        fused_over: number of tensor parallel ranks whose gate and up halves alternate in a fused tensor.

    Raises:
        CheckpointError: a tensor does not have its parameter's shape.
    """

    def __init__(
        self,
        folder: Path,
        contents: Contents,
        names: dict[str, str],
        params: Iterable[ParamMapping],
        fused_over: int = 1,
    ) -> None:
        by_name = {name: key for key, name in names.items()}
        self._folder, self._raw, self._fused_over = folder, contents.tensors, fused_over
        rest = dict(contents.tensors)
        tensors: dict[str, StoredTensor] = {}
        for param in params:
            keys, stored = self._store(param, by_name)
            if stored is not None:
                tensors[param.megatron_name] = stored
            for key in keys:
                rest.pop(key, None)
        super().__init__(folder, Contents({**rest, **tensors}, contents.objects))

    def _store(self, param: ParamMapping, by_name: dict[str, str]) -> tuple[tuple[str, ...], StoredTensor | None]:
        """Stored keys of a parameter's tensor, and the tensor; ((), None) if it is missing."""
        for name in self._candidates(param):
            if name in by_name:
                key = by_name[name]
                stored = self._raw[key]
                if isinstance(param.rule, GatedMLP) and self._fused_over > 1:
                    raise CheckpointError(
                        self._folder,
                        f"{key} alternates the gate and up rows of {self._fused_over} tensor parallel ranks, which is "
                        "not supported: save it with megatron-core 0.14 or later",
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
        """Tensor [gate; up] from the chunks of its two halves."""
        rows = param.rule.segments(param.dims)[0]
        gate, up = (self._raw[key] for key in halves)
        for key in halves:
            self._check(param, key, self._raw[key], (rows, *param.megatron_shape[1:]))
        if gate.dtype != up.dtype:
            raise CheckpointError(self._folder, f"{halves[0]} is {gate.dtype_name}, {halves[1]} is {up.dtype_name}")
        moved = tuple(replace(chunk, offsets=(chunk.offsets[0] + rows, *chunk.offsets[1:])) for chunk in up.chunks)
        return StoredTensor(gate.dtype, gate.dtype_name, param.megatron_shape, (*gate.chunks, *moved))

    def _check(self, param: ParamMapping, key: str, stored: StoredTensor, shape: tuple[int, ...]) -> None:
        padded = isinstance(param.rule, Vocabulary) and stored.shape[1:] == shape[1:] and stored.shape[0] >= shape[0]
        if stored.shape != shape and not padded:
            raise CheckpointError(
                self._folder, f"tensor {key} has shape {list(stored.shape)}, the config asks for {list(shape)}"
            )


def singleton_names(contents: Contents) -> dict[str, str]:
    """Parameter name by stored key of a checkpoint saved with `singleton_local_shards`, where the two are equal."""
    return {key: key for key in contents.tensors if _MEGATRON.match(key)}


def _fsdp_names(contents: Contents) -> dict[str, str]:
    """Parameter name by stored key; empty if Megatron FSDP did not save the checkpoint."""
    found = {}
    for key in contents.tensors:
        match = _MODEL.match(key)
        if match and _MEGATRON.match(key[match.end() :]):
            found[key] = key[match.end() :]
    return found if any(map(_ONLY_MEGATRON.match, found.values())) else {}

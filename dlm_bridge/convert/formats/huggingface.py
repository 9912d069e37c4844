"""The Hub's layout: config.json, weights in one file or in shards with an index, and side files.

Weights are safetensors. torch's pickled files (`pytorch_model*.bin`) are read where a folder has no others.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from dlm_bridge.convert.formats import bin_file
from dlm_bridge.convert.formats.safetensors_file import (
    SafetensorsFile,
    TensorEntry,
    build_header,
    read_header,
    standard_order,
)
from dlm_bridge.convert.manifest import ShardRecord
from dlm_bridge.convert.side_files import INDEX, inside
from dlm_bridge.convert.streaming import Part, Region, Sink, allocate, tensor_bands
from dlm_bridge.convert.tensors import range_digest, read_tensor
from dlm_bridge.errors import DlmBridgeError, one_line

SINGLE = "model.safetensors"
METADATA = {"format": "pt"}
TensorSpecs = Mapping[str, tuple[torch.dtype, Sequence[int]]]


class HubReader:
    """The tensors of a Hub folder. Only headers are read on opening; a tensor is read when asked for.

    Raises DlmBridgeError for a file that is missing, outside the folder, truncated or corrupt, and where the index
    and the files do not name the same tensors.
    """

    def __init__(self, folder: Path, fp8: bool = False) -> None:
        self.folder = folder
        self.pickled = not any(os.path.lexists(folder / name) for name in (SINGLE, INDEX))
        self.pickled &= any(os.path.lexists(folder / name) for name in (bin_file.SINGLE, bin_file.INDEX))
        self._single, self._index = (bin_file.SINGLE, bin_file.INDEX) if self.pickled else (SINGLE, INDEX)
        index = _read_index(folder, self._single, self._index)
        names = [self._single] if index is None else list(dict.fromkeys(index.values()))
        self.files: dict[str, SafetensorsFile] = {}
        for name in sorted(names):
            path = inside(folder, name)
            self.files[name] = bin_file.read_bin(path) if self.pickled else read_header(path, fp8)
        self._where: dict[str, tuple[Path, TensorEntry]] = {}
        for file, content in self.files.items():
            for entry in content.entries:
                if entry.name in self._where:
                    other = self._where[entry.name][0].name
                    raise DlmBridgeError(f"{folder}: tensor {entry.name} is in two files, {other} and {file}")
                self._where[entry.name] = (content.path, entry)
        if index is not None:
            self._check_index(index)

    @property
    def names(self) -> list[str]:
        """The Hub names, in the order of files and bytes."""
        return list(self._where)

    def entry(self, name: str) -> TensorEntry:
        """dtype, shape and place of a tensor; KeyError where there is none."""
        return self._where[name][1]

    def stored_dtype(self, name: str) -> torch.dtype:
        """The dtype of a tensor's bytes in its file."""
        return self._where[name][1].dtype

    def read(self, name: str) -> torch.Tensor:
        """One tensor, in a buffer of its own. Raises DlmBridgeError for a file that was cut meanwhile."""
        path, entry = self._where[name]
        return read_tensor(path, entry.offset, entry.dtype, entry.shape)

    def region(self, name: str, part: Part) -> Region:
        """Where a tensor lies that is `part` of a slice, in `stored_dtype`."""
        path, entry = self._where[name]
        return Region(path, entry.offset, part)

    def shards(self) -> list[ShardRecord]:
        """The folder's own shard map; none for pickled files, since these are not written."""
        if self.pickled:
            return []
        return [
            ShardRecord(file, content.metadata, tuple(entry.name for entry in content.entries))
            for file, content in self.files.items()
        ]

    def weight_files(self) -> set[str]:
        """The files that hold the weights."""
        return set(self.files)

    def _check_index(self, index: dict[str, str]) -> None:
        path = self.folder / self._index
        for name, file in index.items():
            if name not in self._where or self._where[name][0] != self.files[file].path:
                raise DlmBridgeError(f"{path}: tensor {name} is not in {file}, where the index has it")
        for name, (file_path, _) in self._where.items():
            if name not in index:
                raise DlmBridgeError(f"{path}: tensor {name} of {file_path.name} is not in the index")


@dataclass(frozen=True)
class ShardPlan:
    """One safetensors file that will be written: its header and the place of every tensor."""

    file: str
    metadata: Mapping[str, str] | None
    header: bytes
    entries: tuple[TensorEntry, ...]

    @property
    def nbytes(self) -> int:
        return len(self.header) + sum(entry.nbytes for entry in self.entries)


class HubWriter:
    """Writes planned safetensors files tensor by tensor, in any order and from any thread or process.

    A file's size and header are there from the start, and what a run before this one wrote stays. `finish` raises
    AssertionError unless every planned tensor was noted exactly once.
    """

    def __init__(self, folder: Path, plans: Sequence[ShardPlan]) -> None:
        self._where = {entry.name: (folder / plan.file, entry) for plan in plans for entry in plan.entries}
        self._missing = set(self._where)
        allocate(folder, {plan.file: plan.nbytes for plan in plans})
        for plan in plans:
            with (folder / plan.file).open("r+b") as stream:
                stream.write(plan.header)

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """`put` a tensor and note it."""
        self.put(name, tensor)
        self.note([name])

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Put a contiguous tensor's bytes in their place; dtype and number must be the planned ones."""
        _, entry = self._where[name]
        assert (tensor.dtype, tensor.numel()) == (entry.dtype, prod(entry.shape)), f"{name} is not what was planned"
        with self.sink(name) as sink:
            for _, band in tensor_bands(tensor):
                sink.put(band.reshape(-1).data)

    def sink(self, name: str) -> Sink:
        """What writes a tensor's bytes in their place, in order."""
        path, entry = self._where[name]
        return Sink(path, entry.offset)

    def has(self, digests: Mapping[str, str]) -> bool:
        """Whether all these tensors (name -> digest) lie in the files already, from a run before this one."""
        for name, digest in digests.items():
            path, entry = self._where[name]
            if range_digest(path, entry.offset, entry.nbytes) != digest:
                return False
        return True

    def note(self, names: Iterable[str]) -> None:
        """These tensors are in their place."""
        for name in names:
            self._missing.remove(name)

    def finish(self) -> None:
        """Every tensor is there."""
        assert not self._missing, f"planned but not written: {sorted(self._missing)[:3]}"


def plan_like(shards: Iterable[ShardRecord], tensors: TensorSpecs) -> list[ShardPlan]:
    """The files of a known shard map, with the dtypes and shapes of `tensors`."""
    plans = []
    for shard in shards:
        header, entries = build_header(shard.metadata, [(name, *tensors[name]) for name in shard.tensors])
        plans.append(ShardPlan(shard.file, shard.metadata, header, entries))
    return plans


def plan_by_size(tensors: TensorSpecs, shard_size: int) -> list[ShardPlan]:
    """Files of at most `shard_size` bytes of tensors (a larger tensor has a file of its own), named as on the Hub."""
    groups: list[list[tuple[str, torch.dtype, Sequence[int]]]] = []
    room = 0
    for name, (dtype, shape) in tensors.items():
        size = torch.Size(shape).numel() * dtype.itemsize
        if not groups or size > room:
            groups.append([])
            room = shard_size
        groups[-1].append((name, dtype, shape))
        room -= size
    names = [f"model-{number:05d}-of-{len(groups):05d}.safetensors" for number in range(1, len(groups) + 1)]
    plans = []
    for file, group in zip([SINGLE] if len(groups) == 1 else names, groups, strict=True):
        header, entries = build_header(METADATA, standard_order(group))
        plans.append(ShardPlan(file, METADATA, header, entries))
    return plans


def index_text(plans: Sequence[ShardPlan], like: dict[str, Any] | None = None) -> str:
    """model.safetensors.index.json for these files; `like` is an older index whose other metadata is kept."""
    metadata = (like or {}).get("metadata")
    metadata = dict(metadata) if isinstance(metadata, dict) else {}
    metadata["total_size"] = sum(entry.nbytes for plan in plans for entry in plan.entries)
    weight_map = {entry.name: plan.file for plan in plans for entry in plan.entries}
    return json.dumps({"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}, indent=2) + "\n"


def _read_index(folder: Path, single: str, index_file: str) -> dict[str, str] | None:
    """Tensor name -> file, None for a folder with one file."""
    if not os.path.lexists(folder / index_file):
        if not os.path.lexists(folder / single):
            raise DlmBridgeError(f"{folder} is not a checkpoint: it has neither {single} nor {index_file}")
        return None
    path = inside(folder, index_file)
    try:
        index = json.loads(path.read_text("utf-8"))
        weight_map = index["weight_map"]
    except (OSError, ValueError, RecursionError, KeyError, TypeError) as error:
        raise DlmBridgeError(f"{path}: is not a safetensors index: {one_line(error)}") from None
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(f, str) for f in weight_map.values()):
        raise DlmBridgeError(f"{path}: 'weight_map' must map tensor names to files")
    if os.path.lexists(folder / single) and single not in weight_map.values():
        raise DlmBridgeError(
            f"{folder}: has both {single} and {index_file}, which does not name it: remove one of them"
        )
    first = {file: name for name, file in reversed(weight_map.items())}
    for file, name in first.items():
        kind = single.rpartition(".")[2]
        if not file.endswith(f".{kind}"):
            raise DlmBridgeError(f"{path}: tensor {name} is in '{file}', which is not a {kind} file")
        try:
            inside(folder, file)
        except DlmBridgeError as error:
            raise DlmBridgeError(f"{path} names '{file}': {error}") from None
    return weight_map

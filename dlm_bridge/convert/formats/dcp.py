"""torch.distributed.checkpoint's `.metadata`: read without running its pickle's code, and written.

Every class that a real `.metadata` names is replaced by an inert stand-in while reading; any other name is refused.
"""

from __future__ import annotations

import io
import os
import pickle
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from dlm_bridge.convert.formats.pickle_guard import check_pickle
from dlm_bridge.convert.tensors import WEIGHT_DTYPES
from dlm_bridge.errors import DlmBridgeError, one_line

FILE_NAME = ".metadata"


@dataclass(frozen=True)
class Place:
    """Bytes of one saved item."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class Chunk:
    """A box of a global tensor, and the item that holds it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    place: Place

    @property
    def numel(self) -> int:
        return prod(self.sizes)


@dataclass(frozen=True)
class StoredTensor:
    """A global tensor in its chunks."""

    dtype: torch.dtype | None  # None for a dtype that no weight has; an optimizer's step may be anything
    dtype_name: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class Contents:
    """What a `.metadata` lists: tensors, and objects (opaque bytes) by key."""

    tensors: dict[str, StoredTensor]
    objects: dict[str, Place]


def read_metadata(folder: Path) -> Contents:
    """Read and check `folder`/.metadata. Raises DlmBridgeError: unreadable, hostile, or not consistent with the files.

    Checked: every place lies in a plain file of the folder, no chunk leaves its tensor.
    """
    path = folder / FILE_NAME
    try:
        data = path.read_bytes()
        check_pickle(data)
        metadata = _MetadataUnpickler(io.BytesIO(data), path).load()
        contents = _contents(metadata)
    except FileNotFoundError:
        raise DlmBridgeError(f"{folder} is not a torch_dist checkpoint: it has no {FILE_NAME}") from None
    except DlmBridgeError:
        raise
    except Exception as error:  # a damaged pickle raises nearly anything
        raise DlmBridgeError(f"{path}: is not a checkpoint's metadata: {one_line(error)[:300]}") from None
    sizes: dict[str, int] = {}
    for name, tensor in contents.tensors.items():
        for chunk in tensor.chunks:
            _check_chunk(path, name, tensor, chunk)
            _check_place(folder, name, chunk.place, sizes)
    for name, place in contents.objects.items():
        _check_place(folder, name, place, sizes)
    return contents


def combined_file_digests(digests: Mapping[Place, bytes]) -> dict[str, str]:
    """One digest for each file, from those of its items in the order of their places."""
    states: dict[str, Any] = {}
    for place in sorted(digests, key=lambda place: (place.file, place.offset)):
        states.setdefault(place.file, xxhash.xxh3_128()).update(digests[place])
    return {file: state.hexdigest() for file, state in states.items()}


def read_file_digests(folder: Path, contents: Contents) -> dict[str, str]:
    """`combined_file_digests` of what lies on the disk now, every byte of every item read."""
    places = [chunk.place for tensor in contents.tensors.values() for chunk in tensor.chunks]
    digests = {}
    for place in (*places, *contents.objects.values()):
        state, left = xxhash.xxh3_128(), place.length
        with (folder / place.file).open("rb") as stream:
            stream.seek(place.offset)
            while left:
                data = stream.read(min(left, 1 << 20))
                state.update(data)
                left -= len(data)
        digests[place] = state.digest()
    return combined_file_digests(digests)


def write_metadata(folder: Path, contents: Contents) -> None:
    """Write `folder`/.metadata with torch's own classes, as torch and megatron-core do."""
    state: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    for name, tensor in contents.tensors.items():
        chunks = [ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes)) for c in tensor.chunks]
        properties = TensorProperties(dtype=WEIGHT_DTYPES[tensor.dtype_name])
        state[name] = TensorStorageMetadata(properties, torch.Size(tensor.shape), chunks)
        for chunk in tensor.chunks:
            storage[MetadataIndex(name, chunk.offsets)] = _storage_info(chunk.place)
    for name, place in contents.objects.items():
        state[name] = BytesStorageMetadata()
        storage[MetadataIndex(name)] = _storage_info(place)
    metadata = Metadata(state, planner_data=None, storage_data=storage, storage_meta=StorageMeta(), version="1.0.0")
    with (folder / FILE_NAME).open("wb") as stream:
        pickle.dump(metadata, stream)


def _storage_info(place: Place) -> _StorageInfo:
    return _StorageInfo(place.file, place.offset, place.length)


def _contents(metadata: Any) -> Contents:
    fields = metadata.fields
    places: dict[tuple[str, tuple[int, ...] | None], Place] = {}
    for index, info in fields["storage_data"].items():
        if info.fields.get("transform_descriptors"):
            raise ValueError("it is stored with transforms (compressed), which is not supported")
        place = Place(str(info.fields["relative_path"]), _whole(info.fields["offset"]), _whole(info.fields["length"]))
        offset = index.fields.get("offset")
        places[index.fields["fqn"], None if offset is None else tuple(offset)] = place
    tensors: dict[str, StoredTensor] = {}
    objects: dict[str, Place] = {}
    for name, stored in fields["state_dict_metadata"].items():
        if "size" not in stored.fields:
            objects[name] = places[name, None]
            continue
        chunks = []
        for chunk in stored.fields["chunks"]:
            offsets, sizes = (tuple(map(_whole, chunk.fields[key])) for key in ("offsets", "sizes"))
            if (name, offsets) not in places:
                raise ValueError(f"{name}: the chunk at {offsets} has no place in any file")
            chunks.append(Chunk(offsets, sizes, places[name, offsets]))
        word = stored.fields["properties"].state[0]
        if type(word) is not str or len(word) > 40:
            raise ValueError(f"{name}: its dtype is not one of torch's")
        shape = tuple(map(_whole, stored.fields["size"]))
        tensors[name] = StoredTensor(WEIGHT_DTYPES.get(word), word, shape, tuple(chunks))
    return Contents(tensors, objects)


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        # Not repr: a few bytes of pickle make an object whose text fills the memory.
        raise ValueError(f"{value if type(value) is int else type(value).__name__} is not a size")
    return value


def _check_chunk(path: Path, name: str, tensor: StoredTensor, chunk: Chunk) -> None:
    rank = len(tensor.shape)
    if len(chunk.offsets) != rank or len(chunk.sizes) != rank:
        raise DlmBridgeError(f"{path}: tensor {name}: a chunk has another number of axes than the tensor")
    for offset, size, whole in zip(chunk.offsets, chunk.sizes, tensor.shape, strict=True):
        if offset + size > whole:
            raise DlmBridgeError(
                f"{path}: tensor {name}: the chunk at {chunk.offsets} of {chunk.sizes} leaves the shape {tensor.shape}"
            )


def _check_place(folder: Path, name: str, place: Place, sizes: dict[str, int]) -> None:
    if place.file not in sizes:
        path = folder / place.file
        if os.path.basename(place.file) != place.file or os.path.islink(path):
            raise DlmBridgeError(f"{folder / FILE_NAME}: {name} is in '{place.file[:300]}', outside the folder")
        if not os.path.isfile(path):  # also for a name that no file can have
            shown = folder / ascii(place.file[:300])[1:-1]
            raise DlmBridgeError(f"{shown} does not exist, but {FILE_NAME} has {name} in it")
        sizes[place.file] = path.stat().st_size
    if place.offset + place.length > sizes[place.file]:
        raise DlmBridgeError(
            f"{folder / place.file}: truncated: has {sizes[place.file]} bytes, {name} ends at byte "
            f"{place.offset + place.length}"
        )


class _Record:
    """Stands for any object of a `.metadata`: keeps what the pickle sets on it, runs nothing."""

    state: Any = None  # unpickling makes most objects without calling __init__

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state

    @property
    def fields(self) -> dict[str, Any]:
        if not isinstance(self.state, dict | None):
            raise ValueError(f"{type(self).__name__} without fields")
        return self.state or {}


_METADATA = "torch.distributed.checkpoint.metadata"
_PLANNER = "torch.distributed.checkpoint.planner"
_OLDER = "torch.distributed._shard.sharded_tensor.metadata"
_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"
_RECORDS = {
    *((_METADATA, name) for name in ("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties")),
    *((_METADATA, name) for name in ("ChunkStorageMetadata", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING")),
    *((_PLANNER, name) for name in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData")),
    *((_OLDER, name) for name in ("TensorProperties", "MEM_FORMAT_ENCODING")),
    *((_MEGATRON, name) for name in ("MCoreMetadata", "MCoreSavePlan")),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.distributed.checkpoint.filesystem", "_StoragePrefix"),
    ("torch.distributed.checkpoint.default_planner", "_PlannerData"),
    ("pathlib", "PosixPath"),
    ("pathlib", "PurePosixPath"),
}


class _MetadataUnpickler(pickle.Unpickler):
    """Resolves names to stand-ins that are made anew for every file, so that a pickle can alter nothing lasting."""

    def __init__(self, stream: io.BytesIO, path: Path) -> None:
        super().__init__(stream)
        self._path = path
        self._known: dict[tuple[str, str], Any] = {key: type(key[1], (_Record,), {}) for key in _RECORDS}
        self._known["torch", "Size"] = tuple
        self._known["torch.serialization", "_get_layout"] = _constant("strided")
        self._known["collections", "OrderedDict"] = OrderedDict
        self._known["builtins", "set"] = set

    def find_class(self, module: str, name: str) -> Callable[..., Any] | str:
        if (module, name) in self._known:
            return self._known[module, name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return name
        raise DlmBridgeError(f"{self._path}: asks for {module}.{name}, which no checkpoint needs: refused")


def _constant(value: str) -> Callable[[Any], str]:
    return lambda _: value

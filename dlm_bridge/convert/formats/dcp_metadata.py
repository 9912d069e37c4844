"""torch.distributed.checkpoint's `.metadata`: read without running its pickle's code, and written."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from dlm_bridge.convert.formats.unpickler import RestrictedUnpickler
from dlm_bridge.errors import DlmBridgeError, one_line
from dlm_bridge.hub import check_plain_file
from dlm_bridge.mapping.dtypes import WEIGHT_DTYPES, dtype_name

DCP_METADATA = ".metadata"
BACKEND_FILE = "metadata.json"  # which torch_dist has and torch's own writer leaves out

# Classes whose objects a real `.metadata` holds, by full name.
_METADATA_CLASSES = re.compile(
    r"torch\.distributed\.checkpoint\.metadata\.(Metadata|TensorStorageMetadata|BytesStorageMetadata|TensorProperties"
    r"|ChunkStorageMetadata|MetadataIndex|StorageMeta|_MEM_FORMAT_ENCODING)"
    r"|torch\.distributed\.checkpoint\.planner\.(SavePlan|WriteItem|WriteItemType|TensorWriteData|BytesIOWriteData)"
    r"|torch\.distributed\._shard\.sharded_tensor\.metadata\.(TensorProperties|MEM_FORMAT_ENCODING)"
    r"|torch\.distributed\.checkpoint\.filesystem\.(_StorageInfo|_StoragePrefix)"
    r"|torch\.distributed\.checkpoint\.default_planner\._PlannerData"
    r"|megatron\.core\.dist_checkpointing\.strategies\.torch\.(MCoreMetadata|MCoreSavePlan)"
    r"|torch\.serialization\._get_layout|pathlib\.(PosixPath|PurePosixPath)"
)


@dataclass(frozen=True)
class StorageLocation:
    """Bytes of one saved item."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class Chunk:
    """A box of a global tensor, and the item that holds it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    place: StorageLocation

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
    objects: dict[str, StorageLocation]

    def files(self, folder: Path, keys: Iterable[str] | None = None) -> dict[str, int]:
        """The files of `folder` that hold tensors (those of `keys`), and their bytes."""
        tensors = self.tensors.values() if keys is None else [self.tensors[key] for key in keys]
        names = {chunk.place.file for tensor in tensors for chunk in tensor.chunks}
        return {name: (folder / name).stat().st_size for name in sorted(names)}


def read_metadata(folder: Path) -> Contents:
    """Read and check `folder`/.metadata. Raises DlmBridgeError: unreadable, hostile, or not consistent with the files.

    Checked: every place lies in a plain file of the folder, no chunk leaves its tensor.
    """
    path = folder / DCP_METADATA
    try:
        check_plain_file(path)
        contents = _contents(RestrictedUnpickler(path.read_bytes(), path, _METADATA_CLASSES).load())
    except FileNotFoundError:
        raise DlmBridgeError(f"{folder} is not a torch_dist checkpoint: it has no {DCP_METADATA}") from None
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


def _contents(metadata: Any) -> Contents:
    fields = metadata.fields
    places: dict[tuple[str, tuple[int, ...] | None], StorageLocation] = {}
    for index, info in fields["storage_data"].items():
        if info.fields.get("transform_descriptors"):
            raise ValueError("it is stored with transforms (compressed), which is not supported")
        place = StorageLocation(
            str(info.fields["relative_path"]), _whole(info.fields["offset"]), _whole(info.fields["length"])
        )
        offset = index.fields.get("offset")
        places[index.fields["fqn"], None if offset is None else tuple(offset)] = place
    tensors: dict[str, StoredTensor] = {}
    objects: dict[str, StorageLocation] = {}
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
        dtype = stored.fields["properties"].state[0]
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{name}: its dtype is not one of torch's")
        shape = tuple(map(_whole, stored.fields["size"]))
        word = dtype_name(dtype)
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


def _check_place(folder: Path, name: str, place: StorageLocation, sizes: dict[str, int]) -> None:
    if place.file not in sizes:
        path = folder / place.file
        if os.path.basename(place.file) != place.file or os.path.islink(path):
            raise DlmBridgeError(f"{folder / DCP_METADATA}: {name} is in '{place.file[:300]}', outside the folder")
        if not os.path.isfile(path):  # also for a name that no file can have
            shown = folder / ascii(place.file[:300])[1:-1]
            raise DlmBridgeError(f"{shown} does not exist, but {DCP_METADATA} has {name} in it")
        sizes[place.file] = path.stat().st_size
    if place.offset + place.length > sizes[place.file]:
        raise DlmBridgeError(
            f"{folder / place.file}: truncated: has {sizes[place.file]} bytes, {name} ends at byte "
            f"{place.offset + place.length}"
        )

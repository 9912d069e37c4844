"""torch.distributed.checkpoint files: `.metadata`, read and written, and the reader of tensors stored in chunks.

A chunk is a box of a global tensor, saved by `torch.save` at some offset of a larger file. All pickles are read by the
restricted unpickler, without running code. Values are read directly from their offsets, each byte once. Nothing here
imports torch.distributed.checkpoint, which takes as long as torch itself.
"""

from __future__ import annotations

import copyreg
import os
import pickle
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass
from enum import Enum
from functools import cache
from itertools import pairwise, product
from math import prod
from pathlib import Path
from typing import Any

import torch

from dlm_bridge.convert.streaming import FileRegion, SliceRange, raw_bytes, read_into
from dlm_bridge.convert.workers import new_tensor
from dlm_bridge.errors import CheckpointError, DlmBridgeError, one_line
from dlm_bridge.files.pickles import FileTensor, RestrictedUnpickler, read_torch_item
from dlm_bridge.files.reading import check_plain_file, combined_digests, file_digest
from dlm_bridge.mapping.dtypes import WEIGHT_DTYPES, dtype_name

DCP_METADATA = ".metadata"
_METADATA_LIMIT = 1 << 30  # bytes; 100,000 tensors in two chunks each need 40 MB
BACKEND_FILE = "metadata.json"  # written by megatron-core, not by torch
_METADATA_MODULE = "torch.distributed.checkpoint.metadata"
_FILESYSTEM_MODULE = "torch.distributed.checkpoint.filesystem"
_MEM_FORMAT_ENCODING = Enum("_MEM_FORMAT_ENCODING", {"TORCH_CONTIGUOUS_FORMAT": 0}, module=_METADATA_MODULE)

# Full names of the classes in a genuine `.metadata`.
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
    """Byte range of a saved item in a file."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class Chunk:
    """Box of a global tensor, and the item that stores it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    place: StorageLocation

    @property
    def numel(self) -> int:
        return prod(self.sizes)


@dataclass(frozen=True)
class StoredTensor:
    """Global tensor and its chunks."""

    dtype: torch.dtype | None  # None for dtypes that weights do not have, such as an optimizer's step
    dtype_name: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class Contents:
    """Tensors and objects (opaque bytes) that a `.metadata` lists, by key."""

    tensors: dict[str, StoredTensor]
    objects: dict[str, StorageLocation]

    def files(self, folder: Path, keys: Iterable[str] | None = None) -> dict[str, int]:
        """Sizes in bytes of the files that store the tensors (or only those of `keys`)."""
        tensors = self.tensors.values() if keys is None else [self.tensors[key] for key in keys]
        names = {chunk.place.file for tensor in tensors for chunk in tensor.chunks}
        return {name: (folder / name).stat().st_size for name in sorted(names)}


def read_metadata(folder: Path) -> Contents:
    """Read `folder`/.metadata. Checks that every item is in a plain file of the folder, and every chunk in its tensor.

    Raises:
        CheckpointError: unreadable, hostile, or inconsistent with the files.
    """
    contents = read_contents(folder)
    for error in _place_errors(folder, contents):
        raise error
    return contents


def metadata_errors(folder: Path) -> list[CheckpointError]:
    """Errors that `read_metadata` can raise: one per file that is missing or truncated, or one of `.metadata`."""
    try:
        return list(_place_errors(folder, read_contents(folder)))
    except CheckpointError as error:
        return [error]


def read_contents(folder: Path) -> Contents:
    """Same as `read_metadata`, without a comparison with the files. Raises CheckpointError."""
    path = folder / DCP_METADATA
    try:
        check_plain_file(path)
        if path.stat().st_size > _METADATA_LIMIT:
            raise ValueError("it is too large")
        contents = _contents(RestrictedUnpickler(path.read_bytes(), path, _METADATA_CLASSES).load())
    except FileNotFoundError:
        raise CheckpointError(folder, f"is not a distributed checkpoint: it has no {DCP_METADATA}") from None
    except DlmBridgeError:
        raise
    except Exception as error:  # a damaged pickle raises nearly anything
        raise CheckpointError(path, f"is not a checkpoint's metadata: {one_line(error)[:300]}") from None
    for name, tensor in contents.tensors.items():
        for chunk in tensor.chunks:
            _check_inside(path, name, tensor, chunk)
    return contents


def write_metadata(folder: Path, contents: Contents) -> None:
    """Write `folder`/.metadata, byte for byte as `pickle.dump` of torch's own classes."""
    properties_end = (torch.strided, False, _MEM_FORMAT_ENCODING(0), False)  # requires_grad, pin_memory
    state: dict[str, _StandIn] = {}
    stored: dict[_StandIn, _StandIn] = {}

    def locate(name: str, place: StorageLocation, **offset: torch.Size) -> None:
        info = {"relative_path": place.file, "offset": place.offset, "length": place.length}
        index = _stand_in("MetadataIndex", {"fqn": name, "index": None, **offset})
        stored[index] = _stand_in("_StorageInfo", info, _FILESYSTEM_MODULE)

    for name, tensor in contents.tensors.items():
        chunks = []
        for chunk in tensor.chunks:
            box = {"offsets": torch.Size(chunk.offsets), "sizes": torch.Size(chunk.sizes)}
            chunks.append(_stand_in("ChunkStorageMetadata", box))
            locate(name, chunk.place, offset=torch.Size(chunk.offsets))
        properties = _stand_in("TensorProperties", (getattr(torch, tensor.dtype_name), *properties_end))
        fields = {"properties": properties, "size": torch.Size(tensor.shape), "chunks": chunks}
        state[name] = _stand_in("TensorStorageMetadata", fields)
    for name, place in contents.objects.items():
        state[name] = _stand_in("BytesStorageMetadata", None)
        locate(name, place)
    storage: dict[str, Any] = {"checkpoint_id": None, "save_id": None, "load_id": None, "modules": []}
    metadata = {
        "state_dict_metadata": state,
        "planner_data": None,
        "storage_data": stored,
        "storage_meta": _stand_in("StorageMeta", storage),
        "version": "1.0.0",
    }
    with (folder / DCP_METADATA).open("wb") as stream:
        _Pickler(stream).dump(_stand_in("Metadata", metadata))


class _StandIn:
    """Object with the `state` and the name of one of torch's classes, which is not imported."""

    def __init__(self, state: object) -> None:
        self.state = state

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return copyreg.__newobj__, (type(self),), self.state  # type: ignore[attr-defined]


def _stand_in(name: str, state: object, module: str = _METADATA_MODULE) -> _StandIn:
    return _stand_in_class(name, module)(state)


@cache
def _stand_in_class(name: str, module: str) -> type[_StandIn]:
    return type(name, (_StandIn,), {"__module__": module})


class _Pickler(pickle._Pickler):
    """Pickler that names stand-ins without importing their modules. Python's implementation, because C's has no hook
    for names; where the two differ, the bytes are C's."""

    save: Callable[[Any], None]
    write: Callable[[bytes], Any]
    memoize: Callable[[Any], None]
    _BATCHSIZE: int

    def save_global(self, obj: Any, name: str | None = None) -> None:
        if getattr(obj, "__module__", None) not in (_METADATA_MODULE, _FILESYSTEM_MODULE):
            super().save_global(obj, name)  # type: ignore[misc]
            return
        self.save(obj.__module__)
        self.save(obj.__qualname__)
        self.write(pickle.STACK_GLOBAL)
        self.memoize(obj)

    def _batch_setitems(self, items: Iterable[tuple[Any, Any]], *rest: Any) -> None:
        self._batches(list(items), pickle.SETITEM, pickle.SETITEMS)

    def _batch_appends(self, items: Iterable[Any], *rest: Any) -> None:
        self._batches([(item,) for item in items], pickle.APPEND, pickle.APPENDS)

    def _batches(self, items: Sequence[tuple[Any, ...]], one: bytes, many: bytes) -> None:
        """Save the items of a dict or list. C marks a last batch of one item, and ends full batches of a dict with an
        empty one."""
        end = len(items) + (many == pickle.SETITEMS and len(items) > 1)
        for start in range(0, end, self._BATCHSIZE):
            if len(items) > 1:
                self.write(pickle.MARK)
            for item in items[start : start + self._BATCHSIZE]:
                for value in item:
                    self.save(value)
            self.write(many if len(items) > 1 else one)


def _contents(metadata: Any) -> Contents:
    fields = metadata.fields
    places: dict[tuple[str, tuple[int, ...] | None], StorageLocation] = {}
    for index, info in fields["storage_data"].items():
        if info.fields.get("transform_descriptors"):
            raise ValueError("stored transforms (compression) are not supported")
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
                raise ValueError(f"{name}: the chunk at {offsets} is not in any file")
            chunks.append(Chunk(offsets, sizes, places[name, offsets]))
        dtype = stored.fields["properties"].state[0]
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{name}: its dtype is not a torch.dtype")
        shape = tuple(map(_whole, stored.fields["size"]))
        word = dtype_name(dtype)
        tensors[name] = StoredTensor(WEIGHT_DTYPES.get(word), word, shape, tuple(chunks))
    return Contents(tensors, objects)


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        # Without repr: a few bytes of pickle can create an object whose text fills the memory.
        raise ValueError(f"{value if type(value) is int else type(value).__name__} is not a size")
    return value


def _check_inside(path: Path, name: str, tensor: StoredTensor, chunk: Chunk) -> None:
    same_axes = len(chunk.offsets) == len(chunk.sizes) == len(tensor.shape)
    boxes = zip(chunk.offsets, chunk.sizes, tensor.shape, strict=False)
    if not same_axes or any(offset + size > whole for offset, size, whole in boxes):
        raise CheckpointError(
            path,
            f"tensor {name}: the chunk at {chunk.offsets} of sizes {chunk.sizes} is not inside shape {tensor.shape}",
        )


def _place_errors(folder: Path, contents: Contents) -> Iterator[CheckpointError]:
    """The first error of each file in which `.metadata` lists items."""
    items = [(name, chunk.place) for name, tensor in contents.tensors.items() for chunk in tensor.chunks]
    sizes: dict[str, int | None] = {}  # None after an error
    for name, place in (*items, *contents.objects.items()):
        if place.file not in sizes:
            path, sizes[place.file] = folder / place.file, None
            if os.path.basename(place.file) != place.file or os.path.islink(path):
                yield CheckpointError(folder / DCP_METADATA, f"{name} is in '{place.file[:300]}', outside the folder")
            elif not os.path.isfile(path):  # also for an invalid file name
                shown = folder / ascii(place.file[:300])[1:-1]
                yield CheckpointError(shown, f"does not exist, but {DCP_METADATA} lists {name} in it")
            else:
                sizes[place.file] = path.stat().st_size
        size = sizes[place.file]
        if size is not None and place.offset + place.length > size:
            sizes[place.file] = None
            yield CheckpointError(
                folder / place.file, f"truncated: has {size} bytes, {name} ends at byte {place.offset + place.length}"
            )


@dataclass(frozen=True)
class _Box:
    """Intersection of a chunk and a slice: first index in either, and sizes along the slice's axes."""

    chunk: Chunk
    in_chunk: list[int]
    in_slice: list[int]
    sizes: list[int]
    is_region: bool  # contiguous in the chunk, and whole rows or columns of the slice


class ChunkedReader:
    """Reader of global tensors whose chunks are anywhere in a folder's files."""

    def __init__(self, folder: Path, contents: Contents) -> None:
        self.folder = folder
        self.contents = contents
        self._by_place: dict[str, dict[tuple[int, ...], list[Chunk]]] = {}
        self._lock = threading.Lock()
        self._tiled: set[str] = set()  # keys that passed `check_tiled`

    def tensor(self, key: str) -> StoredTensor:
        """Dtype, shape and chunks of a stored tensor. Raises KeyError if it is missing."""
        return self.contents.tensors[key]

    def dtype(self, key: str) -> torch.dtype:
        """Dtype of a stored tensor. Raises CheckpointError for one that weights do not have."""
        tensor = self.tensor(key)
        if tensor.dtype is None:
            raise CheckpointError(
                self.folder, f"tensor {key} has dtype {tensor.dtype_name}, which weights do not have"
            )
        return tensor.dtype

    def file_digests(self) -> dict[str, str]:
        """`combined_digests` of the files, from all bytes of all items."""
        places = {chunk.place for tensor in self.contents.tensors.values() for chunk in tensor.chunks}
        places.update(self.contents.objects.values())
        return combined_digests(
            (file, offset, bytes.fromhex(file_digest(self.folder / file, offset, length)))
            for file, offset, length in map(astuple, places)
        )

    def check_tiled(self, key: str) -> None:
        """Raise CheckpointError unless the tensor has a weight's dtype and its chunks cover it without overlap."""
        if key in self._tiled:
            return
        self.dtype(key)
        tensor = self.tensor(key)
        missing = prod(tensor.shape) - sum(chunk.numel for chunk in tensor.chunks)
        if missing > 0 or not _disjoint(tensor.chunks, 0):
            problem = f"chunks lack {missing} of its elements" if missing > 0 else "chunks overlap"
            raise CheckpointError(self.folder, f"tensor {key}: {problem}")
        self._tiled.add(key)

    def read(self, key: str, stack: tuple[int, ...], shape: Sequence[int]) -> torch.Tensor:
        """Read a slice into a new tensor [*shape], as `read_into`."""
        result = new_tensor(shape, self.dtype(key))
        self.read_into(key, stack, result)
        return result

    def read_into(self, key: str, stack: tuple[int, ...], out: torch.Tensor) -> None:
        """Read a slice of a tensor.

        Args:
            stack: index on the tensor's first axes (layer, expert).
            out: contiguous tensor for the slice, which begins at index 0 on the other axes.

        Raises:
            CheckpointError: a stored item does not match `.metadata`.
        """
        tensor = self.tensor(key)
        for box in self._boxes(key, stack, out.shape):
            _copy(self._item(key, tensor, box.chunk), box, out)

    def in_regions(self, key: str, stack: tuple[int, ...], shape: Sequence[int]) -> bool:
        """True if `regions` can locate the slice."""
        return all(box.is_region for box in self._boxes(key, stack, shape))

    def regions(self, key: str, stack: tuple[int, ...], shape: Sequence[int]) -> list[FileRegion]:
        """File regions, each of rows or columns, of the slice that `read_into` reads. Raises CheckpointError."""
        tensor = self.tensor(key)
        found = []
        for box in self._boxes(key, stack, shape):
            item = self._item(key, tensor, box.chunk)
            offset = item.offset + item_offset(item, box.in_chunk)
            rows = ((box.in_slice[0], box.sizes[0]),)
            columns = None
            if len(shape) > 1 and box.sizes[1] != shape[1]:
                width = prod(shape[2:]) * item.dtype.itemsize
                columns = (box.in_slice[1] * width, box.sizes[1] * width)
            found.append(FileRegion(item.path, offset, SliceRange(rows, columns)))
        return found

    def _boxes(self, key: str, stack: tuple[int, ...], shape: Sequence[int]) -> list[_Box]:
        """Intersections of the stored chunks with a slice."""
        found = []
        offsets, whole = (*stack, *(0,) * len(shape)), (*(1 for _ in stack), *shape)
        for chunk in self._chunks(key, self.tensor(key), len(stack)).get(stack, []):
            low, sizes = _common(chunk, offsets, whole)
            if all(size > 0 for size in sizes):
                in_chunk = [a - b for a, b in zip(low, chunk.offsets, strict=True)]
                in_slice = [a - b for a, b in zip(low, offsets, strict=True)]
                one_run = _is_one_run(sizes, chunk.sizes) and list(sizes[len(stack) + 2 :]) == list(shape[2:])
                found.append(_Box(chunk, in_chunk, in_slice[len(stack) :], sizes[len(stack) :], one_run))
        return found

    def _chunks(self, key: str, tensor: StoredTensor, axes: int) -> dict[tuple[int, ...], list[Chunk]]:
        """Chunks of a tensor by index on the stacked axes, so that reading all slices is linear in the chunks."""
        with self._lock:
            if key not in self._by_place:
                found: dict[tuple[int, ...], list[Chunk]] = {}
                for chunk in tensor.chunks:
                    spans = zip(chunk.offsets[:axes], chunk.sizes[:axes], strict=True)
                    for place in product(*(range(start, start + size) for start, size in spans)):
                        found.setdefault(place, []).append(chunk)
                self._by_place[key] = found
            return self._by_place[key]

    def _item(self, key: str, tensor: StoredTensor, chunk: Chunk) -> FileTensor:
        """Location of a chunk's values, which are one row-major array."""
        place = chunk.place
        item = open_tensor_item(self.folder / place.file, place.offset, place.length, key)
        if (item.dtype, item.shape) != (tensor.dtype, chunk.sizes):
            raise CheckpointError(
                item.path,
                f"tensor {key} is stored as {item.dtype} {list(item.shape)}, {DCP_METADATA} says {tensor.dtype} "
                f"{list(chunk.sizes)}",
            )
        return item


def _copy(item: FileTensor, box: _Box, out: torch.Tensor) -> None:
    """Copy the intersection `box` from a chunk's values, the `item`, to the slice `out`."""
    stack = (1,) * (len(box.in_chunk) - out.dim())
    window, sizes = _part(out, box.in_slice, box.sizes), (*stack, *box.sizes)
    if not _is_one_run(sizes, item.shape):
        whole = new_tensor(item.shape, item.dtype)
        read_item_rows(item, (0,) * len(item.shape), whole.numel(), raw_bytes(whole))
        window.view(stack + window.shape).copy_(_part(whole, box.in_chunk, sizes))
    elif window.is_contiguous():
        read_item_rows(item, box.in_chunk, window.numel(), raw_bytes(window))
    else:
        part = new_tensor(box.sizes, item.dtype)
        read_item_rows(item, box.in_chunk, part.numel(), raw_bytes(part))
        window.copy_(part)


def _part(tensor: torch.Tensor, first: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    """View of shape `sizes` that begins at index `first`."""
    return tensor[tuple(slice(start, start + size) for start, size in zip(first, sizes, strict=True))]


def _common(chunk: Chunk, offsets: Sequence[int], shape: Sequence[int]) -> tuple[list[int], list[int]]:
    """First index and sizes of the intersection of a chunk and the box of `shape` at `offsets`."""
    low = [max(a, b) for a, b in zip(offsets, chunk.offsets, strict=True)]
    high = [min(a + n, b + m) for a, n, b, m in zip(offsets, shape, chunk.offsets, chunk.sizes, strict=True)]
    return low, [b - a for a, b in zip(low, high, strict=True)]


def _is_one_run(sizes: Sequence[int], whole: Sequence[int]) -> bool:
    """True if a box of `sizes` is contiguous in a row-major array of shape `whole`."""
    axis = next((axis for axis, size in enumerate(sizes) if size != 1), len(sizes))
    return all(size == full for size, full in zip(sizes[axis + 1 :], whole[axis + 1 :], strict=True))


def _disjoint(chunks: Sequence[Chunk], axis: int) -> bool:
    """True if no two chunks share an element. Chunks equal on all axes but one are compared along that axis."""
    if len(chunks) < 2:
        return True
    if axis == len(chunks[0].sizes):
        return all(chunk.numel == 0 for chunk in chunks[1:])
    groups: dict[tuple[int, int], list[Chunk]] = {}
    for chunk in chunks:
        groups.setdefault((chunk.offsets[axis], chunk.sizes[axis]), []).append(chunk)
    spans = sorted(groups)
    if any(a + n > b for (a, n), (b, _) in pairwise(spans)):
        if len(chunks) > 4096:
            return False  # no tool writes such chunks, and comparing all pairs would take too long
        return not any(_overlap(a, b) for place, a in enumerate(chunks) for b in chunks[:place])
    return all(_disjoint(group, axis + 1) for group in groups.values())


def _overlap(a: Chunk, b: Chunk) -> bool:
    return all(p < q + m and q < p + n for p, n, q, m in zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True))


def open_tensor_item(path: Path, offset: int, length: int, name: str) -> FileTensor:
    """Location of the tensor saved as one item. `name` is the tensor's, for errors. Raises CheckpointError."""
    tensor = read_torch_item(path, offset, length, f"{path}: tensor {name}")
    if not isinstance(tensor, FileTensor):
        raise CheckpointError(path, f"tensor {name} is not stored as a plain tensor")
    return tensor


def read_item_rows(item: FileTensor, first: Sequence[int], count: int, view: memoryview) -> None:
    """Fill `view` with `count` elements of the item in row-major order, from the element at index `first`."""
    assert len(view) == count * item.dtype.itemsize
    read_into(item.path, item.offset + item_offset(item, first), view)


def item_offset(item: FileTensor, index: Sequence[int]) -> int:
    """Offset in bytes of the element at `index`."""
    start = 0
    for place, size in zip(index, item.shape, strict=True):
        start = start * size + place
    return start * item.dtype.itemsize

"""One tensor as `torch.save` writes it, as an item at some offset of a larger file: sizes, writing, reading in parts.

Reading never runs the item's pickle through torch: the pickle goes through an unpickler that knows a plain tensor and
nothing else, and the values are then read straight from where they lie.
"""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

import torch
import xxhash

from dlm_bridge.convert.tensors import read_into, tight, write_at
from dlm_bridge.errors import DlmBridgeError, one_line

_PICKLE_LIMIT = 1 << 20  # bytes; a plain tensor's pickle has a few hundred
_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "BFloat16Storage": torch.bfloat16,
    "HalfStorage": torch.float16,
}


@dataclass(frozen=True)
class TensorItem:
    """A saved tensor: row-major values of `dtype` and `shape` from byte `offset` of the file on."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int


@lru_cache(maxsize=4096)
def tensor_item_length(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    """Bytes that `torch.save` makes of a tensor of this dtype and shape. No value is touched or written."""
    counter = _Counter()
    with torch.serialization.skip_data():
        torch.save(torch.empty(shape, dtype=dtype), counter)  # type: ignore[arg-type]
    return counter.position


def object_item(value: object) -> bytes:
    """`torch.save` of a small object."""
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def write_tensor_item(path: Path, offset: int, length: int, tensor: torch.Tensor) -> bytes:
    """`torch.save` the tensor at `offset` of an existing file; it must take exactly `length` bytes.

    Returns the xxh3_128 digest of those bytes.
    """
    fd = os.open(path, os.O_WRONLY)
    try:
        stream = _At(fd, offset)
        try:
            torch.save(tight(tensor), stream)  # type: ignore[arg-type]
        except RuntimeError:
            if stream.error is not None:  # torch hides a full disk behind an error of its own
                raise stream.error from None
            raise
        assert stream.position == length, f"{path}: item at {offset} took {stream.position} bytes, planned {length}"
        return stream.hash.digest()
    finally:
        os.close(fd)


def open_tensor_item(path: Path, offset: int, length: int, name: str) -> TensorItem:
    """Read an item's head. `name` is the tensor's, for errors. Raises DlmBridgeError."""
    with path.open("rb") as stream:
        window = _Window(stream, offset, length)
        try:
            with zipfile.ZipFile(window) as archive:
                return _open_archive(path, offset, length, archive, window)
        except DlmBridgeError as error:
            raise DlmBridgeError(f"{path}: tensor {name}: {error}") from None
        except (zipfile.BadZipFile, pickle.UnpicklingError, OSError, ValueError, KeyError, EOFError) as error:
            raise DlmBridgeError(f"{path}: tensor {name}: not a saved tensor: {one_line(error)}") from None
        except (TypeError, IndexError, AttributeError, NotImplementedError, OverflowError, RuntimeError) as error:
            raise DlmBridgeError(f"{path}: tensor {name}: not a saved tensor: {one_line(error)}") from None


def read_item_rows(item: TensorItem, first: Sequence[int], count: int, view: memoryview) -> None:
    """Fill `view` with `count` elements of the item, from the element at index `first` on in row-major order."""
    start = 0
    for index, size in zip(first, item.shape, strict=True):
        start = start * size + index
    assert len(view) == count * item.dtype.itemsize
    read_into(item.path, item.offset + start * item.dtype.itemsize, view)


def _open_archive(path: Path, offset: int, length: int, archive: zipfile.ZipFile, window: _Window) -> TensorItem:
    entries = {info.filename.partition("/")[2]: info for info in archive.infolist()}
    if entries["data.pkl"].file_size > _PICKLE_LIMIT:
        raise DlmBridgeError("its pickle is larger than that of any plain tensor")
    if "byteorder" in entries and _record(window, entries["byteorder"]) != b"little":
        raise DlmBridgeError("it was saved big-endian, which is not supported")
    tensor = _TensorUnpickler(io.BytesIO(_record(window, entries["data.pkl"]))).load()
    if not isinstance(tensor, _Tensor):
        raise DlmBridgeError("the item is not a plain tensor")
    if not _is_row_major(tensor.shape, tensor.stride):
        raise DlmBridgeError(f"it is stored with strides {tensor.stride}, which is not supported")
    itemsize = tensor.storage.dtype.itemsize
    data = entries[f"data/{tensor.storage.key}"]
    first, end = tensor.start * itemsize, (tensor.start + prod(tensor.shape)) * itemsize
    if data.compress_type != zipfile.ZIP_STORED or data.file_size < end:
        raise DlmBridgeError(f"its data has {data.file_size} bytes, {end} are needed")
    start = _record_start(window, data)
    if start + end > length:
        raise DlmBridgeError("its data runs past its end")
    return TensorItem(path, tensor.storage.dtype, tensor.shape, offset + start + first)


def _record_start(window: _Window, info: zipfile.ZipInfo) -> int:
    """Where a record's bytes start: after its local header, whose last field gives two lengths to skip."""
    window.seek(info.header_offset + 26)
    lengths = window.read(4) or b""
    return info.header_offset + 30 + int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little")


def _record(window: _Window, info: zipfile.ZipInfo) -> bytes:
    """A small stored record. torch can leave its checksum out, so zipfile's own reader, which insists, will not do."""
    if info.compress_type != zipfile.ZIP_STORED or info.file_size > _PICKLE_LIMIT:
        raise DlmBridgeError(f"its record {info.filename} is not as torch.save writes it")
    window.seek(_record_start(window, info))
    return window.read(info.file_size) or b""


def _is_row_major(shape: Sequence[int], stride: Sequence[int]) -> bool:
    step = 1
    for size, found in zip(reversed(shape), reversed(stride), strict=True):
        if size != 1 and found != step:
            return 0 in shape
        step *= size
    return True


@dataclass(frozen=True)
class _Storage:
    key: str
    dtype: torch.dtype


@dataclass(frozen=True)
class _Tensor:
    storage: _Storage
    start: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


def _rebuild(storage: Any, start: Any, shape: Any, stride: Any, *_: Any) -> _Tensor:
    whole = all(type(number) is int and number >= 0 for number in (start, *shape, *stride))
    if not isinstance(storage, _Storage) or not whole or len(shape) != len(stride):
        raise pickle.UnpicklingError("not the pickle of a tensor")
    return _Tensor(storage, start, tuple(shape), tuple(stride))


class _TensorUnpickler(pickle.Unpickler):
    """Knows the pickle of a plain tensor and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _rebuild
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        raise DlmBridgeError(f"its pickle asks for {module}.{name}, which is refused")

    def persistent_load(self, pid: Any) -> _Storage:
        kind, dtype, key, _, _ = pid
        if kind != "storage" or not isinstance(dtype, torch.dtype) or not isinstance(key, str):
            raise pickle.UnpicklingError("not the pickle of a tensor")
        return _Storage(key, dtype)


class _Window(io.RawIOBase):
    """The bytes [offset, offset + length) of an open file, as a file of their own."""

    def __init__(self, stream: Any, offset: int, length: int) -> None:
        self._stream, self._offset, self._length, self._position = stream, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise ValueError("seek before the start")
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        view = view[: max(0, min(len(view), self._length - self._position))]
        self._stream.seek(self._offset + self._position)
        count = self._stream.readinto(view)
        self._position += count
        return count


class _At:
    """A write-only file-like object that writes at an offset of a file."""

    def __init__(self, fd: int, offset: int) -> None:
        self._fd, self._offset, self.position = fd, offset, 0
        self.error: OSError | None = None
        self.hash = xxhash.xxh3_128()

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        try:
            write_at(self._fd, view, self._offset + self.position)
        except OSError as error:
            self.error = error
            raise
        self.hash.update(view)
        self.position += len(view)
        return len(view)

    def flush(self) -> None:
        """Nothing is buffered."""


class _Counter:
    """Counts what would be written."""

    def __init__(self) -> None:
        self.position = 0

    def write(self, data: Any) -> int:
        self.position += len(memoryview(data).cast("B"))
        return len(data)

    def seek(self, offset: int, whence: int) -> int:
        assert whence == os.SEEK_CUR
        self.position += offset
        return self.position

    def flush(self) -> None:
        """Nothing is buffered."""

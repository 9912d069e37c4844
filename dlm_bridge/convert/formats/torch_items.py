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

from dlm_bridge.convert.formats.pickle_guard import check_pickle
from dlm_bridge.convert.streaming import Sink
from dlm_bridge.convert.tensors import read_into
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


@dataclass(frozen=True)
class _Template:
    """What `torch.save` writes before and after the values, and where in `tail` their checksum stands."""

    head: bytes
    tail: bytes
    checksums: tuple[int, ...]


def tensor_item_length(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    """Bytes that `torch.save` makes of a tensor of this dtype and shape. No value is touched or written."""
    template = _template(dtype, shape)
    return len(template.head) + prod(shape) * dtype.itemsize + len(template.tail)


def object_item(value: object) -> bytes:
    """`torch.save` of a small object."""
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


class ItemSink(Sink):
    """Writes at `offset` of an existing file what `torch.save` makes of a tensor, of the tensor's bytes in order.

    Only the archive's serialization id, which tells archives apart in logs, is that of an empty one.
    """

    def __init__(self, path: Path, offset: int, length: int, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        assert tensor_item_length(dtype, shape) == length, f"{path}: not what is planned at {offset}"
        super().__init__(path, offset, checksum=True)
        self._template, self._end = _template(dtype, shape), offset + length
        self._unchecked(self._template.head)

    def finish(self) -> bytes:
        """All bytes of the tensor were taken: complete the item. Returns the xxh3_128 digest of the whole of it."""
        tail = bytearray(self._template.tail)
        for place in self._template.checksums:
            tail[place : place + 4] = self.checksum.to_bytes(4, "little")
        self._unchecked(tail)
        assert self.position == self._end, f"an item ends at {self.position}, {self._end} was planned"
        digest: bytes = self.digest.digest()
        return digest

    def _unchecked(self, data: bytes | bytearray) -> None:
        self.digest.update(data)
        self.put(data)


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
    assert len(view) == count * item.dtype.itemsize
    read_into(item.path, item.offset + item_offset(item, first), view)


def item_offset(item: TensorItem, index: Sequence[int]) -> int:
    """Bytes of the item before the element at `index`."""
    start = 0
    for place, size in zip(index, item.shape, strict=True):
        start = start * size + place
    return start * item.dtype.itemsize


@lru_cache(maxsize=4096)
def _template(dtype: torch.dtype, shape: tuple[int, ...]) -> _Template:
    stream = _Around()
    with torch.serialization.skip_data():
        torch.save(torch.empty(shape, dtype=dtype), stream)  # type: ignore[arg-type]
    head, tail = bytes(stream.head), bytes(stream.tail)
    if not tail:  # no values: the checksum of nothing is there already
        return _Template(head, tail, ())
    # Once in the data descriptor, right after the values, and once in the directory, 30 bytes before the name.
    assert tail.startswith(b"PK\x07\x08"), "torch.save writes archives without data descriptors"
    return _Template(head, tail, (4, tail.rindex(b"/data/0") - len("archive") - 30))


def _open_archive(path: Path, offset: int, length: int, archive: zipfile.ZipFile, window: _Window) -> TensorItem:
    entries = {info.filename.partition("/")[2]: info for info in archive.infolist()}
    if entries["data.pkl"].file_size > _PICKLE_LIMIT:
        raise DlmBridgeError("its pickle is larger than that of any plain tensor")
    if "byteorder" in entries and _record(window, entries["byteorder"]) != b"little":
        raise DlmBridgeError("it was saved big-endian, which is not supported")
    pickled = _record(window, entries["data.pkl"])
    check_pickle(pickled)
    tensor = _TensorUnpickler(io.BytesIO(pickled)).load()
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


class _Around:
    """Keeps what is written before and after the values, which `skip_data` seeks past."""

    def __init__(self) -> None:
        self.head, self.tail = bytearray(), bytearray()
        self._past = False

    def write(self, data: Any) -> int:
        part = self.tail if self._past else self.head
        part += memoryview(data).cast("B")
        return len(data)

    def seek(self, offset: int, whence: int) -> int:
        assert whence == os.SEEK_CUR
        self._past = True
        return offset

    def flush(self) -> None:
        """Nothing is buffered."""

"""Restricted unpickler, and a reader of `torch.save` files built on it: plain values, and tensors by file offset.

No code runs: a class that real checkpoints name (argparse.Namespace, megatron-core's enums, numpy's random state)
becomes an inert stand-in, any other name is refused. Time and memory are proportional to the size of the pickle.
`restricted_loading` checks the files that libraries read with torch.load.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import re
import threading
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO, ClassVar

import torch

from dlm_bridge.errors import CheckpointError, one_line
from dlm_bridge.files.reading import FileWindow, gc_paused

_PICKLE_LIMIT = 1 << 28  # bytes; the pickle of a rank with 10,000 tensors and an optimizer has a few MB
_KEY_LIMIT = 5_000  # cost of all keys that are neither text nor small integers; real pickles have hardly any
_SHARED_LIMIT = 500_000  # a pickle may have this many values more than bytes, because values can be shared
_SMALL = 1 << 60
_PLAIN = frozenset((str, bytes, int, float, bool, type(None), torch.dtype))
_TORCH_MAGIC = b"PK\x03\x04"
_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "BFloat16Storage": torch.bfloat16,
    "HalfStorage": torch.float16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "UntypedStorage": torch.uint8,
}
# Full names of classes, other than tensors, whose objects real `torch.save` files contain.
_SAVED_CLASSES = re.compile(
    r"argparse\.Namespace|types\.SimpleNamespace|signal\.Signals|_io\.BytesIO|pathlib\.\w+"
    r"|functools\.partial|builtins\.(getattr|slice|complex)|datetime\.\w+"
    r"|numpy\.(ndarray|dtype)|numpy\.(core|_core)\.(multiarray\.(_reconstruct|scalar)|numeric\._frombuffer)"
    r"|torch\.(Size|device|layout)|torch\.nn\.(functional|modules\.activation)\.\w+|torch\._C\._nn\.\w+"
    r"|torch\.serialization\._get_layout"
    r"|(megatron|transformer_engine|megatron_fsdp|torch\.optim|apex\.optimizers)(\.\w+)+"
)
# The subset that `torch.load` may construct from a file that has passed the check.
_LOADED_CLASSES = re.compile(r"torch\.(device|layout)|_io\.BytesIO")


class Inert:
    """Stand-in for an object of another package, with the state that the pickle sets. `name`: its class."""

    name = ""
    arguments: tuple[Any, ...] = ()
    state: Any = None

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setitem__(self, key: Any, value: Any) -> None:
        """Ignore an item of a dict subclass."""

    def append(self, value: Any) -> None:
        """Ignore an item of a list subclass."""

    def extend(self, values: Any) -> None:
        """Ignore items of a list subclass."""

    def __hash__(self) -> int:
        return id(self)

    @property
    def fields(self) -> dict[str, Any]:
        """Attributes of a Namespace or dataclass; empty for other objects."""
        return self.state if isinstance(self.state, dict) else {}


def _checking_keys(opcode: bytes, keys: slice) -> Any:
    """The base class's method for an opcode, preceded by a check of the `keys` in its part of the stack."""
    method: Any = pickle._Unpickler.dispatch[opcode[0]]

    def checked(unpickler: RestrictedUnpickler) -> None:
        for key in unpickler.stack[keys]:
            unpickler._key(key)
        method(unpickler)

    return checked


class RestrictedUnpickler(pickle._Unpickler):
    """Unpickler of the first pickle in `data` that runs no code which the pickle names.

    Containers and torch's dtypes are loaded as such. A name in `allowed` is replaced by its value there. A class whose
    full name matches `inert` becomes a stand-in class, created per pickle so that no pickle can change global state.
    `load` raises CheckpointError for any other name, and arbitrary exceptions for a damaged or expanding pickle.

    Derives from Python's pure implementation, because the C implementation allocates its memo as an array (one opcode
    can request 32 GB), hashes keys of any size and cannot be interrupted.

    Args:
        data: the pickle; bytes after it are ignored.
        where: field of the error.
        inert: full names of classes to replace by stand-ins.
        allowed: replacements by full name.
        storage: resolves the persistent ids of tensor storages.
    """

    stack: list[Any]
    read: Callable[[int], bytes]
    append: Callable[[Any], None]

    def __init__(
        self,
        data: bytes,
        where: object,
        inert: re.Pattern[str],
        allowed: Mapping[str, Any] | None = None,
        storage: Callable[[Any], Any] | None = None,
    ) -> None:
        self._stream = io.BytesIO(data)
        super().__init__(self._stream)
        self._where, self._inert, self._storage = where, inert, storage
        self._limit = len(data) + _SHARED_LIMIT
        self._copies_left, self._keys_left = len(data), _KEY_LIMIT
        self._known: dict[str, Any] = {
            "collections.OrderedDict": lambda pairs=(): OrderedDict(
                (self._key(key), value) for key, value in self._copied(pairs)
            ),
            "collections.defaultdict": lambda *_: {},
            "builtins.set": lambda items=(): set(map(self._key, self._copied(items))),
            "builtins.frozenset": lambda items=(): frozenset(map(self._key, self._copied(items))),
            "builtins.bytearray": lambda text=b"", *encoding: bytearray(_as_bytes(self._copied(text), *encoding)),
            "_codecs.encode": lambda text, encoding: _as_bytes(self._copied(text), encoding),
            "torch.Size": lambda items=(): tuple(self._copied(items)),
            **(allowed or {}),
        }

    def load(self) -> Any:
        with gc_paused():
            value = super().load()
            _count_values(value, self._limit)
        return value

    @property
    def position(self) -> int:
        """Offset in `data` of the end of the loaded pickle."""
        return self._stream.tell()

    def find_class(self, module: str, name: str) -> Any:
        module = "builtins" if module == "__builtin__" else module  # its name in torch's pickle protocol
        full = f"{module}.{name}"
        if full in self._known:
            return self._known[full]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if not self._inert.fullmatch(full):
            asked = " ".join(full.split())[:100]
            raise CheckpointError(self._where, f"its pickle refers to {asked}, which no checkpoint needs: refused")
        self._known[full] = type("Inert", (Inert,), {"name": full})
        return self._known[full]

    def persistent_load(self, pid: Any) -> Any:
        if self._storage is None:
            raise pickle.UnpicklingError("unexpected tensor storage")
        return self._storage(pid)

    def get_extension(self, code: int) -> None:
        raise pickle.UnpicklingError(f"extension code {code}")

    def _copied(self, items: Any) -> Any:
        """Return the items of a new container. Their total number is limited by the size of the pickle."""
        self._copies_left -= len(items)
        if self._copies_left < 0:
            raise pickle.UnpicklingError("it copies too many values")
        return items

    def _key(self, key: Any) -> Any:
        """Return a dict key or set element. The total cost of hashing them is limited."""
        quick = type(key) is int and abs(key) < _SMALL
        if not quick and not isinstance(key, str | bytes | Inert):
            # Large integers can collide, and hashing takes time proportional to their length.
            cost = 100 + key.bit_length() if isinstance(key, int) else _count_values(key, self._keys_left)
            self._keys_left -= cost
            if self._keys_left < 0:
                raise pickle.UnpicklingError("its keys are too large")
        return key

    def _build(self) -> None:
        state = self.stack.pop()
        if isinstance(self.stack[-1], Inert):
            self.stack[-1].state = state
        elif not isinstance(self.stack[-1], dict):  # attributes of a state dict (_metadata) are ignored
            raise pickle.UnpicklingError("it sets attributes of a plain value")

    def _bytearray(self) -> None:
        size = int.from_bytes(self.read(8), "little")  # the base class would allocate this size first
        self.append(bytearray(self.read(size)))

    dispatch: ClassVar[dict[int, Any]] = {
        **pickle._Unpickler.dispatch,
        pickle.BUILD[0]: _build,
        pickle.BYTEARRAY8[0]: _bytearray,
        pickle.SETITEM[0]: _checking_keys(pickle.SETITEM, slice(-2, -1)),
        pickle.SETITEMS[0]: _checking_keys(pickle.SETITEMS, slice(None, None, 2)),
        pickle.DICT[0]: _checking_keys(pickle.DICT, slice(None, None, 2)),
        pickle.ADDITEMS[0]: _checking_keys(pickle.ADDITEMS, slice(None)),
        pickle.FROZENSET[0]: _checking_keys(pickle.FROZENSET, slice(None)),
    }


def _as_bytes(text: Any, encoding: Any = "latin1") -> bytes:
    """Bytes that older protocols store as Latin-1 text. Other encodings are refused, because they could expand it."""
    if encoding not in ("latin1", "latin-1"):
        raise pickle.UnpicklingError("bytes in an encoding other than Latin-1")
    return text.encode(encoding) if isinstance(text, str) else bytes(text)


def _count_values(value: Any, limit: int) -> int:
    """Count the values in nested containers, shared ones at each occurrence. Raises UnpicklingError above `limit`, and
    for a container that contains itself."""
    count, stack = 1, [value]
    while stack:
        value = stack.pop()
        if type(value) in _PLAIN:
            continue
        parts: tuple[Any, ...] = ()
        if isinstance(value, dict):
            parts = (value.keys(), value.values())
        elif isinstance(value, list | tuple | set | frozenset):
            parts = (value,)
        elif isinstance(value, Inert):
            parts = ((value.state,), value.arguments)
        for part in parts:
            count += len(part)
            if count > limit:
                raise pickle.UnpicklingError("too many shared values")
            stack.extend(part)
    return count


@dataclass(frozen=True)
class FileTensor:
    """Location of a stored tensor: row-major values of `dtype` from byte `offset` on."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class ArchiveRecord:
    """One entry of the zip archive: `start` and `length` of its bytes in the file."""

    name: str  # such as "data/0", without the archive's root folder
    start: int
    length: int


def read_torch_file(path: Path) -> Any:
    """Read the saved object, with a FileTensor for each tensor and an Inert for each object of another package.

    Reads no tensor data. Raises CheckpointError for a file that is truncated, damaged, written by torch < 1.6, or
    refers to a class that no checkpoint needs.
    """
    with path.open("rb") as stream:
        return _read_archive(stream, path, path)


def read_torch_item(path: Path, offset: int, length: int, where: object | None = None) -> Any:
    """Same as `read_torch_file` for a `torch.save` file embedded in `path` at [offset, offset + length). Offsets of
    tensors refer to `path`. Raises CheckpointError with the field `where` (default: the path)."""
    with path.open("rb") as stream:
        return _read_archive(FileWindow(stream, offset, length), path, where or path, offset)


def check_torch_file(file: Any, where: object) -> None:
    """Raise CheckpointError, with the field `where`, for a `torch.save` file (path or stream) that is damaged, written
    by torch < 1.6, or contains anything but tensors and plain values."""
    with contextlib.ExitStack() as opened:
        stream = file if hasattr(file, "read") else opened.enter_context(Path(file).open("rb"))
        _read_archive(stream, Path(), where, classes=_LOADED_CLASSES, any_strides=True)


@contextlib.contextmanager
def restricted_loading() -> Iterator[None]:
    """Context manager in which torch.load runs `check_torch_file` first and reads tensors and plain values only,
    regardless of its arguments; also in other threads. For libraries that read a user's files."""
    with _LOCK:
        if not _original.users:
            _original.load = torch.load
            torch.load = _restricted_load  # type: ignore[assignment]
        _original.users += 1
    try:
        yield
    finally:
        with _LOCK:
            _original.users -= 1
            if not _original.users:
                torch.load = _original.load


def load_torch_file(path: Path) -> Any:
    """Load the saved object with tensors on the CPU. Raises CheckpointError (see `check_torch_file`) and exceptions of
    torch.load."""
    with restricted_loading():
        return torch.load(path, map_location="cpu")


_LOCK, _original = threading.Lock(), SimpleNamespace(load=torch.load, users=0)


def _restricted_load(file: Any, *arguments: Any, **options: Any) -> Any:
    is_stream = hasattr(file, "read")
    check_torch_file(file, getattr(file, "name", "an item") if is_stream else file)
    if is_stream:
        file.seek(0)
    return _original.load(file, *arguments, **{**options, "weights_only": True, "pickle_module": None})


def tensors_in(value: Any, prefix: str = "") -> Iterator[tuple[str, FileTensor]]:
    """Yield (dotted name, tensor) for every tensor in nested dicts."""
    if isinstance(value, FileTensor):
        yield prefix, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from tensors_in(item, f"{prefix}.{key}" if prefix else str(key))


def read_records(stream: BinaryIO) -> Iterator[ArchiveRecord]:
    """Yield the entries of an archive in stored order. Raises ValueError if torch.save cannot have written it."""
    stream.seek(0, io.SEEK_END)
    size = left = stream.tell()
    names = set()
    with zipfile.ZipFile(stream) as archive:
        for place, info in enumerate(archive.infolist(), 1):
            if info.compress_type != zipfile.ZIP_STORED:
                raise ValueError(f"its record {info.filename} is compressed")
            names.add(info.filename)
            left -= info.file_size
            if left < 0 or len(names) != place:
                raise ValueError(f"its record {info.filename} is duplicated or overlaps another")
            # Skip the local header's name and extra field by their lengths. zipfile would verify the checksum as well,
            # which torch may omit.
            stream.seek(info.header_offset + 26)
            lengths = stream.read(4)
            start = info.header_offset + 30 + sum(int.from_bytes(lengths[i : i + 2], "little") for i in (0, 2))
            if start + info.file_size > size:
                raise ValueError(f"its record {info.filename} runs past the end of the file")
            yield ArchiveRecord(info.filename.partition("/")[2], start, info.file_size)


def _read_archive(
    stream: Any,
    path: Path,
    where: object,
    offset: int = 0,
    classes: re.Pattern[str] = _SAVED_CLASSES,
    any_strides: bool = False,
) -> Any:
    try:
        records = {record.name: record for record in read_records(stream)}
        order = records.get("byteorder")
        if order is not None and _bytes_of(stream, order) != b"little":
            raise CheckpointError(where, "was saved in big-endian byte order, which is not supported")
        if records["data.pkl"].length > _PICKLE_LIMIT:
            raise CheckpointError(
                where, f"its pickle has {records['data.pkl'].length} bytes, more than {_PICKLE_LIMIT}"
            )
        tensors = _SavedTensors(path, where, records, offset, any_strides)
        data = _bytes_of(stream, records["data.pkl"])
        return RestrictedUnpickler(data, where, classes, tensors.allowed, tensors.storage).load()
    except CheckpointError:
        raise
    except Exception as error:  # a damaged archive or pickle can raise any exception
        if not _is_archive(stream):
            raise CheckpointError(
                where,
                "is not a zip archive, which torch.save of torch >= 1.6 writes: load it with "
                "torch.load(..., weights_only=True) and save it again",
            ) from None
        raise CheckpointError(where, f"truncated or damaged torch.save file: {one_line(error)[:200]}") from None


def _is_archive(stream: Any) -> bool:
    """True if a file starts with the signature of a zip archive, or cannot be read."""
    try:
        stream.seek(0)
        return stream.read(4) == _TORCH_MAGIC
    except OSError:
        return True


class _SavedTensors:
    """Converts the tensors in an archive's pickle to FileTensors."""

    def __init__(
        self, path: Path, where: object, records: dict[str, ArchiveRecord], offset: int, any_strides: bool
    ) -> None:
        self._path, self._where, self._records, self._offset = path, where, records, offset
        self._any_strides = any_strides  # accept strided tensors, if their values are not read
        self.allowed: dict[str, Any] = {
            "torch._utils._rebuild_tensor_v2": self._tensor,
            "torch._utils._rebuild_parameter": lambda data, *_: data,
            **{f"torch.{name}": dtype for name, dtype in _STORAGES.items()},
            **{f"torch.storage.{name}": dtype for name, dtype in _STORAGES.items()},
        }

    def storage(self, pid: Any) -> tuple[torch.dtype, ArchiveRecord]:
        """dtype and archive entry of a storage."""
        kind, dtype, key, _, count = pid
        if kind != "storage" or not isinstance(dtype, torch.dtype) or not isinstance(key, str):
            raise pickle.UnpicklingError("not the pickle of a tensor")
        record = self._records[f"data/{key}"]
        if type(count) is not int or not 0 <= count * dtype.itemsize <= record.length:
            raise ValueError(f"its record {record.name} has {record.length} bytes, its pickle says {count} values")
        return dtype, record

    def _tensor(self, storage: Any, start: Any, shape: Any, stride: Any, *_: Any) -> FileTensor:
        dtype, record = storage
        numbers = (start, *shape, *stride)
        if not isinstance(record, ArchiveRecord) or len(numbers) > 200 or not all(map(_is_size, numbers)):
            raise pickle.UnpicklingError("not the pickle of a tensor")
        if not self._any_strides and not _is_row_major(tuple(shape), tuple(stride)):
            raise CheckpointError(
                self._where, f"a tensor of shape {list(shape)} has strides {list(stride)}, which are not row-major"
            )
        end = (start + prod(shape)) * dtype.itemsize
        if end > record.length:
            raise CheckpointError(
                self._where, f"a tensor of shape {list(shape)} needs {end} bytes, its record has {record.length}"
            )
        return FileTensor(self._path, dtype, tuple(shape), self._offset + record.start + start * dtype.itemsize)


def _bytes_of(stream: Any, record: ArchiveRecord) -> bytes:
    stream.seek(record.start)
    return bytes(stream.read(record.length))


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


def _is_row_major(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    step = 1
    for size, found in zip(reversed(shape), reversed(stride), strict=True):
        if size != 1 and found != step:
            return 0 in shape
        step *= size
    return True

"""The restricted unpickler, and `torch.save` files read through it: tensors as places in the file, plain values.

Nothing runs: every class that real checkpoints name (an argparse.Namespace, megatron-core's enums, numpy's random
state) becomes an inert stand-in, any other name is refused. Time and memory are proportional to the pickle's size. A
file that a library reads with torch.load is checked here first (`restricted_loading`).
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

from dlm_bridge.errors import DlmBridgeError, one_line
from dlm_bridge.files.reading import FileWindow, gc_paused

_PICKLE_LIMIT = 1 << 28  # bytes; a rank with 10,000 tensors and an optimizer has a few MB
_KEY_LIMIT = 5_000  # values in a pickle's keys that are neither text nor small numbers, which is what real ones are
_SHARED_LIMIT = 500_000  # how many values more than bytes a pickle may have, because some are shared
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
# Classes whose objects real `torch.save` files hold besides tensors, by full name.
_SAVED_CLASSES = re.compile(
    r"argparse\.Namespace|types\.SimpleNamespace|signal\.Signals|_io\.BytesIO|pathlib\.\w+"
    r"|functools\.partial|builtins\.(getattr|slice|complex)|datetime\.\w+"
    r"|numpy\.(ndarray|dtype)|numpy\.(core|_core)\.(multiarray\.(_reconstruct|scalar)|numeric\._frombuffer)"
    r"|torch\.(Size|device|layout)|torch\.nn\.(functional|modules\.activation)\.\w+|torch\._C\._nn\.\w+"
    r"|torch\.serialization\._get_layout"
    r"|(megatron|transformer_engine|megatron_fsdp|torch\.optim|apex\.optimizers)(\.\w+)+"
)
# Of those, the ones that `torch.load` may make of a file which has passed the check.
_LOADED_CLASSES = re.compile(r"torch\.(device|layout)|_io\.BytesIO")


class Inert:
    """Stands for an object of another package: keeps what the pickle sets on it. `name` is the class's full name."""

    name = ""
    arguments: tuple[Any, ...] = ()
    state: Any = None

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setitem__(self, key: Any, value: Any) -> None:
        """The items of a dict's subclass."""

    def append(self, value: Any) -> None:
        """The items of a list's subclass."""

    def extend(self, values: Any) -> None:
        """As `append`."""

    def __hash__(self) -> int:
        return id(self)

    @property
    def fields(self) -> dict[str, Any]:
        """What a Namespace or a dataclass holds; empty for what has no such state."""
        return self.state if isinstance(self.state, dict) else {}


def _checking_keys(opcode: bytes, keys: slice) -> Any:
    """The base class's method for an opcode, after a check of the `keys` among the values that it takes."""
    method: Any = pickle._Unpickler.dispatch[opcode[0]]

    def checked(unpickler: RestrictedUnpickler) -> None:
        for key in unpickler.stack[keys]:
            unpickler._key(key)
        method(unpickler)

    return checked


class RestrictedUnpickler(pickle._Unpickler):
    """Loads the first pickle of `data` without running anything that it names.

    Containers and torch's dtypes are themselves, a name in `allowed` is what stands there, a class whose full name
    matches `inert` becomes a stand-in that is made anew for every pickle, so that none can alter anything lasting.
    `storage` resolves the persistent ids of tensors' storages. Raises DlmBridgeError, with `where` before it, for any
    other name, and anything else for a damaged pickle or one that a few bytes make large.

    The base is Python's own implementation of `pickle`: the C one makes its memo an array, for which one opcode clears
    32 GB, hashes keys of any size, and cannot be interrupted.
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
        """Bytes of `data` up to the end of the pickle, once it is loaded."""
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
            raise DlmBridgeError(f"{self._where}: its pickle asks for {asked}, which no checkpoint needs: refused")
        self._known[full] = type("Inert", (Inert,), {"name": full})
        return self._known[full]

    def persistent_load(self, pid: Any) -> Any:
        if self._storage is None:
            raise pickle.UnpicklingError("a storage where none can be")
        return self._storage(pid)

    def get_extension(self, code: int) -> None:
        raise pickle.UnpicklingError(f"the extension {code}")

    def _copied(self, items: Any) -> Any:
        """`items`, which a container is made of; all of them together are fewer than the pickle's bytes."""
        self._copies_left -= len(items)
        if self._copies_left < 0:
            raise pickle.UnpicklingError("it copies more values than it has")
        return items

    def _key(self, key: Any) -> Any:
        """A key, or an element of a set, whose hash takes no longer than it took to read it."""
        quick = type(key) is int and abs(key) < _SMALL
        if not quick and not isinstance(key, str | bytes | Inert):
            # Many large numbers may have the same hash, and a larger one takes longer.
            cost = 100 + key.bit_length() if isinstance(key, int) else _count_values(key, self._keys_left)
            self._keys_left -= cost
            if self._keys_left < 0:
                raise pickle.UnpicklingError("its keys are too large")
        return key

    def _build(self) -> None:
        state = self.stack.pop()
        if isinstance(self.stack[-1], Inert):
            self.stack[-1].state = state
        elif not isinstance(self.stack[-1], dict):  # a state dict has attributes (_metadata), which nothing needs
            raise pickle.UnpicklingError("it sets attributes of a value")

    def _bytearray(self) -> None:
        size = int.from_bytes(self.read(8), "little")  # the base class makes room for as many
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
    """Bytes as older protocols write them, as text of Latin-1. Other encodings make more of it."""
    if encoding not in ("latin1", "latin-1"):
        raise pickle.UnpicklingError("bytes that are not text of Latin-1")
    return text.encode(encoding) if isinstance(text, str) else bytes(text)


def _count_values(value: Any, limit: int) -> int:
    """Number of values in nested containers, a shared one counted wherever it is. Raises UnpicklingError for more than
    `limit`, and so for a container that contains itself."""
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
                raise pickle.UnpicklingError("its values are shared so often that they are too many")
            stack.extend(part)
    return count


@dataclass(frozen=True)
class FileTensor:
    """A tensor of the file: values of `dtype` from byte `offset` on, in row-major order."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class ArchiveRecord:
    """One stored entry of the archive: `start` and `length` of its bytes in the file."""

    name: str  # without the archive's own folder: "data/0"
    start: int
    length: int


def read_torch_file(path: Path) -> Any:
    """The object that was saved, with a FileTensor for every tensor and an Inert for every foreign object.

    Reads the pickle only, no tensor. Raises DlmBridgeError for a file that is truncated, corrupt, of torch before 1.6,
    or whose pickle asks for anything that no checkpoint needs.
    """
    with path.open("rb") as stream:
        return _read_archive(stream, path, path)


def read_torch_item(path: Path, offset: int, length: int, where: object | None = None) -> Any:
    """The object of a whole `torch.save` file that lies in `length` bytes of `path` from `offset` on; its tensors'
    places are those in `path`. Raises DlmBridgeError, with `where` (else the path) before it."""
    with path.open("rb") as stream:
        return _read_archive(FileWindow(stream, offset, length), path, where or path, offset)


def check_torch_file(file: Any, where: object) -> None:
    """Raise DlmBridgeError, with `where` before it, for a `torch.save` file (a path, or a stream from its start on)
    that is truncated or damaged, of torch before 1.6, or whose pickle holds more than tensors and plain values."""
    with contextlib.ExitStack() as opened:
        stream = file if hasattr(file, "read") else opened.enter_context(Path(file).open("rb"))
        _read_archive(stream, Path(), where, classes=_LOADED_CLASSES, any_strides=True)


@contextlib.contextmanager
def restricted_loading() -> Iterator[None]:
    """While this lasts, torch.load checks every file by `check_torch_file`, and then reads tensors and plain values
    only, whatever its caller asks for: for libraries that read a user's files with it. Calls of other threads are
    restricted, too."""
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
    """The object that was saved, with tensors on the CPU. Raises DlmBridgeError as `check_torch_file` does, and
    whatever torch.load raises."""
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
    """(dotted name, tensor) of every tensor in nested dicts."""
    if isinstance(value, FileTensor):
        yield prefix, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from tensors_in(item, f"{prefix}.{key}" if prefix else str(key))


def read_records(stream: BinaryIO) -> Iterator[ArchiveRecord]:
    """The entries of an archive, as they are stored. Raises ValueError for what torch.save does not write."""
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
                raise ValueError(f"its record {info.filename} is there twice, or shares bytes with another")
            # The local header's last field gives two lengths to skip; zipfile would check the checksum as well, which
            # torch may leave out.
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
            raise DlmBridgeError(f"{where}: it was saved big-endian, which is not supported")
        if records["data.pkl"].length > _PICKLE_LIMIT:
            raise DlmBridgeError(f"{where}: its pickle has {records['data.pkl'].length} bytes, too many")
        tensors = _SavedTensors(path, where, records, offset, any_strides)
        data = _bytes_of(stream, records["data.pkl"])
        return RestrictedUnpickler(data, where, classes, tensors.allowed, tensors.storage).load()
    except DlmBridgeError:
        raise
    except Exception as error:  # a damaged archive or pickle raises nearly anything
        if not _is_archive(stream):
            raise DlmBridgeError(
                f"{where}: not a torch.save file of torch 1.6 or later (no zip archive): load it "
                "with torch.load(..., weights_only=True) and save it again"
            ) from None
        raise DlmBridgeError(f"{where}: not a whole torch.save file: {one_line(error)[:200]}") from None


def _is_archive(stream: Any) -> bool:
    """Whether a file begins as a zip archive does, or cannot be read."""
    try:
        stream.seek(0)
        return stream.read(4) == _TORCH_MAGIC
    except OSError:
        return True


class _SavedTensors:
    """Turns the tensors of an archive's pickle into their places in the file."""

    def __init__(
        self, path: Path, where: object, records: dict[str, ArchiveRecord], offset: int, any_strides: bool
    ) -> None:
        self._path, self._where, self._records, self._offset = path, where, records, offset
        self._any_strides = any_strides  # of tensors whose places nobody asks for
        self.allowed: dict[str, Any] = {
            "torch._utils._rebuild_tensor_v2": self._tensor,
            "torch._utils._rebuild_parameter": lambda data, *_: data,
            **{f"torch.{name}": dtype for name, dtype in _STORAGES.items()},
            **{f"torch.storage.{name}": dtype for name, dtype in _STORAGES.items()},
        }

    def storage(self, pid: Any) -> tuple[torch.dtype, ArchiveRecord]:
        """dtype and bytes of a storage."""
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
            raise DlmBridgeError(
                f"{self._where}: a tensor of shape {list(shape)} is stored with strides {list(stride)}"
            )
        end = (start + prod(shape)) * dtype.itemsize
        if end > record.length:
            raise DlmBridgeError(
                f"{self._where}: a tensor of shape {list(shape)} needs {end} bytes, its data has {record.length}"
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

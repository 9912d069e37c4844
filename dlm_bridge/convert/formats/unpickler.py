"""The restricted unpickler, and `torch.save` files read through it: tensors as places in the file, plain values.

Nothing runs: every class that real checkpoints name (an argparse.Namespace, megatron-core's enums, numpy's random
state) becomes an inert stand-in, any other name is refused. A pickle's opcodes are checked before it is loaded: the C
unpickler keeps its memo in an array, so that one opcode of five bytes can make it clear 32 GB, and it makes room for a
byte array before it looks for the bytes.
"""

from __future__ import annotations

import io
import pickle
import re
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from types import FunctionType
from typing import Any, BinaryIO

import torch

from dlm_bridge.convert.streaming import FileWindow
from dlm_bridge.errors import DlmBridgeError, one_line

_PICKLE_LIMIT = 1 << 28  # bytes; a rank with 10,000 tensors and an optimizer has a few MB
_TORCH_MAGIC = b"PK\x03\x04"
_PICKLE_START = b"\x80"  # of a file of torch before 1.6
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
    r"argparse\.Namespace|types\.SimpleNamespace|signal\.Signals|_io\.BytesIO|_codecs\.encode|pathlib\.\w+"
    r"|functools\.partial|builtins\.(getattr|slice|complex)|datetime\.\w+"
    r"|numpy\.(ndarray|dtype)|numpy\.(core|_core)\.(multiarray\.(_reconstruct|scalar)|numeric\._frombuffer)"
    r"|torch\.(Size|device|layout)|torch\.nn\.(functional|modules\.activation)\.\w+|torch\._C\._nn\.\w+"
    r"|torch\.serialization\._get_layout"
    r"|(megatron|transformer_engine|megatron_fsdp|torch\.optim|apex\.optimizers)(\.\w+)+"
)
_CONTAINERS: dict[str, Any] = {
    "collections.OrderedDict": OrderedDict,
    "builtins.set": set,
    "builtins.frozenset": frozenset,
    "builtins.bytearray": bytearray,
    "collections.defaultdict": lambda *_: {},
    "torch.Size": tuple,
}
_FIXED_OPCODES = re.compile(
    rb"(?:[()012NQRabdelostu}\]\x81\x85-\x89\x8f-\x94\x97\x98]"  # no argument
    rb"|[Khq\x80\x82].|[M\x83]..|[Jj\x84]....|[G\x95]........"  # 1, 2, 4 and 8 bytes
    rb"|[FILPSVg][^\n]*\n|[ci][^\n]*\n[^\n]*\n"  # lines
    rb"|r..[\x00-\x0f]\x00|p\d{1,6}\n)*+",  # memo places below a million, which need no second look
    re.DOTALL,
)
_COUNTED_OPCODES = {  # opcode -> bytes of the length that follows it
    b"\x8c": 1, b"X": 4, b"\x8d": 8, b"C": 1, b"B": 4, b"\x8e": 8, b"U": 1, b"T": 4, b"\x96": 8,
    b"\x8a": 1, b"\x8b": 4,
}  # fmt: skip


class Inert:
    """Stands for an object of another package: keeps what the pickle sets on it. `name` is the class's full name."""

    name = ""
    state: Any = None

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state

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


class RestrictedUnpickler(pickle.Unpickler):
    """Loads the first pickle of `data` without running anything that it names.

    Containers and torch's dtypes are themselves, a name in `allowed` is what stands there, a class whose full name
    matches `inert` becomes a stand-in that is made anew for every pickle, so that none can alter anything lasting.
    `storage` resolves the persistent ids of tensors' storages. Raises DlmBridgeError, with `where` before it, for any
    other name, and ValueError for a pickle that `check_pickle` refuses.
    """

    def __init__(
        self,
        data: bytes,
        where: object,
        inert: re.Pattern[str],
        allowed: Mapping[str, Any] | None = None,
        storage: Callable[[Any], Any] | None = None,
    ) -> None:
        check_pickle(data)
        self._stream = io.BytesIO(data)
        super().__init__(self._stream)
        self._where, self._inert, self._storage = where, inert, storage
        known = {**_CONTAINERS, **(allowed or {})}
        # A pickle may set attributes of what it is given: of functions it gets a wrapper of its own.
        self._known = {name: partial(it) if isinstance(it, FunctionType) else it for name, it in known.items()}

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


def check_whole_archive(path: Path) -> None:
    """Raise DlmBridgeError for a `torch.save` file that is truncated or damaged, by its archive's directory. A file of
    torch before 1.6, which has none, passes."""
    with path.open("rb") as stream:
        try:
            if stream.read(1) == _PICKLE_START:
                return
            for _ in read_records(stream):
                pass
        except Exception as error:  # as of `_read_archive`
            raise DlmBridgeError(f"{path}: not a whole torch.save file: {one_line(error)[:200]}") from None


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
    size = stream.tell()
    with zipfile.ZipFile(stream) as archive:
        for info in archive.infolist():
            if info.compress_type != zipfile.ZIP_STORED:
                raise ValueError(f"its record {info.filename} is compressed")
            # The local header's last field gives two lengths to skip; zipfile would check the checksum as well, which
            # torch may leave out.
            stream.seek(info.header_offset + 26)
            lengths = stream.read(4)
            start = info.header_offset + 30 + sum(int.from_bytes(lengths[i : i + 2], "little") for i in (0, 2))
            if start + info.file_size > size:
                raise ValueError(f"its record {info.filename} runs past the end of the file")
            yield ArchiveRecord(info.filename.partition("/")[2], start, info.file_size)


def check_pickle(data: bytes) -> None:
    """Raise ValueError where the pickle names a memo place or a length that its own size cannot explain, or where an
    opcode is not known."""
    place = 0
    while True:
        match = _FIXED_OPCODES.match(data, place)
        assert match is not None
        place = match.end()
        code = data[place : place + 1]
        if code == b".":
            return
        if code in _COUNTED_OPCODES:
            start = place + 1 + _COUNTED_OPCODES[code]
            length = int.from_bytes(data[place + 1 : start], "little")
            if start + length > len(data):
                raise ValueError(f"byte {place} of the pickle asks for {length} bytes, more than there are")
            place = start + length
        elif code == b"r" and int.from_bytes(data[place + 1 : place + 5], "little") <= len(data) - 5:
            place += 5
        elif code in (b"r", b"p"):
            raise ValueError(f"byte {place} of the pickle asks for a memo larger than the pickle")
        elif code:
            raise ValueError(f"byte {place} of the pickle is no opcode that is known")
        else:
            raise ValueError("the pickle is cut off")


def _read_archive(stream: Any, path: Path, where: object, offset: int = 0) -> Any:
    try:
        records = {record.name: record for record in read_records(stream)}
        order = records.get("byteorder")
        if order is not None and _bytes_of(stream, order) != b"little":
            raise DlmBridgeError(f"{where}: it was saved big-endian, which is not supported")
        if records["data.pkl"].length > _PICKLE_LIMIT:
            raise DlmBridgeError(f"{where}: its pickle has {records['data.pkl'].length} bytes, too many")
        tensors = _SavedTensors(path, where, records, offset)
        data = _bytes_of(stream, records["data.pkl"])
        return RestrictedUnpickler(data, where, _SAVED_CLASSES, tensors.allowed, tensors.storage).load()
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

    def __init__(self, path: Path, where: object, records: dict[str, ArchiveRecord], offset: int) -> None:
        self._path, self._where, self._records, self._offset = path, where, records, offset
        self.allowed: dict[str, Any] = {
            "torch._utils._rebuild_tensor_v2": self._tensor,
            "torch._utils._rebuild_parameter": lambda data, *_: data,
            **{f"torch.{name}": dtype for name, dtype in _STORAGES.items()},
            **{f"torch.storage.{name}": dtype for name, dtype in _STORAGES.items()},
        }

    def storage(self, pid: Any) -> tuple[torch.dtype, ArchiveRecord]:
        """dtype and bytes of a storage."""
        kind, dtype, key, _, _ = pid
        if kind != "storage" or not isinstance(dtype, torch.dtype) or not isinstance(key, str):
            raise pickle.UnpicklingError("not the pickle of a tensor")
        return dtype, self._records[f"data/{key}"]

    def _tensor(self, storage: Any, start: Any, shape: Any, stride: Any, *_: Any) -> FileTensor:
        dtype, record = storage
        if not isinstance(record, ArchiveRecord) or not all(
            type(n) is int and n >= 0 for n in (start, *shape, *stride)
        ):
            raise pickle.UnpicklingError("not the pickle of a tensor")
        if not _is_row_major(tuple(shape), tuple(stride)):
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


def _is_row_major(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    step = 1
    for size, found in zip(reversed(shape), reversed(stride), strict=True):
        if size != 1 and found != step:
            return 0 in shape
        step *= size
    return True

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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch

from dlm_bridge.errors import DlmBridgeError, one_line

_PICKLE_LIMIT = 1 << 28  # bytes; a rank with 10,000 tensors and an optimizer has a few MB
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
# Classes whose objects real checkpoints hold besides tensors, by full name.
_KNOWN = re.compile(
    r"argparse\.Namespace|types\.SimpleNamespace|signal\.Signals|_io\.BytesIO|_codecs\.encode|pathlib\.\w+"
    r"|functools\.partial|builtins\.(getattr|slice|complex)|datetime\.\w+"
    r"|numpy\.(ndarray|dtype)|numpy\.(core|_core)\.(multiarray\.(_reconstruct|scalar)|numeric\._frombuffer)"
    r"|torch\.(Size|device|layout)|torch\.nn\.(functional|modules\.activation)\.\w+|torch\._C\._nn\.\w+"
    r"|torch\.serialization\._get_layout"
    r"|(megatron|transformer_engine|megatron_fsdp|torch\.optim|apex\.optimizers)(\.\w+)+"
)
_PLAIN: dict[str, Any] = {
    "collections.OrderedDict": OrderedDict,
    "builtins.set": set,
    "builtins.frozenset": frozenset,
    "builtins.bytearray": bytearray,
}


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
        """What a Namespace holds; empty for what has no such state."""
        return self.state if isinstance(self.state, dict) else {}


@dataclass(frozen=True)
class ArchiveRecord:
    """One stored entry of the archive: `start` and `length` of its bytes in the file."""

    name: str  # without the archive's own folder: "data/0"
    start: int
    length: int


def is_torch_file(path: Path) -> bool:
    """Whether the file is a zip archive, as `torch.save` has written them since torch 1.6."""
    with path.open("rb") as stream:
        return stream.read(4) == _TORCH_MAGIC


def read_torch_file(path: Path) -> Any:
    """The object that was saved, with a FileTensor for every tensor and an Inert for every foreign object.

    Reads the pickle only, no tensor. Raises DlmBridgeError for a file that is truncated, corrupt, of torch before 1.6,
    or whose pickle asks for anything that no checkpoint needs.
    """
    with path.open("rb") as stream:
        return _read(stream, path)


def read_torch_object(data: bytes, path: Path) -> Any:
    """The object in the bytes of a whole `torch.save` file, which lie somewhere in `path`. Raises DlmBridgeError."""
    return _read(io.BytesIO(data), path)


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


def _read(stream: BinaryIO, path: Path) -> Any:
    try:
        if stream.read(4) != _TORCH_MAGIC:
            raise DlmBridgeError(
                f"{path}: not a torch.save file of torch 1.6 or later (no zip archive): load it "
                "with torch.load(..., weights_only=True) and save it again"
            )
        records = {record.name: record for record in read_records(stream)}
        order = records.get("byteorder")
        if order is not None and _bytes_of(stream, order) != b"little":
            raise DlmBridgeError(f"{path}: it was saved big-endian, which is not supported")
        if records["data.pkl"].length > _PICKLE_LIMIT:
            raise DlmBridgeError(f"{path}: its pickle has {records['data.pkl'].length} bytes, too many")
        data = _bytes_of(stream, records["data.pkl"])
        check_pickle(data)
        return _Unpickler(data, path, records).load()
    except DlmBridgeError:
        raise
    except Exception as error:  # a damaged archive or pickle raises nearly anything
        raise DlmBridgeError(f"{path}: not a whole torch.save file: {one_line(error)[:200]}") from None


def _bytes_of(stream: BinaryIO, record: ArchiveRecord) -> bytes:
    stream.seek(record.start)
    return stream.read(record.length)


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, path: Path, records: dict[str, ArchiveRecord]) -> None:
        super().__init__(io.BytesIO(data))
        self._path, self._records = path, records
        self._inert: dict[str, type[Inert]] = {}

    def find_class(self, module: str, name: str) -> Any:
        module = "builtins" if module == "__builtin__" else module  # its name in torch's pickle protocol
        full = f"{module}.{name}"
        if full == "torch._utils._rebuild_tensor_v2":
            return self._tensor
        if full == "torch._utils._rebuild_parameter":
            return _parameter
        if full in _PLAIN:
            return _PLAIN[full]
        if module in ("torch", "torch.storage") and name in _STORAGES:
            return _STORAGES[name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if full == "torch.Size":
            return tuple
        if full == "collections.defaultdict":
            return _default_dict
        if not _KNOWN.fullmatch(full):
            asked = " ".join(full.split())[:100]
            raise DlmBridgeError(f"{self._path}: its pickle asks for {asked}, which no checkpoint needs: refused")
        if full not in self._inert:
            self._inert[full] = type("Inert", (Inert,), {"name": full})
        return self._inert[full]

    def persistent_load(self, pid: Any) -> tuple[torch.dtype, ArchiveRecord]:
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
                f"{self._path}: a tensor of shape {list(shape)} is stored with strides {list(stride)}"
            )
        end = (start + prod(shape)) * dtype.itemsize
        if end > record.length:
            raise DlmBridgeError(
                f"{self._path}: a tensor of shape {list(shape)} needs {end} bytes, its data has {record.length}"
            )
        return FileTensor(self._path, dtype, tuple(shape), record.start + start * dtype.itemsize)


def _parameter(data: Any, *_: Any) -> Any:
    return data


def _default_dict(*_: Any) -> dict[Any, Any]:
    return {}


def _is_row_major(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    step = 1
    for size, found in zip(reversed(shape), reversed(stride), strict=True):
        if size != 1 and found != step:
            return 0 in shape
        step *= size
    return True


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

"""Weight files of a Hub folder: read tensor by tensor, planned as shards, written in any order.

They are safetensors, whose headers are checked, or torch's pickled files (`pytorch_model*.bin`), which are only read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlm_bridge.convert.streaming import FileRegion, Sink, SliceRange, allocate, read_tensor, tensor_bands
from dlm_bridge.errors import DlmBridgeError, one_line
from dlm_bridge.files.reading import check_safetensors, file_digest
from dlm_bridge.hub import inside
from dlm_bridge.mapping.dtypes import QUANTISED_DTYPES, STORED_DTYPES, dtype_name, torch_dtype

if TYPE_CHECKING:
    import torch  # imported where tensors are moved

FP8 = "F8_E4M3"  # in a header
MXFP4_PARTS = ("_blocks", "_scales")  # of a weight's name: two values a byte, and the exponent of each 32
SAFETENSORS_INDEX = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
BIN_FILE = "pytorch_model.bin"
BIN_INDEX = "pytorch_model.bin.index.json"
METADATA = {"format": "pt"}
_DTYPES = STORED_DTYPES | QUANTISED_DTYPES
TensorSpecs = Mapping[str, "tuple[torch.dtype, Sequence[int]]"]


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a file: `stored` is its dtype's name in a header, `offset` counts bytes from the start of the
    file."""

    name: str
    stored: str
    shape: tuple[int, ...]
    offset: int

    @property
    def dtype(self) -> torch.dtype:
        return torch_dtype(self.stored)

    @property
    def dtype_name(self) -> str:
        return _DTYPES[self.stored][0]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * _DTYPES[self.stored][1]


@dataclass(frozen=True)
class SafetensorsFile:
    """A file's header: its tensors in the order of their bytes."""

    path: Path
    metadata: dict[str, str] | None
    entries: tuple[TensorEntry, ...]
    start: int  # bytes before the tensors


class HubReader:
    """The tensors of a Hub folder. Only headers are read on opening; a tensor is read when asked for.

    Raises DlmBridgeError for a file that is missing, outside the folder, truncated or corrupt, and where the index
    and the files do not name the same tensors.
    """

    def __init__(self, folder: Path, quantised: str | None = None) -> None:
        self.folder = folder
        self.pickled = not any(os.path.lexists(folder / name) for name in (SINGLE_FILE, SAFETENSORS_INDEX))
        self.pickled &= any(os.path.lexists(folder / name) for name in (BIN_FILE, BIN_INDEX))
        self._single, self._index = (BIN_FILE, BIN_INDEX) if self.pickled else (SINGLE_FILE, SAFETENSORS_INDEX)
        index = _read_index(folder, self._single, self._index)
        names = [self._single] if index is None else list(dict.fromkeys(index.values()))
        self.files: dict[str, SafetensorsFile] = {}
        for name in sorted(names):
            path = inside(folder, name)
            self.files[name] = read_bin(path) if self.pickled else read_header(path, quantised)
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
        """One tensor, in a buffer of its own. Raises DlmBridgeError for a file that has been truncated since."""
        path, entry = self._where[name]
        return read_tensor(path, entry.offset, entry.dtype, entry.shape)

    def read_elements(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Elements `start` to `stop` of a tensor in row-major order; only their bytes are read."""
        path, entry = self._where[name]
        return read_tensor(path, entry.offset + start * entry.dtype.itemsize, entry.dtype, (stop - start,))

    def region(self, name: str, part: SliceRange) -> FileRegion:
        """Where a tensor lies that is `part` of a slice, in `stored_dtype`."""
        path, entry = self._where[name]
        return FileRegion(path, entry.offset, part)

    def shards(self) -> list[ShardRecord]:
        """The folder's own shard map; none for pickled files, since these are not written."""
        if self.pickled:
            return []
        return [
            ShardRecord(file, content.metadata, tuple(entry.name for entry in content.entries))
            for file, content in self.files.items()
        ]

    def _check_index(self, index: dict[str, str]) -> None:
        path = self.folder / self._index
        for name, file in index.items():
            if name not in self._where or self._where[name][0] != self.files[file].path:
                raise DlmBridgeError(f"{path}: tensor {name} is not in {file}, where the index has it")
        for name, (file_path, _) in self._where.items():
            if name not in index:
                raise DlmBridgeError(f"{path}: tensor {name} of {file_path.name} is not in the index")


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


def read_bin(path: Path) -> SafetensorsFile:
    """The file's tensors in the order of their bytes, as a safetensors header would list them.

    Raises DlmBridgeError for what is not a state dict of weights, and as `read_torch_file` does.
    """
    from dlm_bridge.files.pickles import FileTensor, read_torch_file
    from dlm_bridge.mapping.dtypes import SAFETENSORS_NAMES

    content = read_torch_file(path)
    if not isinstance(content, Mapping):
        raise DlmBridgeError(f"{path}: is not a dict of tensors")
    entries = []
    for name, tensor in content.items():
        if not isinstance(name, str) or not isinstance(tensor, FileTensor):
            raise DlmBridgeError(f"{path}: {name!r} is not a tensor: a weight file is a dict of tensors")
        if tensor.dtype not in SAFETENSORS_NAMES:
            raise DlmBridgeError(f"{path}: tensor {name} has dtype {dtype_name(tensor.dtype)}, no weight's dtype")
        entries.append(TensorEntry(name, SAFETENSORS_NAMES[tensor.dtype], tensor.shape, tensor.offset))
    entries.sort(key=lambda entry: (entry.offset, entry.nbytes))
    return SafetensorsFile(path, None, tuple(entries), entries[0].offset if entries else 0)


def read_header(path: Path, quantised: str | None = None) -> SafetensorsFile:
    """Read and check a header; safetensors' own reader judges it first. `quantised` is a dtype of no weight that it
    lets through, by its name in the header.

    Raises DlmBridgeError naming the file.
    """
    check_safetensors(path)
    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        text = stream.read(length)
    header: dict[str, Any] = json.loads(text, object_pairs_hook=lambda pairs: _unique(pairs, path))
    metadata = header.pop("__metadata__", None)
    entries = [_entry(path, name, item, 8 + length, quantised) for name, item in header.items()]
    entries.sort(key=lambda entry: (entry.offset, entry.nbytes))
    return SafetensorsFile(path, metadata, tuple(entries), 8 + length)


def build_header(
    metadata: Mapping[str, str] | None, tensors: Sequence[tuple[str, torch.dtype, Sequence[int]]]
) -> tuple[bytes, tuple[TensorEntry, ...]]:
    """The header bytes of a file that holds `tensors` (name, dtype, shape) in this order, and where each one goes.

    The bytes are those that safetensors' own writer makes: compact JSON, padded with spaces to 8 bytes.
    """
    from dlm_bridge.mapping.dtypes import SAFETENSORS_NAMES

    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    places, position = [], 0
    for name, dtype, shape in tensors:
        end = position + prod(shape) * dtype.itemsize
        stored = SAFETENSORS_NAMES[dtype]
        header[name] = {"dtype": stored, "shape": list(shape), "data_offsets": [position, end]}
        places.append((name, stored, tuple(shape), position))
        position = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    entries = tuple(TensorEntry(name, stored, shape, start + offset) for name, stored, shape, offset in places)
    return len(text).to_bytes(8, "little") + text, entries


def standard_order(
    tensors: Sequence[tuple[str, torch.dtype, Sequence[int]]],
) -> list[tuple[str, torch.dtype, Sequence[int]]]:
    """The order that safetensors' own writer gives: widest dtype first, then by name."""
    from dlm_bridge.mapping.dtypes import SAFETENSORS_NAMES

    rank = {dtype: place for place, dtype in enumerate(SAFETENSORS_NAMES)}
    return sorted(tensors, key=lambda item: (rank[item[1]], item[0]))


def _entry(path: Path, name: str, item: dict[str, Any], start: int, quantised: str | None) -> TensorEntry:
    stored = item["dtype"]
    known = stored in STORED_DTYPES or stored == quantised
    if not known and stored == FP8:
        raise DlmBridgeError(f"{path}: tensor {name} is FP8: dlm-bridge import takes it with --dequantize-fp8")
    if not known and stored == "U8" and name.endswith(MXFP4_PARTS):
        raise DlmBridgeError(f"{path}: tensor {name} is MXFP4: dlm-bridge import takes it with --dequantize-mxfp4")
    if not known:
        kinds = ", ".join(STORED_DTYPES)
        raise DlmBridgeError(f"{path}: tensor {name} has dtype {stored}, a weight has one of {kinds}")
    return TensorEntry(name, stored, tuple(item["shape"]), start + item["data_offsets"][0])


def _unique(pairs: list[tuple[str, Any]], path: Path) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise DlmBridgeError(f"{path}: '{twice}' stands twice in the header")
    return result


@dataclass(frozen=True)
class ShardRecord:
    """One safetensors file of the Hub source: its name, its metadata, its tensors in the order of their bytes."""

    file: str
    metadata: Mapping[str, str] | None
    tensors: tuple[str, ...]


@dataclass(frozen=True)
class ShardFile:
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

    def __init__(self, folder: Path, plans: Sequence[ShardFile]) -> None:
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
        return Sink(path, entry.offset, dtype=entry.dtype)

    def has(self, digests: Mapping[str, str]) -> bool:
        """Whether all these tensors (name -> digest) lie in the files already, from a run before this one."""
        for name, digest in digests.items():
            path, entry = self._where[name]
            if file_digest(path, entry.offset, entry.nbytes) != digest:
                return False
        return True

    def note(self, names: Iterable[str]) -> None:
        """These tensors are in their place."""
        for name in names:
            self._missing.remove(name)

    def finish(self) -> None:
        """Every tensor is there."""
        assert not self._missing, f"planned but not written: {sorted(self._missing)[:3]}"


def plan_like(shards: Iterable[ShardRecord], tensors: TensorSpecs) -> list[ShardFile]:
    """The files of a known shard map, with the dtypes and shapes of `tensors`."""
    plans = []
    for shard in shards:
        header, entries = build_header(shard.metadata, [(name, *tensors[name]) for name in shard.tensors])
        plans.append(ShardFile(shard.file, shard.metadata, header, entries))
    return plans


def plan_by_size(tensors: TensorSpecs, shard_size: int) -> list[ShardFile]:
    """Files of at most `shard_size` bytes of tensors (a larger tensor has a file of its own), named as on the Hub."""
    groups: list[list[tuple[str, torch.dtype, Sequence[int]]]] = []
    room = 0
    for name, (dtype, shape) in tensors.items():
        size = prod(shape) * dtype.itemsize
        if not groups or size > room:
            groups.append([])
            room = shard_size
        groups[-1].append((name, dtype, shape))
        room -= size
    names = [f"model-{number:05d}-of-{len(groups):05d}.safetensors" for number in range(1, len(groups) + 1)]
    plans = []
    for file, group in zip([SINGLE_FILE] if len(groups) == 1 else names, groups, strict=True):
        header, entries = build_header(METADATA, standard_order(group))
        plans.append(ShardFile(file, METADATA, header, entries))
    return plans


def index_text(plans: Sequence[ShardFile], like: dict[str, Any] | None = None) -> str:
    """model.safetensors.index.json for these files; `like` is an older index whose other metadata is kept."""
    metadata = (like or {}).get("metadata")
    metadata = dict(metadata) if isinstance(metadata, dict) else {}
    metadata["total_size"] = sum(entry.nbytes for plan in plans for entry in plan.entries)
    weight_map = {entry.name: plan.file for plan in plans for entry in plan.entries}
    return json.dumps({"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}, indent=2) + "\n"

"""Weight files of a Hub folder: reader, shard planning, and a writer that accepts tensors in any order.

Formats: safetensors, and torch's pickled files (`pytorch_model*.bin`), which are read but not written.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlm_bridge.convert.streaming import FileRegion, Sink, SliceRange, allocate, read_tensor, tensor_bands
from dlm_bridge.errors import CheckpointError, DlmBridgeError, one_line
from dlm_bridge.files.reading import check_safetensors, file_digest
from dlm_bridge.hub import inside
from dlm_bridge.mapping.dtypes import QUANTISED_DTYPES, STORED_DTYPES, dtype_name, header_name, torch_dtype

if TYPE_CHECKING:
    import torch  # imported where tensors are moved

FP8 = "F8_E4M3"  # dtype in a header
MXFP4_PARTS = ("_blocks", "_scales")  # suffixes of an MXFP4 weight's tensors: values, and one exponent per 32 values
SAFETENSORS_INDEX = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
BIN_FILE = "pytorch_model.bin"
BIN_INDEX = "pytorch_model.bin.index.json"
METADATA = {"format": "pt"}
_DTYPES = STORED_DTYPES | QUANTISED_DTYPES
TensorSpecs = Mapping[str, "tuple[torch.dtype, Sequence[int]]"]


@dataclass(frozen=True)
class TensorEntry:
    """Tensor in a weight file."""

    name: str
    stored: str  # dtype in a safetensors header
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file

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
    """Header of a weight file, with the tensors in the order of their offsets."""

    path: Path
    metadata: dict[str, str] | None
    entries: tuple[TensorEntry, ...]
    start: int  # bytes before the tensors


class HubReader:
    """Reader of a Hub folder's tensors. Opening reads the headers only.

    Args:
        quantised: header dtypes of quantised weights to accept.

    Raises:
        CheckpointError: a file is missing, outside the folder, truncated or damaged, or the index does not match.
    """

    def __init__(self, folder: Path, quantised: Collection[str] = ()) -> None:
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
                    raise CheckpointError(folder, f"tensor {entry.name} is in two files, {other} and {file}")
                self._where[entry.name] = (content.path, entry)
        if index is not None:
            self._check_index(index)

    @property
    def names(self) -> list[str]:
        """Hub names in the order of files and offsets."""
        return list(self._where)

    def entry(self, name: str) -> TensorEntry:
        """Dtype, shape and offset of a tensor. Raises KeyError if it is missing."""
        return self._where[name][1]

    def stored_dtype(self, name: str) -> torch.dtype:
        """Dtype of a tensor's bytes in its file."""
        return self._where[name][1].dtype

    def read(self, name: str) -> torch.Tensor:
        """Read a tensor into its own buffer. Raises CheckpointError if the file has been truncated since opening."""
        path, entry = self._where[name]
        return read_tensor(path, entry.offset, entry.dtype, entry.shape)

    def read_elements(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Read elements `start` to `stop` of a tensor in row-major order, and only their bytes."""
        path, entry = self._where[name]
        return read_tensor(path, entry.offset + start * entry.dtype.itemsize, entry.dtype, (stop - start,))

    def region(self, name: str, part: SliceRange) -> FileRegion:
        """File region of a tensor that is `part` of a slice, in `stored_dtype`."""
        path, entry = self._where[name]
        return FileRegion(path, entry.offset, part)

    def shards(self) -> list[ShardRecord]:
        """Shard map of the folder; empty for pickled files, which are not written."""
        if self.pickled:
            return []
        return [
            ShardRecord(file, content.metadata, tuple(entry.name for entry in content.entries))
            for file, content in self.files.items()
        ]

    def _check_index(self, index: dict[str, str]) -> None:
        found = {entry.name: file for file, content in self.files.items() for entry in content.entries}
        for name in (*index, *found):
            if index.get(name) != found.get(name):
                raise CheckpointError(
                    self.folder / self._index,
                    f"tensor {name} is in {found.get(name, 'no file')}, the index has it in "
                    f"{index.get(name, 'no file')}",
                )


def _read_index(folder: Path, single: str, index_file: str) -> dict[str, str] | None:
    """File by tensor name; None for a folder with one file."""
    if not os.path.lexists(folder / index_file):
        if not os.path.lexists(folder / single):
            raise CheckpointError(folder, f"is not a checkpoint: it has neither {single} nor {index_file}")
        return None
    path = inside(folder, index_file)
    try:
        weight_map = json.loads(path.read_text("utf-8"))["weight_map"]
        files = weight_map.values() if isinstance(weight_map, dict) else ()
        if not files or not all(isinstance(file, str) for file in files):
            raise ValueError("'weight_map' must map tensor names to files")
    except (OSError, ValueError, RecursionError, KeyError, TypeError) as error:
        raise CheckpointError(path, f"is not a weight index: {one_line(error)}") from None
    if os.path.lexists(folder / single) and single not in weight_map.values():
        raise CheckpointError(
            folder, f"has both {single} and {index_file}, which does not list it: remove one of them"
        )
    kind = single.rpartition(".")[2]
    for file in dict.fromkeys(files):
        if not file.endswith(f".{kind}"):
            raise CheckpointError(path, f"lists '{file}', which is not a {kind} file")
        try:
            inside(folder, file)
        except DlmBridgeError as error:
            raise CheckpointError(path, f"lists '{file}': {error}") from None
    assert isinstance(weight_map, dict)
    return weight_map


def read_bin(path: Path) -> SafetensorsFile:
    """Read the pickle of a `pytorch_model*.bin`, without its tensors.

    Raises:
        CheckpointError: damaged, hostile, or not a state dict of weights.
    """
    from dlm_bridge.files.pickles import FileTensor, read_torch_file
    from dlm_bridge.mapping.dtypes import SAFETENSORS_NAMES

    content = read_torch_file(path)
    if not isinstance(content, Mapping):
        raise CheckpointError(path, "is not a dict of tensors")
    entries = []
    for name, tensor in content.items():
        if not isinstance(name, str) or not isinstance(tensor, FileTensor):
            raise CheckpointError(path, f"{name!r} is not a tensor: a weight file is a dict of tensors")
        if tensor.dtype not in SAFETENSORS_NAMES:
            raise CheckpointError(
                path, f"tensor {name} has dtype {dtype_name(tensor.dtype)}, which weights do not have"
            )
        entries.append(TensorEntry(name, SAFETENSORS_NAMES[tensor.dtype], tensor.shape, tensor.offset))
    entries.sort(key=lambda entry: (entry.offset, entry.nbytes))
    return SafetensorsFile(path, None, tuple(entries), entries[0].offset if entries else 0)


def read_header(path: Path, quantised: Collection[str] = ()) -> SafetensorsFile:
    """Read a safetensors header, after a check by safetensors' own reader.

    Args:
        quantised: header dtypes of quantised weights to accept.

    Raises:
        CheckpointError: damaged, or a tensor's dtype is not a weight's.
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
    """Header bytes of a file of `tensors` (name, dtype, shape) in this order, and the tensors' entries.

    The bytes equal those of safetensors' own writer: compact JSON, padded with spaces to 8 bytes.
    """
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    places, position = [], 0
    for name, dtype, shape in tensors:
        end = position + prod(shape) * dtype.itemsize
        stored = header_name(dtype)
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
    """Tensors in the order of safetensors' own writer: widest dtype first, then by name."""
    rank = {dtype: place for place, dtype in enumerate(_DTYPES)}
    return sorted(tensors, key=lambda item: (-item[1].itemsize, rank[header_name(item[1])], item[0]))


def _entry(path: Path, name: str, item: dict[str, Any], start: int, quantised: Collection[str]) -> TensorEntry:
    stored = item["dtype"]
    if stored not in STORED_DTYPES and stored not in quantised:
        if stored == FP8:
            why = "is FP8: dlm-bridge import converts it with `dequantize_fp8`"
        elif stored == "U8" and name.endswith(MXFP4_PARTS):
            why = "is MXFP4: dlm-bridge import converts it with `dequantize_mxfp4`"
        else:
            why = f"has dtype {stored}, weights have one of {', '.join(STORED_DTYPES)}"
        raise CheckpointError(path, f"tensor {name} {why}")
    return TensorEntry(name, stored, tuple(item["shape"]), start + item["data_offsets"][0])


def _unique(pairs: list[tuple[str, Any]], path: Path) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise CheckpointError(path, f"the header has '{twice}' twice")
    return result


@dataclass(frozen=True)
class ShardRecord:
    """Safetensors file of the Hub source, with the tensor names in the order of their offsets."""

    file: str
    metadata: Mapping[str, str] | None
    tensors: tuple[str, ...]


@dataclass(frozen=True)
class ShardFile:
    """Planned safetensors file: its header and tensors."""

    file: str
    metadata: Mapping[str, str] | None
    header: bytes
    entries: tuple[TensorEntry, ...]

    @property
    def nbytes(self) -> int:
        return len(self.header) + sum(entry.nbytes for entry in self.entries)


class HubWriter:
    """Writer of planned safetensors files, in any order of tensors and from any thread or process.

    Files are created with their full size and header; tensors that an interrupted run wrote are kept. `finish` raises
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
        """Write a tensor and mark it as written."""
        self.put(name, tensor)
        self.note([name])

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Write a contiguous tensor of the planned dtype and size."""
        _, entry = self._where[name]
        assert (tensor.dtype, tensor.numel()) == (entry.dtype, prod(entry.shape)), f"{name} is not what was planned"
        with self.sink(name) as sink:
            for _, band in tensor_bands(tensor):
                sink.put(band.reshape(-1).data)

    def sink(self, name: str) -> Sink:
        """Sink for a tensor's bytes in order."""
        path, entry = self._where[name]
        return Sink(path, entry.offset, dtype=entry.dtype)

    def has(self, digests: Mapping[str, str]) -> bool:
        """True if an interrupted run has written all these tensors already (digests by name)."""
        for name, digest in digests.items():
            path, entry = self._where[name]
            if file_digest(path, entry.offset, entry.nbytes) != digest:
                return False
        return True

    def note(self, names: Iterable[str]) -> None:
        """Mark tensors as written."""
        for name in names:
            self._missing.remove(name)

    def finish(self) -> None:
        """Check that every planned tensor was written."""
        assert not self._missing, f"planned but not written: {sorted(self._missing)[:3]}"


def plan_like(shards: Iterable[ShardRecord], tensors: TensorSpecs) -> list[ShardFile]:
    """Plan the files of a shard map, with the dtypes and shapes of `tensors`."""
    plans = []
    for shard in shards:
        header, entries = build_header(shard.metadata, [(name, *tensors[name]) for name in shard.tensors])
        plans.append(ShardFile(shard.file, shard.metadata, header, entries))
    return plans


def plan_by_size(tensors: TensorSpecs, shard_size: int) -> list[ShardFile]:
    """Plan files of at most `shard_size` bytes of tensors, named as on the Hub. A larger tensor gets its own file."""
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
    """model.safetensors.index.json of these files, with other metadata of the older index `like`."""
    metadata = (like or {}).get("metadata")
    metadata = dict(metadata) if isinstance(metadata, dict) else {}
    metadata["total_size"] = sum(entry.nbytes for plan in plans for entry in plan.entries)
    weight_map = {entry.name: plan.file for plan in plans for entry in plan.entries}
    return json.dumps({"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}, indent=2) + "\n"

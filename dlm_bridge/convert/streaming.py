"""Streaming of tensor bytes from file to file: positioned reads and writes, digests, bands of rows, virtual files.

A band of rows fits a core's cache, so that it is still cached when it is digested and written, and no task needs
memory for a whole tensor. A slice is a matrix of bytes, whose rows are indexed by the slice's first axis.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import xxhash

from dlm_bridge.convert.workers import new_tensor
from dlm_bridge.errors import CheckpointError
from dlm_bridge.files.reading import VirtualFile
from dlm_bridge.lazy_import import LazyModule
from dlm_bridge.mapping.dtypes import dtype_name
from dlm_bridge.mapping.rules import ParamMapping

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch  # imported where tensors are moved
else:
    np = LazyModule("numpy", globals(), "np")

try:
    from zlib_ng.zlib_ng import crc32  # several times as fast as most systems' zlib
except ImportError:  # no wheel for this system
    from zlib import crc32

BAND = 512 << 10  # bytes

Rows: TypeAlias = "npt.NDArray[np.uint8]"  # [rows, bytes of a row]
Bands: TypeAlias = "Iterator[tuple[int, Rows]]"  # (number of the first row, rows); valid until the next one
_local = threading.local()
_EXPONENTS = {  # bit masks of the exponent
    "float64": 0x7FF << 52,
    "float32": 0x7F800000,
    "bfloat16": 0x7F80,
    "float16": 0x7C00,
}
_ONE_CALL = 1 << 30  # Linux moves at most 2 GiB in one call
# Same as in cp. Linux allocates a file's page cache in blocks of the size of the call; large blocks are much slower on
# virtual machines, whose recently freed pages are small.
_ONE_WRITE = 64 << 10


@dataclass(frozen=True)
class SliceRange:
    """Ranges of rows of a slice, or a range of bytes within these rows."""

    rows: tuple[tuple[int, int], ...]  # (start, length), ascending
    columns: tuple[int, int] | None = None  # (start, length) in bytes

    def runs(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Intersect with rows `start` to `stop`. Yields (first row, last row + 1, number of own rows before them)."""
        before = 0
        for first, length in self.rows:
            low, high = max(first, start), min(first + length, stop)
            if low < high:
                yield low, high, before + low - first
            before += length

    def subset(self, start: int, stop: int) -> list[tuple[int, int]]:
        """(start, length) ranges of the slice's rows for this range's own rows `start` to `stop`."""
        found, before = [], 0
        for first, length in self.rows:
            low, high = max(start - before, 0), min(stop - before, length)
            if low < high:
                found.append((first + low, high - low))
            before += length
        return found

    def moved(self, first: int) -> SliceRange:
        """Shift the rows by `first`."""
        return SliceRange(tuple((first + start, length) for start, length in self.rows), self.columns)

    def bytes_of(self, start: int, band: Rows) -> Iterator[memoryview]:
        """Bytes of this range in a band whose first row is `start`, in order."""
        for low, high, _ in self.runs(start, start + len(band)):
            rows = band[low - start : high - start]
            if self.columns is not None:
                first, length = self.columns
                gathered = _buffer("gathered", rows.shape[0] * length).reshape(-1, length)
                np.copyto(gathered, rows[:, first : first + length])
                rows = gathered
            yield rows.reshape(-1).data


@dataclass(frozen=True)
class FileRegion:
    """Part of a slice, stored in a file from byte `offset` on."""

    path: Path
    offset: int
    part: SliceRange


def slice_range(
    shape: Sequence[int], itemsize: int, axis: int | None, ranges: Sequence[tuple[int, int]], first: int = 0
) -> SliceRange:
    """Build a SliceRange.

    Args:
        axis: 0 for `ranges` of rows, 1 for one range of columns, None for the whole slice.
        ranges: (start, length) pairs.
        first: row of a larger slice at which this slice begins.
    """
    if axis == 1:
        ((start, length),) = ranges
        width = prod(shape[2:]) * itemsize
        return SliceRange(((first, shape[0]),), (start * width, length * width))
    assert axis in (None, 0), "only rows and columns are cut"
    rows = ranges if axis == 0 else [(0, shape[0])]
    return SliceRange(tuple((first + start, length) for start, length in rows))


def in_rows(params: Iterable[ParamMapping]) -> Iterator[tuple[ParamMapping, ParamMapping, int]]:
    """Yield (parameter, piece, first row of the piece in the parameter's slice) for every piece of the parameters."""
    for param in params:
        first = 0
        for piece in param.pieces:
            yield param, piece, first
            first += piece.megatron_shape[0] if piece.megatron_shape else 1


class Sink:
    """Consumer of consecutive bytes: computes their digest, counts NaN and infinite values of `dtype`, and writes the
    bytes to `path`, if given, from `offset` on."""

    def __init__(
        self, path: Path | None = None, offset: int = 0, checksum: bool = False, dtype: torch.dtype | None = None
    ) -> None:
        self.digest: Any = xxhash.xxh3_128()
        self.checksum = 0
        self.dtype, self.non_finite = dtype, 0
        self.position = offset
        self._checked = checksum
        self._fd = None if path is None else os.open(path, os.O_WRONLY)

    def take(self, data: memoryview | bytes | bytearray) -> None:
        """Consume the next bytes."""
        self.digest.update(data)
        if self.dtype is not None:
            self.non_finite += count_non_finite(data, self.dtype)
        if self._checked:
            self.checksum = crc32(data, self.checksum)
        self.put(data)

    def put(self, data: memoryview | bytes | bytearray) -> None:
        """Write the next bytes without adding them to the digest or checksum."""
        if self._fd is not None:
            write_at(self._fd, data, self.position)
        self.position += len(data)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if self._fd is not None:
            os.close(self._fd)


def read_bands(regions: Sequence[FileRegion], rows: int, row_bytes: int) -> Bands:
    """Read a slice from its file regions, band by band. Raises CheckpointError for a truncated file."""
    step = _step(row_bytes)
    with ExitStack() as stack:
        files: dict[Path, int] = {}
        for path in {region.path for region in regions}:
            files[path] = os.open(path, os.O_RDONLY)
            stack.callback(os.close, files[path])
        for start in range(0, rows, step):
            count = min(step, rows - start)
            band = _buffer("band", count * row_bytes).reshape(count, row_bytes)
            for region in regions:
                _read_region(files[region.path], region, start, band)
            yield start, band


def read_rows(regions: Sequence[FileRegion], runs: Sequence[tuple[int, int]], row_bytes: int) -> torch.Tensor:
    """Read (start, length) ranges of a slice's rows from its file regions, as uint8 [rows, row_bytes]. Raises
    CheckpointError for a truncated file."""
    import torch

    tensor = new_tensor((sum(length for _, length in runs), row_bytes), torch.uint8)
    data = np.frombuffer(raw_bytes(tensor), dtype=np.uint8).reshape(-1, row_bytes)
    with ExitStack() as stack:
        files: dict[Path, int] = {}
        for region in regions:
            done = 0
            for start, length in runs:
                rows = data[done : done + length]
                done += length
                if not any(region.part.runs(start, start + length)):
                    continue
                if region.path not in files:
                    files[region.path] = os.open(region.path, os.O_RDONLY)
                    stack.callback(os.close, files[region.path])
                _read_region(files[region.path], region, start, rows)
    return tensor


def tensor_bands(tensor: torch.Tensor) -> Bands:
    """Split a contiguous tensor in memory into bands."""
    if tensor.numel() == 0:
        return
    rows = tensor.shape[0] if tensor.dim() else 1
    data = np.frombuffer(raw_bytes(tensor), dtype=np.uint8).reshape(rows, -1)
    step = _step(data.shape[1])
    for start in range(0, rows, step):
        yield start, data[start : start + step]


def with_zero_rows(bands: Bands, rows: int, wanted: int, row_bytes: int) -> Bands:
    """Append zeros to the bands of `rows` rows, up to `wanted` rows."""
    yield from bands
    step = _step(row_bytes)
    for start in range(rows, wanted, step):
        yield start, np.zeros((min(step, wanted - start), row_bytes), dtype=np.uint8)


def digested(bands: Bands, parts: Sequence[SliceRange], sinks: Sequence[Sink]) -> Bands:
    """Yield the bands unchanged, and pass each sink its part of every band."""
    for start, band in bands:
        for part, sink in zip(parts, sinks, strict=True):
            for data in part.bytes_of(start, band):
                sink.take(data)
        yield start, band


def distribute(bands: Bands, parts: Sequence[SliceRange], sinks: Sequence[Sink]) -> None:
    """Pass each sink its part of all bands."""
    for _ in digested(bands, parts, sinks):
        pass


def allocate(folder: Path, files: Mapping[str, int]) -> None:
    """Create files, or resize existing ones, to these sizes in bytes."""
    for file, size in files.items():
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as stream:
            stream.truncate(size)


def _read_region(fd: int, region: FileRegion, start: int, band: Rows) -> None:
    part, row_bytes = region.part, band.shape[1]
    for low, high, before in part.runs(start, start + len(band)):
        rows = band[low - start : high - start]
        if part.columns is None:
            read_at(fd, region.path, region.offset + before * row_bytes, rows.reshape(-1).data)
        else:
            first, length = part.columns
            read = _buffer("read", len(rows) * length)
            read_at(fd, region.path, region.offset + before * length, read.data)
            np.copyto(rows[:, first : first + length], read.reshape(-1, length))


def _step(row_bytes: int) -> int:
    return max(1, BAND // row_bytes)


def _buffer(use: str, nbytes: int) -> npt.NDArray[np.uint8]:
    """Reusable buffer of this thread for one purpose."""
    block: npt.NDArray[np.uint8] | None = getattr(_local, use, None)
    if block is None or len(block) < nbytes:
        block = np.empty(max(nbytes, BAND), dtype=np.uint8)
        setattr(_local, use, block)
    return block[:nbytes]


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """Bytes of a tensor, without a copy if it is contiguous."""
    import torch

    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def count_non_finite(data: memoryview | bytes | bytearray, dtype: torch.dtype) -> int:
    """Count values that are NaN or infinite, which are those with all exponent bits set."""
    exponent = _EXPONENTS.get(dtype_name(dtype))
    if exponent is None:  # part of a quantised weight
        return 0
    bits = np.frombuffer(data, f"u{dtype.itemsize}")
    # The highest exponent bit is zero for values below 2, so that one fast pass is enough for most weights.
    if not int(np.bitwise_or.reduce(bits)) & 1 << 8 * dtype.itemsize - 2:
        return 0
    return int(np.count_nonzero((bits & exponent) == exponent))


def digest(tensor: torch.Tensor) -> str:
    """Hexadecimal xxh3_128 of the tensor's bytes in row-major order."""
    return xxhash.xxh3_128_hexdigest(raw_bytes(tensor))


def read_into(path: Path, offset: int, view: memoryview) -> None:
    """Fill the view with the file's bytes from `offset` on. Raises CheckpointError for a truncated file."""
    fd = os.open(path, os.O_RDONLY)
    try:
        read_at(fd, path, offset, view)
    finally:
        os.close(fd)


def read_at(fd: int, path: Path, offset: int, view: memoryview) -> None:
    """Fill the view from an open file, as `read_into`."""
    done = 0
    while done < len(view):
        got = os.preadv(fd, [view[done : done + _ONE_CALL]], offset + done)
        if got == 0:
            raise CheckpointError(path, f"truncated: ends before byte {offset + len(view)}")
        done += got


def read_tensor(path: Path, offset: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """Read a tensor from the file's bytes at `offset`."""
    tensor = new_tensor(shape, dtype)
    read_into(path, offset, raw_bytes(tensor))
    return tensor


def write_at(fd: int, data: memoryview | bytes | bytearray, offset: int) -> None:
    """Write all of `data` at `offset`."""
    view = memoryview(data).cast("B")
    done = 0
    while done < len(view):
        done += os.pwrite(fd, view[done : done + _ONE_WRITE], offset + done)


class SparseFile(VirtualFile):
    """File in memory that stores written bytes in `segments`, and reads gaps as zeros."""

    def __init__(self) -> None:
        super().__init__(0)
        self.segments: list[tuple[int, bytes]] = []

    def write(self, data: Any) -> int:
        content = bytes(data)
        if self.segments and self.segments[-1][0] + len(self.segments[-1][1]) == self._position:
            offset, before = self.segments[-1]
            self.segments[-1] = (offset, before + content)
        else:
            self.segments.append((self._position, content))
        self._position += len(content)
        self.size = max(self.size, self._position)
        return len(content)

    def readinto(self, buffer: Any) -> int:
        view = self._part(buffer)
        view[:] = bytes(len(view))
        first = bisect_right(self.segments, self._position, key=lambda segment: segment[0])
        for offset, data in self.segments[max(0, first - 1) :]:
            if offset >= self._position + len(view):
                break
            low, high = max(offset, self._position), min(offset + len(data), self._position + len(view))
            if low < high:
                view[low - self._position : high - self._position] = data[low - offset : high - offset]
        self._position += len(view)
        return len(view)

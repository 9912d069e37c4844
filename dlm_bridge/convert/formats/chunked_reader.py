"""Global tensors in chunks, read box by box from any chunking, each byte once.

A chunk is one tensor as `torch.save` writes it, at some offset of a larger file. Its pickle goes through the
restricted unpickler; the values are then read straight from where they lie.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from itertools import pairwise, product
from math import prod
from pathlib import Path

import torch

from dlm_bridge.convert.formats.dcp_metadata import DCP_METADATA, Chunk, Contents, StoredTensor
from dlm_bridge.convert.formats.unpickler import FileTensor, read_torch_item
from dlm_bridge.convert.streaming import (
    FileRegion,
    SliceRange,
    combined_digests,
    range_digest,
    raw_bytes,
    read_into,
)
from dlm_bridge.convert.workers import new_tensor
from dlm_bridge.errors import DlmBridgeError


@dataclass(frozen=True)
class _Box:
    """What a chunk and a slice have in common: its first index in either, and its sizes along the slice's axes."""

    chunk: Chunk
    in_chunk: list[int]
    in_slice: list[int]
    sizes: list[int]
    is_region: bool  # whether it is one run of the chunk's values, and of the slice whole rows or columns


class ChunkedReader:
    """Global tensors in chunks that lie anywhere in a folder's files, read box by box."""

    def __init__(self, folder: Path, contents: Contents) -> None:
        self.folder = folder
        self.contents = contents
        self._by_place: dict[str, dict[tuple[int, ...], list[Chunk]]] = {}
        self._lock = threading.Lock()
        self._tiled: set[str] = set()  # keys that were checked

    def tensor(self, key: str) -> StoredTensor:
        """A stored tensor's dtype, shape and chunks; KeyError where there is none."""
        return self.contents.tensors[key]

    def file_digests(self) -> dict[str, str]:
        """`combined_digests` of the files as they are now, every byte of every item read."""
        places = {chunk.place for tensor in self.contents.tensors.values() for chunk in tensor.chunks}
        places.update(self.contents.objects.values())
        return combined_digests(
            (file, offset, bytes.fromhex(range_digest(self.folder / file, offset, length)))
            for file, offset, length in map(astuple, places)
        )

    def check_tiled(self, key: str) -> None:
        """Raise DlmBridgeError unless the tensor's chunks cover it exactly: no gap, no overlap, a weight's dtype."""
        if key in self._tiled:
            return
        tensor = self.tensor(key)
        if tensor.dtype is None:
            raise DlmBridgeError(f"{self.folder}: tensor {key} has dtype {tensor.dtype_name}, which no weight has")
        covered = sum(chunk.numel for chunk in tensor.chunks)
        if covered < prod(tensor.shape):
            missing = prod(tensor.shape) - covered
            raise DlmBridgeError(f"{self.folder}: tensor {key}: {missing} of its elements are in no chunk")
        if not _disjoint(tensor.chunks, 0):
            raise DlmBridgeError(f"{self.folder}: tensor {key}: chunks overlap")
        self._tiled.add(key)

    def read(self, key: str, stack: tuple[int, ...], shape: Sequence[int]) -> torch.Tensor:
        """`read_into` a new tensor. [*shape]."""
        dtype = self.tensor(key).dtype
        assert dtype is not None
        result = new_tensor(shape, dtype)
        self.read_into(key, stack, result)
        return result

    def read_into(self, key: str, stack: tuple[int, ...], out: torch.Tensor) -> None:
        """Fill the contiguous `out` with one slice of a tensor: the index `stack` on its first axes (layer, expert),
        and the first elements along the others, as many as `out` has.

        Raises DlmBridgeError for an item that is not the tensor's.
        """
        tensor = self.tensor(key)
        for box in self._boxes(key, stack, out.shape):
            _copy(self._item(key, tensor, box.chunk), box, out)

    def in_regions(self, key: str, stack: tuple[int, ...], shape: Sequence[int]) -> bool:
        """Whether `regions` can tell where this slice lies."""
        return all(box.is_region for box in self._boxes(key, stack, shape))

    def regions(self, key: str, stack: tuple[int, ...], shape: Sequence[int]) -> list[FileRegion]:
        """Where the slice that `read_into` reads lies, in parts of rows or columns.

        Raises DlmBridgeError for an item that is not the tensor's.
        """
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
        """What each chunk has of a slice."""
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
        """A tensor's chunks by their place on the stacked axes, so that reading it all is linear in its chunks."""
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
        """Where the chunk's values lie, as one row-major array."""
        place = chunk.place
        item = open_tensor_item(self.folder / place.file, place.offset, place.length, key)
        if (item.dtype, item.shape) != (tensor.dtype, chunk.sizes):
            raise DlmBridgeError(
                f"{item.path}: tensor {key}: the item is {item.dtype} {list(item.shape)}, "
                f"{DCP_METADATA} says {tensor.dtype} {list(chunk.sizes)}"
            )
        return item


def _copy(item: FileTensor, box: _Box, out: torch.Tensor) -> None:
    """Copy what a chunk, whose values are the `item`, and the slice `out` have in common."""
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
    """A view of `sizes` from the element `first` on."""
    return tensor[tuple(slice(start, start + size) for start, size in zip(first, sizes, strict=True))]


def _common(chunk: Chunk, offsets: Sequence[int], shape: Sequence[int]) -> tuple[list[int], list[int]]:
    """First index and sizes of what a chunk and the box of `shape` at `offsets` have in common."""
    low = [max(a, b) for a, b in zip(offsets, chunk.offsets, strict=True)]
    high = [min(a + n, b + m) for a, n, b, m in zip(offsets, shape, chunk.offsets, chunk.sizes, strict=True)]
    return low, [b - a for a, b in zip(low, high, strict=True)]


def _is_one_run(sizes: Sequence[int], whole: Sequence[int]) -> bool:
    """Whether a box of `sizes` in a row-major array of shape `whole` is one run of elements."""
    axis = next((axis for axis, size in enumerate(sizes) if size != 1), len(sizes))
    return all(size == full for size, full in zip(sizes[axis + 1 :], whole[axis + 1 :], strict=True))


def _disjoint(chunks: Sequence[Chunk], axis: int) -> bool:
    """No two chunks share an element. Chunks that agree on all axes but one are compared along that one."""
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
            return False  # no tool cuts like this; comparing every pair would take too long
        return not any(_overlap(a, b) for place, a in enumerate(chunks) for b in chunks[:place])
    return all(_disjoint(group, axis + 1) for group in groups.values())


def _overlap(a: Chunk, b: Chunk) -> bool:
    return all(p < q + m and q < p + n for p, n, q, m in zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True))


def open_tensor_item(path: Path, offset: int, length: int, name: str) -> FileTensor:
    """The place of the one plain tensor that was saved there. `name` is the tensor's, for errors. Raises
    DlmBridgeError."""
    tensor = read_torch_item(path, offset, length, f"{path}: tensor {name}")
    if not isinstance(tensor, FileTensor):
        raise DlmBridgeError(f"{path}: tensor {name}: the item is not a plain tensor")
    return tensor


def read_item_rows(item: FileTensor, first: Sequence[int], count: int, view: memoryview) -> None:
    """Fill `view` with `count` elements of the item, from the element at index `first` on in row-major order."""
    assert len(view) == count * item.dtype.itemsize
    read_into(item.path, item.offset + item_offset(item, first), view)


def item_offset(item: FileTensor, index: Sequence[int]) -> int:
    """Bytes of the item before the element at `index`."""
    start = 0
    for place, size in zip(index, item.shape, strict=True):
        start = start * size + place
    return start * item.dtype.itemsize

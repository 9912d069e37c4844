"""Memory that tasks use in turn: a fresh page costs the system more than copying one, so blocks are kept."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod

import torch

_SMALL = 1 << 20  # bytes; below, the allocator of the process reuses its memory itself
_HUGE_PAGE = 2 << 20
_task = threading.local()


class Memory:
    """Blocks for the tensors of the tasks under way: no more than `limit` bytes stay allocated beyond those in use."""

    def __init__(self, limit: int) -> None:
        self._limit, self._total = limit, 0
        self._free: list[mmap.mmap] = []
        self._lock = threading.Lock()

    @contextmanager
    def task(self) -> Iterator[None]:
        """Within it `new_tensor` takes its memory from here, on this thread. No such tensor may be used afterwards."""
        taken: list[mmap.mmap] = []
        _task.memory, _task.taken = self, taken
        try:
            yield
        finally:
            _task.memory = None
            with self._lock:
                self._free += taken

    def _take(self, nbytes: int) -> mmap.mmap:
        with self._lock:
            fits = [block for block in self._free if nbytes <= len(block) <= 2 * nbytes]
            if fits:
                block = min(fits, key=len)
                self._free.remove(block)
                return block
            size = -(-nbytes // _HUGE_PAGE) * _HUGE_PAGE
            while self._free and self._total + size > self._limit:
                self._total -= len(self._free.pop(0))
            self._total += size
        block = mmap.mmap(-1, size)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            block.madvise(mmap.MADV_HUGEPAGE)
        return block


def new_tensor(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised tensor, in the memory of the task that this thread runs where there is one."""
    memory: Memory | None = getattr(_task, "memory", None)
    nbytes = prod(shape) * dtype.itemsize
    if memory is None or nbytes < _SMALL:
        return torch.empty(tuple(shape), dtype=dtype)
    block = memory._take(nbytes)
    _task.taken.append(block)
    return torch.frombuffer(block, dtype=dtype, count=prod(shape)).view(tuple(shape))

"""Threads, forked processes and memory of a conversion's tasks.

The bytes in flight are bounded whatever the number of threads. With several processes each has its share of the tasks
and sends what they return to the first one.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from math import prod
from multiprocessing import connection, get_all_start_methods, get_context
from typing import TYPE_CHECKING, Any

from dlm_bridge.errors import DlmBridgeError, WorkerError
from dlm_bridge.files.reading import gc_paused
from dlm_bridge.processes import end_with_parent, how_it_ended, leave_inherited, signals_blocked

if TYPE_CHECKING:
    import torch  # imported where tensors are moved

Progress = Callable[[int, int], None]  # (bytes just done, bytes in all); called from any thread
FLOOR = 512 << 20  # bytes that may be in flight even where every tensor is small
_SMALL = 1 << 20  # bytes; below, the allocator of the process reuses its memory itself
_HUGE_PAGE = 2 << 20
_task = threading.local()
_DONE = -1  # sent in a task's place: the process has done its share
_FAILED = -2


def worker_count(workers: int | None) -> int:
    """The number of threads: as asked, else one per core and no more than eight. Raises DlmBridgeError."""
    if workers is None:
        return min(8, os.cpu_count() or 1)
    if workers < 1:
        raise DlmBridgeError(f"--workers must be at least 1, not {workers}")
    return workers


def in_flight(sizes: Iterable[int]) -> int:
    """Bytes that tasks of these sizes may hold together: as many as the largest one, or FLOOR if that is more."""
    return max([FLOOR, *sizes])


def run_tasks(tasks: Sequence[tuple[int, Callable[[], None]]], workers: int) -> None:
    """Run (bytes, task) pairs; the tasks under way hold no more bytes than `in_flight` of all of them.

    The first exception stops the rest and is raised; so does KeyboardInterrupt.
    """
    budget = _Budget(in_flight(size for size, _ in tasks))
    stop = threading.Event()

    def run(size: int, task: Callable[[], None]) -> None:
        with budget.hold(size):
            if not stop.is_set():
                try:
                    task()
                except BaseException:
                    stop.set()
                    raise

    executor = ThreadPoolExecutor(workers, thread_name_prefix="dlm-bridge")
    try:
        futures = [executor.submit(run, size, task) for size, task in tasks]
        done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        for future in done:
            future.result()
    finally:
        stop.set()
        executor.shutdown(wait=True, cancel_futures=True)


def check_processes(processes: int) -> None:
    """Raise DlmBridgeError for a number of processes that cannot be."""
    if processes < 1:
        raise DlmBridgeError(f"--processes must be at least 1, not {processes}")
    if processes > 1 and "fork" not in get_all_start_methods():
        raise DlmBridgeError(f"--processes {processes} needs a system that can fork: use --workers")
    if processes > 1 and "torch" in sys.modules and sys.modules["torch"].cuda.is_initialized():
        raise DlmBridgeError(f"--processes {processes}: this process uses CUDA, which does not survive a fork")


def run_forked(
    tasks: Sequence[tuple[int, Callable[[], Any]]], processes: int, workers: int, done: Callable[[int, Any], None]
) -> None:
    """Run (bytes, task) pairs in `processes` processes of `workers` threads; `done` gets the number of each task and
    what it returned, here. The first exception ends all processes and is raised; a process that was killed is a
    WorkerError."""
    context = get_context("fork")
    running = {}
    try:
        for share in _shares([size for size, _ in tasks], processes):
            here, there = context.Pipe(duplex=False)
            mine = [(n, *tasks[n]) for n in share]
            process = context.Process(target=_work, args=(os.getpid(), there, mine, workers))
            # The first process hears of Ctrl-C and ends this one, which collects nothing before `leave_inherited`.
            with signals_blocked(), gc_paused():
                process.start()
            there.close()
            running[here] = process
        while running:
            for end in connection.wait(list(running)):
                assert isinstance(end, connection.Connection)
                try:
                    number, result = end.recv()
                except (EOFError, OSError):
                    process = running[end]
                    process.join()
                    raise WorkerError(f"a worker process {how_it_ended(process.exitcode)}") from None
                if number == _FAILED:
                    raise result
                if number == _DONE:
                    running.pop(end).join()
                else:
                    done(number, result)
    finally:
        for process in running.values():
            process.kill()
            process.join()


class TaskMemory:
    """Blocks for the tensors of the tasks under way: no more than `limit` bytes stay allocated beyond those in use."""

    def __init__(self, limit: int) -> None:
        self._limit, self._total = limit, 0
        self._free: list[mmap.mmap] = []
        self._lock = threading.Lock()

    @contextmanager
    def task(self) -> Iterator[None]:
        """Context in which `new_tensor` allocates from here, on this thread. Its tensors are invalid afterwards."""
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
    import torch

    memory: TaskMemory | None = getattr(_task, "memory", None)
    nbytes = prod(shape) * dtype.itemsize
    if memory is None or nbytes < _SMALL:
        return torch.empty(tuple(shape), dtype=dtype)
    block = memory._take(nbytes)
    _task.taken.append(block)
    return torch.frombuffer(block, dtype=dtype, count=prod(shape)).view(tuple(shape))


class _Budget:
    """Memory budget in bytes that tasks share; one task alone may always run."""

    def __init__(self, limit: int) -> None:
        self._limit, self._used = limit, 0
        self._changed = threading.Condition()

    @contextmanager
    def hold(self, size: int) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: self._used == 0 or self._used + size <= self._limit)
            self._used += size
        try:
            yield
        finally:
            with self._changed:
                self._used -= size
                self._changed.notify_all()


def _shares(sizes: Sequence[int], processes: int) -> list[list[int]]:
    """The tasks' numbers for each process, so that all have about as many bytes, each in order."""
    shares: list[list[int]] = [[] for _ in range(processes)]
    filled = [0] * processes
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        least = filled.index(min(filled))
        shares[least].append(number)
        filled[least] += sizes[number]
    return [sorted(share) for share in shares if share]


def _work(
    parent: int, end: connection.Connection, share: Sequence[tuple[int, int, Callable[[], Any]]], workers: int
) -> None:
    """In a forked process, which ends here: no handler or buffer that it has inherited may run or be flushed."""
    import torch

    leave_inherited()
    end_with_parent(parent)
    torch.set_num_threads(1)  # the threads that torch had are not here
    lock = threading.Lock()

    def one(number: int, task: Callable[[], Any]) -> None:
        result = task()
        with lock:
            end.send((number, result))

    status = 0
    try:
        run_tasks([(size, partial(one, number, task)) for number, size, task in share], workers)
        end.send((_DONE, None))
    except BrokenPipeError:  # the first process is gone
        status = 1
    except (DlmBridgeError, OSError) as error:
        end.send((_FAILED, error))
    except BaseException as error:
        end.send((_FAILED, RuntimeError(f"{type(error).__name__}: {error}")))
    finally:
        os._exit(status)

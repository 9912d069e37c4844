"""Threads, forked processes and memory of a conversion's tasks.

The memory of concurrent tasks is bounded for any number of threads. Forked processes each run a part of the tasks and
send the results to the parent process.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from math import prod
from multiprocessing import connection, get_context
from typing import TYPE_CHECKING, Any

from dlm_bridge.errors import DlmBridgeError, WorkerError
from dlm_bridge.files.reading import gc_paused
from dlm_bridge.processes import end_with_parent, how_it_ended, leave_inherited, signals_blocked
from dlm_bridge.settings import check_minimum

if TYPE_CHECKING:
    import torch  # imported where tensors are moved

FLOOR = 512 << 20  # bytes that concurrent tasks may always hold
_SMALL = 1 << 20  # bytes; the process's allocator reuses smaller blocks itself
_HUGE_PAGE = 2 << 20
_task = threading.local()
_DONE = -1  # sent instead of a task's number when a process has finished
_FAILED = -2


def worker_count(workers: int | None) -> int:
    """Number of threads; None: one per core, at most eight. Raises SettingError."""
    check_minimum("workers", workers)
    return min(8, os.cpu_count() or 1) if workers is None else workers


def in_flight(sizes: Iterable[int]) -> int:
    """Bytes that concurrent tasks of these sizes may hold: the largest size, at least FLOOR."""
    return max([FLOOR, *sizes])


def run_tasks(tasks: Sequence[tuple[int, Callable[[], None]]], workers: int) -> None:
    """Run (bytes, task) pairs in threads; concurrent tasks hold at most `in_flight` bytes.

    The first exception, also KeyboardInterrupt, stops the remaining tasks and is raised.
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


def run_forked(
    tasks: Sequence[tuple[int, Callable[[], Any]]], processes: int, workers: int, done: Callable[[int, Any], None]
) -> None:
    """Run (bytes, task) pairs in `processes` forked processes of `workers` threads each.

    Args:
        done: called in this process with the number of each finished task and its result.

    Raises:
        WorkerError: a process was killed. The first exception of a task is raised too; it ends all processes.
    """
    context = get_context("fork")
    running = {}
    try:
        for share in _shares([size for size, _ in tasks], processes):
            here, there = context.Pipe(duplex=False)
            mine = [(n, *tasks[n]) for n in share]
            process = context.Process(target=_work, args=(os.getpid(), there, mine, workers))
            # The parent handles Ctrl-C and ends the child, which runs no garbage collection before `leave_inherited`.
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
                    raise WorkerError("processes", f"a worker process {how_it_ended(process.exitcode)}") from None
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
    """Memory blocks for tensors of tasks, reused by later tasks. Unused ones are freed beyond `limit` bytes."""

    def __init__(self, limit: int) -> None:
        self._limit, self._total = limit, 0
        self._free: list[mmap.mmap] = []
        self._lock = threading.Lock()

    @contextmanager
    def task(self) -> Iterator[None]:
        """Context manager: `new_tensor` in this thread uses these blocks. Its tensors are invalid afterwards."""
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
    """Create an uninitialised tensor, in the memory of this thread's task if it runs one."""
    import torch

    memory: TaskMemory | None = getattr(_task, "memory", None)
    nbytes = prod(shape) * dtype.itemsize
    if memory is None or nbytes < _SMALL:
        return torch.empty(tuple(shape), dtype=dtype)
    block = memory._take(nbytes)
    _task.taken.append(block)
    return torch.frombuffer(block, dtype=dtype, count=prod(shape)).view(tuple(shape))


class _Budget:
    """Memory budget in bytes, shared by tasks. A single task may exceed it."""

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
    """Numbers of the tasks of each process, in ascending order, balanced by bytes."""
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
    """Main function of a forked process. It ends with `os._exit`, so that no inherited handler runs and no inherited
    buffer is flushed."""
    import torch

    leave_inherited()
    end_with_parent(parent)
    torch.set_num_threads(1)  # torch's threads were not forked
    lock = threading.Lock()

    def one(number: int, task: Callable[[], Any]) -> None:
        result = task()
        with lock:
            end.send((number, result))

    status = 0
    try:
        run_tasks([(size, partial(one, number, task)) for number, size, task in share], workers)
        end.send((_DONE, None))
    except BrokenPipeError:  # the parent has ended
        status = 1
    except (DlmBridgeError, OSError) as error:
        end.send((_FAILED, error))
    except BaseException as error:
        end.send((_FAILED, RuntimeError(f"{type(error).__name__}: {error}")))
    finally:
        os._exit(status)

"""Runs a conversion's tasks over threads, with the bytes in flight bounded whatever the number of threads."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager

from dlm_bridge.errors import DlmBridgeError

Progress = Callable[[int, int], None]  # (bytes just done, bytes in all); called from any thread
FLOOR = 512 << 20  # bytes that may be in flight even where every tensor is small


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


class _Budget:
    """A number of bytes that holders share; one holder alone may always go on."""

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

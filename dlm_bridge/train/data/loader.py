"""Which samples a step reads, and batches made ahead of time in a background thread.

Sample g of a run counts from zero over all steps and processes; what it holds is a pure function of g and the seed.
Nothing is stored, so a resumed run repeats nothing and skips nothing, on any number of processes.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Generic, TypeVar


@dataclass(frozen=True)
class BatchSampler:
    """The global sample indices of each step."""

    global_batch_size: int

    def samples(self, step: int, process: int, processes: int, micro_batch_size: int) -> list[list[int]]:
        """The global sample indices of one process's micro-batches at `step`, which counts from 1."""
        share = self.global_batch_size // processes
        first = (step - 1) * self.global_batch_size + process * share
        return [
            list(range(start, start + micro_batch_size)) for start in range(first, first + share, micro_batch_size)
        ]


T = TypeVar("T")


class Prefetcher(Generic[T]):
    """`produce(step)` for step = first, first + 1, ..., made in a background thread and handed out in order.

        with Prefetcher(make_batches, first=step + 1) as batches:
            for step in range(step + 1, config.steps + 1):
                train(batches.get())

    At most `depth` results wait, so that memory is bounded. What `produce` raises is raised by the `get` of its step.
    `produce` runs in one thread only, one step at a time, and must depend on nothing but the step.
    """

    def __init__(self, produce: Callable[[int], T], first: int, depth: int = 2) -> None:
        self._produce = produce
        self._ready: queue.Queue[tuple[T | None, BaseException | None]] = queue.Queue(maxsize=depth)
        self._closed = threading.Event()
        self._failure: BaseException | None = None
        # A daemon: an exception that passes by close() does not keep the process alive.
        self._thread = threading.Thread(target=self._run, args=(first,), name="prefetch", daemon=True)
        self._thread.start()

    def get(self) -> T:
        """The result of the step after the last one taken. Waits for it; raises what `produce` raised, again at every
        further call, and RuntimeError after close()."""
        if self._closed.is_set():
            raise RuntimeError("the prefetcher is closed")
        if self._failure is None:
            result, self._failure = self._ready.get()
        if self._failure is not None:
            raise self._failure
        return result  # type: ignore[return-value]

    def close(self) -> None:
        """Stop and wait for the thread, which finishes the step that it is making."""
        self._closed.set()
        while self._thread.is_alive():
            self._drain()  # makes room for a result that the thread is waiting to put
            self._thread.join(timeout=0.1)
        self._drain()

    def __enter__(self) -> Prefetcher[T]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, step: int) -> None:
        while not self._closed.is_set():
            try:
                result: tuple[T | None, BaseException | None] = (self._produce(step), None)
            except BaseException as error:
                result = (None, error)
            self._ready.put(result)
            if result[1] is not None:
                return
            step += 1

    def _drain(self) -> None:
        while True:
            try:
                self._ready.get_nowait()
            except queue.Empty:
                return

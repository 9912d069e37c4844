"""Sample indices of each step, and a background thread that prepares batches ahead of time.

The sample index g counts from zero over all steps and processes. A sample depends only on g and the seed. There is no
state to store, so a resumed run neither repeats nor skips samples, on any number of processes.
"""

from __future__ import annotations

import bisect
import functools
import math
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Generic, TypeVar


@dataclass(frozen=True)
class BatchSampler:
    """Global sample indices of each step. Steps count from 1.

    Args:
        sizes: global batch sizes of the ramp-up, ending with the final size.
        samples_per_size: number of samples of each stage of the ramp-up, as in megatron-core: stage i ends with the
            first step after which the run has read at least i * `samples_per_size` samples.
    """

    sizes: tuple[int, ...]
    samples_per_size: float = 0.0

    def batch_size(self, step: int) -> int:
        """Global batch size of a step."""
        return self._stage(step)[2]

    def samples_before(self, step: int) -> int:
        """Number of samples read by all steps before `step`."""
        first_step, first_sample, size = self._stage(step)
        return first_sample + (step - first_step) * size

    def samples(self, step: int, process: int, processes: int, micro_batch_size: int) -> list[list[int]]:
        """Global sample indices of one process's micro-batches at a step."""
        share = self.batch_size(step) // processes
        first = self.samples_before(step) + process * share
        return [
            list(range(start, start + micro_batch_size)) for start in range(first, first + share, micro_batch_size)
        ]

    def _stage(self, step: int) -> tuple[int, int, int]:
        """(first step, first sample, batch size) of the stage that a step belongs to."""
        return self._stages[bisect.bisect_right(self._stages, step, key=lambda stage: stage[0]) - 1]

    @functools.cached_property
    def _stages(self) -> list[tuple[int, int, int]]:
        stages, step, sample = [], 1, 0
        for number, size in enumerate(self.sizes[:-1], 1):
            steps = max(0, math.ceil((number * self.samples_per_size - sample) / size))
            if steps:
                stages.append((step, sample, size))
            step, sample = step + steps, sample + steps * size
        return [*stages, (step, sample, self.sizes[-1])]


T = TypeVar("T")


class Prefetcher(Generic[T]):
    """Background thread that computes `produce(step)` for step = first, first + 1, ..., and returns results in order.

        with Prefetcher(make_batches, first=step + 1) as batches:
            for step in range(step + 1, config.steps + 1):
                train(batches.get())

    At most `depth` results are buffered. An exception in `produce` is raised by the `get` of the same step. `produce`
    runs in a single thread, one step at a time, and must depend only on the step.
    """

    def __init__(self, produce: Callable[[int], T], first: int, depth: int = 2) -> None:
        self._produce = produce
        self._ready: queue.Queue[tuple[T | None, BaseException | None]] = queue.Queue(maxsize=depth)
        self._closed = threading.Event()
        self._failure: BaseException | None = None
        # A daemon thread, so that the process can exit if close() is not called.
        self._thread = threading.Thread(target=self._run, args=(first,), name="prefetch", daemon=True)
        self._thread.start()

    def get(self) -> T:
        """Wait for the next result and return it. Raises the exception of `produce`, also at every further call, and
        RuntimeError after `close`."""
        if self._closed.is_set():
            raise RuntimeError("the prefetcher is closed")
        if self._failure is None:
            result, self._failure = self._ready.get()
        if self._failure is not None:
            raise self._failure
        return result  # type: ignore[return-value]

    def close(self) -> None:
        """Stop the thread and wait until it has finished its current step."""
        self._closed.set()
        while self._thread.is_alive():
            self._drain()  # unblocks the thread if the buffer is full
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

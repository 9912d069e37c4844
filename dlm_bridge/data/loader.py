"""Which samples a step reads, and batches made ahead of time in a background thread.

Sample g of a run counts from zero over all steps and processes; what it holds is a pure function of g and the seed.
Nothing is stored, so a resumed run repeats nothing and skips nothing, on any number of processes.
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
    """The global sample indices of each step, which counts from 1.

    Args:
        sizes: the global batch sizes that a run begins with, the final one last; each but the last until it has read
            `samples_per_size` samples more than the sizes before it were to read, as megatron-core's ramp-up does.
    """

    sizes: tuple[int, ...]
    samples_per_size: float = 0.0

    def batch_size(self, step: int) -> int:
        """The global batch size of a step."""
        return self._stage(step)[2]

    def samples_before(self, step: int) -> int:
        """How many samples all steps before `step` read together."""
        first_step, first_sample, size = self._stage(step)
        return first_sample + (step - first_step) * size

    def samples(self, step: int, process: int, processes: int, micro_batch_size: int) -> list[list[int]]:
        """The global sample indices of one process's micro-batches at a step."""
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

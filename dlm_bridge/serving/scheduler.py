"""Rows that wait for the model, and the one thread that samples them.

A request puts its rows into a bounded queue; a worker thread hands rows of equal sampler settings to a `RowSampler`,
which may take more of them while it runs. What happens to a row is told to the row's listener, in the worker thread.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.generation.rows import check_stop_strings

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Committed:
    """Tokens of a row that one forward pass committed or changed, anywhere in it.

    Args:
        forwards: forward passes that the row took part in so far.
        positions: counted from the row's first new token.
        tokens: [len(positions)] token ids.
    """

    forwards: int
    positions: tuple[int, ...]
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Extended:
    """The next new tokens of a row that no later step changes; all on their left have been told before."""

    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Ended:
    """A row is complete: its new tokens, up to and including the one that ends it.

    Args:
        stopped: False where it only ran out of room.
    """

    tokens: tuple[int, ...]
    stopped: bool


@dataclass(frozen=True)
class Failed:
    """A row that will not be completed."""

    error: Exception


RowEvent = Committed | Extended | Ended | Failed


@dataclass(eq=False)
class Row:
    """One sequence to sample.

    Args:
        prompt: its tokens.
        settings: the sampler's, without a seed; `gen_length` is among them.
        seed: of the row's own noise; None: any.
        group: equal for rows that can be sampled in one batch.
        listener: is called with every event of the row.
        live: wants `Committed` and `Extended` events.
    """

    prompt: tuple[int, ...]
    settings: Mapping[str, Any]
    seed: int | None
    group: str
    listener: Callable[[RowEvent], None]
    live: bool = True
    cancelled: bool = field(default=False, init=False)
    overtaken: int = field(default=0, init=False)  # rows of other settings that came later and were taken earlier

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return check_stop_strings(self.settings.get("stop_strings"))


class RowSampler(Protocol):
    """Samples rows of one group. Runs in the scheduler's thread, and only there."""

    def run(self, rows: Sequence[Row], scheduler: Scheduler) -> None:
        """Sample the rows, and those that `scheduler.take` gives meanwhile, until none is left. Rows that are
        `cancelled` are dropped. What it raises ends all its rows."""


class QueueFullError(Exception):
    """There is no room in the queue for a request's rows."""


class ClosedError(Exception):
    """The server is being shut down."""


class Scheduler:
    """A bounded queue of rows, and the thread that samples them.

    Args:
        sampler: what samples them.
        batch_size: rows that are sampled at a time, at most.
        queue_size: rows that wait, at most.

    Attributes:
        tokens: new tokens of all rows so far.
        forwards: forward passes of the model so far.
    """

    def __init__(self, sampler: RowSampler, *, batch_size: int, queue_size: int) -> None:
        self._sampler = sampler
        self.batch_size, self.queue_size = batch_size, queue_size
        self.tokens = self.forwards = 0
        self._waiting: deque[Row] = deque()
        self._running: set[Row] = set()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="sample", daemon=True)

    @property
    def waiting(self) -> int:
        """The number of rows in the queue."""
        return len(self._waiting)

    @property
    def room(self) -> int:
        """The number of rows that can be submitted: the queue's free places, and what the next batch takes at once."""
        free = self.batch_size - len(self._running) if not self._waiting else 0
        return self.queue_size + max(free, 0) - len(self._waiting)

    @property
    def running(self) -> int:
        """The number of rows that are being sampled."""
        return len(self._running)

    @property
    def alive(self) -> bool:
        """Whether rows are taken."""
        return self._thread.is_alive() and not self._closed

    @property
    def busy(self) -> bool:
        """True if the thread still runs."""
        return self._thread.is_alive()

    def start(self) -> None:
        self._thread.start()

    def submit(self, rows: Sequence[Row]) -> None:
        """Queue the rows, all or none. Raises QueueFullError or ClosedError."""
        with self._changed:
            if self._closed:
                raise ClosedError
            if len(rows) > self.room:
                raise QueueFullError
            self._waiting.extend(rows)
            self._changed.notify()

    def cancel(self, rows: Sequence[Row]) -> None:
        """Nobody waits for these rows any more: they get no further event."""
        with self._changed:
            for row in rows:
                row.cancelled = True
            self._waiting = deque(row for row in self._waiting if not row.cancelled)

    def close(self, wait_s: float | None = None) -> None:
        """Take no more rows and end those that are here; the thread ends after the forward pass that is running, for
        which this waits so long (None: not at all)."""
        with self._changed:
            self._closed = True
            unfinished = [*self._waiting, *self._running]
            self._waiting.clear()
            self._changed.notify()
        for row in unfinished:
            self.tell(row, Failed(ClosedError()))
            row.cancelled = True
        if wait_s is not None and self._thread.is_alive():
            self._thread.join(wait_s)

    def take(self, group: str, count: int) -> list[Row]:
        """Up to so many rows of the group, which now are running, the oldest first.

        Rows of other groups are overtaken by a batch of rows at most, so that none waits for ever.
        """
        with self._changed:
            taken: list[Row] = []
            passed: list[Row] = []
            for row in self._waiting:
                if len(taken) == count or any(other.overtaken >= self.batch_size for other in passed):
                    break
                if row.group != group:
                    passed.append(row)
                    continue
                taken.append(row)
                for other in passed:
                    other.overtaken += 1
            chosen = set(taken)
            self._waiting = deque(row for row in self._waiting if row not in chosen)
            self._running |= chosen
            return taken

    def tell(self, row: Row, event: RowEvent) -> None:
        """Hand an event to the row's listener; a row without anyone who waits for it gets none."""
        if isinstance(event, Ended):
            self.tokens += len(event.tokens)
        final = isinstance(event, Ended | Failed)
        if final:
            self.drop(row)
        if not row.cancelled and (row.live or final):
            row.listener(event)

    def drop(self, row: Row) -> None:
        """The row has left the batch."""
        with self._changed:
            self._running.discard(row)

    def _work(self) -> None:
        while self._await_rows():
            self._sample()

    def _await_rows(self) -> bool:
        """Wait for rows; False when there will be none."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._waiting)
            return not self._closed

    def _sample(self) -> None:
        """Sample a batch of the oldest row's group."""
        with self._changed:
            rows = self.take(self._waiting[0].group, self.batch_size) if self._waiting else []
        try:
            if rows:
                self._sampler.run(rows, self)
        except Exception as error:
            if not isinstance(error, DlmBridgeError):
                logger.exception("sampling failed")
            with self._changed:
                unfinished = list(self._running)
            for row in unfinished:
                self.tell(row, Failed(error))
        with self._changed:
            self._running.clear()

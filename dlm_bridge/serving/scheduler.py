"""Continuous batching of jobs: a bounded queue and one sampling thread.

The thread submits jobs of equal sampler settings to one sampling engine, also while the engine runs. It passes the
engine's events to the job's listener.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Protocol

from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.generation.request import Ended, Engine, Event, Failed, Request
from dlm_bridge.generation.stopping import check_stop_strings

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Job:
    """One sequence to sample.

    Args:
        prompt: token ids.
        settings: sampler settings with `gen_length`, without the seed.
        seed: seed of the job's random numbers.
        group: key of the engine: jobs with equal keys can share one.
        listener: called with every event.
        constraint: language that the text must belong to, see `Request.constraint`.
        stream: also deliver `Committed` and `Extended` events.
    """

    prompt: tuple[int, ...]
    settings: Mapping[str, Any]
    seed: int | None
    group: str
    listener: Callable[[Event], None]
    constraint: Any = None
    stream: bool = True
    cancelled: bool = field(default=False, init=False)
    overtaken: int = field(default=0, init=False)  # number of later jobs of other groups that were started before

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return check_stop_strings(self.settings.get("stop_strings"))


class OpenEngine(Protocol):
    """Function that opens an engine for the jobs of a group."""

    def __call__(
        self, settings: Mapping[str, Any], max_rows: int, deliver: Callable[[Sequence[Event]], None]
    ) -> Engine: ...


class QueueFullError(Exception):
    """The queue cannot hold a request's jobs."""


class ClosedError(Exception):
    """The server is being shut down."""


class Scheduler:
    """Bounded queue of jobs and the thread that samples them.

    Args:
        open_engine: opens the engine of a group.
        batch_size: maximum number of jobs sampled together.
        queue_size: maximum number of waiting jobs.

    Attributes:
        tokens: new tokens of all finished jobs.
        forwards: forward passes of all closed engines.
    """

    def __init__(self, open_engine: OpenEngine, *, batch_size: int, queue_size: int) -> None:
        self._open_engine = open_engine
        self.batch_size, self.queue_size = batch_size, queue_size
        self.tokens = self.forwards = 0
        self._waiting: deque[Job] = deque()
        self._running: set[Job] = set()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="sample", daemon=True)

    @property
    def waiting(self) -> int:
        """Number of jobs in the queue."""
        return len(self._waiting)

    @property
    def room(self) -> int:
        """Number of jobs that can be submitted: free slots of the queue, and of the batch if no job waits."""
        free = self.batch_size - len(self._running) if not self._waiting else 0
        return self.queue_size + max(free, 0) - len(self._waiting)

    @property
    def running(self) -> int:
        """Number of jobs that are being sampled."""
        return len(self._running)

    @property
    def alive(self) -> bool:
        """True if jobs are accepted."""
        return self._thread.is_alive() and not self._closed

    @property
    def busy(self) -> bool:
        """True if the sampling thread is running."""
        return self._thread.is_alive()

    def start(self) -> None:
        self._thread.start()

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queue the jobs, all or none. Raises QueueFullError or ClosedError."""
        with self._changed:
            if self._closed:
                raise ClosedError
            if len(jobs) > self.room:
                raise QueueFullError
            self._waiting.extend(jobs)
            self._changed.notify()

    def cancel(self, jobs: Sequence[Job]) -> None:
        """Cancel jobs. Their listeners get no further events."""
        with self._changed:
            for job in jobs:
                job.cancelled = True
            self._waiting = deque(job for job in self._waiting if not job.cancelled)

    def close(self, wait_s: float | None = None) -> None:
        """Reject new jobs and fail the present ones. The thread ends after the running forward pass.

        Args:
            wait_s: maximum seconds to wait for the thread; None: do not wait.
        """
        with self._changed:
            self._closed = True
            unfinished = [*self._waiting, *self._running]
            self._waiting.clear()
            self._changed.notify()
        for job in unfinished:
            self._notify(job, Failed(None, ClosedError()))
            job.cancelled = True
        if wait_s is not None and self._thread.is_alive():
            self._thread.join(wait_s)

    def start_jobs(self, group: str, most: int) -> list[Job]:
        """Move up to `most` jobs of the group from the queue to the running ones, the oldest first.

        At most `batch_size` jobs overtake a job of another group, so that every job is sampled eventually.
        """
        with self._changed:
            started: list[Job] = []
            passed: list[Job] = []
            for job in self._waiting:
                if len(started) == most or any(other.overtaken >= self.batch_size for other in passed):
                    break
                if job.group != group:
                    passed.append(job)
                    continue
                started.append(job)
                for other in passed:
                    other.overtaken += 1
            chosen = set(started)
            self._waiting = deque(job for job in self._waiting if job not in chosen)
            self._running |= chosen
            return started

    def _notify(self, job: Job, event: Event) -> None:
        """Pass an event to the listener of the job, unless it is cancelled."""
        if isinstance(event, Ended):
            self.tokens += len(event.tokens)
        final = isinstance(event, Ended | Failed)
        if final:
            self._drop(job)
        if not job.cancelled and (job.stream or final):
            job.listener(event)

    def _drop(self, job: Job) -> None:
        with self._changed:
            self._running.discard(job)

    def _work(self) -> None:
        while self._await_jobs():
            self._sample()

    def _await_jobs(self) -> bool:
        """Wait for jobs. Returns False when the scheduler is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._waiting)
            return not self._closed

    def _sample(self) -> None:
        """Sample the group of the oldest job."""
        with self._changed:
            jobs = self.start_jobs(self._waiting[0].group, self.batch_size) if self._waiting else []
        try:
            if jobs:
                self._run(jobs)
        except Exception as error:
            if not isinstance(error, DlmBridgeError):
                logger.exception("sampling failed")
            with self._changed:
                unfinished = list(self._running)
            for job in unfinished:
                self._notify(job, Failed(None, error))
        with self._changed:
            self._running.clear()

    def _run(self, entering: list[Job]) -> None:
        """Sample these jobs and those of the group that arrive while they run. Returns when all have ended."""
        group, names, running = entering[0].group, count(), dict[Any, Job]()
        own = {name: value for name, value in entering[0].settings.items() if name != "gen_length"}

        def handle(events: Sequence[Event]) -> None:
            for event in events:
                job = running.pop(event.name) if isinstance(event, Ended | Failed) else running[event.name]
                self._notify(job, event)
            for name in [name for name, job in running.items() if job.cancelled]:
                engine.cancel(name)
                self._drop(running.pop(name))

        engine = self._open_engine(own, self.batch_size, handle)
        try:
            while entering or running:
                for job in entering:
                    name = next(names)
                    try:
                        length = job.settings["gen_length"]
                        request = Request(
                            name, job.prompt, length, job.seed, stream=job.stream, constraint=job.constraint
                        )
                        engine.submit(request)
                        running[name] = job
                    except DlmBridgeError as error:
                        self._notify(job, Failed(name, error))
                handle(engine.step())
                entering = self.start_jobs(group, self.batch_size - len(running))
        finally:
            engine.close()
            self.forwards += engine.forwards

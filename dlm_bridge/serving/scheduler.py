"""Jobs that wait for the model, and the one thread that samples them.

A request puts its jobs into a bounded queue; a worker thread gives jobs of equal sampler settings to a sampling
engine, and more of them while it runs. The engine's events go to the job's listener, in the worker thread.
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
        prompt: its tokens.
        settings: the sampler's, without a seed; `gen_length` is among them.
        seed: of its random numbers.
        group: equal for jobs that can be sampled by one engine.
        listener: is called with every event.
        stream: wants `Committed` and `Extended` events.
    """

    prompt: tuple[int, ...]
    settings: Mapping[str, Any]
    seed: int | None
    group: str
    listener: Callable[[Event], None]
    stream: bool = True
    cancelled: bool = field(default=False, init=False)
    overtaken: int = field(default=0, init=False)  # jobs of other settings that came later and were taken earlier

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return check_stop_strings(self.settings.get("stop_strings"))


class OpenEngine(Protocol):
    """Opens an engine for the jobs of a group."""

    def __call__(
        self, settings: Mapping[str, Any], max_rows: int, deliver: Callable[[Sequence[Event]], None]
    ) -> Engine: ...


class QueueFullError(Exception):
    """The queue has no room for a request's jobs."""


class ClosedError(Exception):
    """The server is being shut down."""


class Scheduler:
    """A bounded queue of jobs, and the thread that samples them.

    Args:
        open_engine: opens the engine of a group.
        batch_size: jobs that are sampled at a time, at most.
        queue_size: jobs that wait, at most.

    Attributes:
        tokens: new tokens of all jobs so far.
        forwards: forward passes of the model so far.
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
        """The number of jobs in the queue."""
        return len(self._waiting)

    @property
    def room(self) -> int:
        """The number of jobs that can be submitted: the queue's free places, and what the next batch takes at once."""
        free = self.batch_size - len(self._running) if not self._waiting else 0
        return self.queue_size + max(free, 0) - len(self._waiting)

    @property
    def running(self) -> int:
        """The number of jobs that are being sampled."""
        return len(self._running)

    @property
    def alive(self) -> bool:
        """True if jobs are accepted."""
        return self._thread.is_alive() and not self._closed

    @property
    def busy(self) -> bool:
        """True if the thread still runs."""
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
        """Drop jobs that nobody waits for any more: they get no further event."""
        with self._changed:
            for job in jobs:
                job.cancelled = True
            self._waiting = deque(job for job in self._waiting if not job.cancelled)

    def close(self, wait_s: float | None = None) -> None:
        """Accept no more jobs and fail the present ones; the thread ends after the running forward pass.

        Args:
            wait_s: seconds to wait for the thread; None: do not wait.
        """
        with self._changed:
            self._closed = True
            unfinished = [*self._waiting, *self._running]
            self._waiting.clear()
            self._changed.notify()
        for job in unfinished:
            self._tell(job, Failed(None, ClosedError()))
            job.cancelled = True
        if wait_s is not None and self._thread.is_alive():
            self._thread.join(wait_s)

    def take(self, group: str, most: int) -> list[Job]:
        """Mark up to `most` jobs of the group as running, the oldest first.

        Jobs of other groups are overtaken by a batch of jobs at most, so that none waits for ever.
        """
        with self._changed:
            taken: list[Job] = []
            passed: list[Job] = []
            for job in self._waiting:
                if len(taken) == most or any(other.overtaken >= self.batch_size for other in passed):
                    break
                if job.group != group:
                    passed.append(job)
                    continue
                taken.append(job)
                for other in passed:
                    other.overtaken += 1
            chosen = set(taken)
            self._waiting = deque(job for job in self._waiting if job not in chosen)
            self._running |= chosen
            return taken

    def _tell(self, job: Job, event: Event) -> None:
        """Give an event to the job's listener, unless nobody waits for the job."""
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
        """Wait for jobs. Returns False when there will be none."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._waiting)
            return not self._closed

    def _sample(self) -> None:
        """Sample the jobs of the oldest one's group."""
        with self._changed:
            jobs = self.take(self._waiting[0].group, self.batch_size) if self._waiting else []
        try:
            if jobs:
                self._run(jobs)
        except Exception as error:
            if not isinstance(error, DlmBridgeError):
                logger.exception("sampling failed")
            with self._changed:
                unfinished = list(self._running)
            for job in unfinished:
                self._tell(job, Failed(None, error))
        with self._changed:
            self._running.clear()

    def _run(self, entering: list[Job]) -> None:
        """Sample these jobs, and those of their group that arrive meanwhile, until none is left."""
        group, names, running = entering[0].group, count(), dict[Any, Job]()
        own = {name: value for name, value in entering[0].settings.items() if name != "gen_length"}

        def handle(events: Sequence[Event]) -> None:
            for event in events:
                job = running.pop(event.name) if isinstance(event, Ended | Failed) else running[event.name]
                self._tell(job, event)
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
                        engine.submit(Request(name, job.prompt, length, job.seed, stream=job.stream))
                        running[name] = job
                    except DlmBridgeError as error:
                        self._tell(job, Failed(name, error))
                handle(engine.step())
                entering = self.take(group, self.batch_size - len(running))
        finally:
            engine.close()
            self.forwards += engine.forwards

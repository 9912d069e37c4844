"""A request in progress: the events of its jobs, until every choice is finished or the request is cancelled."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from fastapi import Request

from dlm_bridge.errors import DlmBridgeError, NonFiniteError, RowError
from dlm_bridge.generation.request import MASK, Ended, Event, Extended, Failed
from dlm_bridge.serving.choices import Choice
from dlm_bridge.serving.metrics import Metrics
from dlm_bridge.serving.model import ServedModel
from dlm_bridge.serving.protocol import AnswerBodies, RequestError, TextRequest
from dlm_bridge.serving.routes import closed, queue_full, timed_out, unless_left
from dlm_bridge.serving.scheduler import ClosedError, Job, QueueFullError, Scheduler
from dlm_bridge.serving.scores import Bounded, Scored


class Call:
    """A request in progress.

    Args:
        began: arrival of the request in the loop's time.
    """

    def __init__(
        self,
        request: TextRequest,
        bodies: type[AnswerBodies],
        loop: asyncio.AbstractEventLoop,
        served: ServedModel,
        scheduler: Scheduler,
        metrics: Metrics,
        began: float,
    ) -> None:
        self.request, self._bodies, self.jobs = request, bodies, list[Job]()
        self.choices: list[Choice] = []
        self._loop, self._served, self._scheduler, self._metrics = loop, served, scheduler, metrics
        self._began = began
        self._queue: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self._timer: asyncio.TimerHandle | None = None
        self._saw_token = False

    def listener(self, index: int) -> Callable[[Event], None]:
        """Listener of a choice's job, called in the scheduler's thread."""

        def enqueue(event: Event) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._queue.put_nowait, (index, event))

        return enqueue

    def submit(self, jobs: list[Job], timeout_s: float) -> None:
        """Queue the jobs. Raises RequestError if the queue is full."""
        self.jobs = jobs
        # A prompt with several choices counts once; its jobs are adjacent.
        given = sum(len(job.prompt) - job.prompt.count(MASK) for job in jobs[:: self.request.choices])
        self.answer = self._bodies(self.request, self._served.name, given, self._served.decode)
        infill = self.request.infill
        self.choices = [
            Choice(
                self._served.decode,
                job.stop_strings,
                job.prompt if infill else (),
                constraint=job.constraint,
                calls=self._served.call_parser(self.request),
            )
            for job in jobs
        ]
        try:
            self._scheduler.submit(jobs)
        except QueueFullError:
            raise queue_full(self._metrics) from None
        except ClosedError:
            raise closed() from None
        self._metrics.accepted(self.answer.prompt_tokens)
        self._timer = self._loop.call_at(self._began + timeout_s, self._expire, timeout_s)

    async def events(self) -> AsyncIterator[tuple[int, Event]]:
        """The jobs' events, until every choice is finished. Raises RequestError for a failure."""
        try:
            while any(choice.finish_reason is None for choice in self.choices):
                index, event = await self._queue.get()
                if isinstance(event, Failed):
                    raise self._failure(event.error, index)
                if not (self._saw_token or isinstance(event, Ended)):
                    self._saw_token = True
                    self._metrics.first_token(self._loop.time() - self._began)
                yield index, event
            self._metrics.answered(self._loop.time() - self._began)
        finally:
            self.close()

    def add(self, index: int, event: Event) -> tuple[str, str | None]:
        """The text that an event adds to its choice, and the finish reason if the choice is finished."""
        choice = self.choices[index]
        if choice.finish_reason is not None or not isinstance(event, Extended | Ended | Scored | Bounded):
            return "", None
        piece = choice.add(event)
        if choice.finish_reason is not None and not isinstance(event, Ended):
            self._scheduler.cancel([self.jobs[index]])  # a stop string inside the block
        return piece, choice.finish_reason

    async def whole(self, request: Request) -> None:
        """Wait until every choice is finished. Raises RequestError for a failure or a disconnected client."""

        async def finish() -> None:
            async for index, event in self.events():
                self.add(index, event)

        try:
            await unless_left(request, finish())
        finally:
            self.close()

    def close(self) -> None:
        """Cancel the jobs."""
        if self._timer is not None:
            self._timer.cancel()
        self._scheduler.cancel(self.jobs)

    def _expire(self, timeout_s: float) -> None:
        """Cancel the jobs and report the timeout, even to a client that does not read its answer."""
        self._scheduler.cancel(self.jobs)
        self._queue.put_nowait((0, Failed(None, TimeoutError(timeout_s))))

    def _failure(self, error: Exception, index: int) -> RequestError:
        if isinstance(error, TimeoutError):
            return timed_out(error.args[0])
        if isinstance(error, ClosedError):
            return closed()
        choice = f"choice {index}: " if len(self.choices) > 1 else ""
        if isinstance(error, NonFiniteError):  # presumably not the request's fault
            return RequestError(f"{choice}{error.reason}", 500, kind="server_error", code="non_finite_logits")
        if isinstance(error, RowError):
            return RequestError(f"{choice}{error.reason}")
        if isinstance(error, DlmBridgeError):
            return RequestError(str(error), param=error.field)
        return RequestError("sampling failed: see the server's log", 500, kind="server_error")

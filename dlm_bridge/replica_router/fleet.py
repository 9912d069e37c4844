"""Replica processes: their start, their replacement when they die, and their end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import signal
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import httpx
from prometheus_client.parser import text_string_to_metric_families

from dlm_bridge.errors import WorkerError
from dlm_bridge.processes import how_it_ended
from dlm_bridge.replica_router.replica import ROUTER
from dlm_bridge.serving.metrics import PREFIX

logger = logging.getLogger(__name__)
ADDRESS = re.compile(r"(http://127\.0\.0\.1:\d+)/v1")  # in the line of a server that is ready
LINE = 2**20  # maximum length of a line that a replica prints
CHECK_S, PATIENCE_S = 5.0, 60.0  # time between two checks of a replica; maximum time until it answers one
END_S = 9.0  # from SIGTERM to SIGKILL
MAX_WAIT_S = 60.0  # maximum time between two starts
STARTS = 5  # failed starts in a row that end a server without any other replica
KEPT_LINES = 50  # of stderr, during a start
IDLE_S = 2.0  # connections are closed by the router, before a replica closes them after 5 s


class Replica:
    """A server process, and its successors.

    Attributes:
        ready: true if it accepts requests.
        client: HTTP client of the running process.
        batch_size: number of texts that it samples together.
        started: number of processes that became ready so far.
        greeting: the line that the first one printed when it was ready.
    """

    def __init__(
        self, index: int, command: Sequence[str], environment: Mapping[str, str], changed: Callable[[Replica], None]
    ) -> None:
        self.index, self.ready, self.batch_size, self.started, self.greeting = index, False, 1, 0, ""
        self.client = httpx.AsyncClient()
        self._command, self._environment, self._changed = command, environment, changed
        self._process: asyncio.subprocess.Process | None = None
        self._readers: list[asyncio.Task[None]] = []
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)  # of stderr, until the process is ready
        self._doubted = asyncio.Event()

    async def start(self) -> bool:
        """Start a process and wait until it accepts requests. Returns False if it ends before."""
        loop, self._lines = asyncio.get_running_loop(), deque(maxlen=KEPT_LINES)
        # From the main thread: the kernel ends a replica when the thread that started it ends.
        self._process = process = await asyncio.create_subprocess_exec(
            *self._command,
            env={**self._environment, ROUTER: str(os.getpid())},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            process_group=0,  # Ctrl-C reaches the router alone
            limit=LINE,
        )
        assert process.stdout is not None
        assert process.stderr is not None
        address: asyncio.Future[str] = loop.create_future()
        self._readers = [
            asyncio.create_task(self._read_stdout(process.stdout, address)),
            asyncio.create_task(self._read_stderr(process.stderr, address)),
        ]
        ended = asyncio.ensure_future(process.wait())
        await asyncio.wait((address, ended), return_when=asyncio.FIRST_COMPLETED)
        if not address.done():
            await asyncio.wait(self._readers, timeout=1)  # the reason may still be in the pipe
            return False
        ended.cancel()
        await self.client.aclose()
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=IDLE_S)
        timeout = httpx.Timeout(None, connect=PATIENCE_S)
        self.client = httpx.AsyncClient(base_url=address.result(), limits=limits, timeout=timeout, trust_env=False)
        try:
            self.batch_size = int(await self._metric(f"{PREFIX}_batch_size"))
        except httpx.HTTPError:  # it has just ended
            self.kill()
            return False
        for line in self._lines:
            self._print(line)
        self.started += 1
        self._set_ready(True)
        return True

    async def supervise(self) -> str:
        """Wait until the process has ended. One that does not answer is killed. Returns how it ended."""
        assert self._process is not None
        process = self._process
        while process.returncode is None:
            waiting = [asyncio.ensure_future(process.wait()), asyncio.ensure_future(self._doubted.wait())]
            await asyncio.wait(waiting, timeout=CHECK_S, return_when=asyncio.FIRST_COMPLETED)
            for each in waiting:
                each.cancel()
            if process.returncode is None and not await self._is_healthy(process):
                self.kill()
                await process.wait()
        self._set_ready(False)
        return how_it_ended(process.returncode)

    def doubt(self, started: int) -> None:
        """Send no requests until a check has succeeded, after a request has failed.

        Args:
            started: value of `started` when the request was sent.
        """
        if started == self.started and self.ready:
            self._set_ready(False)
            self._doubted.set()

    @property
    def reason(self) -> str:
        """What a process printed that ended before it was ready."""
        return "\n".join(self._lines)

    @property
    def exit_code(self) -> int:
        """Exit code of the last process."""
        code = None if self._process is None else self._process.returncode
        return 1 if code is None else code if code >= 0 else 128 - code

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal to the process, if it runs."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def end(self) -> None:
        """Wait for the end of the process, and kill it if it does not end in time."""
        if self._process is not None:
            try:
                await asyncio.wait_for(self._process.wait(), END_S)
            except TimeoutError:
                self.kill()
                await self._process.wait()
        await asyncio.wait(self._readers, timeout=1) if self._readers else None
        await self.client.aclose()

    async def _is_healthy(self, process: asyncio.subprocess.Process) -> bool:
        """True if the process answers that it is well; in doubt its connections are closed first."""
        doubted = self._doubted.is_set()
        self._doubted.clear()
        asking = asyncio.ensure_future(self.client.get("/health", timeout=PATIENCE_S))
        ended = asyncio.ensure_future(process.wait())
        await asyncio.wait((asking, ended), return_when=asyncio.FIRST_COMPLETED)
        ended.cancel()
        if not asking.done():
            asking.cancel()
            return True  # it has ended, which the caller sees
        failed = asking.exception() is not None or asking.result().status_code != 200
        if failed:
            with contextlib.suppress(TimeoutError):  # it may be ending by itself
                await asyncio.wait_for(process.wait(), CHECK_S)
            return process.returncode is not None
        if doubted:
            self._set_ready(True)
        return True

    async def _metric(self, name: str) -> float:
        for family in text_string_to_metric_families((await self.client.get("/metrics")).text):
            if family.name == name:
                return float(family.samples[0].value)
        raise KeyError(name)

    async def _read_stdout(self, stream: asyncio.StreamReader, address: asyncio.Future[str]) -> None:
        while line := await _line(stream):
            found = ADDRESS.findall(line)
            if found and not address.done():
                address.set_result(found[-1])
                self.greeting = self.greeting or line

    async def _read_stderr(self, stream: asyncio.StreamReader, address: asyncio.Future[str]) -> None:
        """Pass on what the process prints: at once if it is ready, else when it is, or in `reason`."""
        while line := await _line(stream):
            if self.ready or address.done():
                self._print(line.rstrip())
            else:
                self._lines.append(line.rstrip())

    def _print(self, line: str) -> None:
        print(f"replica {self.index}: {line}", file=sys.stderr, flush=True)

    def _set_ready(self, ready: bool) -> None:
        if ready != self.ready:
            self.ready = ready
            self._changed(self)


async def _line(stream: asyncio.StreamReader) -> str:
    """The next line; empty at the end. A line that is too long is skipped."""
    while True:
        try:
            return (await stream.readline()).decode(errors="replace")
        except ValueError:
            continue


class Fleet:
    """All replicas, each with a task that replaces its process.

    Args:
        commands: command line and environment of each replica.
        changed: called when a replica has become ready, or is not any more.
        failed: called when no replica is left and none starts.
    """

    def __init__(
        self,
        commands: Sequence[tuple[Sequence[str], Mapping[str, str]]],
        changed: Callable[[Replica], None],
        failed: Callable[[], None],
    ) -> None:
        self.replicas = [Replica(index, *command, changed) for index, command in enumerate(commands)]
        self.replaced = [0] * len(commands)
        self.failure: WorkerError | None = None
        self._failed = failed
        self._tasks: list[asyncio.Task[None]] = []
        self._closed = False

    async def start(self, interrupted: Callable[[], bool]) -> None:
        """Start all replicas and wait until they are ready, or until `interrupted`. If one fails, the others are
        ended, and SystemExit is raised after what that one printed."""
        starts = {asyncio.create_task(each.start()): each for each in self.replicas}
        waiting = set(starts)
        while waiting and not interrupted():
            done, waiting = await asyncio.wait(waiting, timeout=0.1, return_when=asyncio.FIRST_COMPLETED)
            for one in done:
                if not one.result():
                    await self._give_up(waiting)
                    print(starts[one].reason, file=sys.stderr, flush=True)
                    raise SystemExit(starts[one].exit_code or 1)
        if waiting:
            await self._give_up(waiting)
            return
        self._tasks = [asyncio.create_task(self._keep(each)) for each in self.replicas]

    def close(self) -> None:
        """Ask all processes to end, and replace none."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        for each in self.replicas:
            each.kill(signal.SIGTERM)

    async def end(self) -> None:
        """Wait until all processes have ended."""
        self.close()
        await asyncio.gather(*(each.end() for each in self.replicas))

    async def _give_up(self, starts: set[asyncio.Task[bool]]) -> None:
        for each in self.replicas:
            each.kill()
        for one in starts:
            one.cancel()
        await self.end()

    async def _keep(self, replica: Replica) -> None:
        """Replace the replica's process whenever it has ended."""
        failures = 0
        while True:
            ended = await replica.supervise()
            if self._closed:
                return
            logger.warning(f"replica {replica.index} {ended}: it is replaced")
            while not await replica.start():
                failures += 1
                if self._closed:
                    return
                reason = "".join(replica.reason.splitlines()[-1:])
                logger.warning(f"replica {replica.index} did not start: {reason or 'it printed nothing'}")
                if failures >= STARTS and not any(each.ready for each in self.replicas):
                    self.failure = WorkerError("replicas", f"none is left, and {failures} starts failed")
                    self._failed()
                    return
                await asyncio.sleep(min(2.0**failures, MAX_WAIT_S))
            failures = 0
            self.replaced[replica.index] += 1

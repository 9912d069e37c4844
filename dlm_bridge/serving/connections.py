"""The HTTP server under our applications: limits of connections, of their time and of what they log, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import signal
import socket
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, Literal

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from dlm_bridge.errors import SettingError

LOOPBACK = ("localhost", "127.0.0.1", "::1", "[::1]")  # names of this machine in the header Host
GRACE_S = 2.5
HEADER_S = 15.0  # for a request's header to come, from its first byte or the connection's start
SEND_S = 60.0  # for a client to read what it is sent
MAX_DESCRIPTORS = 10_240  # asked of the system, where its hard limit allows; macOS gives no more
MIN_CONNECTIONS = 1024  # taken at a time, where the descriptors suffice
BACKLOG = 2048  # connections that wait to be accepted, uvicorn's own default
REPEAT_S = 60.0  # between two lines of the log that say the same
# Beginnings of messages that clients can cause as often as they like.
REPEATED = ("socket.accept() out of system resource", "Exceeded concurrency limit", "Invalid HTTP request received")


class Connection(H11Protocol):
    """An HTTP connection that is closed if a header, or the client's reading of an answer, takes too long.

    A new connection above the limit takes the place of the one that has been idle for the longest time.
    """

    _header_timer: asyncio.TimerHandle | None = None
    _send_timer: asyncio.TimerHandle | None = None

    @property
    def idle(self) -> bool:
        """True if no request is running."""
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.heard = self.loop.time()  # from the client, the last time
        self._await_header()
        limit = self.config.limit_concurrency
        if limit is not None and len(self.connections) >= limit:
            others = [one for one in self.connections if isinstance(one, Connection) and one is not self and one.idle]
            if (other := min(others, key=lambda one: one.heard, default=None)) is not None:
                other.timeout_keep_alive_handler()
                self.connections.discard(other)

    def data_received(self, data: bytes) -> None:
        self.heard = self.loop.time()
        super().data_received(data)
        if not self.idle:
            self._stop(self._header_timer)
            self._header_timer = None
        elif self._header_timer is None:
            self._await_header()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._send_timer = self.loop.call_later(SEND_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop(self._send_timer)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop(self._header_timer)
        self._stop(self._send_timer)

    def _await_header(self) -> None:
        self._header_timer = self.loop.call_later(HEADER_S, self.timeout_keep_alive_handler)

    def _stop(self, timer: asyncio.TimerHandle | None) -> None:
        if timer is not None:
            timer.cancel()


def connection_limits(requests: int) -> tuple[int, int]:
    """uvicorn's `limit_concurrency` and `backlog` for a server that holds up to `requests` at a time: together at most
    three quarters of the file descriptors, whose soft limit is raised where the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    descriptors = MAX_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft
    return min(max(MIN_CONNECTIONS, 2 * requests), descriptors // 2), min(BACKLOG, descriptors // 4)


class _OncePerMinute(logging.Filter):
    """Drops a message of `REPEATED` that was logged within REPEAT_S, and the traceback of one that was not."""

    def __init__(self) -> None:
        super().__init__()
        self._next: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        said: Any = next((text for text in REPEATED if str(record.msg).startswith(text)), None)
        if said is None:
            return True
        record.exc_info = record.exc_text = None
        now = time.monotonic()
        if now < self._next.get(said, now):
            return False
        self._next[said] = now + REPEAT_S
        return True


_once_per_minute = _OncePerMinute()


def limit_log() -> None:
    """Log what clients can cause at will once a minute."""
    for name in ("asyncio", "uvicorn.error"):
        logging.getLogger(name).addFilter(_once_per_minute)


class HttpServer(uvicorn.Server):
    """uvicorn on a bound socket, which SIGINT and SIGTERM end.

    Args:
        app: the ASGI application.
        sock: bound to the address; see `bind`.
        when_ready: is called once requests are taken.
        requests: held at a time, at most.
        grace_s: at the end, seconds for answers to be sent before connections are cut.
        lifespan: whether the application has events of its start and end.
    """

    def __init__(
        self,
        app: Any,
        sock: socket.socket,
        when_ready: Callable[[], None] = lambda: None,
        *,
        requests: int = 0,
        grace_s: float = GRACE_S,
        lifespan: Literal["on", "off"] = "off",
    ) -> None:
        self._sock, self._when_ready, self._grace_s = sock, when_ready, grace_s
        self.interrupted = False
        connections, backlog = connection_limits(requests)
        super().__init__(
            uvicorn.Config(
                app,
                http=Connection,
                ws="none",
                lifespan=lifespan,
                log_level="warning",
                access_log=False,
                limit_concurrency=connections,
                backlog=backlog,
                timeout_graceful_shutdown=int(grace_s) + 1,  # connections are cut before
            )
        )
        limit_log()

    def serve_forever(self) -> None:
        """Serve requests until SIGINT or SIGTERM. Raises KeyboardInterrupt after SIGINT."""
        self.run(sockets=[self._sock])
        if self.interrupted:
            raise KeyboardInterrupt

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.interrupted |= sig == signal.SIGINT
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._when_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Wait for answers that are being sent, and cut the connections of clients that do not read theirs."""
        asyncio.get_running_loop().call_later(self._grace_s, self._cut)
        await super().shutdown(sockets)

    def _cut(self) -> None:
        for connection in list(self.server_state.connections):
            if connection.transport is not None:
                connection.transport.abort()


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to the address, which does not accept connections yet. Raises SettingError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, protocol)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        raise SettingError("port", f"{port} of {host}: {error.strerror}: set another `port` or `host`") from error
    return sock

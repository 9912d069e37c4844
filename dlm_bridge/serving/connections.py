"""HTTP server with limits on connections, their duration and their log messages, and an orderly shutdown."""

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
HEADER_S = 15.0  # maximum time to receive a header, from its first byte or the connection's start
SEND_S = 60.0  # maximum time until a client reads pending data
MAX_DESCRIPTORS = 10_240  # soft limit to request, the maximum of macOS
MIN_CONNECTIONS = 1024  # connection limit if the descriptors suffice
BACKLOG = 2048  # connections that wait to be accepted, uvicorn's default
REPEAT_S = 60.0  # minimum time between two equal log messages
# Prefixes of log messages that clients can trigger without limit.
REPEATED = ("socket.accept() out of system resource", "Exceeded concurrency limit", "Invalid HTTP request received")


class Connection(H11Protocol):
    """HTTP connection that is closed if the client takes too long to send a header or to read an answer.

    A new connection above the limit replaces the one that has been idle longest.
    """

    _header_timer: asyncio.TimerHandle | None = None
    _send_timer: asyncio.TimerHandle | None = None

    @property
    def idle(self) -> bool:
        """True if no request is running."""
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.heard = self.loop.time()  # time of the last data from the client
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
    """uvicorn's `limit_concurrency` and `backlog` for a server of up to `requests` concurrent requests.

    Together they are at most three quarters of the file descriptors. Raises the soft limit of those if possible.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    descriptors = MAX_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft
    return min(max(MIN_CONNECTIONS, 2 * requests), descriptors // 2), min(BACKLOG, descriptors // 4)


class _OncePerMinute(logging.Filter):
    """Filter that drops a message of `REPEATED` logged within the last REPEAT_S, and the tracebacks of the others."""

    def __init__(self) -> None:
        super().__init__()
        self._next: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        prefix: Any = next((text for text in REPEATED if str(record.msg).startswith(text)), None)
        if prefix is None:
            return True
        record.exc_info = record.exc_text = None
        now = time.monotonic()
        if now < self._next.get(prefix, now):
            return False
        self._next[prefix] = now + REPEAT_S
        return True


_once_per_minute = _OncePerMinute()


def limit_log() -> None:
    """Log messages that clients can trigger at most once per minute."""
    for name in ("asyncio", "uvicorn.error"):
        logging.getLogger(name).addFilter(_once_per_minute)


class HttpServer(uvicorn.Server):
    """uvicorn on a bound socket, stopped by SIGINT and SIGTERM.

    Args:
        app: ASGI application.
        sock: bound socket; see `bind`.
        when_ready: called when the server accepts requests.
        requests: maximum number of concurrent requests.
        grace_s: seconds during shutdown until open connections are closed.
        lifespan: "on" if the application has startup and shutdown events.
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
                timeout_graceful_shutdown=int(grace_s) + 1,  # connections are closed before
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
        """Wait until pending answers are sent; close the connections of clients that do not read theirs."""
        asyncio.get_running_loop().call_later(self._grace_s, self._abort)
        await super().shutdown(sockets)

    def _abort(self) -> None:
        for connection in list(self.server_state.connections):
            if connection.transport is not None:
                connection.transport.abort()


def bind(host: str, port: int) -> socket.socket:
    """Socket bound to the address, not listening yet. Raises SettingError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, protocol)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        raise SettingError("port", f"{port} of {host}: {error.strerror}: set another `port` or `host`") from error
    return sock

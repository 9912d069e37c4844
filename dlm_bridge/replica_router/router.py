"""The router: an HTTP server with the endpoints of `serve`, which passes requests on to replicas.

A request is read and checked here, waits in the router's queue and goes to one replica. If that replica dies before
any text was sent to the client, the request goes to another one: with a seed its text is the same. A stream whose text
has begun ends with an error.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from typing import Any

import httpx
from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from dlm_bridge.replica_router.dispatch import Dispatcher, Ticket, prompt_blocks
from dlm_bridge.replica_router.fleet import Fleet, Replica
from dlm_bridge.replica_router.metrics import RouterMetrics
from dlm_bridge.serving.connections import HttpServer
from dlm_bridge.serving.options import ServeOptions
from dlm_bridge.serving.protocol import RequestError, TextRequest, parse_infill, parse_request
from dlm_bridge.serving.responses import parse_response
from dlm_bridge.serving.routes import Routes, build_app, closed, timed_out, unless_left
from dlm_bridge.serving.server import LINGER_S

RETRIES = 2  # of a request, each after a replica died: it may be the request that ends them
SENT_ON = ("accept", "authorization", "content-type", "host", "user-agent")  # headers of a request
# Headers of an answer that belong to its connection, or that this server writes.
OWN_HEADERS = {"connection", "content-length", "date", "keep-alive", "server", "transfer-encoding"}
STREAM = "text/event-stream"
# Types of events that come before the text: of /v1/commits, and of the Responses API.
OPENINGS = {
    "start", "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"
}  # fmt: skip
SCRAPE_S = 5.0  # maximum time until a replica answers with its metrics


class ReplicaLostError(Exception):
    """The replica has died, or ends."""


class RouterServer(HttpServer):
    """HTTP server in front of replicas. It listens when all of them are ready.

    Args:
        commands: command line and environment of each replica.
        when_ready: called when the server accepts requests, with the line that a replica printed when it was ready.
    """

    def __init__(
        self,
        commands: Sequence[tuple[Sequence[str], Mapping[str, str]]],
        options: ServeOptions,
        sock: socket.socket,
        when_ready: Callable[[str], None],
    ) -> None:
        self._fleet = Fleet(commands, self._changed, self._end)
        self._dispatcher = Dispatcher(self._fleet.replicas, options.queue_size)
        self._routes = _Routes(self._fleet, self._dispatcher, options)
        rows = 2 * len(commands) * (options.batch_size or 256)  # unknown before they start, if set by memory
        super().__init__(
            build_app(self._routes, options),
            sock,
            lambda: when_ready(self._fleet.replicas[0].greeting),
            requests=rows + options.queue_size,
        )

    def serve_forever(self) -> None:
        try:
            super().serve_forever()
        finally:
            self._routes.reader.shutdown(wait=False, cancel_futures=True)
        if self._fleet.failure is not None:
            raise self._fleet.failure

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().serve(sockets)
        finally:
            await self._fleet.end()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await self._fleet.start(lambda: self.should_exit)
        if not self.should_exit:
            await super().startup(sockets)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._routes.close()
        self._fleet.close()
        await asyncio.sleep(LINGER_S)
        await super().shutdown(sockets)

    def _changed(self, replica: Replica) -> None:
        if not replica.ready:
            self._dispatcher.forget(replica)
        self._dispatcher.dispatch()

    def _end(self) -> None:
        self.should_exit = True


class _Routes(Routes):
    def __init__(self, fleet: Fleet, dispatcher: Dispatcher, options: ServeOptions) -> None:
        self._fleet, self._dispatcher = fleet, dispatcher
        self._figures = RouterMetrics(fleet, dispatcher)
        super().__init__(options, self._figures, options.queue_size)

    @property
    def room(self) -> int:
        return self._dispatcher.room

    async def complete(self, request: Request, *, chat: bool) -> Response:
        return await self._answer(request, lambda raw: parse_request(raw, chat))

    async def respond(self, request: Request) -> Response:
        return await self._answer(request, parse_response)

    async def infill(self, request: Request) -> Response:
        return await self._answer(request, parse_infill)

    async def commits(self, request: Request) -> Response:
        return await self._answer(request, lambda raw: parse_request(raw, None))

    async def health(self, request: Request) -> Response:
        ready = sum(each.ready for each in self._fleet.replicas)
        status = "ending" if self._closed else "ok" if ready else "no replica is ready"
        replicas = {"replicas": len(self._fleet.replicas), "ready": ready}
        return JSONResponse({"status": status, **replicas}, 200 if status == "ok" else 503)

    async def figures(self, request: Request) -> Response:
        ready = [each for each in self._fleet.replicas if each.ready]
        asked = [each.client.get("/metrics", timeout=SCRAPE_S) for each in ready]
        found = await asyncio.gather(*asked, return_exceptions=True)
        texts = {
            each.index: one.text for each, one in zip(ready, found, strict=True) if isinstance(one, httpx.Response)
        }
        return Response(self._figures.text(texts), media_type="text/plain; version=0.0.4")

    async def _read_only(self, request: Request) -> Response:
        """The answer of the first replica that is ready."""
        for replica in self._fleet.replicas:
            if replica.ready:
                with contextlib.suppress(httpx.TransportError):
                    url = httpx.URL(path=request.url.path, query=request.url.query.encode() or None)
                    answer = await replica.client.request(request.method, url, headers=_headers(request))
                    return Response(answer.content, answer.status_code, _own_headers(answer))
        raise RequestError("no replica is ready: try again later", 503, kind="server_error", code="no_replica")

    models = model = home = docs = load_model = _read_only

    async def _answer(self, request: Request, parse: Callable[[bytes], TextRequest]) -> Response:
        began = asyncio.get_running_loop().time()
        async with self.arrival(began):
            raw, asked = await self.read(request, parse)
            with self.slots(asked.texts):
                ticket = Ticket(asked.texts, prompt_blocks(asked))
            relays: list[_Relay] = []
            try:
                return await unless_left(request, self._sampled(request, raw, ticket, began, relays))
            except BaseException:
                for relay in relays:  # a stream that has just begun
                    await relay.close()
                raise

    async def _sampled(
        self, request: Request, raw: bytes, ticket: Ticket, began: float, relays: list[_Relay]
    ) -> Response:
        """The answer of a replica, of another one if it dies before there is a text to send."""
        for tries in range(RETRIES + 1):
            replica = await self._dispatcher.acquire(ticket, first=tries > 0)
            relay = _Relay(replica, partial(self._dispatcher.release, replica, ticket))
            relays.append(relay)
            try:
                if not await relay.open(request, raw):
                    self._figures.answered(asyncio.get_running_loop().time() - began)
                    return relay.whole
                return _Stream(relay, self._pieces(relay, began))
            except ReplicaLostError:
                self._figures.retry()
            finally:
                if not relay.is_stream:
                    await relay.close()
        message = f"{RETRIES + 1} replicas ended while they sampled the request"
        raise RequestError(message, 503, kind="server_error", code="replica_lost")

    async def _pieces(self, relay: _Relay, began: float) -> AsyncIterator[bytes]:
        """Bytes of a stream. An error is the last event."""
        deadline = began + self.options.timeout
        try:
            while True:
                async with asyncio.timeout_at(deadline):
                    piece = await relay.piece()
                if not piece:
                    break
                yield piece
            self._figures.answered(asyncio.get_running_loop().time() - began)
        except TimeoutError:
            yield _event(timed_out(self.options.timeout))
        except ReplicaLostError:
            self._figures.broken_stream()
            error = RequestError(
                "the replica that sampled the text died: send the request again",
                503,
                kind="server_error",
                code="replica_lost",
            )
            yield _event(closed() if self._closed else error)


class _Relay:
    """A request at a replica.

    Args:
        release: called once, when the replica has nothing more to do for the request.

    Attributes:
        whole: the answer, unless it is a stream.
        is_stream: true if the answer is a stream whose text has begun.
    """

    whole: Response

    def __init__(self, replica: Replica, release: Callable[[], None]) -> None:
        self._replica, self._started = replica, replica.started
        self._release: Callable[[], None] | None = release
        self._answer: httpx.Response | None = None
        self._pieces: AsyncIterator[bytes]
        self._begun = b""  # of a stream: everything up to the first event with a text
        self.is_stream = False

    async def open(self, request: Request, raw: bytes) -> bool:
        """Send the request. Waits for the whole answer or, of a stream, for its first text. Returns `is_stream`.
        Raises ReplicaLostError."""
        with self._losses():
            client = self._replica.client
            self._answer = answer = await client.send(
                client.build_request("POST", request.url.path, content=raw, headers=_headers(request)), stream=True
            )
            if not answer.headers.get("content-type", "").startswith(STREAM):
                content = await answer.aread()
                if answer.status_code == 503:
                    raise self._loss()  # it ends, such as after one of its processes
                self.whole = Response(content, answer.status_code, _own_headers(answer))
                return False
            self._pieces = answer.aiter_raw()
            while not _has_text(self._begun):
                piece = await self._next()
                if not piece:
                    break
                self._begun += piece
        if b'"code": "closed"' in self._begun:
            raise self._loss()
        self.is_stream = True
        return True

    async def piece(self) -> bytes:
        """The next bytes of the stream; empty at its end. Raises ReplicaLostError."""
        if self._begun:
            begun, self._begun = self._begun, b""
            return begun
        with self._losses():
            return await self._next()

    @property
    def headers(self) -> dict[str, str]:
        """Headers of a stream."""
        assert self._answer is not None
        return _own_headers(self._answer)

    async def close(self) -> None:
        """End the request at the replica, which stops sampling it."""
        if self._release is not None:
            release, self._release = self._release, None
            release()
        if self._answer is not None:
            with contextlib.suppress(httpx.HTTPError):
                await self._answer.aclose()

    async def _next(self) -> bytes:
        async for piece in self._pieces:
            return piece
        return b""

    @contextlib.contextmanager
    def _losses(self) -> Any:
        try:
            yield
        except httpx.TransportError as error:
            raise self._loss() from error

    def _loss(self) -> ReplicaLostError:
        self._replica.doubt(self._started)
        return ReplicaLostError()


class _Stream(StreamingResponse):
    """Stream of a replica. The request at the replica ends with it, for any reason."""

    def __init__(self, relay: _Relay, pieces: AsyncIterator[bytes]) -> None:
        super().__init__(pieces, headers=relay.headers)
        self._relay = relay

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._relay.close()


def _has_text(begun: bytes) -> bool:
    """True if these bytes of a stream contain a complete event that is more than the head of an answer."""
    return any(not _is_opening(event) for event in begun.split(b"\n\n")[:-1])


def _is_opening(event: bytes) -> bool:
    """True for an event that a server sends before any text: the role of a chat's message, the start of commits, or
    the first events of a response."""
    _, _, data = event.rpartition(b"data: ")
    try:
        fields = json.loads(data)
    except ValueError:  # [DONE]
        return False
    if fields.get("type") in OPENINGS:
        return True
    choices = fields.get("choices")
    if not choices or "delta" not in choices[0]:
        return False
    return all(not each["finish_reason"] and each["delta"] == {"role": "assistant", "content": ""} for each in choices)


def _headers(request: Request) -> dict[str, str]:
    """Headers that a replica gets. The scheme is that of the client's connection, which the page at / names."""
    sent = {name: request.headers[name] for name in SENT_ON if name in request.headers}
    return {**sent, "x-forwarded-proto": request.url.scheme}


def _own_headers(answer: httpx.Response) -> dict[str, str]:
    return {name: value for name, value in answer.headers.items() if name not in OWN_HEADERS}


def _event(error: RequestError) -> bytes:
    return f"data: {json.dumps(error.body)}\n\n".encode()

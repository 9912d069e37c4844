"""The HTTP server: OpenAI's completions and chat completions, a stream of commits, models, health and metrics.

One event loop receives and answers requests, one thread validates and tokenizes them, and the scheduler's thread
samples. When a client disconnects or a request times out, its jobs leave the batch.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect

from dlm_bridge.display.trace import TokenStrings
from dlm_bridge.generation.request import Committed
from dlm_bridge.serving.calls import CLIENT_LEFT, Call, closed, queue_full, timed_out
from dlm_bridge.serving.connections import HttpServer
from dlm_bridge.serving.metrics import Metrics
from dlm_bridge.serving.model import ServedModel
from dlm_bridge.serving.options import ServeOptions
from dlm_bridge.serving.pages import POLICY, docs, home
from dlm_bridge.serving.protocol import (
    AnswerBodies,
    InfillBodies,
    RequestError,
    TextRequest,
    parse_infill,
    parse_request,
)
from dlm_bridge.serving.responses import ResponseBodies, parse_response
from dlm_bridge.serving.scheduler import Scheduler

logger = logging.getLogger(__name__)
OPEN_PATHS = ("/", "/docs", "/health", "/metrics")  # need no API key
SAMPLER_S = 3.0  # shutdown: maximum wait for the running forward pass
LINGER_S = 0.3  # shutdown: time in which arriving requests still get an error as their answer
BODY_S = 60.0  # maximum time to receive a request's body
READER = "read-requests"  # name of the thread
COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
INFILL, COMMITS = "/v1/infill", "/v1/commits"


class Server(HttpServer):
    """HTTP server of a model. During shutdown every unfinished request is answered with 503."""

    def __init__(
        self,
        served: ServedModel,
        scheduler: Scheduler,
        options: ServeOptions,
        sock: socket.socket,
        when_ready: Callable[[], None] = lambda: None,
    ) -> None:
        self._scheduler, self._routes = scheduler, _Routes(served, scheduler, options)
        requests = scheduler.batch_size + scheduler.queue_size
        super().__init__(build_app(self._routes, options), sock, when_ready, requests=requests)

    def serve_forever(self) -> None:
        self._scheduler.start()
        try:
            super().serve_forever()
        finally:
            self._scheduler.close(SAMPLER_S)
            self._routes.reader.shutdown(wait=False, cancel_futures=True)

    @property
    def busy(self) -> bool:
        """True if a thread still samples or reads a request, which would delay the end of the process."""
        return self._scheduler.busy or any(thread.name.startswith(READER) for thread in threading.enumerate())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._routes.close()
        self._scheduler.close()
        await asyncio.sleep(LINGER_S)
        await super().shutdown(sockets)


def build_app(routes: _Routes, options: ServeOptions) -> FastAPI:
    """FastAPI application of the routes."""
    # Without FastAPI's documentation pages, which load scripts from other sites.
    app = FastAPI(title="dlm-bridge", docs_url=None, redoc_url=None, openapi_url=None)
    for path, chat in ((COMPLETIONS, False), (CHAT, True)):
        app.add_api_route(path, routes.answering(partial(routes.complete, chat=chat)), methods=["POST"])
    app.add_api_route(RESPONSES, routes.answering(routes.respond), methods=["POST"])
    app.add_api_route(INFILL, routes.answering(routes.infill), methods=["POST"])
    app.add_api_route(COMMITS, routes.answering(routes.commits), methods=["POST"])
    read = ["GET", "HEAD"]
    app.add_api_route("/v1/models", routes.answering(routes.models), methods=read)
    app.add_api_route("/v1/models/{name:path}", routes.answering(routes.model), methods=read)
    app.add_api_route("/", routes.answering(routes.home), methods=read)
    app.add_api_route("/docs", routes.answering(routes.docs), methods=read)
    app.add_api_route("/load_model", routes.answering(routes.load_model), methods=["POST"])
    app.add_api_route("/health", routes.answering(routes.health), methods=read)
    app.add_api_route("/metrics", routes.answering(routes.figures), methods=read)
    app.add_exception_handler(HTTPException, routes.refuse)
    if options.cors_origin:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=options.cors_origin,
            allow_methods=[*read, "POST"],
            allow_headers=["*"],
            expose_headers=["Retry-After"],
        )
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=options.allowed_host or ["*"], www_redirect=False)
    return app


class _Routes:
    def __init__(self, served: ServedModel, scheduler: Scheduler, options: ServeOptions) -> None:
        self._served, self._scheduler, self._options = served, scheduler, options
        self._metrics = Metrics(scheduler, served.prompts)
        # Validates requests and encodes prompts, which would block the event loop.
        self.reader = ThreadPoolExecutor(1, thread_name_prefix=READER)
        self._reading = 0  # texts of the requests in that thread
        self._arriving: set[asyncio.Timeout] = set()  # of requests without jobs
        self._closed = False
        self._created = int(time.time())

    def close(self) -> None:
        """Answer requests without jobs, and all that arrive, with 503."""
        self._closed = True
        now = asyncio.get_running_loop().time()
        for timeout in self._arriving:
            timeout.reschedule(now)

    def answering(self, route: Callable[[Request], Any]) -> Callable[[Request], Any]:
        """The route with a check of the API key and errors in OpenAI's format."""

        async def answer(request: Request) -> Response:
            path = request.scope["route"].path
            try:
                if path not in OPEN_PATHS:
                    self._check_key(request)
                response: Response = await route(request)
            except RequestError as error:
                response = _error_response(error)
            except asyncio.CancelledError:
                response = _error_response(closed())
            except Exception:
                logger.exception("a request failed")
                response = _error_response(RequestError("the server failed: see its log", 500, kind="server_error"))
            self._metrics.request(path, response.status_code)
            return response

        return answer

    async def refuse(self, request: Request, error: Exception) -> Response:
        """Answer a request for an unknown path or method."""
        status = error.status_code if isinstance(error, HTTPException) else 500
        self._metrics.request("other", status)
        what = f"{request.method} {request.url.path}"
        return _error_response(RequestError(f"{what}: no such endpoint; /docs lists them", status, code="not_found"))

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model(self._served.name)]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name != self._served.name:
            raise RequestError(f"no model {name!r} here: there is {self._served.name}", 404, code="model_not_found")
        return JSONResponse(self._model(name))

    async def home(self, request: Request) -> Response:
        origin = f"{request.url.scheme}://{request.url.netloc}"
        return _html(home(self._served, origin, self._options.api_key is not None))

    async def docs(self, request: Request) -> Response:
        return _html(docs(self._served, self._options.api_key is not None))

    async def load_model(self, request: Request) -> Response:
        """Answer the first request of `transformers chat`."""
        ready = {"status": "ready", "model": self._served.name, "cached": True}
        return Response(f"data: {json.dumps(ready)}\n\n", media_type="text/event-stream")

    async def health(self, request: Request) -> Response:
        alive = self._scheduler.alive
        return JSONResponse({"status": "ok" if alive else "ending"}, 200 if alive else 503)

    async def figures(self, request: Request) -> Response:
        return Response(self._metrics.text(), media_type="text/plain; version=0.0.4")

    async def complete(self, request: Request, *, chat: bool) -> Response:
        """A completion or a chat completion, whole or as a stream."""
        return await self._answer(request, lambda raw: parse_request(raw, chat), AnswerBodies)

    async def respond(self, request: Request) -> Response:
        """A response of OpenAI's Responses API, whole or as a stream."""
        return await self._answer(request, parse_response, ResponseBodies)

    async def infill(self, request: Request) -> Response:
        """A text whose masks are filled in, whole or as a stream of every commit: the text is not final from left to
        right."""
        return await self._answer(request, parse_infill, InfillBodies)

    async def _answer(
        self, request: Request, parse: Callable[[bytes], TextRequest], bodies: type[AnswerBodies]
    ) -> Response:
        call = await self._start(request, parse, bodies)
        if call.request.stream:
            events = self._commit_events(call) if call.request.infill else self._text_chunks(call)
            return _EventStream(call, events)
        await call.whole(request)
        return JSONResponse(call.answer.whole(call.choices))

    async def commits(self, request: Request) -> Response:
        """A stream of every commit, in the order of the denoising."""
        call = await self._start(request, lambda raw: parse_request(raw, None), AnswerBodies, live=True)
        return _EventStream(call, self._commit_events(call))

    async def _start(
        self,
        request: Request,
        parse: Callable[[bytes], TextRequest],
        bodies: type[AnswerBodies],
        live: bool = False,
    ) -> Call:
        """Read a request and queue its jobs. Its timeout and its slots in the queue count from its arrival."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        async with self._arrival(began):
            raw = await self._body(request)
            with self._slots(1):
                asked = await loop.run_in_executor(self.reader, parse, raw)
            if asked.texts > self._scheduler.queue_size:
                raise RequestError(
                    f"{asked.texts} texts in one request, above the queue's size of {self._scheduler.queue_size}",
                    param="n",
                )
            with self._slots(asked.texts):
                call = Call(asked, bodies, loop, self._served, self._scheduler, self._metrics, began)
                jobs = await loop.run_in_executor(self.reader, self._served.jobs, asked, call.listener)
            for job in jobs:
                job.stream = live or asked.stream or bool(job.stop_strings) or asked.scored
            call.submit(jobs, self._options.timeout)
        return call

    @asynccontextmanager
    async def _arrival(self, began: float) -> AsyncIterator[None]:
        """Context of a request without jobs. Raises RequestError at the request's timeout and at `close`."""
        if self._closed:
            raise closed()
        timeout_s = self._options.timeout
        timeout = asyncio.timeout_at(began + timeout_s)
        self._arriving.add(timeout)
        try:
            async with timeout:
                yield
        except TimeoutError:
            raise (closed() if self._closed else timed_out(timeout_s)) from None
        finally:
            self._arriving.discard(timeout)

    @contextmanager
    def _slots(self, texts: int) -> Iterator[None]:
        """Reserve slots of the queue while a request is read. Raises RequestError if the queue is full."""
        if self._reading + texts > self._scheduler.room:
            raise queue_full(self._metrics)
        self._reading += texts
        try:
            yield
        finally:
            self._reading -= texts

    async def _body(self, request: Request) -> bytes:
        """The request's body. Raises RequestError for a body that is too large, or whose Content-Type is not JSON (a
        browser sends other types across sites without asking the server)."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise RequestError("the header Content-Type must be application/json", 415)
        limit = int(self._options.max_body * 2**20)
        too_large = RequestError(f"the body is larger than {limit} bytes", 413, code="body_too_large")
        length = request.headers.get("content-length", "")
        if length.isdigit() and int(length) > limit:
            raise too_large
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_S):
                async for part in request.stream():
                    body += part
                    if len(body) > limit:
                        raise too_large
        except TimeoutError:
            raise RequestError("the body did not arrive in time", 408, kind="timeout_error") from None
        except ClientDisconnect:
            raise RequestError("the client has disconnected", CLIENT_LEFT) from None
        return bytes(body)

    def _check_key(self, request: Request) -> None:
        key = self._options.api_key
        if key is None:
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), key.encode()):
            raise RequestError(
                "the API key is missing or wrong: send it as Authorization: Bearer KEY",
                401,
                kind="authentication_error",
                code="invalid_api_key",
            )

    def _model(self, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": self._created, "owned_by": "dlm-bridge"}

    async def _text_chunks(self, call: Call) -> AsyncIterator[Any]:
        for index in range(len(call.choices)):
            for chunk in call.answer.opening(index):
                yield chunk
        async for index, event in call.events():
            piece, reason = call.add(index, event)
            choice = call.choices[index]
            new_calls = choice.new_calls()
            if piece or reason or new_calls:
                for chunk in call.answer.pieces(index, piece, reason, choice.new_scores(), new_calls):
                    yield chunk
        for chunk in call.answer.last(call.choices):
            yield chunk

    async def _commit_events(self, call: Call) -> AsyncIterator[Any]:
        strings = TokenStrings(self._served.loaded.tokenizer)
        infill = call.request.infill
        start: dict[str, Any] = {"lengths": [job.settings["gen_length"] for job in call.jobs]}
        if infill:  # positions are counted from the first token of the given text
            start = {"lengths": [len(job.prompt) for job in call.jobs]}
            start["texts"] = [strings.of(job.prompt) for job in call.jobs]
        yield {
            "type": "start",
            "id": call.answer.id,
            "model": self._served.name,
            "prompt_tokens": call.answer.prompt_tokens,
            **start,
        }
        async for index, event in call.events():
            _, reason = call.add(index, event)
            if isinstance(event, Committed):
                texts = [strings.of([token])[0] for token in event.tokens]
                yield {
                    "type": "commit",
                    "index": index,
                    "forwards": event.forwards,
                    "positions": event.positions,
                    "tokens": event.tokens,
                    "texts": texts,
                }
            if reason:
                choice = call.choices[index]
                yield {
                    "type": "end",
                    "index": index,
                    "finish_reason": "stop" if infill else reason,
                    "tokens": choice.tokens,
                    "text": choice.text,
                    **(call.answer.filled(choice) if isinstance(call.answer, InfillBodies) else {}),
                }
        yield {"type": "usage", **call.answer.usage(call.choices)}
        yield "[DONE]"


class _EventStream(StreamingResponse):
    """Server-sent events. The call is closed when the stream ends for any reason."""

    def __init__(self, call: Call, events: AsyncIterator[Any]) -> None:
        super().__init__(_encoded(events), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._call = call

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._call.close()


async def _encoded(events: AsyncIterator[Any]) -> AsyncIterator[str]:
    """Encode events as lines. An error is the last event."""
    try:
        async for event in events:
            text = event if isinstance(event, str) else json.dumps(event, ensure_ascii=False, separators=(",", ":"))
            named = f"event: {event['type']}\n" if "sequence_number" in event else ""  # of the Responses API
            yield f"{named}data: {text}\n\n"
    except RequestError as error:
        yield f"data: {json.dumps(error.body)}\n\n"


def _html(page: str) -> Response:
    headers = {
        "Content-Security-Policy": POLICY,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
    }
    return HTMLResponse(page, headers=headers)


def _error_response(error: RequestError) -> Response:
    headers = {} if error.retry_after_s is None else {"Retry-After": str(error.retry_after_s)}
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(error.body, error.status, headers)

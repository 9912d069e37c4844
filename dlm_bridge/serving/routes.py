"""What the servers share: endpoints, the check of the API key, limits of a request, errors in OpenAI's form."""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any, Protocol, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect

from dlm_bridge.serving.options import ServeOptions
from dlm_bridge.serving.protocol import RequestError, TextRequest

logger = logging.getLogger(__name__)
T = TypeVar("T")
OPEN_PATHS = ("/", "/docs", "/health", "/metrics")  # need no API key
BODY_S = 60.0  # maximum time to receive a request's body
CLIENT_LEFT = 499  # status in the metrics of a client that disconnected; never sent
READER = "read-requests"  # name of the thread
COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
INFILL, COMMITS = "/v1/infill", "/v1/commits"


class RequestMetrics(Protocol):
    """What `Routes` needs of a server's metrics."""

    @property
    def retry_after_s(self) -> int: ...

    def request(self, path: str, status: int) -> None: ...


def build_app(routes: Routes, options: ServeOptions) -> FastAPI:
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


class Routes:
    """Routes of a server. A subclass has a method for each endpoint of `build_app`.

    Args:
        queue_size: maximum number of waiting texts.
    """

    complete: Any
    respond: Any
    infill: Any
    commits: Any
    models: Any
    model: Any
    home: Any
    docs: Any
    load_model: Any
    health: Any
    figures: Any

    def __init__(self, options: ServeOptions, metrics: RequestMetrics, queue_size: int) -> None:
        self.options, self.metrics, self.queue_size = options, metrics, queue_size
        # Validates requests and encodes prompts, which would block the event loop.
        self.reader = ThreadPoolExecutor(1, thread_name_prefix=READER)
        self._reading = 0  # texts of the requests in that thread
        self._arriving: set[asyncio.Timeout] = set()  # of requests without jobs
        self._closed = False

    @property
    def room(self) -> int:
        """Number of texts that the queue accepts."""
        raise NotImplementedError

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
                response = error_response(error)
            except asyncio.CancelledError:
                response = error_response(closed())
            except Exception:
                logger.exception("a request failed")
                response = error_response(RequestError("the server failed: see its log", 500, kind="server_error"))
            self.metrics.request(path, response.status_code)
            return response

        return answer

    async def refuse(self, request: Request, error: Exception) -> Response:
        """Answer a request for an unknown path or method."""
        status = error.status_code if isinstance(error, HTTPException) else 500
        self.metrics.request("other", status)
        what = f"{request.method} {request.url.path}"
        return error_response(RequestError(f"{what}: no such endpoint; /docs lists them", status, code="not_found"))

    async def read(self, request: Request, parse: Callable[[bytes], TextRequest]) -> tuple[bytes, TextRequest]:
        """Body of a request, and the body parsed. Raises RequestError, also if the queue can never hold its texts."""
        raw = await self._body(request)
        with self.slots(1):
            asked = await asyncio.get_running_loop().run_in_executor(self.reader, parse, raw)
        if asked.texts > self.queue_size:
            raise RequestError(
                f"{asked.texts} texts in one request, above the queue's size of {self.queue_size}", param="n"
            )
        return raw, asked

    @asynccontextmanager
    async def arrival(self, began: float) -> AsyncIterator[None]:
        """Context of a request without jobs. Raises RequestError at the request's timeout and at `close`."""
        if self._closed:
            raise closed()
        timeout_s = self.options.timeout
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
    def slots(self, texts: int) -> Iterator[None]:
        """Reserve slots of the queue while a request is read. Raises RequestError if the queue is full."""
        if self._reading + texts > self.room:
            raise queue_full(self.metrics)
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
        limit = int(self.options.max_body * 2**20)
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
        key = self.options.api_key
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


async def unless_left(request: Request, answering: Coroutine[Any, Any, T]) -> T:
    """Result of a coroutine, which is cancelled with RequestError if the client disconnects. The request's body must
    have been read."""
    finishing = asyncio.ensure_future(answering)
    leaving = asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait((finishing, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not finishing.done():
            raise RequestError("the client has disconnected", CLIENT_LEFT)
        return finishing.result()
    finally:
        finishing.cancel()
        leaving.cancel()


async def _left(request: Request) -> None:
    """Return when the client has disconnected."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def queue_full(metrics: RequestMetrics) -> RequestError:
    return RequestError(
        "the queue is full: try again later",
        429,
        kind="rate_limit_error",
        code="queue_full",
        retry_after_s=metrics.retry_after_s,
    )


def timed_out(timeout_s: float) -> RequestError:
    return RequestError(
        f"the answer was not complete after {timeout_s:g} s", 504, kind="timeout_error", code="timeout"
    )


def closed() -> RequestError:
    return RequestError("the server is being shut down", 503, kind="server_error", code="closed")


def error_response(error: RequestError) -> Response:
    headers = {} if error.retry_after_s is None else {"Retry-After": str(error.retry_after_s)}
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(error.body, error.status, headers)

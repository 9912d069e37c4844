"""The HTTP server: OpenAI's completions and chat completions, a stream of commits, models, health and metrics.

One event loop receives and answers requests, one thread validates and tokenizes them, and the scheduler's thread
samples. When a client disconnects or a request times out, its jobs leave the batch.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from fastapi import Request
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse

from dlm_bridge.display.trace import TokenStrings
from dlm_bridge.generation.request import Committed
from dlm_bridge.serving.calls import Call
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
from dlm_bridge.serving.routes import READER, Routes, build_app
from dlm_bridge.serving.scheduler import Scheduler

logger = logging.getLogger(__name__)
SAMPLER_S = 3.0  # shutdown: maximum wait for the running forward pass
LINGER_S = 0.3  # shutdown: time in which arriving requests still get an error as their answer


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


class _Routes(Routes):
    def __init__(self, served: ServedModel, scheduler: Scheduler, options: ServeOptions) -> None:
        self._metrics = Metrics(scheduler, served.prompts)
        super().__init__(options, self._metrics, scheduler.queue_size)
        self._served, self._scheduler = served, scheduler
        self._created = int(time.time())

    @property
    def room(self) -> int:
        return self._scheduler.room

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model(self._served.name)]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name != self._served.name:
            raise RequestError(f"no model {name!r} here: there is {self._served.name}", 404, code="model_not_found")
        return JSONResponse(self._model(name))

    async def home(self, request: Request) -> Response:
        origin = f"{request.url.scheme}://{request.url.netloc}"
        return _html(home(self._served, origin, self.options.api_key is not None))

    async def docs(self, request: Request) -> Response:
        return _html(docs(self._served, self.options.api_key is not None))

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
        async with self.arrival(began):
            _, asked = await self.read(request, parse)
            with self.slots(asked.texts):
                call = Call(asked, bodies, loop, self._served, self._scheduler, self._metrics, began)
                jobs = await loop.run_in_executor(self.reader, self._served.jobs, asked, call.listener)
            for job in jobs:
                job.stream = live or asked.stream or bool(job.stop_strings) or asked.scored
            call.submit(jobs, self.options.timeout)
        return call

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

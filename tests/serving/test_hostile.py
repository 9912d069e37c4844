"""Clients that are slow, many, or send what they should not: the server goes on, and its end waits for none."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import pytest

from dlm_bridge.loading import LoadedModel
from dlm_bridge.serving import connections, routes, server
from dlm_bridge.serving.model import ServedModel
from dlm_bridge.serving.server import LINGER_S
from tests.serving.conftest import PATIENCE_S, Running, running, wait_until
from tests.serving.test_refusals import PROMPT, connection, error_of, held, post

PORT_LESS = "Host: 127.0.0.1\r\n"


@contextmanager
def blocked(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> Iterator[threading.Semaphore]:
    """Calls of a function wait until the end of the context; the semaphore counts those that do."""
    go, began, function = threading.Event(), threading.Semaphore(0), getattr(owner, name)

    def wait(*arguments: Any, **options: Any) -> Any:
        began.release()
        go.wait(PATIENCE_S)
        return function(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, wait)
        try:
            yield began
        finally:
            go.set()


def in_background(call: Callable[[], Any]) -> Callable[[], Any]:
    """Call in a thread; the result waits for it."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()

    def result() -> Any:
        thread.join(PATIENCE_S)
        return found[0]

    return result


def connect(at: Running, receive_buffer: int | None = None) -> socket.socket:
    host, port = at.address.removeprefix("http://").split(":")
    client = socket.socket()
    if receive_buffer is not None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    client.settimeout(PATIENCE_S)
    client.connect((host, int(port)))
    return client


def drip(client: socket.socket, data: bytes) -> int:
    """Send byte by byte, until the other side closes. The bytes that were sent."""
    client.settimeout(0.02)
    for count, byte in enumerate(data):
        try:
            client.sendall(bytes([byte]))
            if client.recv(64) == b"":
                return count
        except TimeoutError:
            pass
        except OSError:
            return count
    return len(data)


def status(client: socket.socket) -> int:
    return int(client.recv(64).split()[1])


def healthy(at: Running) -> bool:
    return httpx.get(f"{at.address}/health", timeout=PATIENCE_S).status_code == 200


@pytest.mark.parametrize(("owner", "name"), [(server, "parse_request"), (ServedModel, "jobs")])
def test_a_request_that_takes_long_to_read_is_in_nobodys_way(
    diffusion: LoadedModel, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str
) -> None:
    """Other requests are answered; its timeout and its slots of the queue count: of four requests at once the queue
    has no place for the last."""
    with (
        running(diffusion, timeout=5.0, batch_size=1, queue_size=2) as at,
        blocked(monkeypatch, owner, name) as began,
    ):
        answers = [in_background(lambda: post(at, PROMPT)) for _ in range(4)]
        began.acquire()
        assert healthy(at)
        full, *late = sorted((answer() for answer in answers), key=lambda answer: answer.status_code)
        assert full.status_code == 429
        assert [answer.status_code for answer in late] == [504] * 3
        assert error_of(late[0])["code"] == "timeout"
    assert not at.scheduler.running


@pytest.mark.parametrize("chat", [False, True])
def test_a_prompt_above_the_limit_is_not_encoded(
    diffusion: LoadedModel, monkeypatch: pytest.MonkeyPatch, chat: bool
) -> None:
    longest, encoded = max(map(len, diffusion.tokenizer.get_vocab())), []
    encode = type(diffusion.tokenizer).__call__

    def note(tokenizer: Any, text: str, **options: Any) -> Any:
        encoded.append(len(text))
        return encode(tokenizer, text, **options)

    monkeypatch.setattr(type(diffusion.tokenizer), "__call__", note)
    text = "ab " * 1_300_000
    body = {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": ["a", text, text]}
    with running(diffusion, max_length=100, max_body=10) as at:
        error = error_of(post(at, body, "chat/completions" if chat else "completions"))
        assert error["code"] == "context_length_exceeded"
        assert error["param"] == ("messages" if chat else "prompt")
        many = error_of(post(at, {"prompt": ["a" * 200, "b" * 200]}))  # the second one is not encoded either
        assert many["code"] == "context_length_exceeded"
    assert max(encoded) <= 100 * longest
    assert encoded.count(200) == 1


def test_slow_headers_bodies_and_readers_are_cut_off(diffusion: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEADER_S", 0.5)
    monkeypatch.setattr(connections, "SEND_S", 0.5)
    monkeypatch.setattr(routes, "BODY_S", 0.5)
    health = f"GET /health HTTP/1.1\r\n{PORT_LESS}\r\n".encode()
    with running(diffusion) as at, connect(at) as silent, connect(at) as dripping, connect(at) as second:
        second.sendall(health)
        assert status(second) == 200
        second.sendall(b"GET ")  # the beginning of another request
        drops = in_background(lambda: drip(dripping, health * 100))
        while second.recv(4096):
            pass
        assert silent.recv(64) == b""
        assert drops() < len(health) * 100
        with connection(at, b'{"prompt":', length=100) as half:
            half.settimeout(PATIENCE_S)
            assert status(half) == 408
        at.process._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        with connect(at, receive_buffer=4096) as deaf:
            body = json.dumps({**PROMPT, "n": 16, "max_tokens": 64}).encode()
            head = f"POST /v1/commits HTTP/1.1\r\n{PORT_LESS}Content-Type: application/json\r\n"
            deaf.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            at.wait(lambda: at.scheduler.tokens + at.scheduler.running > 0, "it is sampled")
            at.wait(lambda: not at.process.server_state.connections, "its connection is cut")
        assert healthy(at)


def test_connections_above_the_limit_take_the_place_of_idle_ones(
    diffusion: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "MIN_CONNECTIONS", 8)
    with running(diffusion, batch_size=1, queue_size=1) as at, ExitStack() as stack:
        assert at.process.config.limit_concurrency == 8
        clients = [stack.enter_context(connect(at)) for _ in range(40)]
        for client in clients[-4:]:
            client.sendall(b"GET /health HTTP/1.1\r\n")
        assert healthy(at)
        at.wait(lambda: len(at.process.server_state.connections) <= 8, "the others are closed")
        answers = [in_background(lambda: post(at, PROMPT).status_code) for _ in range(4)]
        assert {answer() for answer in answers} <= {200, 429}


def test_what_clients_can_cause_is_logged_once(caplog: pytest.LogCaptureFixture, server: Running) -> None:
    full = OSError(24, "Too many open files")
    loop = asyncio.new_event_loop()
    for _ in range(1000):
        loop.call_exception_handler({"message": "socket.accept() out of system resource", "exception": full})
    loop.close()
    for _ in range(3):
        with connect(server) as client:
            client.sendall(b"\x16\x03\x01 nonsense\r\n\r\n")
            assert status(client) == 400
    said = [record.getMessage().split(".")[0] for record in caplog.records]
    assert said.count("socket") == 1
    assert said.count("Invalid HTTP request received") <= 1
    assert "Traceback" not in caplog.text
    logging.getLogger("asyncio").error("another")
    logging.getLogger("asyncio").error("another")
    assert caplog.text.count("another") == 2


def ask_at_once(at: Running, count: int) -> tuple[Callable[[], list[Any]], list[Any]]:
    """Send `count` completions at once, a third of them as streams. Returns a function that waits for all results, and
    the list of the results so far: a status, or the error in a stream."""
    came: list[Any] = []

    async def ask(client: httpx.AsyncClient, number: int) -> None:
        body = {"prompt": f"{number} ", "max_tokens": 32, "stream": number % 3 == 0}
        answer = await client.post(f"{at.address}/v1/completions", json=body)
        lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
        if answer.status_code == 200 and body["stream"] and lines[-1] != "[DONE]":
            came.append(json.loads(lines[-1])["error"]["code"])
        else:
            came.append((answer.status_code, json.loads(answer.text)["error"]["code"])
                        if answer.status_code != 200 else 200)  # fmt: skip

    async def ask_all() -> list[Any]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(limits=limits, timeout=PATIENCE_S) as client:
            await asyncio.gather(*(ask(client, number) for number in range(count)))
        return came

    return in_background(lambda: asyncio.run(ask_all())), came


def test_the_end_in_the_middle_of_500_requests(diffusion: LoadedModel, caplog: pytest.LogCaptureFixture) -> None:
    with running(diffusion, batch_size=16, queue_size=600) as at:
        answers, came = ask_at_once(at, 500)
        wait_until(lambda: len(came) > 30, "some are answered")
        wait_until(lambda: len(at.process.server_state.connections) + len(came) >= 500, "all have connected")
        at.process.should_exit = True
        found = answers()
    assert len(found) == 500
    assert set(found) <= {200, "closed", (503, "closed")}
    assert found.count(200) < 500
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_nobody_is_waited_for_at_the_end(
    diffusion: LoadedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Shutdown with an incomplete body, a prompt that is encoded, a running forward pass and an idle client."""
    with ExitStack() as stack:
        at = stack.enter_context(running(diffusion, batch_size=1))
        go = stack.enter_context(held(diffusion))
        whole, streamed = (
            in_background(lambda stream=stream: post(at, {**PROMPT, "stream": stream})) for stream in (False, True)
        )
        at.wait(lambda: at.scheduler.running + at.scheduler.waiting == 2, "both wait")
        began = stack.enter_context(blocked(monkeypatch, ServedModel, "jobs"))
        encoded, behind = (in_background(lambda: post(at, PROMPT)) for _ in range(2))
        began.acquire()
        half = stack.enter_context(connection(at, b'{"prompt":', length=100))
        idle = stack.enter_context(connect(at))
        at.wait(lambda: len(at.process.server_state.tasks) == 5, "all are open")
        before = time.monotonic()
        at.process.should_exit = True
        for answer in (whole(), encoded(), behind()):
            assert (answer.status_code, error_of(answer)["code"]) == (503, "closed")
        assert "shut down" in streamed().text
        half.settimeout(PATIENCE_S)
        assert status(half) == 503
        assert idle.recv(64) == b""
        wait_until(lambda: not at.process.server_state.connections, "all connections are closed")
        assert time.monotonic() - before < 10
        go.set()
    assert "Traceback" not in caplog.text


def test_requests_after_the_signal_get_an_answer(diffusion: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "LINGER_S", 5 * LINGER_S)
    with running(diffusion) as at:
        at.process.should_exit = True
        at.wait(lambda: httpx.get(f"{at.address}/health").status_code == 503, "it ends")
        assert error_of(post(at, PROMPT))["code"] == "closed"


def test_a_request_that_is_cancelled_gets_an_answer(diffusion: LoadedModel, caplog: pytest.LogCaptureFixture) -> None:
    with running(diffusion) as at, held(diffusion):
        answer = in_background(lambda: post(at, PROMPT))
        at.wait(lambda: at.scheduler.running == 1, "it is sampled")
        (task,) = at.process.server_state.tasks
        task.get_loop().call_soon_threadsafe(task.cancel)
        assert (answer().status_code, error_of(answer())["code"]) == (503, "closed")
    assert "Traceback" not in caplog.text


def test_hosts_origins_and_head(diffusion: LoadedModel) -> None:
    page, preflight = {"Origin": "https://a.example"}, {"Access-Control-Request-Method": "POST"}
    asked = {**preflight, "Access-Control-Request-Headers": "authorization,content-type"}
    limits = {"allowed_host": ["127.0.0.1", "b.example"], "cors_origin": ["https://a.example"], "api_key": "secret"}
    with running(diffusion, **limits) as at:
        url = f"{at.address}/v1/completions"
        for host, code in (("evil.example", 400), ("b.example:80", 200), ("127.0.0.1", 200)):
            assert httpx.get(f"{at.address}/health", headers={"Host": host}).status_code == code
        answer = httpx.options(url, headers={**page, **asked})
        assert answer.status_code == 200
        assert answer.headers["Access-Control-Allow-Origin"] == "https://a.example"
        assert "authorization" in answer.headers["Access-Control-Allow-Headers"]
        assert httpx.options(url, headers={"Origin": "https://evil.example", **asked}).status_code == 400
        answer = httpx.post(url, json=PROMPT, headers=page)  # without the key
        assert (answer.status_code, answer.headers["Access-Control-Allow-Origin"]) == (401, "https://a.example")
    with running(diffusion) as at:
        assert httpx.options(f"{at.address}/v1/completions", headers={**page, **asked}).status_code == 405
        for path in ("/health", "/metrics", "/v1/models", "/v1/models/tiny"):
            answer = httpx.head(at.address + path)
            assert (answer.status_code, answer.content) == (200, b"")
            assert "Access-Control-Allow-Origin" not in answer.headers

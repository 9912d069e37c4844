"""Bad requests get OpenAI-style errors; full queues, timeouts, clients that leave and the end of the server."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from dlm_bridge.errors import SettingError
from dlm_bridge.loading import LoadedModel
from dlm_bridge.serving.command import web_app
from dlm_bridge.serving.protocol import RequestError, parse_request
from tests.serving.conftest import PATIENCE_S, Running, openai, running

PROMPT = {"prompt": "the cat ", "max_tokens": 16}
CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def post(server: Running, body: Any, path: str = "completions", kind: str = "application/json") -> httpx.Response:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Content-Type": kind}
    return httpx.post(f"{server.address}/v1/{path}", content=raw, headers=headers, timeout=PATIENCE_S)


def error_of(answer: httpx.Response) -> dict[str, Any]:
    """The error of an answer in OpenAI's form."""
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "\n" not in error["message"]
    return error


@contextmanager
def connection(server: Running, body: bytes, length: int | None = None) -> Iterator[socket.socket]:
    """A connection that has sent a completion's body, or the beginning of one of this length."""
    host, port = server.address.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as client:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        client.sendall(f"{head}Content-Length: {length or len(body)}\r\n\r\n".encode() + body)
        yield client


@contextmanager
def held(loaded: LoadedModel) -> Iterator[threading.Event]:
    """Forward passes wait until the event is set."""
    go = threading.Event()
    handle = loaded.model.register_forward_pre_hook(lambda *_: go.wait(PATIENCE_S) and None)
    try:
        yield go
    finally:
        go.set()
        handle.remove()


def test_the_page_is_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gradio")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SettingError, match="one process") as refused:
        web_app("model", port=7860)
    assert refused.value.field == "WORLD_SIZE"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": 3}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": ["a", [1]]}, "prompt"),
        (rb'{"prompt": "\ud800"}', None),
        ({**PROMPT, "max_tokens": 0}, "max_tokens"),
        ({**PROMPT, "max_tokens": 2.5}, "max_tokens"),
        ({**PROMPT, "max_tokens": "a\n\ud800"}, None),
        ({**PROMPT, "max_completion_tokens": 8}, "max_tokens"),
        ({**PROMPT, "n": 0}, "n"),
        ({**PROMPT, "n": 10**9}, "n"),
        ({**PROMPT, "seed": "x"}, "seed"),
        ({**PROMPT, "generation_config": {"seed": "x"}}, "seed"),
        ({**PROMPT, "stop": [""]}, "stop"),
        ({**PROMPT, "stop": list("abcde")}, "stop"),
        ({**PROMPT, "stop": "a" * 257}, "stop"),
        ({**PROMPT, "stop": ["a" * 90_000]}, "stop"),
        ({**PROMPT, "bad_words_ids": [[5, 6]] * 10_000}, "bad_words_ids"),
        ({**PROMPT, "ignore_eos": "yes"}, "ignore_eos"),
        ({**PROMPT, "stream": "yes"}, "stream"),
        ({**PROMPT, "stream_options": {"include_usage": True}}, "stream_options"),
        ({**PROMPT, "echo": True}, "echo"),
        ({**PROMPT, "suffix": "end"}, "suffix"),
        ({**PROMPT, "presence_penalty": 0.5}, "presence_penalty"),
        ({**PROMPT, "infill": True}, "infill"),
        ({**PROMPT, "generation_config": "{"}, "generation_config"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0]"),
        ({"messages": [{"role": "\ud800", "content": "hi"}]}, None),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages[0]"),
        ({**CHAT, "tools": [{"type": "function"}]}, "tools"),
        ({**CHAT, "tools": [{"type": "function"}], "tool_choice": "auto"}, "tools"),
        ({**CHAT, "chat_template_kwargs": [1]}, "chat_template_kwargs"),
        ({**CHAT, "chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template_kwargs"),
        ({**CHAT, "top_logprobs": 3}, "top_logprobs"),
        ({**PROMPT, "tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({**CHAT, "tool_choice": "required"}, "tool_choice"),
        ({**CHAT, "functions": [{"name": "f"}]}, "functions"),
    ],
)
def test_the_field_at_fault_is_named(body: Any, param: str | None) -> None:
    with pytest.raises(RequestError) as refused:
        parse_request(body if isinstance(body, bytes) else json.dumps(body).encode(), None)
    assert refused.value.status == 400
    error = refused.value.body["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert "\n" not in error["message"]


def test_a_byte_order_mark_is_accepted() -> None:
    """Some clients on Windows send one."""
    assert parse_request(b'\xef\xbb\xbf{"prompt": "hi"}', None).prompts == ["hi"]


@pytest.mark.parametrize(
    ("settings", "param", "named"),
    [
        ({"min_new_tokens": 2**64}, "min_new_tokens", ""),
        ({"top_k": -2}, "top_k", "-2"),
        ({"temperature": "hot"}, "temperature", "hot"),
        ({"top_p": 2}, "top_p", "2"),
        ({"algorithm": "wedlm"}, "algorithm", "wedlm"),
        ({"algorithm": {"a": 1}}, "algorithm", ""),
        ({"max_tokens": 10, "block_length": 4}, "gen_length", "block_length=4"),
        ({"messages": CHAT["messages"]}, "messages", ""),
        ({"prompt": [9999]}, "prompt", "9999"),
        ({"prompt": [[5], [9999]]}, "prompt[1]", "9999"),
        ({"frobnicate": 1}, "frobnicate", "remasking"),  # the sampler's settings are listed
    ],
)
def test_the_setting_that_the_sampler_refuses_is_named(
    server: Running, settings: dict[str, Any], param: str, named: str
) -> None:
    answer = post(server, {**PROMPT, **settings})
    error = error_of(answer)
    assert (answer.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert named in error["message"]


def test_fields_that_ask_for_nothing_are_taken(server: Running) -> None:
    body = {**PROMPT, "user": "me", "logprobs": None, "echo": False, "presence_penalty": 0.0, "best_of": 1, "stop": []}
    assert post(server, body).status_code == 200
    tools = {"tools": [{"type": "function"}], "tool_choice": "none"}
    for nothing in (
        {"tools": []},
        tools,
        {"functions": [{}], "function_call": "none"},
        {"presence_penalty": 0, "frequency_penalty": 0},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]},
    ):
        assert chat_text(server, **nothing) == chat_text(server)
    called = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function"}]}
    empty = {"role": "assistant", "content": ""}
    texts = [chat_text(server, messages=[*CHAT["messages"], one, *CHAT["messages"]]) for one in (called, empty)]
    assert texts[0] == texts[1] != chat_text(server)


def chat_text(server: Running, **body: Any) -> str:
    answer = post(server, {**CHAT, "max_tokens": 8, **body}, "chat/completions")
    return str(answer.json()["choices"][0]["message"]["content"])


def test_other_servers_words_are_understood(server: Running, diffusion: LoadedModel) -> None:
    hot = {**PROMPT, "temperature": 1, "seed": 2}
    with running(diffusion, defaults={"top_k": 1}) as greedy:
        texts = [post(greedy, {**hot, **more}).json()["choices"][0]["text"] for more in ({}, {"top_k": -1})]
        assert texts[0] != texts[1] == post(server, hot).json()["choices"][0]["text"]
    ids = diffusion.tokenizer(PROMPT["prompt"], return_tensors="pt")["input_ids"]
    tokens = diffusion.model.generate(ids, gen_length=16, eos_token_id=None)[0, ids.shape[1] :].tolist()
    with running(diffusion, defaults={"eos_token_id": tokens[4], "pad_token_id": 1}) as ending:
        lengths = [
            post(ending, {**PROMPT, "ignore_eos": flag}).json()["usage"]["completion_tokens"] for flag in (False, True)
        ]
    assert lengths[0] < lengths[1] == 16


def test_a_prompt_that_is_too_long_gets_the_numbers(server: Running, diffusion: LoadedModel) -> None:
    context = diffusion.model.config.max_position_embeddings
    answer = post(server, {"prompt": [5] * context, "max_tokens": 16})
    assert answer.status_code == 400
    assert error_of(answer)["code"] == "context_length_exceeded"
    for number in (context, context + 16):
        assert str(number) in error_of(answer)["message"]
    far = error_of(post(server, {**PROMPT, "max_tokens": 100_001}))["message"]  # and no number of blocks
    assert f"limit of {context}" in far
    with running(diffusion, max_length=20) as short:
        assert "20" in error_of(post(short, {**PROMPT, "prompt": [5] * 5}))["message"]
        assert post(short, {**PROMPT, "prompt": [5] * 4}).status_code == 200


def test_bodies_that_are_no_json_or_too_large(server: Running) -> None:
    for raw in (b"{", b"[1]", b"\xff", b"[" * 50_000):
        assert post(server, raw).status_code == 400
    assert post(server, b"{}", kind="text/plain").status_code == 415
    large = {"prompt": "x" * 110_000}
    answer = post(server, large)
    assert answer.status_code == 413
    assert "104857" in error_of(answer)["message"]

    def parts() -> Iterator[bytes]:  # of unknown length
        yield from [b" " * 10_000] * 11

    headers = {"Content-Type": "application/json"}
    assert httpx.post(f"{server.address}/v1/completions", content=parts(), headers=headers).status_code == 413


def test_paths_that_there_are_not(server: Running) -> None:
    assert httpx.get(f"{server.address}/v1/nowhere").status_code == 404
    answer = httpx.get(f"{server.address}/v1/completions")
    assert answer.status_code == 405
    assert "/v1/completions" in error_of(answer)["message"]


def test_a_key_is_asked_for(diffusion: LoadedModel) -> None:
    with running(diffusion, api_key="secret") as server:
        with pytest.raises(openai.AuthenticationError):
            server.client("wrong").models.list()
        for header in ({}, {"Authorization": "Basic secret"}, {"Authorization": "Bearer s\xe9cret".encode("latin-1")}):
            assert httpx.get(f"{server.address}/v1/models", headers=header).status_code == 401
        assert server.client("secret").completions.create(model="any", **PROMPT).choices
        assert httpx.get(f"{server.address}/health").status_code == 200


def test_a_full_queue_sends_clients_away_for_a_while(diffusion: LoadedModel) -> None:
    with running(diffusion, batch_size=1, queue_size=2) as server, held(diffusion) as go:
        answers: list[httpx.Response] = []
        threads = [
            threading.Thread(target=lambda: answers.append(post(server, {**PROMPT, "stream": False})))
            for _ in range(3)
        ]
        threads[0].start()
        server.wait(lambda: server.scheduler.running == 1, "the first one is sampled")
        for thread in threads[1:]:
            thread.start()
        server.wait(lambda: server.scheduler.waiting == 2, "the others wait")
        with pytest.raises(openai.RateLimitError) as refused:
            server.client().completions.create(model="any", **PROMPT)
        assert int(refused.value.response.headers["Retry-After"]) >= 1
        go.set()
        for thread in threads:
            thread.join()
        assert [answer.status_code for answer in answers] == [200] * 3
        assert post(server, PROMPT).status_code == 200
        for body in ({**PROMPT, "n": 3}, {**PROMPT, "prompt": ["a"] * 3}):  # could never wait
            assert "queue's size of 2" in error_of(post(server, body))["message"]


def test_a_client_that_leaves_while_it_asks_is_no_failure(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    with connection(server, b'{"prompt":', length=100):
        pass
    status = 'dlm_bridge_requests_total{path="/v1/completions",status="499"} 1'
    server.wait(lambda: status in httpx.get(f"{server.address}/metrics").text, "the request is counted")
    assert "Traceback" not in caplog.text


def test_an_answer_that_takes_too_long(diffusion: LoadedModel) -> None:
    with running(diffusion, timeout=0.5) as server:
        with held(diffusion):
            answer = post(server, PROMPT)
            assert answer.status_code == 504
            assert error_of(answer)["type"] == "timeout_error"
            streamed = post(server, {**PROMPT, "stream": True}).text
            assert "timeout_error" in streamed
            assert "[DONE]" not in streamed
        server.wait(lambda: not server.scheduler.running, "its rows leave")


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_takes_its_row_along(diffusion: LoadedModel, stream: bool) -> None:
    passes: list[int] = []
    handle = diffusion.model.register_forward_pre_hook(lambda *_: passes.append(1))
    try:
        with running(diffusion) as server, held(diffusion) as go:
            body = json.dumps({"prompt": "the cat ", "max_tokens": 128, "stream": stream}).encode()
            with connection(server, body):
                server.wait(lambda: server.scheduler.running == 1, "it is sampled")
            server.wait(lambda: all(row.cancelled for row in server.scheduler._running), "its row is cancelled")
            go.set()
            server.wait(lambda: not server.scheduler.running, "the batch ends")
            assert len(passes) < 16
            assert post(server, PROMPT).status_code == 200
    finally:
        handle.remove()


def test_what_fails_while_sampling_is_no_end_of_the_server(
    diffusion: LoadedModel, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("a kernel failed")

    with running(diffusion) as server:
        handle = diffusion.model.register_forward_pre_hook(fail)
        try:
            answer = post(server, PROMPT)
        finally:
            handle.remove()
        assert answer.status_code == 500
        assert error_of(answer)["type"] == "server_error"
        assert "a kernel failed" not in answer.text
        assert "a kernel failed" in caplog.text
        assert post(server, PROMPT).status_code == 200

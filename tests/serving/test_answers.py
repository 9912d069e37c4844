"""Answers to the real `openai` client: equal to `generate` alone, whole, streamed, and as commits."""

from __future__ import annotations

import asyncio
import copy
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from dlm_bridge.loading import LoadedModel, load_model
from dlm_bridge.serving.model import ServedModel
from dlm_bridge.serving.protocol import parse_request
from tests.serving.conftest import PATIENCE_S, Running, openai, running

PROMPT = "the cat "
CHAT = [{"role": "user", "content": "hi"}]
AS_TEXT = "user: hi\nassistant: "  # the same by the chat template
BODY: dict[str, Any] = {"model": "any", "max_tokens": 16}


@pytest.fixture(scope="module")
def autoregressive(qwen3: Any) -> Iterator[Running]:
    with running(load_model(qwen3)) as found:
        yield found


def events(server: Running, body: dict[str, Any], path: str = "commits") -> list[Any]:
    """The events of a stream, without its last line."""
    with httpx.stream("POST", f"{server.address}/v1/{path}", json=body, timeout=PATIENCE_S) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@pytest.mark.parametrize(
    ("given", "extra"),
    [({}, {}), ({"temperature": 0.7, "seed": 5, "top_p": 0.9}, {}), ({}, {"block_length": 4, "steps": 8})],
)
def test_a_completion_is_what_generate_writes(server: Running, given: dict[str, Any], extra: dict[str, Any]) -> None:
    answer = server.client().completions.create(prompt=PROMPT, **BODY, **given, extra_body=extra)
    assert answer.choices[0].text == server.alone(PROMPT, gen_length=16, **given, **extra)
    assert answer.choices[0].finish_reason == "length"
    assert answer.model == "tiny"
    assert answer.usage.prompt_tokens == len(server.served.loaded.tokenizer(PROMPT)["input_ids"])
    assert (answer.usage.completion_tokens, answer.usage.total_tokens - answer.usage.prompt_tokens) == (16, 16)


def test_the_chat_template_gets_its_variables(diffusion: LoadedModel) -> None:
    tokenizer = copy.deepcopy(diffusion.tokenizer)
    tokenizer.chat_template = "{{ 1 if loud is true else 0 }}: {{ messages[-1].content }}"
    served = ServedModel(replace(diffusion, tokenizer=tokenizer), "tiny", {})
    for args, text in (({"loud": True}, "1: hi"), ({}, "0: hi"), (None, "0: hi")):
        body = {"messages": CHAT, "chat_template_kwargs": args, "max_tokens": 4}
        (row,) = served.jobs(parse_request(json.dumps(body).encode(), chat=True), lambda _: lambda _: None)
        assert list(row.prompt) == tokenizer(text)["input_ids"]


def test_pieces_of_a_stream_are_the_whole_text(server: Running) -> None:
    client, extra = server.client(), {"block_length": 4}
    whole = client.chat.completions.create(messages=CHAT, **BODY, extra_body=extra)
    assert whole.choices[0].message.content == server.alone(AS_TEXT, gen_length=16, **extra)
    chunks = list(
        client.chat.completions.create(
            messages=CHAT, stream=True, stream_options={"include_usage": True}, **BODY, extra_body=extra
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    pieces = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices and chunk.choices[0].delta.content]
    assert "".join(pieces) == whole.choices[0].message.content
    assert len(pieces) > 1
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].usage == whole.usage
    assert len({chunk.id for chunk in chunks}) == 1


def test_choices_are_those_of_one_call_of_generate(server: Running) -> None:
    loaded, settings = server.served.loaded, {"temperature": 1.0, "seed": 3}
    ids = loaded.tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    rows = loaded.model.generate(ids, gen_length=16, num_return_sequences=3, eos_token_id=None, **settings)
    wanted = loaded.tokenizer.batch_decode(rows[:, ids.shape[1] :], skip_special_tokens=True)
    extra = {"eos_token_id": None}
    answer = server.client().completions.create(prompt=PROMPT, n=3, **BODY, **settings, extra_body=extra)
    assert [choice.text for choice in answer.choices] == wanted
    assert len(set(wanted)) == 3
    streamed = server.client().completions.create(
        prompt=PROMPT, n=3, stream=True, **BODY, **settings, extra_body=extra
    )
    texts = ["", "", ""]
    for chunk in streamed:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == wanted


def test_prompts_are_texts_or_tokens(server: Running) -> None:
    client, prompts = server.client(), ["the", "a long prompt ", "x"]
    wanted = [server.alone(prompt, gen_length=16) for prompt in prompts]
    ids = [server.served.loaded.tokenizer(prompt)["input_ids"] for prompt in prompts]
    for given in (prompts, ids):
        answer = client.completions.create(prompt=given, **BODY)
        assert [choice.text for choice in answer.choices] == wanted
        assert answer.usage.prompt_tokens == sum(map(len, ids))
    assert client.completions.create(prompt=ids[1], **BODY).choices[0].text == wanted[1]


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_text_before_it(server: Running, stream: bool) -> None:
    settings = {"temperature": 1.0, "seed": 1}
    text = server.alone(PROMPT, gen_length=32, block_length=4, **settings)
    stop = next(text[n] for n in range(6, len(text)) if text[n] not in text[:n])
    assert stop != "\ufffd"
    answer = server.client().completions.create(
        model="any",
        prompt=PROMPT,
        max_tokens=32,
        stop=["no such text", stop],
        stream=stream,
        extra_body={"block_length": 4},
        **settings,
    )
    chunks = list(answer) if stream else [answer]
    assert "".join(chunk.choices[0].text for chunk in chunks) == text[: text.index(stop)]
    assert chunks[-1].choices[0].finish_reason == "stop"
    if not stream:
        assert answer.usage.completion_tokens < 32


def test_an_end_of_sequence_token_ends_the_text(server: Running) -> None:
    loaded = server.served.loaded
    ids = loaded.tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    tokens = loaded.model.generate(ids, gen_length=16, eos_token_id=None)[0, ids.shape[1] :].tolist()
    end = next(token for token in tokens[4:] if token not in tokens[:4])
    extra = {"eos_token_id": end, "pad_token_id": 1}
    for stream in (False, True):
        answer = server.client().completions.create(prompt=PROMPT, stream=stream, **BODY, extra_body=extra)
        chunks = list(answer) if stream else [answer]
        wanted = loaded.tokenizer.decode(tokens[: tokens.index(end) + 1], skip_special_tokens=True)
        assert "".join(chunk.choices[0].text for chunk in chunks) == wanted
        assert chunks[-1].choices[0].finish_reason == "stop"


def test_requests_of_many_settings_at_once_are_not_mixed_up(server: Running) -> None:
    given = [
        {"prompt": f"prompt {number % 4} ", "seed": number, "temperature": 0.5 * (number % 2)} for number in range(6)
    ]
    lengths = [8 * (1 + number % 3) for number in range(6)]

    async def ask_all() -> list[Any]:
        client = openai.AsyncOpenAI(base_url=f"{server.address}/v1", api_key="none", timeout=PATIENCE_S)
        async with client:
            calls = [
                client.completions.create(model="", max_tokens=new, **one)
                for one, new in zip(given, lengths, strict=True)
            ]
            return await asyncio.gather(*calls)

    for one, new, answer in zip(given, lengths, asyncio.run(ask_all()), strict=True):
        assert answer.choices[0].text == server.alone(gen_length=new, **one)


def test_commits_add_up_to_the_text(server: Running) -> None:
    """In the order in which the model makes them, which is not that of the text."""
    found = events(server, {"prompt": PROMPT, "max_tokens": 16, "block_length": 8})
    start, *middle, end, usage = found
    assert (start["type"], end["type"], usage["type"]) == ("start", "end", "usage")
    assert start["lengths"] == [16]
    tokens, order = [-1] * 16, []
    for event in middle:
        assert event["type"] == "commit"
        for place, token in zip(event["positions"], event["tokens"], strict=True):
            tokens[place] = token
            order.append(place)
    assert tokens == end["tokens"]
    assert sorted(order) == list(range(16)) != order
    assert [event["forwards"] for event in middle] == sorted(event["forwards"] for event in middle)
    assert end["text"] == server.alone(PROMPT, gen_length=16, block_length=8)
    assert usage["completion_tokens"] == 16


def test_commits_of_a_chat(server: Running) -> None:
    *_, end, _ = events(server, {"messages": CHAT, "max_tokens": 8})
    assert end["text"] == server.alone(AS_TEXT, gen_length=8)


@pytest.mark.parametrize("given", [{"temperature": 0}, {"temperature": 0.9, "seed": 4}])
def test_an_autoregressive_model_answers_alike(autoregressive: Running, given: dict[str, Any]) -> None:
    wanted = autoregressive.alone(AS_TEXT, gen_length=16, **given)
    client = autoregressive.client()
    whole = client.chat.completions.create(messages=CHAT, **BODY, **given)
    assert whole.choices[0].message.content == wanted
    chunks = list(client.chat.completions.create(messages=CHAT, stream=True, **BODY, **given))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == wanted
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": [5, -1]}, "prompt"),
        ({"prompt": [5, 10**6]}, "prompt"),
        ({"prompt": "a", "bad_words_ids": [[True]]}, "bad_words_ids"),
    ],
)
def test_what_an_autoregressive_model_refuses_is_named(autoregressive: Running, body: Any, param: str) -> None:
    answer = httpx.post(f"{autoregressive.address}/v1/completions", json={"max_tokens": 4, **body})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_as_transformers_chat_asks(server: Running) -> None:
    """First whether the model is loaded, then with a generation config, which can hold a sampler's settings."""
    ready = httpx.post(f"{server.address}/load_model", json={"model": "any"}).text
    assert json.loads(ready.removeprefix("data: "))["status"] == "ready"
    config = {"max_new_tokens": 16, "block_length": 4, "do_sample": False, "transformers_version": "5.23.0"}
    body = {"messages": CHAT, "generation_config": json.dumps(config), "stream": True}
    found = events(server, body, "chat/completions")
    pieces = [event["choices"][0]["delta"].get("content", "") for event in found]
    assert "".join(pieces) == server.alone(AS_TEXT, gen_length=16, block_length=4)


def test_defaults_of_the_server_are_those_of_requests_that_do_not_say(diffusion: LoadedModel) -> None:
    with running(diffusion, defaults={"gen_length": 8, "block_length": 4}) as server:
        client = server.client()
        answer = client.completions.create(model="any", prompt=PROMPT)
        assert answer.choices[0].text == server.alone(PROMPT, gen_length=8, block_length=4)
        answer = client.completions.create(model="any", prompt=PROMPT, max_tokens=12, extra_body={"block_length": 6})
        assert answer.choices[0].text == server.alone(PROMPT, gen_length=12, block_length=6)
        other_name = client.completions.create(model="any", prompt=PROMPT, max_tokens=12, extra_body={"block_size": 6})
        assert other_name.choices[0].text == answer.choices[0].text
    text = answer.choices[0].text
    with running(diffusion, defaults={"gen_length": 12, "block_length": 6, "stop_strings": [text[-1]]}) as server:
        answer = server.client().completions.create(model="any", prompt=PROMPT)
        assert answer.choices[0].text == text[: text.index(text[-1])]
        assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("context", "limit", "stored"), [(128, None, {}), (256, 100, {}), (130, None, {"gen_length": 300})]
)
@pytest.mark.fast("130-*", "256-*")
def test_defaults_are_shortened_to_the_room(
    llada: Path, tmp_path: Path, context: int, limit: int | None, stored: dict[str, int]
) -> None:
    """The sampler's 128 new tokens, or those of generation_config.json, do not fit; what a request names must."""
    folder = tmp_path / "short"
    shutil.copytree(llada, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_sequence_length": context}))
    (folder / "generation_config.json").write_text(json.dumps({"algorithm": "llada", **stored}))
    room = min(context, limit or context)
    with running(load_model(folder), max_length=limit) as server:
        assert server.served.plan().rows > 0
        for length in (2, 90):
            body = {"prompt": [5] * length, "eos_token_id": None}
            answer = httpx.post(f"{server.address}/v1/completions", json=body, timeout=PATIENCE_S)
            assert answer.json()["usage"]["total_tokens"] == room
        refused = httpx.post(f"{server.address}/v1/completions", json={**body, "max_tokens": room})
        assert refused.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("length", [1, 100, 131])
@pytest.mark.fast("131")
def test_a_length_need_not_be_whole_default_blocks(server: Running, length: int) -> None:
    extra = {"eos_token_id": None}
    answer = server.client().completions.create(model="", prompt=PROMPT, max_tokens=length, extra_body=extra)
    assert answer.usage.completion_tokens == length
    assert answer.choices[0].text == server.alone(PROMPT, gen_length=length, **extra)


def test_the_server_s_lengths_of_an_autoregressive_model(qwen3: Path) -> None:
    for defaults, new in (({"max_new_tokens": 5}, 5), ({"max_length": 12}, 9), ({}, 125)):
        with running(load_model(qwen3), defaults=defaults) as server:
            assert server.served.plan().rows > 0
            body = {"prompt": [5, 6, 7], "ignore_eos": True}
            answer = httpx.post(f"{server.address}/v1/completions", json=body, timeout=PATIENCE_S)
            assert answer.json()["usage"]["completion_tokens"] == new


def test_models_health_and_metrics(diffusion: LoadedModel) -> None:
    with running(diffusion) as server:
        client = server.client()
        assert [model.id for model in client.models.list()] == ["tiny"]
        assert client.models.retrieve("tiny").id == "tiny"
        with pytest.raises(openai.NotFoundError, match="other"):
            client.models.retrieve("other")
        assert httpx.get(f"{server.address}/health").json() == {"status": "ok"}
        client.completions.create(prompt=PROMPT, **BODY)
        figures = httpx.get(f"{server.address}/metrics").text
        lines = [line.rsplit(" ", 1) for line in figures.splitlines() if not line.startswith("#")]
        said = {name: float(value) for name, value in lines}
        assert said['dlm_bridge_requests_total{path="/v1/completions",status="200"}'] == 1
        assert said["dlm_bridge_generated_tokens_total"] == said["dlm_bridge_forwards_total"] == 16
        assert said["dlm_bridge_prompt_tokens_total"] > 0
        assert said['dlm_bridge_request_seconds_bucket{le="+Inf"}'] == said["dlm_bridge_request_seconds_count"] == 1
        assert said["dlm_bridge_first_token_seconds_count"] == 0  # only of streams
        assert said["dlm_bridge_queue_rows"] == said["dlm_bridge_running_rows"] == 0
        assert not any("_created" in name for name in said)

"""Responses, infilling and the pages, by the real `openai` client where it has them."""

from __future__ import annotations

import contextlib
import html
import io
import json
import re
import subprocess
from typing import Any

import httpx
import pytest

from dlm_bridge.generation.offline import write_texts
from dlm_bridge.generation.prompts import encode_text
from dlm_bridge.generation.samplers import SAMPLERS
from dlm_bridge.loading import LoadedModel, load_model
from dlm_bridge.serving.protocol import RequestError, parse_infill
from dlm_bridge.serving.responses import parse_response
from tests.serving.conftest import PATIENCE_S, Running, openai, running
from tests.serving.test_answers import events

ITEMS = [
    {"role": "user", "content": "hi"},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "ho"}]},
    {"role": "user", "content": [{"type": "input_text", "text": "he"}]},
]
INPUTS: list[tuple[dict[str, Any], str]] = [
    ({"input": "hi"}, "user: hi\nassistant: "),
    ({"input": "hi", "instructions": "be brief"}, "system: be brief\nuser: hi\nassistant: "),
    ({"input": ITEMS}, "user: hi\nassistant: ho\nuser: he\nassistant: "),
    ({"input": [{"role": "developer", "content": "x"}, ITEMS[0]]}, "system: x\nuser: hi\nassistant: "),
]


@pytest.mark.parametrize(("given", "prompt"), INPUTS)
@pytest.mark.fast("given0*", "given3*")
def test_a_response_is_what_generate_writes(server: Running, given: dict[str, Any], prompt: str) -> None:
    answer = server.client().responses.create(model="any", max_output_tokens=16, **given)
    assert answer.output_text == server.alone(prompt, gen_length=16)
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert answer.usage.input_tokens == len(server.served.loaded.tokenizer(prompt)["input_ids"])
    assert (answer.usage.output_tokens, answer.usage.total_tokens - answer.usage.input_tokens) == (16, 16)
    assert answer.model == "tiny"


def test_an_answer_is_the_input_of_the_next_request(server: Running) -> None:
    client = server.client()
    first = client.responses.create(model="any", input="hi", max_output_tokens=4)
    conversation = [ITEMS[0], *first.output, {"role": "user", "content": "he"}]
    second = client.responses.create(model="any", input=conversation, max_output_tokens=4)
    prompt = f"user: hi\nassistant: {first.output_text}\nuser: he\nassistant: "
    assert second.output_text == server.alone(prompt, gen_length=4)


def test_events_of_a_stream_make_the_response(server: Running) -> None:
    settings: dict[str, Any] = {"temperature": 0.7, "top_p": 0.9, "extra_body": {"block_length": 4, "seed": 3}}
    asked: dict[str, Any] = {"model": "any", "input": "hi", "max_output_tokens": 16, **settings}
    whole = server.client().responses.create(**asked)
    events = list(server.client().responses.create(stream=True, **asked))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = list(dict.fromkeys(event.type.removeprefix("response.") for event in events))
    assert kinds == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta", "output_text.done",
        "content_part.done", "output_item.done", "incomplete",
    ]  # fmt: skip
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text == events[-1].response.output_text
    assert sum(map(bool, deltas)) > 1
    assert events[-1].response.usage == whole.usage
    assert events[0].response.status == "in_progress"
    with server.client().responses.stream(**{**asked, "model": "any"}) as stream:  # the client's own accumulation
        for _ in stream:
            pass


def test_a_response_repeats_instructions_and_metadata(server: Running) -> None:
    asked: dict[str, Any] = {"model": "any", "input": "hi", "max_output_tokens": 4}
    plain = server.client().responses.create(**asked)
    assert (plain.instructions, plain.metadata) == (None, {})
    more = {"instructions": "be brief", "metadata": {"topic": "demo"}}
    answer = server.client().responses.create(**asked, **more)
    assert (answer.instructions, answer.metadata) == ("be brief", {"topic": "demo"})
    created, *_ = server.client().responses.create(**asked, **more, stream=True)
    assert (created.response.instructions, created.response.metadata) == ("be brief", {"topic": "demo"})


def test_a_stop_string_completes_a_response(server: Running) -> None:
    text = server.alone("user: hi\nassistant: ", gen_length=16)
    stop = next(character for character in text[2:] if character.isprintable() and character != "\ufffd")
    answer = server.client().responses.create(
        model="any", input="hi", max_output_tokens=16, extra_body={"stop": [stop]}
    )
    assert (answer.status, answer.output_text) == ("completed", text[: text.index(stop)])
    assert answer.incomplete_details is None


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"input": None}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": [ITEMS[0], {"type": "function_call_output", "output": "1"}]}, "input[1]"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0]"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"text": {"format": {"type": "xml"}}}, "text"),
        ({"text": {"verbosity": "low"}}, "text"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"reasoning": {"effort": "high"}}, "reasoning"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["reasoning.encrypted_content"]}, "include"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_tokens": 4}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"n": 2}, "n"),
        ({"metadata": {"topic": 1}}, "metadata"),
        ({"metadata": {str(number): "" for number in range(17)}}, "metadata"),
    ],
)
def test_what_responses_do_not_support_is_named(given: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as refused:
        parse_response(json.dumps({"input": "hi", **given}).encode())
    assert (refused.value.status, refused.value.body["error"]["param"]) == (400, param)


def test_errors_reach_the_client(server: Running) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        server.client().responses.create(model="any", input="hi", previous_response_id="resp_1")
    assert refused.value.param == "previous_response_id"
    with pytest.raises(openai.BadRequestError) as refused:
        server.client().responses.create(model="any", input="hi", extra_body={"blok_length": 4})
    assert refused.value.param == "blok_length"


def infill(server: Running, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.address}/v1/infill", json=body, timeout=PATIENCE_S)


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.8, "seed": 3}])
def test_masks_are_filled_in_as_by_generate(server: Running, settings: dict[str, Any]) -> None:
    text, loaded = "the [MASK:3] sat on[MASK].", server.served.loaded
    ids = encode_text(loaded.tokenizer, text, infill=True)
    wanted = write_texts(loaded.model, loaded.tokenizer, [ids], {"infill": True, **settings})
    answer = infill(server, prompt=text, **settings).json()
    (choice,) = answer["choices"]
    assert choice["text"] == wanted.texts[0]
    filled = [ids.index(-1), len(ids) - 2]
    tokens = wanted.token_ids[0]
    parts = [tokens[filled[0] : filled[0] + 3], tokens[filled[1] : filled[1] + 1]]
    assert choice["infills"] == [server.served.decode(part) for part in parts]
    assert answer["usage"] == {"prompt_tokens": len(ids) - 4, "completion_tokens": 4, "total_tokens": len(ids)}
    again = infill(server, prefix="a [MASK] ", suffix=" b", max_tokens=2, n=2, temperature=1.0, seed=1).json()
    assert len({choice["text"] for choice in again["choices"]}) == 2
    for choice in again["choices"]:  # the prefix is a text, whose [MASK] is none
        assert choice["text"] == f"a [MASK] {choice['infills'][0]} b"


def test_commits_of_masks_add_up_to_the_text(server: Running) -> None:
    body = {"prompt": "the [MASK:6] sat on [MASK:2].", "n": 2, "temperature": 1.0, "seed": 3, "block_length": 4}
    whole = infill(server, **body).json()
    start, *middle, usage = events(server, {**body, "stream": True}, "infill")
    ends = sorted((event for event in middle if event["type"] == "end"), key=lambda event: event["index"])
    filled: list[list[tuple[int, int]]] = [[], []]  # (position, token), in the order of the commits
    for event in middle:
        if event["type"] == "commit":
            filled[event["index"]] += zip(event["positions"], event["tokens"], strict=True)
    for end, texts, length, commits, choice in zip(
        ends, start["texts"], start["lengths"], filled, whole["choices"], strict=True
    ):
        masks = [place for place, text in enumerate(texts) if text is None]
        places = [place for place, _ in commits]
        assert (len(masks), len(texts), len(end["tokens"])) == (8, length, length)
        assert sorted(places) == masks != places
        assert [end["tokens"][place] for place in places] == [token for _, token in commits]
        assert (end["text"], end["infills"]) == (choice["text"], choice["infills"])
        assert end["finish_reason"] == choice["finish_reason"]
    assert {"type": "usage", **whole["usage"]} == usage


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prefix": "a"}, "max_tokens"),
        ({"prompt": "a [MASK]", "suffix": "b"}, "suffix"),
        ({"prompt": "a [MASK]", "max_tokens": 3}, "max_tokens"),
        ({"prompt": ["a [MASK]"]}, "prompt"),
        ({"prompt": "a [MASK]", "stop": ["b"]}, "stop"),
        ({"prompt": "a [MASK]", "span_lengths": [1, 2]}, "span_lengths"),
        ({"prompt": "a [MASK]", "tools": [1]}, "tools"),
    ],
)
def test_what_infilling_does_not_support_is_named(body: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as refused:
        parse_infill(json.dumps(body).encode())
    assert (refused.value.status, refused.value.body["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("text", "code"),
    [("nothing", None), ("[MASK:0]", None), ("", None), ("[MASK:300]", "context_length_exceeded")],
)
def test_a_text_that_cannot_be_filled_in_is_refused(server: Running, text: str, code: str | None) -> None:
    answer = infill(server, prompt=text)
    assert answer.status_code == 400
    assert (answer.json()["error"]["param"], answer.json()["error"]["code"]) == ("prompt", code)


def test_an_autoregressive_model_fills_in_no_masks(qwen3: Any) -> None:
    with running(load_model(qwen3)) as found:
        assert infill(found, prompt="a [MASK]").status_code == 400
        answer = found.client().responses.create(model="any", input="hi", max_output_tokens=4)
        assert answer.usage.output_tokens <= 4


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_pages_load_nothing_and_name_the_model(diffusion: LoadedModel, path: str) -> None:
    name = "</title><script>alert(1)</script>"
    with running(diffusion, name=name) as found:
        page = httpx.get(found.address + path, timeout=PATIENCE_S)
        assert httpx.head(found.address + path, timeout=PATIENCE_S).status_code == 200
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert "{{" not in page.text
    assert html.escape(name) in page.text
    assert name not in page.text
    assert set(re.findall('(?:src|href)="([^"]*)"', page.text)) <= {"data:,", ".", "docs"}
    assert "@import" not in page.text


def test_the_home_page_s_examples_are_answered(server: Running) -> None:
    page = httpx.get(server.address, timeout=PATIENCE_S).text
    examples = [html.unescape(re.sub("<[^>]+>", "", each)) for each in re.findall("<pre>(.*?)</pre>", page, re.DOTALL)]
    assert len(examples) == 2
    done = subprocess.run(["bash", "-c", examples[0]], capture_output=True, text=True, check=True, timeout=PATIENCE_S)
    text = json.loads(done.stdout)["choices"][0]["message"]["content"]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(examples[1], {})
    assert printed.getvalue() == f"{text}\n"


def test_docs_list_every_endpoint_and_setting(server: Running) -> None:
    page = httpx.get(f"{server.address}/docs", timeout=PATIENCE_S).text
    routes = {route.path for route in server.process.config.app.routes if "{" not in route.path}
    assert [path for path in routes - {"/", "/docs", "/load_model"} if path not in page] == []
    assert [name for name in SAMPLERS["llada"].parameters() if f"<code>{name}</code>" not in page] == []


def test_a_key_hides_the_model_but_not_the_pages(diffusion: LoadedModel) -> None:
    with running(diffusion, api_key="secret", name="unreleased") as found:
        for path in ("/", "/docs"):
            page = httpx.get(found.address + path, timeout=PATIENCE_S)
            assert page.status_code == 200
            assert "unreleased" not in page.text
        assert httpx.post(f"{found.address}/v1/infill", json={}, timeout=PATIENCE_S).status_code == 401
        assert httpx.post(f"{found.address}/v1/responses", json={}, timeout=PATIENCE_S).status_code == 401

"""Formats and calls of tools over HTTP: every accepted request ends in a valid text, also where `max_tokens` cuts it.

The models have random weights and draw at temperature 1, so a text is valid because of its constraint alone.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import AutoTokenizer

from dlm_bridge import registration
from dlm_bridge.errors import MissingExtraError
from dlm_bridge.loading import LoadedModel, load_model
from tests.serving.conftest import PATIENCE_S, Running, running

pytestmark = pytest.mark.extension("structured")
jsonschema = pytest.importorskip("jsonschema")

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
ADD = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": ADD}},
    {"type": "function", "function": {"name": "now"}},
]
# As the templates of Qwen and Hermes write calls, results and tools.
TEMPLATE = (
    "{% if tools %}tools: {{ tools | tojson }} <tool_call>{{ '\n' }}{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for call in m.tool_calls %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
CHAT = [{"role": "user", "content": "hi"}]
BODY: dict[str, Any] = {"model": "any", "messages": CHAT, "temperature": 1.0, "max_tokens": 72}


def with_tools(source: Path, folder: Path) -> LoadedModel:
    """The model with a longer context and a template that writes tools: a token of its tokenizer is a byte."""
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    for name in {"max_sequence_length", "max_position_embeddings"} & config.keys():
        config[name] = 2048
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return load_model(folder)


@pytest.fixture(scope="module")
def calling(tmp_path_factory: pytest.TempPathFactory, llada: Path) -> Iterator[Running]:
    loaded = with_tools(llada, tmp_path_factory.mktemp("calling") / "llada")
    with running(loaded, defaults={"steps": 4}) as found:
        yield found


@pytest.fixture(scope="module")
def causal(tmp_path_factory: pytest.TempPathFactory, qwen3: Path) -> Iterator[Running]:
    with running(with_tools(qwen3, tmp_path_factory.mktemp("causal") / "qwen3")) as found:
        yield found


def post(server: Running, path: str = "completions", **body: Any) -> httpx.Response:
    return httpx.post(f"{server.address}/v1/{path}", json=body, timeout=PATIENCE_S)


def text_of(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"structured_outputs": {"regex": "[a-f]{3}-[0-9]{2,}"}}, "[a-f]{3}-[0-9]{2,}"),
        ({"regex": "(ab|c)+"}, "(ab|c)+"),
        ({"structured_outputs": {"choice": ["yes", "no", "yes and no"]}}, "yes|no|yes and no"),
    ],
)
@pytest.mark.fast("fields0*")
def test_a_text_matches_where_max_tokens_cut_it(server: Running, fields: Any, pattern: str) -> None:
    for seed, tokens in enumerate((10, 17)):
        given = {"prompt": "the", "temperature": 1.0, "seed": seed, "max_tokens": tokens, **fields}
        answer = post(server, **given)
        assert re.fullmatch(pattern, text_of(answer))
        cut = answer.json()["usage"]["completion_tokens"] == tokens
        assert answer.json()["choices"][0]["finish_reason"] == "stop" or cut


def test_a_text_that_may_not_go_on_has_stopped(server: Running) -> None:
    """At `max_tokens`, a text to which more could be added was cut; one that is complete was not."""
    for pattern, reason in (("[0-9]{4}", "stop"), ("[0-9]+", "length"), ("[0-9]{3}x?", "stop")):
        answer = post(server, prompt="the", max_tokens=4, temperature=1.0, ignore_eos=True, regex=pattern)
        choice = answer.json()["choices"][0]
        assert re.fullmatch(pattern, choice["text"])
        assert choice["finish_reason"] == reason


def test_the_mass_of_the_feasible_tokens_is_reported(server: Running) -> None:
    given = {"prompt": "the", "max_tokens": 4, "temperature": 1.0, "seed": 1, "dlm": True}
    figures = [post(server, **given, **more).json()["usage"]["dlm"] for more in ({"regex": "[a-c]+"}, {})]
    assert figures[0]["constraint_log_mass"] < 0
    assert "constraint_log_mass" not in figures[1]


def test_every_field_of_a_schema_gives_the_same_text(server: Running) -> None:
    given: dict[str, Any] = {"prompt": "the", "temperature": 1.0, "seed": 3, "max_tokens": 32, "steps": 4}
    texts = {
        text_of(post(server, **given, **fields))
        for fields in (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}},
            {"structured_outputs": {"json": PERSON}},
            {"json_schema": json.dumps(PERSON)},
        )
    }
    assert len(texts) == 1
    jsonschema.validate(json.loads(texts.pop()), PERSON)


def test_the_openai_client_parses_the_answer(calling: Running, causal: Running) -> None:
    from pydantic import BaseModel

    class Point(BaseModel):
        x: int
        label: str

    for server in (calling, causal):
        answer = server.client().chat.completions.parse(**{**BODY, "max_tokens": 32}, response_format=Point, seed=1)
        assert isinstance(answer.choices[0].message.parsed, Point)
        response = server.client().responses.parse(
            model="any", input="hi", temperature=1.0, max_output_tokens=32, text_format=Point, extra_body={"seed": 1}
        )
        assert isinstance(response.output_parsed, Point)


def test_a_json_object_is_one(calling: Running) -> None:
    given = {**BODY, "max_tokens": 12, "response_format": {"type": "json_object"}}
    answer = calling.client().chat.completions.create(**given)
    assert isinstance(json.loads(answer.choices[0].message.content), dict)


def test_one_batch_has_texts_of_different_formats(server: Running) -> None:
    """Requests with other constraints, and one without, share the engine and do not change each other's texts."""
    given: dict[str, Any] = {"temperature": 1.0, "max_tokens": 12}
    kinds: list[dict[str, Any]] = [{"regex": "[a-c]+"}, {"regex": "[0-9]{4}"}, {}]
    alone = [text_of(post(server, prompt="the", seed=5, **given, **kind)) for kind in kinds]
    jobs = []
    client = httpx.Client(timeout=PATIENCE_S)
    import concurrent.futures as futures

    with futures.ThreadPoolExecutor(3) as pool:
        for kind in kinds:
            body = {"prompt": "the", "seed": 5, **given, **kind}
            jobs.append(pool.submit(client.post, f"{server.address}/v1/completions", json=body))
    assert [text_of(job.result()) for job in jobs] == alone


# ---- Tools.


def check_calls(calls: Any) -> None:
    for call in calls:
        arguments = json.loads(call.function.arguments)
        if call.function.name == "add":
            jsonschema.validate(arguments, ADD)
        else:
            assert (call.function.name, arguments) == ("now", {})
        assert call.type == "function"
        assert call.id.startswith("call_")


@pytest.mark.parametrize("parallel", [True, False])
def test_a_required_call_is_one_of_the_tools(calling: Running, causal: Running, parallel: bool) -> None:
    for server in (calling, causal):
        answer = server.client().chat.completions.create(
            **BODY, tools=TOOLS, tool_choice="required", parallel_tool_calls=parallel
        )
        (choice,) = answer.choices
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
        check_calls(choice.message.tool_calls)
        assert len(choice.message.tool_calls) == 1 or parallel


def test_a_named_function_is_called(calling: Running) -> None:
    chosen = {"type": "function", "function": {"name": "add"}}
    answer = calling.client().chat.completions.create(**BODY, tools=TOOLS, tool_choice=chosen, seed=1)
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "add"
    check_calls([call])


def test_with_auto_a_text_is_free_of_the_mark(calling: Running) -> None:
    """Random weights hardly ever write the mark; the language itself is tested in tests/structured."""
    answer = calling.client().chat.completions.create(**{**BODY, "max_tokens": 12}, tools=TOOLS)
    (choice,) = answer.choices
    assert choice.message.content
    assert "<tool_call>" not in choice.message.content
    assert (choice.finish_reason in ("stop", "length"), choice.message.tool_calls) == (True, None)


def test_streams_send_a_call_when_its_arguments_are_final(calling: Running) -> None:
    given = {**BODY, "tools": TOOLS, "tool_choice": "required", "seed": 4}
    whole = calling.client().chat.completions.create(**given).choices[0].message.tool_calls
    deltas, reasons = [], []
    for chunk in calling.client().chat.completions.create(**given, stream=True):
        (choice,) = chunk.choices
        assert not choice.delta.content
        deltas += choice.delta.tool_calls or []
        reasons.append(choice.finish_reason)
    assert reasons[-1] == "tool_calls"
    assert [delta.index for delta in deltas] == list(range(len(whole)))
    assert [delta.function.arguments for delta in deltas] == [call.function.arguments for call in whole]
    with calling.client().chat.completions.stream(**given) as stream:
        final = stream.get_final_completion()
    assert [call.function.arguments for call in final.choices[0].message.tool_calls] == [
        call.function.arguments for call in whole
    ]


def test_the_template_gets_tools_and_calls_as_objects(calling: Running) -> None:
    from dlm_bridge.serving.protocol import parse_request

    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
    messages = [
        *CHAT,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "3"},
    ]
    body = {**BODY, "messages": messages, "tools": TOOLS}
    (job,) = calling.served.jobs(parse_request(json.dumps(body).encode(), chat=True), lambda _: lambda _: None)
    text = calling.served.loaded.tokenizer.decode(job.prompt)
    assert '"arguments": {"a": 1, "b": 2}' in text
    assert '"description": "Adds."' in text
    assert text.endswith("tool: 3\nassistant: ")


FLAT_TOOLS = [{"type": "function", **tool["function"]} for tool in TOOLS]
RESPONSE: dict[str, Any] = {"model": "any", "input": "hi", "temperature": 1.0, "max_output_tokens": 72}


def test_a_response_calls_tools(calling: Running) -> None:
    given = {**RESPONSE, "tools": FLAT_TOOLS, "tool_choice": "required", "extra_body": {"seed": 4}}
    whole = calling.client().responses.create(**given)
    assert (whole.status, whole.output_text, whole.tool_choice) == ("completed", "", "required")
    for item in whole.output:
        assert (item.type, item.status) == ("function_call", "completed")
        if item.name == "add":
            jsonschema.validate(json.loads(item.arguments), ADD)
        else:
            assert (item.name, item.arguments) == ("now", "{}")
    with calling.client().responses.stream(**given) as stream:  # also accumulates the items itself
        events = list(stream)
    kinds = [event.type.removeprefix("response.") for event in events]
    of_call = [
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
    ]
    assert kinds == ["created", "in_progress", *of_call * len(whole.output), "completed"]
    final = events[-1].response.output
    assert [(item.name, item.arguments) for item in final] == [(item.name, item.arguments) for item in whole.output]
    assert [event.output_index for event in events if "arguments.done" in event.type] == [*range(len(final))]


def test_a_response_may_be_a_text_beside_tools(calling: Running) -> None:
    given = {**RESPONSE, "max_output_tokens": 12, "tools": FLAT_TOOLS, "extra_body": {"seed": 4}}
    whole = calling.client().responses.create(**given)
    (item,) = whole.output
    assert (item.type, item.content[0].text) == ("message", whole.output_text)
    assert whole.output_text
    events = list(calling.client().responses.create(**given, stream=True))
    kinds = list(dict.fromkeys(event.type.removeprefix("response.") for event in events))[2:-1]
    assert kinds == [
        "output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done",
        "output_item.done",
    ]  # fmt: skip
    assert events[-1].response.output_text == whole.output_text


def test_calls_and_results_are_the_input_of_the_next_response(calling: Running) -> None:
    from dlm_bridge.serving.responses import parse_response

    call = {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "add", "arguments": '{"a": 1, "b": 2}'}
    items = [*CHAT, call, {"type": "function_call_output", "call_id": "call_1", "output": "3"}]
    body = {**RESPONSE, "input": items, "tools": FLAT_TOOLS}
    (job,) = calling.served.jobs(parse_response(json.dumps(body).encode()), lambda _: lambda _: None)
    text = calling.served.loaded.tokenizer.decode(job.prompt)
    assert '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>' in text
    assert '"function": {"name": "add", "description": "Adds."' in text
    assert text.endswith("tool: 3\nassistant: ")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": TOOLS}, "tools"),
        ({"tools": FLAT_TOOLS, "tool_choice": {"type": "function", "name": "sub"}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": FLAT_TOOLS, "include": ["message.output_text.logprobs"]}, "include"),
        ({"tools": FLAT_TOOLS, "text": {"format": {"type": "json_object"}}}, "text"),
        ({"tools": FLAT_TOOLS, "max_tool_calls": 1}, "max_tool_calls"),
    ],
)
def test_malformed_tools_of_a_response_are_refused(fields: dict[str, Any], param: str) -> None:
    from dlm_bridge.serving.protocol import RequestError
    from dlm_bridge.serving.responses import parse_response

    with pytest.raises(RequestError) as refused:
        parse_response(json.dumps({"input": "hi", **fields}).encode())
    assert refused.value.body["error"]["param"] == param


# ---- Bodies of other clients.

# langchain-openai 0.3's ChatOpenAI, as its documentation describes bind_tools and with_structured_output (not
# recorded): messages as role and content, tools by `convert_to_openai_tool` of a pydantic class, and the default
# fields of its payload.
LANGCHAIN = [
    {
        "model": "any",
        "messages": [{"content": "What is 3 + 12?", "role": "user"}],
        "stream": False,
        "n": 1,
        "temperature": 0.7,
        "max_completion_tokens": 72,
        "tools": [
            {
                "type": "function",
                "function": {
                    "name": "Add",
                    "description": "Add two integers.",
                    "parameters": {
                        "properties": {
                            "a": {"description": "First integer", "type": "integer"},
                            "b": {"description": "Second integer", "type": "integer"},
                        },
                        "required": ["a", "b"],
                        "type": "object",
                    },
                },
            }
        ],
        "tool_choice": {"type": "function", "function": {"name": "Add"}},
        "parallel_tool_calls": False,
    },
    {
        "model": "any",
        "messages": [
            {"content": "Answer briefly.", "role": "system"},
            {"content": "What is 3 + 12?", "role": "user"},
            {
                "content": None,
                "role": "assistant",
                "tool_calls": [
                    {"type": "function", "id": "call_1", "function": {"name": "Add", "arguments": '{"a": 3, "b": 12}'}}
                ],
            },
            {"content": "15", "role": "tool", "tool_call_id": "call_1"},
        ],
        "max_completion_tokens": 20,
        "response_format": {
            "type": "json_schema",
            "json_schema": {
                "name": "Answer",
                "description": "The answer.",
                "strict": True,
                "schema": {
                    "additionalProperties": False,
                    "description": "The answer.",
                    "properties": {"value": {"title": "Value", "type": "integer"}},
                    "required": ["value"],
                    "title": "Answer",
                    "type": "object",
                },
            },
        },
    },
]
# litellm.completion("openai/any", ...), as its documentation describes function calling and JSON mode (not
# recorded): OpenAI's fields, with an assistant's message as its own objects dump it.
LITELLM = [
    {
        "model": "any",
        "messages": [{"role": "user", "content": "What is the time?"}],
        "max_tokens": 80,
        "tools": [
            {
                "type": "function",
                "function": {
                    "name": "get_time",
                    "description": "Get the time in a zone",
                    "parameters": {
                        "type": "object",
                        "properties": {"zone": {"type": "string", "enum": ["utc", "local"]}},
                        "required": ["zone"],
                    },
                },
            }
        ],
        "tool_choice": "required",
    },
    {
        "model": "any",
        "messages": [
            {"role": "user", "content": "What is the time?"},
            {
                "role": "assistant",
                "content": None,
                "function_call": None,
                "tool_calls": [
                    {
                        "function": {"arguments": '{"zone": "utc"}', "name": "get_time"},
                        "id": "call_2",
                        "type": "function",
                    }
                ],
            },
            {"role": "tool", "tool_call_id": "call_2", "name": "get_time", "content": '{"time": "12:00"}'},
        ],
        "max_tokens": 8,
        "response_format": {"type": "json_object"},
    },
]


@pytest.mark.parametrize("body", [*LANGCHAIN, *LITELLM])
def test_bodies_of_other_clients_are_answered(calling: Running, body: dict[str, Any]) -> None:
    answer = httpx.post(f"{calling.address}/v1/chat/completions", json={**body, "seed": 1}, timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    if "tools" in body:
        (tool,) = body["tools"]
        for call in choice["message"]["tool_calls"]:
            assert call["function"]["name"] == tool["function"]["name"]
            jsonschema.validate(json.loads(call["function"]["arguments"]), tool["function"]["parameters"])
        assert choice["finish_reason"] == "tool_calls"
    else:
        value = json.loads(choice["message"]["content"])
        jsonschema.validate(value, body["response_format"].get("json_schema", {}).get("schema", {"type": "object"}))


# ---- Forms.


def test_a_form_has_a_constraint_per_gap(server: Running) -> None:
    given = {"prompt": "Name: [MASK:4], age: [MASK:2].", "temperature": 1.0, "seed": 2}
    spans = [{"regex": "[A-Z][a-z]+"}, {"regex": "[1-9][0-9]"}]
    answer = post(server, "infill", **given, structured_outputs=spans)
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    assert re.fullmatch("Name: [A-Z][a-z]{3}, age: [1-9][0-9][.]", choice["text"])
    whole = post(server, "infill", **given, regex="Name: [A-Z][a-z]+, age: [1-9][0-9][.]")
    assert whole.json()["choices"][0]["text"] == choice["text"]
    parts = post(server, "infill", prefix="x = [MASK] ", suffix=";", max_tokens=3, structured_outputs=spans[:1])
    assert re.fullmatch("[A-Z][a-z]{2}", parts.json()["choices"][0]["infills"][0])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"structured_outputs": [{"regex": "a"}]}, "structured_outputs"),  # one for two spans
        ({"structured_outputs": [{"regex": "a"}, {"regex": "b", "choice": ["c"]}]}, "structured_outputs[1]"),
        ({"structured_outputs": [{"regex": "a"}, {"regex": "bbb"}]}, "structured_outputs"),  # a gap of two tokens
        ({"structured_outputs": [{"regex": "a"}, {"regex": "bb"}], "regex": "c"}, "structured_outputs"),
        ({"regex": "x+"}, "regex"),  # the given text does not match
    ],
)
def test_a_form_that_cannot_be_filled_in_is_refused(server: Running, fields: Any, param: str) -> None:
    answer = post(server, "infill", prompt="A: [MASK], B: [MASK:2].", **fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


# ---- Refusals.


@pytest.mark.parametrize(
    ("fields", "param", "named"),
    [
        ({"regex": "a{20}"}, "regex", ["20", "8"]),  # no text of max_tokens: both numbers
        ({"regex": "(a"}, "regex", ["character 0"]),
        ({"json_schema": {"type": "object", "properties": {"a": {"$ref": "#/nowhere"}}}}, "json_schema", ["#/"]),
        ({"structured_outputs": {"choice": ["a" * 9, "b" * 12]}}, "structured_outputs", ["9", "8"]),
        ({"regex": "a+", "stop": "b"}, "regex", ["stop"]),
        ({"regex": "a+", "suppress_tokens": [5]}, "regex", ["suppress_tokens"]),
        ({"regex": "a+", "ebnf": "b"}, "ebnf", ["regex"]),
    ],
)
def test_a_format_that_cannot_be_kept_is_refused(server: Running, fields: Any, param: str, named: list[str]) -> None:
    answer = post(server, prompt="the", max_tokens=8, **fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    for each in named:
        assert each in error["message"]


def test_auto_needs_a_template_that_marks_calls(server: Running) -> None:
    answer = post(server, "chat/completions", messages=CHAT, tools=TOOLS)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tool_choice")


def test_without_the_extension_formats_and_tools_are_refused(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(kind: str, name: str) -> Any:
        raise MissingExtraError(name, "not installed")

    monkeypatch.setattr("dlm_bridge.serving.protocol.load", load)
    assert registration.load is not load
    for path, body, param in (
        ("completions", {"prompt": "a", "regex": "a"}, "regex"),
        ("chat/completions", {"messages": CHAT, "tools": TOOLS, "tool_choice": "required"}, "tools"),
    ):
        answer = post(server, path, **body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
        assert "\n" not in answer.json()["error"]["message"]

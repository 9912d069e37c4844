"""Calls of tools: what their language contains, and what a text's calls are."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from dlm_bridge.errors import SettingError
from dlm_bridge.structured.compile import byte_automaton
from dlm_bridge.structured.composed import form_constraint
from dlm_bridge.structured.constraint import Constraint
from dlm_bridge.structured.languages import Limits
from dlm_bridge.structured.tools import CallParser, ToolChoice, ToolFormat
from tests.refusals import refused

TAGS = "{% if tools %}<tool_call>{% endif %}"
PLAIN = "{{ messages }}"
# References are to the parameters' own definitions, as pydantic writes them.
LOOK_UP = {
    "type": "object",
    "properties": {"word": {"type": "string"}, "where": {"$ref": "#/$defs/Place"}},
    "required": ["word"],
    "additionalProperties": False,
    "$defs": {"Place": {"enum": ["here", "there"]}},
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "look_up", "parameters": LOOK_UP}},
    {"type": "function", "function": {"name": "now"}},
]
CALL = '{"name": "look_up", "arguments": {"word": "tide", "where": "here"}}'
NOW = '{"name": "now", "arguments": {}}'


def tagged(call: str) -> str:
    return f"<tool_call>\n{call}\n</tool_call>"


def accepts(constraint: Constraint, text: str) -> bool:
    return byte_automaton(constraint, Limits(10_000, time.monotonic() + 60)).matches(text.encode())


@pytest.mark.parametrize(
    ("choice", "template", "inside", "outside"),
    [
        (
            ToolChoice(TOOLS, required=True),
            TAGS,
            [tagged(CALL), tagged(NOW), f"{tagged(NOW)}\n{tagged(CALL)}\n{tagged(NOW)}"],
            ["", "hello", CALL, tagged(CALL[:-1]), tagged(NOW) + " ", tagged('{"name": "other", "arguments": {}}')],
        ),
        (ToolChoice(TOOLS, required=True, parallel=False), TAGS, [tagged(CALL)], [f"{tagged(CALL)}\n{tagged(NOW)}"]),
        (ToolChoice(TOOLS, required=True, name="now"), TAGS, [tagged(NOW)], [tagged(CALL), f"{tagged(NOW)}\n" * 2]),
        (
            ToolChoice(TOOLS),
            TAGS,
            ["", "5 < 6", "a <tool_cal", f"Let me see.\n{tagged(CALL)}", tagged(NOW), f"<tool_call{tagged(NOW)}"],
            ["a <tool_call>", f"{tagged(CALL)} done", "<tool_call>\n{}\n</tool_call>"],
        ),
        (ToolChoice(TOOLS, required=True), PLAIN, [CALL, NOW], [tagged(CALL), f"{CALL}\n{NOW}", "", "x"]),
    ],
)
def test_the_language_is_that_of_the_choice(
    choice: ToolChoice, template: str, inside: list[str], outside: list[str]
) -> None:
    constraint = choice.constraint(template)
    for text in inside:
        assert accepts(constraint, text), text
    for text in outside:
        assert not accepts(constraint, text), text


def test_parameters_that_are_not_supported_name_their_tool() -> None:
    tools = [{"type": "function", "function": {"name": "odd", "parameters": {"$ref": "#/nowhere"}}}]
    with refused(SettingError, "constraint", "odd", "#/"):
        accepts(ToolChoice(tools, required=True).constraint(TAGS), "")


def test_a_text_or_a_call_need_a_mark_that_tells_them_apart() -> None:
    for template in (PLAIN, "<tool_call><function=x>", None):
        with refused(SettingError, "tool_choice"):
            ToolChoice(TOOLS).constraint(template)
    assert ToolFormat.of({"default": PLAIN, "tool_use": TAGS}).begin
    assert not ToolFormat.of({"default": PLAIN}).begin


def parsed(text: str, template: str = TAGS, *, size: int) -> tuple[str, list[dict[str, Any]]]:
    """Content and calls of a text that arrives in pieces."""
    parser = CallParser(ToolFormat.of(template))
    content, calls = "", []
    for start in range(0, len(text), size):
        piece, new = parser.add(text[start : start + size])
        content, calls = content + piece, calls + new
        for call in new:
            json.loads(call["function"]["arguments"])  # complete when it is sent
    piece, new = parser.add("", last=True)
    assert parser.calls == calls + new
    return content + piece, calls + new


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_calls_are_found_in_texts_that_arrive_in_pieces(size: int) -> None:
    content, calls = parsed(f"Let me see.\n{tagged(CALL)}\n{tagged(NOW)}", size=size)
    assert content == "Let me see.\n"
    assert [call["function"]["name"] for call in calls] == ["look_up", "now"]
    assert calls[0]["function"]["arguments"] == '{"word": "tide", "where": "here"}'
    assert calls[0]["type"] == "function"
    assert len({call["id"] for call in calls}) == 2
    assert parsed("1 < 2 <tool", size=size) == ("1 < 2 <tool", [])
    content, calls = parsed(NOW, PLAIN, size=size)
    assert (content, [call["function"]["arguments"] for call in calls]) == ("", ["{}"])


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize("word", ["</tool_call>", "<tool_call>", '"}}\\n</tool_call>', '", "arguments": "', "1e400"])
def test_arguments_may_contain_the_marks(size: int, word: str) -> None:
    raw = '{"word": ' + json.dumps(word) + "}"
    content, calls = parsed(tagged('{"name": "look_up", "arguments": ' + raw + "}"), size=size)
    assert (content, [call["function"]["arguments"] for call in calls]) == ("", [raw])


def test_numbers_stay_as_the_model_wrote_them() -> None:
    _, calls = parsed(tagged('{"name": "now", "arguments": {"x": 1.10, "y": 12345678901234567890123}}'), size=9)
    assert calls[0]["function"]["arguments"] == '{"x": 1.10, "y": 12345678901234567890123}'


def test_a_text_without_a_constraint_keeps_what_is_no_call() -> None:
    for text in (tagged("{"), "a <tool_call> b", tagged("[1]")):
        content, calls = parsed(text, size=4)
        assert ("".join(content.split()), calls) == ("".join(text.split()), [])


def test_a_form_has_the_given_texts_and_a_constraint_per_gap() -> None:
    form = form_constraint(["Name: ", Constraint.regex("[A-Z][a-z]+"), ", ", Constraint.choice(["yes", "no"]), "."])
    assert accepts(form, "Name: Ann, no.")
    for text in ("Name: ann, no.", "Name: Ann, no", "Name: Ann, perhaps.", "Ann, no."):
        assert not accepts(form, text)

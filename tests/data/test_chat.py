"""Which tokens of a conversation are answers, for every kind of row and of chat template, and what is refused."""

# ruff: noqa: RUF001  DeepSeek's marks
from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from dlm_bridge.data.chat_template import set_chat_template
from dlm_bridge.data.conversations import encode_conversations
from dlm_bridge.data.messages import DataRecord
from dlm_bridge.errors import CheckpointError, InputFileError, SettingError
from tests.data.chats import MARKED, TEMPLATE, THINKING, calling, chatty, said
from tests.data.templates import (
    MULTIMODAL,
    marks,
    problems,
    random_chat,
    refusable,
    templates,
    tokenizer_of,
    trl_folder,
)
from tests.refusals import refused

TALK = [said("user", "def f1é"), said("assistant", "return x"), said("user", "x + 1"), said("assistant", "(x): 2")]


DEEP: Any = []
for _ in range(5000):
    DEEP = [DEEP]


def _answers(tokenizer: Any, row: dict[str, Any]) -> tuple[str, list[str]]:
    """All of a row as text, and its stretches of answer."""
    (example,) = encode_conversations([DataRecord(row, "here")], tokenizer)
    found, run = [], []
    for token, answer in zip([*example.input_ids, None], [*example.answer, False], strict=True):
        if answer:
            run.append(token)
        elif run:
            found.append(tokenizer.decode(run))
            run = []
    return tokenizer.decode(example.input_ids), found


@pytest.mark.parametrize(
    ("template", "row", "answers"),
    [
        (TEMPLATE, {"messages": TALK}, ["return x<eos>", "(x): 2<eos>"]),
        (MARKED, {"messages": TALK}, ["return x<eos>", "(x): 2<eos>"]),
        (THINKING, {"messages": TALK}, ["return x<eos>", "think return\n(x): 2<eos>"]),
        (TEMPLATE, {"prompt": TALK[:3], "completion": TALK[3:]}, ["(x): 2<eos>"]),
        (MARKED, {"prompt": TALK[:3], "completion": TALK[3:]}, ["(x): 2<eos>"]),
        (None, {"prompt": "def f1(x):\n    return", "completion": " x + 1\n", "messages": None}, [" x + 1\n<eos>"]),
    ],
)
def test_what_the_assistant_says_is_answer(
    tokenizer: PreTrainedTokenizerFast, template: str | None, row: dict[str, Any], answers: list[str]
) -> None:
    chat = chatty(tokenizer, template)
    text, found = _answers(chat, row)
    assert found == answers
    messages = row.get("messages") or (row["prompt"] + row["completion"] if template else None)
    expected = (
        chat.apply_chat_template(messages, tokenize=False) if messages else "def f1(x):\n    return x + 1\n<eos>"
    )
    assert text == expected


def test_rows_of_all_kinds_keep_their_order(tokenizer: PreTrainedTokenizerFast) -> None:
    rows: list[dict[str, Any]] = [{"messages": TALK}, {"prompt": "def ", "completion": "f1"}, {"messages": TALK[:2]}]
    for template in (TEMPLATE, MARKED):
        chat = chatty(tokenizer, template)
        together = list(encode_conversations([DataRecord(row, str(number)) for number, row in enumerate(rows)], chat))
        assert [example.where for example in together] == ["0", "1", "2"]
        for number, row in enumerate(rows):
            assert [together[number]] == list(encode_conversations([DataRecord(row, str(number))], chat))


def test_a_token_that_reaches_into_the_answer_is_answer(tokenizer: PreTrainedTokenizerFast) -> None:
    """Else a prompt would show what is to be learnt."""
    _, found = _answers(tokenizer, {"prompt": "def f1(x):\n    ret", "completion": "urn x"})
    assert found == [" return x<eos>"]


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ({"text": "x"}, "'text'"),
        ({"prompt": "x"}, "'prompt'"),
        ({"prompt": "x", "completion": TALK[3:]}, "'completion'"),
        ({"messages": []}, "'messages'"),
        ({"messages": "x"}, "'messages'"),
        ({"messages": 3}, "'messages'"),
        ({"conversations": [{"value": "x"}]}, "message 1 of 'conversations' has no 'role'"),
        ({"messages": TALK[:1], "prompt": "x", "completion": "y"}, "'user'"),
        ({"messages": [TALK[0], {**TALK[1], "weight": 0.5}]}, "message 2: 'weight'"),
        ({"messages": [TALK[0], {**TALK[1], "train": "no"}]}, "message 2: 'weight'"),
        ({"messages": [TALK[0], {**TALK[1], "train": False}]}, "no answer"),
        ({"messages": TALK[:2], "tools": "x"}, "'tools'"),
        ({"messages": TALK[:2], "tools": {"a": 1}}, "'tools'"),
        ({"messages": [TALK[0], {"role": "assistant", "tool_calls": [{"type": "function"}]}]}, "'name'"),
        ({"messages": [TALK[0], calling('["x"]')]}, "'arguments' of tool call 1 of message 2"),
        ({"messages": [TALK[0], calling("{")]}, "'arguments' of tool call 1 of message 2"),
        ({"messages": [TALK[0], calling('{"x": "\\ud800"}')]}, "surrogate"),
        ({"messages": [TALK[0], said("assistant", [{"type": "image"}])]}, "'image'"),
        ({"messages": [{**TALK[0], "x": DEEP}, TALK[1]]}, "message 1"),
        ({"messages": TALK[:2], "tools": [DEEP]}, "'tools'"),
        ({"instruction": 3, "output": "x"}, "'instruction'"),
        ({"instruction": "x", "output": "x", "history": ["ab"]}, "'history'"),
        ({"instruction": "x", "output": 3}, "'content'"),
        ({"messages": [TALK[0], calling({"x": 1})]}, "tool call 1 of message 2"),
        ({"messages": [{"role": "user", "content": None}, TALK[1]]}, "message 1 of 'messages' has no 'content'"),
        ({"messages": [{"content": "x"}]}, "message 1 of 'messages' has no 'role'"),
        ({"messages": [TALK[0], {"role": "assistant"}]}, "message 2 of 'messages' has no 'content'"),
        ({"prompt": TALK[:1], "completion": TALK[2:3]}, "no answer"),
        ({"messages": [said("system", "x"), *TALK[:2]]}, "no system message"),
    ],
)
def test_a_bad_row_is_named(tokenizer: PreTrainedTokenizerFast, row: dict[str, Any], named: str) -> None:
    strict = "{% if messages[0].role == 'system' %}{{ raise_exception('no system message') }}{% endif %}" + TEMPLATE
    with refused(InputFileError, "chats.jsonl:7", named) as raised:
        list(encode_conversations([DataRecord(row, "chats.jsonl:7")], chatty(tokenizer, strict)))
    assert "\n" not in str(raised.value)


def test_what_stands_before_a_chat_may_depend_on_what_follows(tokenizer: PreTrainedTokenizerFast) -> None:
    chat = chatty(tokenizer, "{{ messages | length }} turns\n" + TEMPLATE)
    assert _answers(chat, {"messages": TALK})[1] == ["return x<eos>", "(x): 2<eos>"]


def test_a_template_whose_answers_cannot_be_found_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    numbered = TEMPLATE.replace("{{ m.role }}:", "{{ loop.index }} of {{ loop.length }}:")
    with refused(InputFileError, "here", tokenizer.name_or_path, "`chat_template`"):
        list(encode_conversations([DataRecord({"messages": TALK}, "here")], chatty(tokenizer, numbered)))


def test_a_tokenizer_without_a_template_is_named(tokenizer: PreTrainedTokenizerFast) -> None:
    with refused(CheckpointError, tokenizer.name_or_path or "tokenizer", "a row", "`chat_template`", "`tokenizer`"):
        list(encode_conversations([DataRecord({"messages": TALK}, "a row")], tokenizer))


# -- what published templates do, each with a tokenizer of its marks


def _of(name: str) -> PreTrainedTokenizerFast:
    return tokenizer_of(templates()[name])


def _said_by(name: str, *messages: dict[str, Any], **fields: Any) -> list[str]:
    return _answers(_of(name), {"messages": list(messages), **fields})[1]


USER, AGAIN = said("user", "hi"), said("user", "more")


@pytest.mark.parametrize(
    ("name", "end", "last"),
    [
        ("qwen3", "<|im_end|>\n", "<think>\n\n</think>\n\n<|im_end|>\n"),
        ("phi3", "<|end|>\n", "<|end|>\n<|endoftext|>"),
        ("gptoss", "<|channel|>final<|message|><|end|>", "<|channel|>final<|message|><|return|>"),
        ("llama3", "<|eot_id|>", "<|eot_id|>"),
    ],
)
@pytest.mark.parametrize("content", ["", None])
def test_an_answer_may_be_empty(name: str, end: str, last: str, content: str | None) -> None:
    assert _said_by(name, USER, said("assistant", content), AGAIN, said("assistant", content)) == [end, last]


@pytest.mark.parametrize("arguments", [{"word": "x"}, '{"word": "x"}'])
@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("qwen2_5", '"arguments": {"word": "x"}}\n</tool_call><|im_end|>\n'),
        ("qwen3", '"arguments": {"word": "x"}}\n</tool_call><|im_end|>\n'),
        ("llama3_1", '"parameters": {"word": "x"}}<|eot_id|>'),
        ("gptoss", '<|message|>{"word": "x"}<|call|>'),
        ("deepseekv3", '```json\n{"word": "x"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>'),
        ("glm4moe", "<arg_value>x</arg_value>\n</tool_call><|endoftext|>"),
    ],
)
def test_arguments_of_tool_calls_are_written_once(name: str, written: str, arguments: Any) -> None:
    (answer,) = _said_by(name, USER, calling(arguments))
    assert "look_up" in answer
    assert answer.endswith(written)
    first, _ = _said_by(
        name, USER, calling(arguments), {**said("tool", "42"), "tool_call_id": "call00001"}, said("assistant", "so")
    )
    assert first.endswith(written.removesuffix("<|endoftext|>"))


@pytest.mark.parametrize("name", ["llada_8b_base", "bos_before_an_appended_header"])
def test_a_header_that_is_always_appended_is_not_trained(name: str) -> None:
    text, found = _answers(_of(name), {"messages": [USER, said("assistant", "a"), AGAIN, said("assistant", "b")]})
    end = "<|im_end|>\n" if "bos" in name else "<|eot_id|>"
    assert found == [f"a{end}", f"b{end}"]
    assert text.endswith(f"b{end}")  # nothing stands behind the answer either


@pytest.mark.parametrize("name", ["phi3", "gptoss", "olmo_3", "qwen3", "qwen3_5_think", "nemotron_3_nano"])
@pytest.mark.parametrize("answer", ["yes", "<think>\nyes\n</think>\n\nyes"])
def test_an_answer_that_occurs_again_is_trained_alone(name: str, answer: str) -> None:
    chat = [
        USER,
        said("assistant", answer),
        said("user", "yes Q yes"),
        said("assistant", answer),
        USER,
        said("assistant", answer),
    ]
    found = _said_by(name, *chat)
    assert len(found) == 3
    assert not any("Q" in one for one in found)
    assert all("yes" in one for one in found)


def test_a_template_that_ends_no_answer_gets_the_stop_token() -> None:
    (first, last) = _said_by("glm4moe", USER, said("assistant", "a"), AGAIN, said("assistant", "b"))
    assert first.endswith("a")
    assert last.endswith("b<|endoftext|>")


@pytest.mark.parametrize("completion", [" return x", " return x<eos>"])
def test_a_completion_ends_with_one_stop_token(tokenizer: PreTrainedTokenizerFast, completion: str) -> None:
    text, found = _answers(tokenizer, {"prompt": "def f1(x):", "completion": completion})
    assert found == [" return x<eos>"]
    assert text.count("<eos>") == 1


@pytest.mark.parametrize("name", ["qwen3", "phi3", "llada_8b_base", "qwen3_training", "gemma3_training", "lfm2_2_5"])
@pytest.mark.parametrize("mark", [{"weight": 0}, {"train": False}])
def test_an_answer_may_be_left_out(name: str, mark: dict[str, Any]) -> None:
    chat = [USER, said("assistant", "aa"), AGAIN, said("assistant", "bb"), USER, said("assistant", "cc")]
    every = _said_by(name, *chat)
    assert len(every) == 3
    for out in range(3):
        marked = [{**m, **mark} if at == 2 * out + 1 else {**m, "weight": 1} for at, m in enumerate(chat)]
        assert _said_by(name, *marked) == [one for at, one in enumerate(every) if at != out]


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("deepseekv3", "yes<｜end▁of▁sentence｜>"),
        ("deepseek_r1_distill", "yes<｜end▁of▁sentence｜>"),
        ("nemotron_3_nano", "</think>yes<|im_end|>\n"),  # the prompt opens with <think>
        ("qwen3_5_think", "\n</think>\n\nyes<|im_end|>\n"),
    ],
)
def test_a_prompt_may_open_the_answer(name: str, answer: str) -> None:
    assert _said_by(name, USER, said("assistant", "yes")) == [answer]


CALL, ANSWER = calling({"word": "x"}), said("assistant", "a")
TOOL = {"name": "look_up", "description": "Look up.", "parameters": {"type": "object", "properties": {}}}
WRAPPED = [{"type": "function", "function": TOOL}]


@pytest.mark.parametrize(
    ("row", "same"),
    [
        ({"messages": [USER, {**ANSWER, "tool_calls": []}]}, {"messages": [USER, ANSWER]}),
        ({"messages": [USER, said("assistant", "a")], "tools": []}, {"messages": [USER, said("assistant", "a")]}),
        ({"messages": [USER, CALL], "tools": json.dumps(WRAPPED)}, {"messages": [USER, CALL], "tools": WRAPPED}),
        ({"messages": [USER, CALL], "tools": [json.dumps(TOOL)]}, {"messages": [USER, CALL], "tools": WRAPPED}),
        ({"messages": json.dumps([USER, CALL])}, {"messages": [USER, CALL]}),
        ({"messages": [USER, {**CALL, "tool_calls": json.dumps(CALL["tool_calls"])}]}, {"messages": [USER, CALL]}),
        (
            {"messages": [USER, said("assistant", [{"text": "a"}, {"type": "text", "text": "b", "image": None}])]},
            {"messages": [USER, said("assistant", "ab")]},
        ),
        (
            {
                "conversations": [
                    {"from": "human", "value": "hi"},
                    {"from": "function_call", "value": '{"name": "look_up", "arguments": {"word": "x"}}'},
                    {"from": "observation", "value": "42"},
                    {"from": "gpt", "value": "a"},
                ],
                "system": "s",
            },
            {"messages": [said("system", "s"), USER, CALL, said("tool", "42"), said("assistant", "a")]},
        ),
        ({"instruction": "hi", "input": "", "output": "a"}, {"messages": [USER, said("assistant", "a")]}),
        (
            {"instruction": "hi", "input": "x", "output": "a", "history": [["q", "r"]], "system": ""},
            {"messages": [said("user", "q"), said("assistant", "r"), said("user", "hi\nx"), said("assistant", "a")]},
        ),
        ({"prompt": [USER], "completion": [said("assistant", "a")]}, {"messages": [USER, said("assistant", "a")]}),
    ],
)  # fmt: skip
def test_a_row_has_one_canonical_form(row: dict[str, Any], same: dict[str, Any]) -> None:
    assert _answers(_of("qwen2_5"), row) == _answers(_of("qwen2_5"), same)


def test_a_part_that_the_template_drops_is_refused() -> None:
    """gpt-oss' writes the first call of a message alone, LFM2's none."""
    two = {**CALL, "tool_calls": CALL["tool_calls"] * 2}
    for name, answer, call in (
        ("gptoss", two, "tool call 2 of message 2"),
        ("lfm2", {**CALL, "content": "a"}, "tool call 1 of message 2"),
    ):
        with refused(InputFileError, None, call):
            _said_by(name, USER, answer, tools=WRAPPED)


@pytest.mark.parametrize("name", MULTIMODAL)
def test_a_template_that_takes_parts_alone_is_refused(name: str) -> None:
    chat = tokenizer_of((trl_folder() / f"{name}.jinja").read_text("utf-8"))
    with refused(InputFileError, "here"):
        _answers(chat, {"messages": [USER, ANSWER]})


def test_text_of_a_tool_inside_an_answer_is_refused() -> None:
    chat = [
        USER,
        {**CALL, "content": "looking"},
        {**said("tool", "42"), "tool_call_id": "call00001"},
        said("assistant", "a"),
    ]
    with refused(InputFileError, None, "message 3 inside message 2"):
        _said_by("gemma4", *chat)


# -- every template


def _check_random_chats(name: str, template: str, seeds: range) -> None:
    tokenizer, special = tokenizer_of(template), marks(template)
    accepted = 0
    for seed in seeds:
        row = random_chat(Random(seed), special)
        try:
            (example,) = encode_conversations([DataRecord(row, "here")], tokenizer)
        except InputFileError as error:
            if "\n" in str(error) or not refusable(name, row):
                pytest.fail(f"seed {seed}: {error}")
            continue
        accepted += 1
        assert not problems(name, example, row, tokenizer, set(special)), seed
    assert accepted >= len(seeds) // 4


@pytest.mark.parametrize("name", sorted(templates()))
def test_nothing_but_answers_is_trained(name: str) -> None:
    _check_random_chats(name, templates()[name], range(12))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(templates()))
def test_nothing_but_answers_is_trained_in_many_chats(name: str) -> None:
    _check_random_chats(name, templates()[name], range(12, 400))


# -- another template


def test_a_template_is_named_by_file_or_name(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    (tmp_path / "mine.jinja").write_text(MARKED)
    chat = chatty(tokenizer, None)
    set_chat_template(chat, str(tmp_path / "mine.jinja"))
    assert chat.chat_template == MARKED
    set_chat_template(chat, "qwen3_training")
    assert chat.chat_template == templates()["qwen3_training"]
    several = chatty(tokenizer, {"default": TEMPLATE, "tool_use": MARKED})  # type: ignore[arg-type]
    set_chat_template(several, "tool_use")
    assert several.chat_template == MARKED
    with refused(SettingError, "chat_template", "qwen9", "qwen3_training"):
        set_chat_template(chat, "qwen9")
    (tmp_path / "damaged.jinja").write_bytes(b"\xff\xfe")
    with refused(InputFileError, tmp_path / "damaged.jinja"):
        set_chat_template(chat, str(tmp_path / "damaged.jinja"))

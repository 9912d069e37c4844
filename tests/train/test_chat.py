"""Which tokens of a conversation are answers, for every kind of row and of chat template, and what is refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.train.data.conversations import encode_conversations
from dlm_bridge.train.data.messages import DataRow
from tests.train.chats import MARKED, TEMPLATE, THINKING, chatty, said

TALK = [said("user", "def f1é"), said("assistant", "return x"), said("user", "x + 1"), said("assistant", "(x): 2")]


def _answers(tokenizer: Any, row: dict[str, Any]) -> tuple[str, list[str]]:
    """All of a row as text, and its stretches of answer."""
    (example,) = encode_conversations([DataRow(row, "here")], tokenizer)
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
        together = list(encode_conversations([DataRow(row, str(number)) for number, row in enumerate(rows)], chat))
        assert [example.where for example in together] == ["0", "1", "2"]
        for number, row in enumerate(rows):
            assert [together[number]] == list(encode_conversations([DataRow(row, str(number))], chat))


def test_a_token_that_reaches_into_the_answer_is_answer(tokenizer: PreTrainedTokenizerFast) -> None:
    """Else a prompt would show what is to be learnt."""
    _, found = _answers(tokenizer, {"prompt": "def f1(x):\n    ret", "completion": "urn x"})
    assert found == [" return x<eos>"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "x"}, "line 7: no 'messages', or 'prompt' and 'completion' (it has 'text')"),
        ({"prompt": "x"}, "line 7: no 'messages', or 'prompt' and 'completion' (it has 'prompt')"),
        ({"prompt": "x", "completion": TALK[3:]}, "line 7: 'prompt' and 'completion' must both be texts or both"),
        ({"messages": []}, "line 7: 'messages' is not a list of messages"),
        ({"messages": "x"}, "line 7: 'messages' is not a list of messages"),
        ({"messages": [{"content": "x"}]}, "line 7: message 1 of 'messages' has no 'role'"),
        ({"messages": [TALK[0], {"role": "assistant"}]}, "line 7: message 2 of 'messages' has no 'content' with text"),
        ({"messages": TALK[:3]}, "line 7: the last message is of 'user': an answer is needed"),
        ({"prompt": TALK[:1], "completion": TALK[2:3]}, "line 7: nothing in this row is an answer"),
        ({"messages": [said("system", "x"), *TALK[:2]]}, "line 7: the chat template refuses it: no system message"),
    ],
)
def test_a_bad_row_is_named(tokenizer: PreTrainedTokenizerFast, row: dict[str, Any], message: str) -> None:
    strict = "{% if messages[0].role == 'system' %}{{ raise_exception('no system message') }}{% endif %}" + TEMPLATE
    with pytest.raises(DlmBridgeError, match=re.escape(message)) as raised:
        list(encode_conversations([DataRow(row, "chats.jsonl, line 7")], chatty(tokenizer, strict)))
    assert "\n" not in str(raised.value)


def test_a_template_that_rewrites_turns_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    template = "{{ messages | length }} turns\n" + TEMPLATE
    with pytest.raises(
        DlmBridgeError, match=r"writes message 2 differently .* \{% generation %\}, or rows of one turn"
    ):
        list(encode_conversations([DataRow({"messages": TALK}, "here")], chatty(tokenizer, template)))


def test_a_tokenizer_without_a_template_is_named(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(DlmBridgeError, match=r"no chat template, which a row needs: name a tokenizer .* --tokenizer"):
        list(encode_conversations([DataRow({"messages": TALK}, "a row")], tokenizer))

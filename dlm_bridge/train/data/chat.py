"""Conversations become tokens of which each is a prompt's or an answer's, by the tokenizer's own chat template."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dlm_bridge.errors import DlmBridgeError, one_line

FIELDS = "'messages', or 'prompt' and 'completion'"
# A template that marks what the assistant says.
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class Record:
    """A row of a data set."""

    fields: Mapping[str, Any]
    where: str  # file and line, for errors


@dataclass(frozen=True)
class Example:
    """A conversation as tokens."""

    input_ids: list[int]
    answer: list[bool]  # what is trained on
    where: str


@dataclass(frozen=True)
class _Text:
    """A conversation as text, and from where to where its answers reach."""

    text: str
    answers: list[tuple[int, int]]
    where: str
    ends: bool  # an EOS token follows: no template says how an answer ends


def encode(records: Sequence[Record], tokenizer: Any) -> Iterator[Example]:
    """The conversations of some rows, in order: {"messages": [...]}, where everything the assistant says is an answer;
    or {"prompt", "completion"}, two texts, with an EOS token after them, or two lists of messages, of which the second
    is answer. `tools` in a row are the template's.

    Raises:
        DlmBridgeError: a row without these fields, one that the template refuses, or one without an answer, each with
            its file and line; a tokenizer that has no chat template, or is not one of the `tokenizers` library.
    """
    if not tokenizer.is_fast:
        raise DlmBridgeError(f"tokenizer {tokenizer.name_or_path} does not say where its tokens stand: use a fast one")
    found = [_read(record, tokenizer) for record in records]
    texts = [item for item in found if isinstance(item, _Text)]
    encoded: Any = {"input_ids": [], "offset_mapping": []}
    if texts:
        encoded = tokenizer(
            [item.text for item in texts], add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
    tokens = zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)
    for item in found:
        example = item if isinstance(item, Example) else _labelled(item, *next(tokens), tokenizer)
        if not any(example.answer):
            raise DlmBridgeError(f"{example.where}: nothing in this row is an answer")
        yield example


def _read(record: Record, tokenizer: Any) -> _Text | Example:
    fields = {name: value for name, value in record.fields.items() if value is not None}
    if "messages" in fields:
        messages = _messages(fields["messages"], "messages", record.where)
        if (last := messages[-1]["role"]) != "assistant":
            raise DlmBridgeError(f"{record.where}: the last message is of '{last}': an answer is needed")
        return _conversation(messages, 0, fields.get("tools"), record.where, tokenizer)
    if not {"prompt", "completion"} <= fields.keys():
        has = ", ".join(map(repr, fields)) or "nothing"
        raise DlmBridgeError(f"{record.where}: no {FIELDS} (it has {has})")
    prompt, completion = fields["prompt"], fields["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        if tokenizer.eos_token_id is None:
            raise DlmBridgeError(f"tokenizer {tokenizer.name_or_path} has no EOS token, which ends a completion")
        text = prompt + completion
        return _Text(text, [(len(prompt), len(text))], record.where, ends=True)
    if isinstance(prompt, str) or isinstance(completion, str):
        raise DlmBridgeError(f"{record.where}: 'prompt' and 'completion' must both be texts or both lists of messages")
    before = _messages(prompt, "prompt", record.where)
    messages = before + _messages(completion, "completion", record.where)
    return _conversation(messages, len(before), fields.get("tools"), record.where, tokenizer)


def _messages(found: Any, name: str, where: str) -> list[dict[str, Any]]:
    if not isinstance(found, Sequence) or isinstance(found, str) or not found:
        raise DlmBridgeError(f"{where}: '{name}' is not a list of messages")
    for number, message in enumerate(found, 1):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise DlmBridgeError(f"{where}: message {number} of '{name}' has no 'role'")
        if not isinstance(message.get("content"), str) and not message.get("tool_calls"):
            raise DlmBridgeError(f"{where}: message {number} of '{name}' has no 'content' with text")
    return [dict(message) for message in found]


def _conversation(
    messages: list[dict[str, Any]], first: int, tools: Any, where: str, tokenizer: Any
) -> _Text | Example:
    """What the assistant says from message `first` on is answer."""

    def render(count: int, **options: Any) -> Any:
        try:
            return tokenizer.apply_chat_template(messages[:count], tools=tools, **options)
        except Exception as error:  # whatever a template raises
            raise DlmBridgeError(f"{where}: the chat template refuses it: {one_line(error)}") from error

    if tokenizer.chat_template is None:
        raise DlmBridgeError(
            f"tokenizer {tokenizer.name_or_path} has no chat template, which {where} needs: name a tokenizer that has "
            "one with --tokenizer, or give 'prompt' and 'completion' as texts"
        )
    if first == 0 and GENERATION.search(tokenizer.get_chat_template(tools=tools)):
        marked = render(len(messages), tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        return Example(list(marked["input_ids"]), [bool(mask) for mask in marked["assistant_masks"]], where)
    text = render(len(messages), tokenize=False)
    answers = []
    for number in range(first, len(messages)):
        if messages[number]["role"] != "assistant":
            continue
        before = render(number, tokenize=False, add_generation_prompt=True)
        until = text if number + 1 == len(messages) else render(number + 1, tokenize=False)
        end = _end(text, before, until, messages[number].get("content"))
        if not text.startswith(before) or end is None:
            raise DlmBridgeError(
                f"{where}: the chat template writes message {number + 1} differently once others follow: use one that "
                "marks answers with {% generation %}, or rows of one turn"
            )
        answers.append((len(before), end))
    return _Text(text, answers, where, ends=False)


def _end(text: str, before: str, until: str, content: Any) -> int | None:
    """Where in `text` an answer ends that begins after `before`, and with which `until` ends; None if it cannot be
    told."""
    if text.startswith(until):
        return len(until)
    # Some templates (Qwen3's) write a last turn differently from the turns before: its end must be looked for.
    said = content.strip() if isinstance(content, str) else ""
    closing = said + until.rpartition(said)[2]
    place = text.find(closing, len(before)) if said else -1
    return None if place < 0 else place + len(closing)


def _labelled(item: _Text, ids: list[int], offsets: list[tuple[int, int]], tokenizer: Any) -> Example:
    """A token belongs to an answer if any of its characters does: a prompt shows nothing of what follows it."""
    starts, stops = np.asarray(offsets, dtype=np.int64).reshape(-1, 2).T
    answer = np.zeros(len(ids), dtype=bool)
    for begin, end in item.answers:
        answer |= (starts < end) & (stops > begin)
    if item.ends:
        return Example([*ids, tokenizer.eos_token_id], [*answer.tolist(), True], item.where)
    return Example(ids, answer.tolist(), item.where)

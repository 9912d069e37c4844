"""Prompts as people write them down: a text, a conversation, or a file with one of either a line."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.generation.texts import encode_chat, encode_text


@dataclass(frozen=True)
class WrittenPrompt:
    """A text, or the messages of a conversation; `row` is all that stood beside it, `where` the file and line."""

    text: str | None = None
    messages: tuple[dict[str, Any], ...] = ()
    row: dict[str, Any] = field(default_factory=dict)
    where: str = ""

    def encode(self, tokenizer: Any, name: str, mask_token_id: int | None = None) -> list[int]:
        """Its tokens; `name` is what the tokenizer is called in errors, a mask token that of spans to fill (None:
        there are none). Raises DlmBridgeError."""
        if self.text is None:
            return encode_chat(tokenizer, self.messages, name, mask_token_id)
        return encode_text(tokenizer, self.text, mask_token_id)


def as_message(text: str, system: str | None) -> WrittenPrompt:
    """A text as what a user says, after what the system says."""
    first = [] if system is None else [{"role": "system", "content": system}]
    return WrittenPrompt(messages=(*first, {"role": "user", "content": text}))


def read_prompts(name: str, key: str, chat: bool, system: str | None) -> list[WrittenPrompt]:
    """The prompts of a JSONL file ("-": of stdin): under `key` a text, a user's message with `chat`, or under
    "messages" a conversation. Empty lines are passed over.

    Raises DlmBridgeError for a file that cannot be read or has none, and, with its line, for a row without them.
    """
    if name == "-":
        return _prompts("stdin", sys.stdin, key, chat, system)
    try:
        with Path(name).open(encoding="utf-8") as lines:
            return _prompts(name, lines, key, chat, system)
    except OSError as error:
        raise DlmBridgeError(f"--jsonl {name}: {error.strerror}") from error
    except UnicodeDecodeError:
        raise DlmBridgeError(f"--jsonl {name}: not a text in UTF-8") from None


def _prompts(name: str, lines: Iterable[str], key: str, chat: bool, system: str | None) -> list[WrittenPrompt]:
    prompts = [
        _prompt(line, f"{name}, line {number}", key, chat, system)
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not prompts:
        raise DlmBridgeError(f"{name}: no prompts there")
    return prompts


def _prompt(line: str, where: str, key: str, chat: bool, system: str | None) -> WrittenPrompt:
    try:
        row = json.loads(line)
    except ValueError:
        raise DlmBridgeError(f"{where}: not JSON") from None
    if not isinstance(row, dict):
        raise DlmBridgeError(f"{where}: not a JSON object")
    if key in row:
        text = row[key]
        if not isinstance(text, str):
            raise DlmBridgeError(f"{where}: '{key}' must be a text, not {type(text).__name__}")
        message = as_message(text, system) if chat else WrittenPrompt(text=text)
        return WrittenPrompt(message.text, message.messages, {**row, "prompt": text}, where)
    messages = row.get("messages")
    if messages is None:
        raise DlmBridgeError(f"{where}: neither '{key}' nor 'messages' there")
    if not isinstance(messages, list) or not messages or not all(isinstance(each, dict) for each in messages):
        raise DlmBridgeError(f"{where}: 'messages' must be a list of objects with role and content")
    return WrittenPrompt(messages=tuple(messages), row=row, where=where)

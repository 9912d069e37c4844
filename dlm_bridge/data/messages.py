"""Rows of conversations: reading from files and datasets, and conversion to a canonical form."""

from __future__ import annotations

import csv
import itertools
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets

from dlm_bridge.data.documents import (
    NamedDataset,
    Source,
    fields_of,
    has_json_lines,
    open_data,
    open_parquet,
    parse_object,
    read_parquet,
)
from dlm_bridge.errors import InputFileError, SettingError, one_line
from dlm_bridge.files.reading import check_characters, reading
from dlm_bridge.generation.prompts import with_joined_text

FIELDS = "'messages', 'prompt' and 'completion', 'conversations', or 'instruction' and 'output'"
# Names of roles in ShareGPT's rows; any other name is the role itself.
SHAREGPT_ROLES = {
    "human": "user", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant", "function_call": "assistant",
    "observation": "tool", "function_response": "tool",
}  # fmt: skip
TABLE_SUFFIXES = (".parquet", ".csv")


@dataclass(frozen=True)
class DataRecord:
    """Row of a data set."""

    fields: Mapping[str, Any]
    where: str  # file and line, for errors


@dataclass(frozen=True)
class Conversation:
    """Messages in canonical form: content is text, arguments of tool calls are mappings, nulls are removed."""

    messages: list[dict[str, Any]]
    answers: tuple[int, ...]  # indices of the messages that are trained
    tools: list[Any] | None
    where: str


def check_sources(sources: Sequence[Any]) -> None:
    """Raise SettingError for a source that cannot contain conversations."""
    for source in sources:
        known = isinstance(source, Path) and (has_json_lines(source) or source.suffix in TABLE_SUFFIXES)
        if not (known or isinstance(source, NamedDataset)):
            name = source if isinstance(source, Path | str) else f"{source.prefix}.bin"
            raise SettingError("data", f"{name} cannot contain conversations: use JSONL, parquet, CSV or a dataset")


def read_data_rows(source: Source) -> Iterator[DataRecord]:
    """Read the rows of a JSONL, parquet or CSV file or a dataset. Raises InputFileError for an invalid row."""
    if isinstance(source, NamedDataset):
        with reading(source.name, "truncated or damaged dataset", kind=InputFileError):
            for number, row in enumerate(source.rows.with_format(None), 1):
                yield DataRecord(row, f"{source.name}, row {number}")
    elif source.suffix == ".parquet":
        yield from _parquet_rows(source)
    elif source.suffix == ".csv":
        yield from _csv_rows(source)
    else:
        with open_data(source, "rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    where = f"{source}:{number}"
                    yield DataRecord(parse_object(line, where), where)


def _parquet_rows(path: Path) -> Iterator[DataRecord]:
    with open_parquet(path) as file:
        with reading(path, "not a table of rows", kind=InputFileError):
            # Metadata could name types that open files.
            features = datasets.Features.from_arrow_schema(file.schema_arrow.remove_metadata())
        for number, row in enumerate(read_parquet(file, path), 1):
            with reading(f"{path}, row {number}", "not JSON", kind=InputFileError):
                decoded = features.decode_example(row)  # columns of the type Json
            yield DataRecord(decoded, f"{path}, row {number}")


def _csv_rows(path: Path) -> Iterator[DataRecord]:
    csv.field_size_limit(sys.maxsize)
    with open_data(path, "r", encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, strict=True)
        try:
            for row in reader:
                where = f"{path}:{reader.line_num}"
                if None in row or None in row.values():
                    raise InputFileError(where, "not as many cells as the first line has columns")
                yield DataRecord(row, where)
        except (csv.Error, UnicodeDecodeError) as error:
            raise InputFileError(f"{path}:{reader.line_num + 1}", f"not CSV in UTF-8 ({error})") from None


def read_conversation(record: DataRecord) -> Conversation | tuple[str, str]:
    """Parse the conversation of a row in any of the formats of `FIELDS`; or (prompt, completion), if both are texts.

    The assistant's messages are answers, except messages with `weight: 0` or `train: false` and messages of a prompt.

    Raises:
        InputFileError: a row without these fields or with invalid values, with its file and line.
    """
    fields, where = _columns(record), record.where
    if "messages" not in fields and {"prompt", "completion"} <= fields.keys():
        prompt, completion = fields["prompt"], fields["completion"]
        if isinstance(prompt, str) and isinstance(completion, str):
            return prompt, completion
        if isinstance(prompt, str) or isinstance(completion, str):
            raise InputFileError(where, "'prompt' and 'completion' must both be texts or both lists of messages")
        before, after = _messages(prompt, "prompt", where), _messages(completion, "completion", where)
        return _conversation([*before, *after], len(before), fields, where)
    messages = _listed(fields, where)
    if messages is None:
        raise InputFileError(where, f"no {FIELDS} (it has {fields_of(fields)})")
    if (last := messages[-1]["role"]) != "assistant":
        raise InputFileError(where, f"the last message has the role '{last}': an answer is needed")
    return _conversation(messages, 0, fields, where)


def read_prompt(record: DataRecord) -> Conversation | str:
    """Parse the prompt of a row: its `prompt` (a text or messages), or its conversation without the last answer.
    Raises InputFileError as `read_conversation` does."""
    fields, where = _columns(record), record.where
    if isinstance(prompt := fields.get("prompt"), str):
        return prompt
    messages = _listed(fields, where) if prompt is None else _messages(prompt, "prompt", where)
    if messages is None:
        raise InputFileError(where, f"no 'prompt' or {FIELDS.partition(',')[0]} (it has {fields_of(fields)})")
    if prompt is None and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    if not messages:
        raise InputFileError(where, "no message before the answer")
    return _conversation(messages, len(messages), fields, where)


def _listed(fields: Mapping[str, Any], where: str) -> list[dict[str, Any]] | None:
    """Messages of a row in messages, ShareGPT or Alpaca format; None for other formats."""
    if "messages" in fields:
        return _messages(fields["messages"], "messages", where)
    if "conversations" in fields:
        messages = _messages(fields["conversations"], "conversations", where)
    elif {"instruction", "output"} <= fields.keys():
        asked = (fields["instruction"], fields.get("input", ""))
        turns = _parsed(fields.get("history") or [], where, "'history'")
        pairs = isinstance(turns, list) and all(isinstance(turn, list) and len(turn) == 2 for turn in turns)
        if not pairs or not all(isinstance(text, str) for text in asked):
            raise InputFileError(where, "'instruction' and 'input' are texts, 'history' is a list of pairs of texts")
        texts = [*itertools.chain.from_iterable(turns), "\n".join(filter(None, asked)), fields["output"]]
        roles = itertools.cycle(("user", "assistant"))
        messages = _messages([{"role": next(roles), "content": text} for text in texts], "instruction", where)
    else:
        return None
    if system := fields.get("system"):
        messages = [*_messages([{"role": "system", "content": system}], "system", where), *messages]
    return messages


def _conversation(messages: list[dict[str, Any]], first: int, fields: Mapping[str, Any], where: str) -> Conversation:
    answers = []
    for number, message in enumerate(messages):
        trained = [message.pop(name) for name in ("weight", "train") if name in message]
        if any(type(value) not in (bool, int, float) or value not in (0, 1) for value in trained):
            raise InputFileError(where, f"message {number + 1}: 'weight' and 'train' are 0 or 1, not {trained}")
        if number >= first and message["role"] == "assistant" and all(trained):
            answers.append(number)
    return Conversation(messages, tuple(answers), _tools(fields.get("tools"), where), where)


def _messages(found: Any, name: str, where: str) -> list[dict[str, Any]]:
    found = found if name == "prompt" else _parsed(found, where, f"'{name}'")
    if not isinstance(found, Sequence) or isinstance(found, str) or not found:
        raise InputFileError(where, f"'{name}' is not a list of messages")
    return [_message(message, number, name, where) for number, message in enumerate(found, 1)]


def _message(found: Any, number: int, name: str, where: str) -> dict[str, Any]:
    here = f"message {number} of '{name}'"
    found = _parsed(found, where, here)
    message = _without_nulls(found if isinstance(found, Mapping) else {}, where, here)
    if isinstance(sender := message.get("from"), str) and "role" not in message:
        del message["from"]
        value = "tool_calls" if sender == "function_call" else "content"
        message |= {"role": SHAREGPT_ROLES.get(sender, sender), value: message.pop("value", None)}
    if not isinstance(role := message.get("role"), str):
        raise InputFileError(where, f"{here} has no 'role'")
    legacy = message.pop("function_call", None)
    calls = _parsed(message.pop("tool_calls", None) or legacy or [], where, f"'tool_calls' of {here}")
    if calls:
        calls = calls if isinstance(calls, list) else [calls]
        message["tool_calls"] = [
            _tool_call(call, where, f"tool call {index} of {here}") for index, call in enumerate(calls, 1)
        ]
        check_characters(message["tool_calls"], where)  # calls that were JSON text
    if "content" not in message and (calls or (role == "assistant" and "content" in found)):
        message["content"] = ""  # the answer is null, or only calls tools
    message = with_joined_text(message, number, where)
    if not isinstance(message.get("content"), str):
        raise InputFileError(where, f"{here} has no 'content' with text")
    return message


def _tool_call(call: Any, where: str, here: str) -> dict[str, Any]:
    """Convert a tool call to OpenAI's format, with its arguments as a mapping."""
    call = _parsed(call, where, here)
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InputFileError(where, f"{here} has no function with a 'name'")
    arguments = _parsed(function.get("arguments") or {}, where, f"'arguments' of {here}")
    if not isinstance(arguments, Mapping):
        raise InputFileError(where, f"'arguments' of {here} is not a JSON object")
    outer = {} if call is function else call
    return {"type": "function", **outer, "function": {**function, "arguments": arguments}}


def _tools(found: Any, where: str) -> list[Any] | None:
    found = _parsed(found or [], where, "'tools'")
    if not isinstance(found, list):
        raise InputFileError(where, "'tools' is not a list")
    tools = [_without_nulls(_parsed(tool, where, "'tools'"), where, "'tools'") for tool in found]
    return [
        {"type": "function", "function": tool} if isinstance(tool, Mapping) and "name" in tool else tool
        for tool in tools
    ] or None


def _parsed(value: Any, where: str, here: str) -> Any:
    """Parse a JSON text; return any other value unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise InputFileError(where, f"{here} is not JSON ({error})") from None


def _columns(record: DataRecord) -> dict[str, Any]:
    return {name: value for name, value in record.fields.items() if value is not None}


def _without_nulls(value: Any, where: str, here: str) -> Any:
    """Remove nulls from mappings. Raises InputFileError for a value that is nested too deeply, or invalid text."""
    try:
        value = _present(value)
        check_characters(value, where)
    except (RecursionError, TypeError) as error:
        raise InputFileError(where, f"{here} is not JSON, or nested too deeply ({one_line(error)})") from None
    return value


def _present(value: Any) -> Any:
    """Remove nulls from mappings. Arrow gives every mapping the keys of all rows, with null for missing keys."""
    if isinstance(value, Mapping):
        return {key: _present(item) for key, item in value.items() if item is not None}
    return [_present(item) for item in value] if isinstance(value, list | tuple) else value

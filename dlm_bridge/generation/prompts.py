"""Prompts: conversion of text, conversations and files to token ids, and checks of token ids before sampling."""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from dlm_bridge.errors import CheckpointError, InputFileError, RowError, SettingError, counted, one_line
from dlm_bridge.files.reading import check_characters, check_text_file
from dlm_bridge.generation.request import MASK

logger = logging.get_logger(__name__)
SPAN = re.compile(r"\[MASK(?::(-?\d+))?\]")  # tokens to fill in, by default one
IN_PYTHON = "set `infill` to fill it in, or exclude padding with attention_mask"


# ---- Text and conversations.


class PromptTooLongError(InputFileError):
    """A prompt has more than `max_chars` characters."""


def encode_text(
    tokenizer: Any, text: str, infill: bool = False, max_chars: int | None = None, begins: bool = True
) -> list[int]:
    """Token ids of a plain prompt. With `infill`, [MASK] becomes one `MASK` and [MASK:n] n of them. A text that does
    not begin a prompt gets no special tokens.

    Raises:
        InputFileError: a span of masks is empty, or the text has a lone surrogate.
        PromptTooLongError: the text has more than `max_chars` characters.
    """
    return _with_spans(tokenizer, text, infill, begins=begins, max_chars=max_chars)


def encode_chat(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    name: str,
    infill: bool = False,
    max_chars: int | None = None,
    template_args: Mapping[str, Any] | None = None,
) -> list[int]:
    """Token ids of a conversation in the tokenizer's chat template, with the generation prompt. Masks as in
    `encode_text`. Text parts of a content are joined.

    Args:
        name: name of the tokenizer in errors.

    Raises:
        CheckpointError: the tokenizer has no chat template.
        InputFileError: the template refuses the messages, a part is not text, or as in `encode_text`.
    """
    plain = [with_joined_text(message, number, name) for number, message in enumerate(messages, 1)]
    text = render_chat(tokenizer, plain, name, template_args)
    return _with_spans(tokenizer, text, infill, begins=False, max_chars=max_chars)


def render_chat(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    name: str,
    template_args: Mapping[str, Any] | None = None,
    add_generation_prompt: bool = True,
) -> str:
    """Text of a conversation in the tokenizer's chat template, with the variables `template_args`. Without the
    generation prompt, the last message stays open. Raises CheckpointError or InputFileError, see `encode_chat`."""
    if tokenizer.chat_template is None:
        raise CheckpointError(
            name,
            "the tokenizer has no chat template, as base models have none: `dlm-bridge generate` continues texts, and "
            "`dlm-bridge sft` with `chat_template` trains a chat model. A template that the model was trained with "
            "belongs into its folder, as chat_template.jinja",
        )
    try:
        text = tokenizer.apply_chat_template(
            messages,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
            **(template_args or {}),
        )
    except Exception as error:  # templates raise any class
        raise InputFileError(name, f"the chat template refuses the messages: {one_line(error)}") from error
    return str(text)


def check_template_args(template_args: Mapping[str, Any], name: str) -> None:
    """Raise SettingError for arguments of `apply_chat_template` itself, which are not variables of a template. `name`:
    the setting."""
    for key in inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters:
        if key in template_args and key not in ("tools", "documents", "kwargs"):
            raise SettingError(name, f"{key} is not a variable of the chat template: remove it")


def with_joined_text(message: Mapping[str, Any], number: int, name: str) -> dict[str, Any]:
    """Join the text parts of a message's content. Raises InputFileError, with the field `name`, for other parts."""
    content = message.get("content")
    if not isinstance(content, list):
        return dict(message)
    for part in content:
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            kind = repr(part.get("type"))[:40] if isinstance(part, dict) else type(part).__name__
            raise InputFileError(name, f"message {number} has a part that is not text ({kind}): remove it")
    return {**message, "content": "".join(part["text"] for part in content)}


def _with_spans(tokenizer: Any, text: str, infill: bool, begins: bool, max_chars: int | None) -> list[int]:
    if max_chars is not None and len(text) > max_chars:
        raise PromptTooLongError("prompt", f"has {len(text)} characters, above the limit of {max_chars}")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InputFileError("prompt", "contains a lone surrogate, which is not a character") from None
    if not infill:
        return list(tokenizer(text, add_special_tokens=begins)["input_ids"])
    ids: list[int] = []
    place = 0
    for span in SPAN.finditer(text):
        ids += tokenizer(text[place : span.start()], add_special_tokens=begins and not place)["input_ids"]
        count = int(span[1] or 1)
        if count < 1:
            raise InputFileError("prompt", f"{span[0]}: a span of masks needs at least one token")
        ids += [MASK] * count
        place = span.end()
    return [*ids, *tokenizer(text[place:], add_special_tokens=begins and not place)["input_ids"]]


# ---- Files of prompts.


@dataclass(frozen=True)
class WrittenPrompt:
    """Text of a prompt, or messages of a conversation.

    Args:
        template_args: variables of the chat template.
        row: row of the JSONL file.
        where: path and line, as "prompts.jsonl:12".
    """

    text: str | None = None
    messages: tuple[dict[str, Any], ...] = ()
    template_args: Mapping[str, Any] = field(default_factory=dict)
    row: dict[str, Any] = field(default_factory=dict)
    where: str = ""

    def encode(self, tokenizer: Any, name: str, infill: bool = False) -> list[int]:
        """Token ids of the prompt. `name`: the tokenizer's name in errors; see `encode_text` and `encode_chat`."""
        if self.text is None:
            return encode_chat(tokenizer, self.messages, name, infill, template_args=self.template_args)
        return encode_text(tokenizer, self.text, infill)


def as_message(text: str, system: str | None, template_args: Mapping[str, Any] | None = None) -> WrittenPrompt:
    """Conversation of an optional system message and a user message."""
    first = [] if system is None else [{"role": "system", "content": system}]
    return WrittenPrompt(messages=(*first, {"role": "user", "content": text}), template_args=template_args or {})


def read_prompts(
    name: str, key: str, chat: bool, system: str | None, template_args: Mapping[str, Any] | None = None
) -> list[WrittenPrompt]:
    """Read the prompts of a JSONL file ("-": stdin). Empty lines are skipped.

    Args:
        key: field with the text; rows without it need a conversation in "messages".
        chat: texts are user messages.
        system: system message of these.
        template_args: variables of the chat template.

    Raises:
        InputFileError: the file cannot be read or is empty, or a row has no prompt (with its line).
    """
    parse = partial(_prompt, key=key, chat=chat, system=system, template_args=template_args or {})
    if name == "-":
        return _prompts("stdin", sys.stdin, parse)
    check_text_file(Path(name))
    try:
        with Path(name).open(encoding="utf-8") as lines:
            return _prompts(name, lines, parse)
    except OSError as error:
        raise InputFileError(name, str(error.strerror)) from error
    except UnicodeDecodeError:
        raise InputFileError(name, "is not UTF-8 text") from None


def _prompts(name: str, lines: Iterable[str], parse: Callable[[str, str], WrittenPrompt]) -> list[WrittenPrompt]:
    prompts = [parse(line, f"{name}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise InputFileError(name, "contains no prompts")
    return prompts


def _prompt(
    line: str, where: str, key: str, chat: bool, system: str | None, template_args: Mapping[str, Any]
) -> WrittenPrompt:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        raise InputFileError(where, "is not JSON") from None
    if not isinstance(row, dict):
        raise InputFileError(where, "is not a JSON object")
    check_characters(row, where)
    if key in row:
        text = row[key]
        if not isinstance(text, str):
            raise InputFileError(where, f"'{key}' must be a text, not {type(text).__name__}")
        if chat and not text.strip():
            raise InputFileError(where, f"'{key}' is empty: with `chat` it is a user's message")
        message = as_message(text, system, template_args) if chat else WrittenPrompt(text=text)
        return replace(message, row={**row, "prompt": text}, where=where)
    messages = row.get("messages")
    if messages is None:
        raise InputFileError(where, f"has neither '{key}' nor 'messages'")
    if not isinstance(messages, list) or not messages or not all(isinstance(each, dict) for each in messages):
        raise InputFileError(where, "'messages' must be a list of objects with role and content")
    return WrittenPrompt(messages=tuple(messages), template_args=template_args, row=row, where=where)


# ---- Token ids.


@dataclass(frozen=True)
class PromptLimits:
    """Limits of a prompt.

    Args:
        mask_token_id: token that the model reads at masks; None: the sampler has no masks.
        ordinary_mask: True if texts contain this token and the model may sample it.
        gen_length: number of new tokens after the prompt.
        context: maximum number of tokens of a sequence; None: no limit.
        infill: True if masks of the prompt are filled in; otherwise it must not contain masks. Masks are `MASK`, or
            mask tokens unless `ordinary_mask`.
        inside: True if new tokens only replace masks of the prompt.
    """

    mask_token_id: int | None
    vocabulary_size: int
    gen_length: int
    context: int | None
    infill: bool = False
    inside: bool = False
    ordinary_mask: bool = False

    @property
    def excluded_token_id(self) -> int:
        """The mask token if it is never sampled, else -1."""
        return -1 if self.mask_token_id is None or self.ordinary_mask else self.mask_token_id

    def with_masks(self, prompt: Sequence[int]) -> list[int]:
        """Replace mask tokens to fill in by `MASK`."""
        if not self.infill or self.ordinary_mask:
            return list(prompt)
        return [MASK if token == self.mask_token_id else token for token in prompt]


def prompt_rows(
    tokens_BP: torch.Tensor, attention_mask_BP: torch.Tensor | None, limits: PromptLimits
) -> tuple[list[list[int]], list[list[int]]]:
    """Check a padded batch. Returns the real tokens of each row, with `MASK` at masks to fill in, and its padding.

    Raises:
        SettingError: padding inside a row of `attention_mask`, or `infill` without masks.
        RowError: a row has an invalid token or an unexpected mask, or does not fit into the context with its new
            tokens.
    """
    width = tokens_BP.shape[1]
    ids = tokens_BP.tolist()
    real = [[1] * width for _ in ids] if attention_mask_BP is None else attention_mask_BP.tolist()
    rows, padding = [], []
    for number, (row, flags) in enumerate(zip(ids, real, strict=True)):
        if any(flag not in (0, 1) for flag in flags):
            raise SettingError("attention_mask", f"row {number} has values other than 0 and 1")
        count = int(sum(flags))
        first = flags.index(1) if count else 0
        if not all(flags[first : first + count]):
            raise SettingError(
                "attention_mask", f"row {number} has padding between its tokens: pad on the left or on the right"
            )
        prompt = limits.with_masks(row[first : first + count])
        check_row(prompt, number, limits)
        rows.append(prompt)
        padding.append(row[first + count :] + row[:first])
    if limits.infill and (limits.inside or not limits.gen_length) and not any(MASK in row for row in rows):
        what = f"the mask token {limits.mask_token_id}"
        if limits.ordinary_mask:
            what = f"{MASK} at the positions to fill ({limits.mask_token_id} is an ordinary token)"
        raise SettingError(
            "infill", f"nothing to fill in: put [MASK] or [MASK:n] into the text, or {what} in input_ids"
        )
    return rows, padding


def check_ids(tokens: Any, attention_mask: Any) -> torch.Tensor:
    """Check `input_ids` [B, P] and `attention_mask`. Raises SettingError."""
    if not isinstance(tokens, torch.Tensor):
        raise SettingError(
            "input_ids", f"must be a tensor, not {type(tokens).__name__}: pass a tokenizer's output as **inputs"
        )
    shape = tuple(tokens.shape)
    if len(shape) != 2:
        remedy = ": add a batch axis with input_ids[None]" if len(shape) == 1 else ""
        raise SettingError("input_ids", f"must be [batch, length], not of shape {shape}{remedy}")
    if tokens.device.type == "meta":
        raise SettingError("input_ids", "must not be on the meta device")
    if shape[0] == 0:
        raise SettingError("input_ids", "has no rows")
    if shape[1] and (tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool):
        raise SettingError("input_ids", f"must be integers, not {tokens.dtype}")
    is_tensor = isinstance(attention_mask, torch.Tensor)
    if attention_mask is not None and not (is_tensor and attention_mask.shape == tokens.shape):
        found = tuple(attention_mask.shape) if is_tensor else type(attention_mask).__name__
        raise SettingError("attention_mask", f"must be a tensor of shape {shape} like input_ids, not {found}")
    return tokens


def warn_of_padding(tokens_BP: torch.Tensor, pad_token_id: int) -> None:
    """Warn if some rows, but not all, begin or end with the padding token. Call this without an attention_mask.

    Padding is not inferred: in most families, the padding token is the end-of-text token, which a prompt may contain.
    """
    edges_B2 = tokens_BP[:, [0, -1]] == pad_token_id if tokens_BP.shape[1] else torch.zeros(1, 2)
    some = (edges_B2.any(dim=0) & ~edges_B2.all(dim=0)).any()
    if bool(some):
        logger.warning_once(
            f"some rows of input_ids begin or end with the padding token {pad_token_id}, which counts as text without "
            "attention_mask: pass the tokenizer's attention_mask"
        )


def check_row(prompt: Sequence[int], name: object, limits: PromptLimits, remedy: str = IN_PYTHON) -> None:
    """Raise RowError for a prompt that cannot be continued or filled in.

    Args:
        name: index or name of the prompt in errors.
        remedy: remedy for a mask token in the prompt.
    """
    mask, count, new = limits.mask_token_id, len(prompt), limits.gen_length
    if mask is not None and mask in prompt and not limits.infill and not limits.ordinary_mask:
        raise RowError(f"contains the mask token {mask} at position {prompt.index(mask)}: {remedy}", [name])
    check_vocabulary(prompt, limits.vocabulary_size, name, lowest=MASK if limits.infill else 0)
    if limits.inside:
        masks = sum(token == MASK for token in prompt)
        if masks > new:
            raise RowError(f"contains {counted(masks, 'mask')}, but `gen_length={new}`: increase it", [name])
        count -= masks
    if limits.context is not None and count + new > limits.context:
        room = limits.context - count
        remedy = f"use `gen_length={room}` or less" if room > 0 else f"shorten the prompt by at least {1 - room}"
        length = f"and `gen_length={new}` make {count + new} tokens" if new else "tokens are"
        raise RowError(
            f"the prompt's {count} {length} beyond the model's context of {limits.context}: "
            f"{remedy if new else f'shorten it by {-room}'}",
            [name],
        )


def check_vocabulary(prompt: Sequence[int], vocabulary: int, name: object, lowest: int = 0) -> None:
    """Raise RowError for a prompt with a token that is below `lowest` or not below `vocabulary`."""
    outside = next((token for token in prompt if not lowest <= token < vocabulary), None)
    if outside is not None:
        raise RowError(f"contains token {outside}, outside the vocabulary of {vocabulary}", [name])


def spans(row: Sequence[int]) -> list[tuple[int, int]]:
    """(begin, end) of each run of masks."""
    found, place = [], 0
    for is_mask, run in groupby(row, lambda token: token == MASK):
        length = len(list(run))
        if is_mask:
            found.append((place, place + length))
        place += length
    return found


def resized_span(row: Sequence[int], number: int, length: int) -> list[int]:
    """Return the row with `length` masks in the span of this index."""
    begin, end = spans(row)[number]
    return [*row[:begin], *[MASK] * length, *row[end:]]

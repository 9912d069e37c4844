"""Prompts: text, conversations and files of them to token ids, and the checks of token ids before they are sampled."""

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

from dlm_bridge.errors import DlmBridgeError, one_line
from dlm_bridge.files.reading import check_characters, check_text_file
from dlm_bridge.generation.request import MASK

logger = logging.get_logger(__name__)
SPAN = re.compile(r"\[MASK(?::(-?\d+))?\]")  # tokens to fill, by default one
IN_PYTHON = "a prompt must be all real tokens (mask padding with attention_mask); infill=True fills its masks"


# ---- Text and conversations.


class PromptTooLongError(DlmBridgeError):
    """A text that is longer than `max_chars`."""


def encode_text(tokenizer: Any, text: str, infill: bool = False, max_chars: int | None = None) -> list[int]:
    """Token ids of a plain prompt; with `infill`, [MASK] becomes one `MASK` and [MASK:n] n of them.

    Raises DlmBridgeError for an empty span, for a lone surrogate, and before it encodes more than `max_chars`
    characters.
    """
    return _with_spans(tokenizer, text, infill, begins=True, max_chars=max_chars)


def encode_chat(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    name: str,
    infill: bool = False,
    max_chars: int | None = None,
    template_args: Mapping[str, Any] | None = None,
) -> list[int]:
    """Token ids of a conversation by the tokenizer's chat template, with the generation prompt; masks as in
    `encode_text`. A content of text parts is joined.

    Raises DlmBridgeError, which calls the tokenizer `name`, without a template, for a part that is not text, where the
    template raises, for a lone surrogate, or before it encodes more than `max_chars` characters.
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
    """A conversation as text by the tokenizer's chat template, which gets the `template_args`; without the generation
    prompt the last message is left open. Raises DlmBridgeError, which calls the tokenizer `name`."""
    if tokenizer.chat_template is None:
        raise DlmBridgeError(
            f"{name}: its tokenizer has no chat template, which messages and --chat need: name one with --tokenizer"
        )
    try:
        text = tokenizer.apply_chat_template(
            messages,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
            **(template_args or {}),
        )
    except Exception as error:  # a template may raise anything
        raise DlmBridgeError(f"{name}: its chat template refuses the messages: {one_line(error)}") from error
    return str(text)


def check_template_args(template_args: Mapping[str, Any], name: str) -> None:
    """Raise DlmBridgeError, which calls them `name`, for arguments of `apply_chat_template` itself, which are not
    variables of a template."""
    for key in inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters:
        if key in template_args and key not in ("tools", "documents", "kwargs"):
            raise DlmBridgeError(f"{name}: {key} is not a variable of the chat template: leave it out")


def with_joined_text(message: Mapping[str, Any], number: int, name: str) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, list):
        return dict(message)
    for part in content:
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            kind = repr(part.get("type"))[:40] if isinstance(part, dict) else type(part).__name__
            raise DlmBridgeError(
                f"{name}: message {number} has a part that is not text ({kind}): leave it out, only text is supported"
            )
    return {**message, "content": "".join(part["text"] for part in content)}


def _with_spans(tokenizer: Any, text: str, infill: bool, begins: bool, max_chars: int | None) -> list[int]:
    if max_chars is not None and len(text) > max_chars:
        raise PromptTooLongError(f"a prompt of {len(text)} characters, above the limit of {max_chars}")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise DlmBridgeError("a prompt or message holds a lone surrogate, which is not a character") from None
    if not infill:
        return list(tokenizer(text, add_special_tokens=begins)["input_ids"])
    ids: list[int] = []
    place = 0
    for span in SPAN.finditer(text):
        ids += tokenizer(text[place : span.start()], add_special_tokens=begins and not place)["input_ids"]
        count = int(span[1] or 1)
        if count < 1:
            raise DlmBridgeError(f"{span[0]} in a prompt: a span to fill has at least one token")
        ids += [MASK] * count
        place = span.end()
    return [*ids, *tokenizer(text[place:], add_special_tokens=begins and not place)["input_ids"]]


# ---- Files of prompts.


@dataclass(frozen=True)
class WrittenPrompt:
    """A text, or the messages of a conversation.

    Args:
        template_args: variables of the chat template.
        row: the JSONL row that it comes from.
        where: its file and line.
    """

    text: str | None = None
    messages: tuple[dict[str, Any], ...] = ()
    template_args: Mapping[str, Any] = field(default_factory=dict)
    row: dict[str, Any] = field(default_factory=dict)
    where: str = ""

    def encode(self, tokenizer: Any, name: str, infill: bool = False) -> list[int]:
        """The prompt's token ids; `name` is the tokenizer's in errors. Raises DlmBridgeError."""
        if self.text is None:
            return encode_chat(tokenizer, self.messages, name, infill, template_args=self.template_args)
        return encode_text(tokenizer, self.text, infill)


def as_message(text: str, system: str | None, template_args: Mapping[str, Any] | None = None) -> WrittenPrompt:
    """A text as a user message, after the system message."""
    first = [] if system is None else [{"role": "system", "content": system}]
    return WrittenPrompt(messages=(*first, {"role": "user", "content": text}), template_args=template_args or {})


def read_prompts(
    name: str, key: str, chat: bool, system: str | None, template_args: Mapping[str, Any] | None = None
) -> list[WrittenPrompt]:
    """The prompts of a JSONL file ("-": stdin): under `key` a text, with `chat` a user message, or under "messages" a
    conversation. The chat template gets the `template_args`. Empty lines are skipped.

    Raises DlmBridgeError for a file that cannot be read or is empty, and, with its line, for a row without a prompt.
    """
    parse = partial(_prompt, key=key, chat=chat, system=system, template_args=template_args or {})
    if name == "-":
        return _prompts("stdin", sys.stdin, parse)
    check_text_file(Path(name))
    try:
        with Path(name).open(encoding="utf-8") as lines:
            return _prompts(name, lines, parse)
    except OSError as error:
        raise DlmBridgeError(f"--jsonl {name}: {error.strerror}") from error
    except UnicodeDecodeError:
        raise DlmBridgeError(f"--jsonl {name}: not a text in UTF-8") from None


def _prompts(name: str, lines: Iterable[str], parse: Callable[[str, str], WrittenPrompt]) -> list[WrittenPrompt]:
    prompts = [parse(line, f"{name}, line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise DlmBridgeError(f"{name}: no prompts there")
    return prompts


def _prompt(
    line: str, where: str, key: str, chat: bool, system: str | None, template_args: Mapping[str, Any]
) -> WrittenPrompt:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        raise DlmBridgeError(f"{where}: not JSON") from None
    if not isinstance(row, dict):
        raise DlmBridgeError(f"{where}: not a JSON object")
    check_characters(row, where)
    if key in row:
        text = row[key]
        if not isinstance(text, str):
            raise DlmBridgeError(f"{where}: '{key}' must be a text, not {type(text).__name__}")
        message = as_message(text, system, template_args) if chat else WrittenPrompt(text=text)
        return replace(message, row={**row, "prompt": text}, where=where)
    messages = row.get("messages")
    if messages is None:
        raise DlmBridgeError(f"{where}: neither '{key}' nor 'messages' there")
    if not isinstance(messages, list) or not messages or not all(isinstance(each, dict) for each in messages):
        raise DlmBridgeError(f"{where}: 'messages' must be a list of objects with role and content")
    return WrittenPrompt(messages=tuple(messages), template_args=template_args, row=row, where=where)


# ---- Token ids.


@dataclass(frozen=True)
class PromptLimits:
    """What a prompt may hold.

    Args:
        mask_token_id: the token that the model reads at masks; None: the sampler works without one.
        ordinary_mask: this token is an ordinary one, which texts contain and the model may sample.
        gen_length: new tokens behind the prompt.
        context: the longest sequence that the model was made for, in tokens; None: any.
        infill: masks of a prompt are to be filled; without it there may be none. They are `MASK`, or mask tokens
            unless these are ordinary.
        inside: the new tokens take the place of these masks; there are none behind the prompt.
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
        """The mask token where it is a token of its own, which is never sampled; else -1."""
        return -1 if self.mask_token_id is None or self.ordinary_mask else self.mask_token_id

    def with_masks(self, prompt: Sequence[int]) -> list[int]:
        """The prompt with `MASK` in place of mask tokens, where these are to be filled."""
        if not self.infill or self.ordinary_mask:
            return list(prompt)
        return [MASK if token == self.mask_token_id else token for token in prompt]


def prompt_rows(
    tokens_BP: torch.Tensor, attention_mask_BP: torch.Tensor | None, limits: PromptLimits
) -> tuple[list[list[int]], list[list[int]]]:
    """The real tokens of each row of a padded batch, checked; masks to fill are `MASK`.

    Returns:
        The rows, and the padding of each.

    Raises:
        DlmBridgeError: padding inside a row, a token outside the vocabulary, an unexpected or missing mask token, or a
            row that does not fit into the model's context together with its new tokens.
    """
    width = tokens_BP.shape[1]
    ids = tokens_BP.tolist()
    real = [[1] * width for _ in ids] if attention_mask_BP is None else attention_mask_BP.tolist()
    rows, padding = [], []
    for number, (row, flags) in enumerate(zip(ids, real, strict=True)):
        if any(flag not in (0, 1) for flag in flags):
            raise DlmBridgeError(f"attention_mask row {number} holds other values than 0 and 1")
        count = int(sum(flags))
        first = flags.index(1) if count else 0
        if not all(flags[first : first + count]):
            raise DlmBridgeError(
                f"attention_mask row {number} has padding between its tokens: pad on the left or on the right"
            )
        prompt = limits.with_masks(row[first : first + count])
        check_row(prompt, f"input_ids row {number}", limits)
        rows.append(prompt)
        padding.append(row[first + count :] + row[:first])
    if limits.infill and (limits.inside or not limits.gen_length) and not any(MASK in row for row in rows):
        what = f"the mask token {limits.mask_token_id}"
        if limits.ordinary_mask:
            what = f"{MASK} at the positions to fill ({limits.mask_token_id} is an ordinary token)"
        raise DlmBridgeError(
            f"infill: nothing to fill in: put [MASK] or [MASK:n] into the text, or {what} in input_ids"
        )
    return rows, padding


def check_ids(tokens: Any, attention_mask: Any) -> torch.Tensor:
    """`tokens` as [B, P] integers. Raises DlmBridgeError where they or the mask are not what they should be."""
    if tokens is None:
        raise DlmBridgeError("generate needs input_ids: a [batch, length] tensor of token ids")
    if not isinstance(tokens, torch.Tensor):
        raise DlmBridgeError(
            f"input_ids must be a tensor, not {type(tokens).__name__}: pass a tokenizer's output as **inputs"
        )
    shape = tuple(tokens.shape)
    if len(shape) != 2:
        remedy = ": add a batch axis with input_ids[None]" if len(shape) == 1 else ""
        raise DlmBridgeError(f"input_ids must be [batch, length], not of shape {shape}{remedy}")
    if tokens.device.type == "meta":
        raise DlmBridgeError("input_ids are on the meta device, without values: pass real ones")
    if shape[0] == 0:
        raise DlmBridgeError("input_ids has no rows: there is nothing to generate")
    if shape[1] and (tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool):
        raise DlmBridgeError(f"input_ids must hold integers, not {tokens.dtype}")
    if attention_mask is not None:
        if not isinstance(attention_mask, torch.Tensor):
            raise DlmBridgeError(f"attention_mask must be a tensor, not {type(attention_mask).__name__}")
        if tuple(attention_mask.shape) != shape:
            raise DlmBridgeError(
                f"attention_mask has shape {tuple(attention_mask.shape)}, input_ids {shape}: they must be equal"
            )
    return tokens


def warn_of_padding(tokens_BP: torch.Tensor, pad_token_id: int) -> None:
    """Warn where some rows, not all, begin or end with the padding token and there is no attention_mask.

    Padding is not guessed: in most families the padding token is the end of text, which a prompt may contain.
    """
    edges_B2 = tokens_BP[:, [0, -1]] == pad_token_id if tokens_BP.shape[1] else torch.zeros(1, 2)
    some = (edges_B2.any(dim=0) & ~edges_B2.all(dim=0)).any()
    if bool(some):
        logger.warning_once(
            f"some rows of input_ids begin or end with the padding token {pad_token_id}, and there is no "
            "attention_mask: it counts as text; pass the tokenizer's attention_mask"
        )


def check_row(prompt: Sequence[int], name: str, limits: PromptLimits, remedy: str = IN_PYTHON) -> None:
    """Raise DlmBridgeError, which calls the prompt `name`, where it cannot be continued or filled; `remedy` is that of
    a mask token in it."""
    mask, count, new = limits.mask_token_id, len(prompt), limits.gen_length
    if mask is not None and mask in prompt and not limits.infill and not limits.ordinary_mask:
        raise DlmBridgeError(f"{name} holds the mask token {mask} at its token {prompt.index(mask)}: {remedy}")
    lowest = MASK if limits.infill else 0
    outside = next((token for token in prompt if not lowest <= token < limits.vocabulary_size), None)
    if outside is not None:
        raise DlmBridgeError(f"{name} holds token {outside}, outside the vocabulary of {limits.vocabulary_size}")
    if limits.inside:
        masks = sum(token == MASK for token in prompt)
        if masks > new:
            raise DlmBridgeError(
                f"{name} holds {masks} masks, gen_length allows {new} tokens in their place: raise it"
            )
        count -= masks
    if limits.context is not None and count + new > limits.context:
        room = limits.context - count
        remedy = f"use gen_length {room} or less" if room > 0 else f"shorten the prompt by at least {1 - room}"
        length = f"tokens and gen_length {new} make {count + new}," if new else "tokens is"
        raise DlmBridgeError(
            f"{name}: a prompt of {count} {length} beyond the model's context of {limits.context}: "
            f"{remedy if new else f'shorten it by {-room}'}"
        )


def spans(row: Sequence[int]) -> list[tuple[int, int]]:
    """Begin and end of each run of masks."""
    found, place = [], 0
    for is_mask, run in groupby(row, lambda token: token == MASK):
        length = len(list(run))
        if is_mask:
            found.append((place, place + length))
        place += length
    return found


def resized_span(row: Sequence[int], number: int, length: int) -> list[int]:
    """The row with `length` masks in its span of this number."""
    begin, end = spans(row)[number]
    return [*row[:begin], *[MASK] * length, *row[end:]]

"""Text generation: prompts as text, chats or JSONL files, to texts, by diffusion and autoregressive models."""

from __future__ import annotations

import inspect
import json
import re
import sys
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from dlm_bridge.distributed import ALONE, Replicas
from dlm_bridge.errors import DlmBridgeError, NonFiniteError, one_line
from dlm_bridge.files.reading import check_characters, check_text_file
from dlm_bridge.generation.batching import ContinuousBatch, Event, RowEnded, RowFailed, RowRequest
from dlm_bridge.generation.canvas_batch import CanvasBatch, CanvasText, batches_canvases
from dlm_bridge.generation.canvases import has_canvas
from dlm_bridge.generation.native import check_prompt, end_tokens, native_settings, sample
from dlm_bridge.generation.rows import StopCondition, check_row, check_stop_strings
from dlm_bridge.generation.settings import resolve_settings
from dlm_bridge.generation.token_sampling import drawn_seeds, row_seeds

SPAN = re.compile(r"\[MASK(?::(-?\d+))?\]")  # tokens to fill, by default one


@dataclass(frozen=True)
class GeneratedTexts:
    """Texts generated for a batch of prompts.

    Args:
        texts: by prompt, without special tokens; with `infill` including the prompt.
        token_ids: by prompt, the tokens of that text, up to and including the one that ends the row.
        counts: by prompt, the number of new tokens.
        forwards: forward passes of the model, for all rows together.
        tokens_per_forward: new tokens of a row per forward pass that it took part in, on average.
        seconds: elapsed time.
    """

    texts: tuple[str, ...]
    token_ids: tuple[tuple[int, ...], ...]
    counts: tuple[int, ...]
    forwards: int
    tokens_per_forward: float
    seconds: float

    @property
    def tokens(self) -> int:
        return sum(self.counts)

    @property
    def summary(self) -> str:
        """The figures of the call in words."""
        rate = f"({self.tokens_per_forward:.2f} a forward)"
        return f"{self.tokens} tokens in {self.forwards} forwards {rate}, {self.seconds:.2f} s"


class PromptTooLongError(DlmBridgeError):
    """A text that is longer than `max_chars`."""


def encode_text(
    tokenizer: Any, text: str, mask_token_id: int | None = None, max_chars: int | None = None
) -> list[int]:
    """Tokens of a plain prompt; with a mask token, [MASK] becomes one of it and [MASK:n] n. Raises DlmBridgeError for
    an empty span, for a lone surrogate, and before it encodes more than `max_chars` characters."""
    return _with_spans(tokenizer, text, mask_token_id, begins=True, max_chars=max_chars)


def encode_chat(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    name: str,
    mask_token_id: int | None = None,
    max_chars: int | None = None,
    template_args: Mapping[str, Any] | None = None,
) -> list[int]:
    """Tokens of a conversation by the tokenizer's chat template, with the generation prompt; masks as in
    `encode_text`. A content in parts of text is those joined.

    Raises DlmBridgeError, which calls the tokenizer `name`, without a template, for a part that is no text, where the
    template raises, for a lone surrogate, or before it encodes more than `max_chars` characters.
    """
    plain = [with_joined_text(message, number, name) for number, message in enumerate(messages, 1)]
    text = render_chat(tokenizer, plain, name, template_args)
    return _with_spans(tokenizer, text, mask_token_id, begins=False, max_chars=max_chars)


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
                f"{name}: message {number} has a part that is no text ({kind}): leave it out, only text is supported"
            )
    return {**message, "content": "".join(part["text"] for part in content)}


def mask_token(model: Any, settings: Mapping[str, Any]) -> int | None:
    """The mask token of a diffusion model's sampler, if any."""
    sources = (getattr(model, "generation_config", None), model.config, model.family)
    named = [settings.get("mask_token_id"), *(getattr(source, "mask_token_id", None) for source in sources)]
    return next((token for token in named if token is not None), None)


def check_prompts(
    model: Any, prompts: Sequence[tuple[str, Sequence[int]]], settings: Mapping[str, Any], *, diffusion: bool
) -> None:
    """Raise DlmBridgeError for the first of these (name, tokens) that `write_texts` would refuse, by its name: a file
    of prompts is checked before hours are spent on its first part."""
    if diffusion:
        found = resolve_settings(model, None, settings, prompt_width=max(len(ids) for _, ids in prompts))
        for name, ids in prompts:
            check_row(ids, name, found.limits)
        return
    given = native_settings(model, settings, max(len(ids) for _, ids in prompts))
    for name, ids in prompts:
        try:
            check_prompt(model, ids, given)
        except DlmBridgeError as error:
            raise DlmBridgeError(f"{name}: {error}") from None


def copies_of_prompt(model: Any, settings: Mapping[str, Any], *, diffusion: bool) -> int:
    """The number of texts that each prompt gets (`num_return_sequences`)."""
    if diffusion:
        return resolve_settings(model, None, settings, prompt_width=1).num_return_sequences
    stored = None if has_canvas(model) else getattr(model.generation_config, "num_return_sequences", None)
    return int(native_settings(model, settings).get("num_return_sequences") or stored or 1)


def seeds_of(model: Any, prompts: Sequence[Sequence[int]], settings: Mapping[str, Any]) -> list[int] | None:
    """The row seeds of a diffusion model's texts for all prompts, those of a prompt next to each other; None without a
    seed. With them the texts do not depend on how the prompts are batched, not even for a repeated prompt."""
    found = resolve_settings(model, None, settings, prompt_width=max(map(len, prompts)))
    if found.seed is None:
        return None
    return row_seeds(found.seed, [prompt for prompt in prompts for _ in range(found.num_return_sequences)])


def write_texts(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Sequence[int]],
    settings: Mapping[str, Any],
    *,
    diffusion: bool,
    streamer: Any = None,
    seeds: Sequence[int] | None = None,
) -> GeneratedTexts:
    """Sample a text for each prompt, a batch at once, padded on the left.

    Args:
        settings: keyword arguments of `dlm_bridge.generation.generate` for a diffusion model, of transformers'
            `generate` for an autoregressive one, with `gen_length` and `seed` in addition; a temperature implies
            `do_sample`. Those of DiffusionGemma are `canvases.SETTINGS`.
        diffusion: the model is sampled by `dlm_bridge.generation.generate`, not by transformers'.
        streamer: the `streamer` of that `generate`. With a method `fail` it is told the rows of an autoregressive
            model whose logits are NaN, which otherwise are an error.
        seeds: row seeds of a diffusion model, for prompts that are part of a larger set (`seeds_of`).

    Raises:
        DlmBridgeError: a setting or a prompt that the model cannot be sampled with.
        NonFiniteError: logits that are NaN, of the prompts that it names or of all.
    """
    if settings.get("span_lengths") and len(prompts) > 1:
        raise DlmBridgeError("span_lengths makes rows of different lengths: sample one prompt at a time (batch 1)")
    width = max(len(prompt) for prompt in prompts)
    input_ids = torch.tensor([[0] * (width - len(ids)) + list(ids) for ids in prompts], dtype=torch.long)
    mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts])
    input_ids, mask = input_ids.view(len(prompts), width), mask.view(len(prompts), width)
    began = time.perf_counter()
    if diffusion:
        output = _diffusion(model, tokenizer, input_ids, mask, settings, streamer, seeds)
    else:
        found = sample(model, tokenizer, input_ids, mask, settings, streamer)
        stop, new = stop_condition(model, tokenizer, settings), found.sequences[:, width:].tolist()
        output = _Output(found.sequences, found.forwards, [width + (stop.end_of(row) or len(row)) for row in new])
        failed = found.failed(output.row_ends)
        if failed and not hasattr(streamer, "fail"):
            copies = len(new) // len(prompts)
            raise NonFiniteError(rows=sorted({row // copies for row in failed}) if len(failed) < len(new) else ())
    rows = output.sequences.cpu()
    seconds = time.perf_counter() - began  # the tokens have arrived
    copies = len(rows) // len(prompts)  # of each prompt
    pairs = [
        _text_ids(row, prompts[number // copies], width, end, settings, output.mask_token_id)
        for number, (row, end) in enumerate(zip(rows.tolist(), output.row_ends, strict=True))
    ]
    token_ids, counts = tuple(ids for ids, _ in pairs), tuple(count for _, count in pairs)
    texts = tuple(tokenizer.decode(ids, skip_special_tokens=True) for ids in token_ids)
    rate = output.tokens_per_forward
    if rate is None:
        rate = sum(counts) / len(counts) / max(output.forwards, 1)
    return GeneratedTexts(texts, token_ids, counts, output.forwards, rate, seconds)


def batch_of_rows(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Sequence[int]],
    settings: Mapping[str, Any],
    max_rows: int,
    replicas: Replicas = ALONE,
    record: bool = False,
    skip: Container[int] = (),
) -> ContinuousBatch:
    """A continuous batch of a diffusion model, to which all prompts are submitted, the longest first, so that rows of
    similar length run together; with `replicas` this process's share of them. A row's name is the prompt's number,
    times `num_return_sequences` plus the copy's; rows in `skip` are omitted. `record` reports the steps that
    `recorded_rows` needs.

    With a `seed` the tokens are those of `write_texts` with `seeds_of` all prompts.
    """
    found = resolve_settings(model, None, settings, prompt_width=max(map(len, prompts)))
    copies = found.num_return_sequences
    rows = [prompt for prompt in prompts for _ in range(copies)]
    seeds = seeds_of(model, prompts, settings)
    own = {name: value for name, value in settings.items() if name not in ("num_return_sequences", "seed")}
    length = max(map(len, prompts)) + found.limits.gen_length
    batch = ContinuousBatch(
        model,
        {**own, "tokenizer": tokenizer},
        max_rows=min(max_rows, len(rows)),
        max_length=length,
        stream=False,
        record=record,
    )
    for number in replicas.share(_longest_first(rows, skip)):
        batch.submit(RowRequest(number, rows[number], seed=None if seeds is None else seeds[number]))
    return batch


def canvas_texts(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Sequence[int]],
    settings: Mapping[str, Any],
    max_rows: int,
    replicas: Replicas = ALONE,
    skip: Container[int] = (),
) -> tuple[CanvasBatch, Iterator[CanvasText]] | None:
    """The texts of DiffusionGemma for all prompts, as they end, in a batch that rows enter and leave; with `replicas`
    this process's share of them. Numbers and `skip` are those of `batch_of_rows`. None where transformers' own loop
    has to sample (`write_texts`).

    The text of a number is the one that `write_texts` gives for its prompt alone, at the same `seed`.
    """
    given = native_settings(model, settings)
    if not batches_canvases(model, given):
        return None
    copies, seed = given.pop("num_return_sequences", 1), given.pop("seed", None)
    rows = [prompt for prompt in prompts for _ in range(copies)]
    seeds = drawn_seeds(len(rows)) if seed is None else row_seeds(seed, rows)
    order = replicas.share(_longest_first(rows, skip))
    batch = CanvasBatch(model, given, min(max_rows, len(rows)))
    found = batch.run(rows, seeds, list(order))
    stop = stop_condition(model, tokenizer, settings)
    return batch, (replace(row, tokens=row.tokens[: stop.end_of(row.tokens)]) for row in found)


def _longest_first(rows: Sequence[Sequence[int]], skip: Container[int]) -> list[int]:
    return sorted((n for n in range(len(rows)) if n not in skip), key=lambda number: -len(rows[number]))


def ended_rows(batch: ContinuousBatch) -> Iterator[RowEnded]:
    """Run the batch until it is idle; its rows as they end. Raises DlmBridgeError for a row that fails."""
    return (event for event in _events(batch) if isinstance(event, RowEnded))


def recorded_rows(batch: ContinuousBatch) -> Iterator[tuple[RowEnded, list[int]]]:
    """The same of a batch that records, each with its trajectory: the commit step of each of its tokens, counted from
    1 over the forward passes that the row took part in; of a token that a later step changed, that step."""
    return ((row, list(row.steps[: len(row.tokens)])) for row in ended_rows(batch))


def _events(batch: ContinuousBatch) -> Iterator[Event]:
    try:
        while not batch.idle:
            for event in batch.advance():
                if isinstance(event, RowFailed):
                    raise event.error
                yield event
    finally:
        batch.close()


def _with_spans(
    tokenizer: Any, text: str, mask_token_id: int | None, begins: bool, max_chars: int | None
) -> list[int]:
    if max_chars is not None and len(text) > max_chars:
        raise PromptTooLongError(f"a prompt of {len(text)} characters, above the limit of {max_chars}")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise DlmBridgeError("a prompt or message holds a lone surrogate, which is no character") from None
    if mask_token_id is None:
        return list(tokenizer(text, add_special_tokens=begins)["input_ids"])
    ids: list[int] = []
    place = 0
    for span in SPAN.finditer(text):
        ids += tokenizer(text[place : span.start()], add_special_tokens=begins and not place)["input_ids"]
        count = int(span[1] or 1)
        if count < 1:
            raise DlmBridgeError(f"{span[0]} in a prompt: a span to fill has at least one token")
        ids += [mask_token_id] * count
        place = span.end()
    return [*ids, *tokenizer(text[place:], add_special_tokens=begins and not place)["input_ids"]]


def _text_ids(
    row: Sequence[int],
    prompt: Sequence[int],
    width: int,
    end: int,
    settings: Mapping[str, Any],
    mask_token_id: int | None,
) -> tuple[tuple[int, ...], int]:
    """The tokens of a row's text, and the number of new ones. A row is padding and prompt up to `width`, then new
    tokens, up to `end`."""
    if not settings.get("infill"):
        return tuple(row[width:end]), end - width
    begin = 0 if settings.get("span_lengths") else width - len(prompt)  # with span_lengths a single row
    filled = tuple(row[begin:end])
    return filled, len(filled) - sum(token != mask_token_id for token in prompt)


@dataclass(frozen=True)
class _Output:
    sequences: torch.Tensor  # [B, P + new]
    forwards: int
    row_ends: list[int]  # the column behind each row's last token
    tokens_per_forward: float | None = None  # where `generate` counts it
    mask_token_id: int | None = None


def _diffusion(
    model: Any,
    tokenizer: Any,
    input_ids: torch.Tensor,
    mask: torch.Tensor,
    settings: Mapping[str, Any],
    streamer: Any,
    seeds: Sequence[int] | None,
) -> _Output:
    given = {**settings, "tokenizer": tokenizer}  # for stop_strings, the caller's or the checkpoint's
    if seeds is not None:
        given["seed"] = list(seeds)
    if streamer is not None:
        given["streamer"] = streamer
    output = model.generate(input_ids, attention_mask=mask, return_dict_in_generate=True, **given)
    ends = output.row_ends.tolist()
    return _Output(output.sequences, output.forwards, ends, output.tokens_per_forward, mask_token(model, settings))


def stop_condition(model: Any, tokenizer: Any, settings: Mapping[str, Any]) -> StopCondition:
    """The stop condition, with the precedence of `generate`."""
    stored = getattr(model.generation_config, "stop_strings", None)
    strings = check_stop_strings(settings.get("stop_strings", stored))
    return StopCondition(end_tokens(model, settings), torch.device("cpu"), strings, tokenizer)


@dataclass(frozen=True)
class WrittenPrompt:
    """A text, or the messages of a conversation with variables of the chat template; `row` is the JSONL row that it
    comes from, `where` its file and line."""

    text: str | None = None
    messages: tuple[dict[str, Any], ...] = ()
    template_args: Mapping[str, Any] = field(default_factory=dict)
    row: dict[str, Any] = field(default_factory=dict)
    where: str = ""

    def encode(self, tokenizer: Any, name: str, mask_token_id: int | None = None) -> list[int]:
        """The prompt's tokens; `name` is the tokenizer's in errors, `mask_token_id` that of spans to fill (None: there
        are none). Raises DlmBridgeError."""
        if self.text is None:
            return encode_chat(tokenizer, self.messages, name, mask_token_id, template_args=self.template_args)
        return encode_text(tokenizer, self.text, mask_token_id)


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
    check_text_file(Path(name), f"--jsonl {name}")
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

"""Sampling of given prompts: the engine by kind of model, one closed call, and files of prompts over processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dlm_bridge.distributed import ALONE, Replicas
from dlm_bridge.errors import DlmBridgeError, NonFiniteError, RowError
from dlm_bridge.generation import autoregressive, gemma
from dlm_bridge.generation.engine import SamplingEngine
from dlm_bridge.generation.prompts import PromptLimits, check_row
from dlm_bridge.generation.request import MASK, Ended, Engine, Event, Failed, Request
from dlm_bridge.generation.settings import resolve_settings
from dlm_bridge.generation.token_sampling import drawn_seeds, row_seeds


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
        """Tokens, time, speed and forward passes, in one line."""
        speed = self.tokens / max(self.seconds, 1e-9)
        passes = f"{self.forwards} forward passes of {self.tokens_per_forward:.2f} tokens per row"
        return f"{self.tokens} tokens in {self.seconds:.2f} s ({speed:.0f} tokens/s), {passes}"


def is_diffusion(model: Any) -> bool:
    """True for a model that `dlm_bridge.generation.generate` samples from."""
    return getattr(getattr(model, "family", None), "sampled_here", False)


def open_engine(
    model: Any,
    tokenizer: Any,
    settings: Mapping[str, Any],
    *,
    max_rows: int,
    max_length: int | None = None,
    stream: bool = False,
    record: bool = False,
    deliver: Callable[[list[Event]], None] | None = None,
) -> Engine:
    """The engine of a model of any kind.

    Args:
        settings: keyword arguments of `generate`, without a seed; those of DiffusionGemma are `gemma.SETTINGS`.
        max_rows, max_length, stream, record: see `SamplingEngine`.
        deliver: of an engine that runs closed batches, see `AutoregressiveEngine`.

    Raises:
        DlmBridgeError: a setting that the model cannot be sampled with.
    """
    if is_diffusion(model):
        options: dict[str, Any] = {"max_rows": max_rows, "max_length": max_length, "tokenizer": tokenizer}
        return SamplingEngine(model, settings, stream=stream, record=record, **options)
    if not gemma.is_gemma(model):
        return autoregressive.AutoregressiveEngine(model, tokenizer, settings, max_rows=max_rows, deliver=deliver)
    if gemma.supports_drafts(model, gemma.gemma_keywords(model, settings)):
        return gemma.GemmaEngine(model, tokenizer, settings, max_rows=max_rows, stream=stream)
    return gemma.GemmaLoopEngine(model, tokenizer, settings, max_rows=max_rows, deliver=deliver)


def check_prompts(
    model: Any,
    prompts: Sequence[tuple[str, Sequence[int]]],
    settings: Mapping[str, Any],
    fill: str | None = None,
) -> None:
    """Raise DlmBridgeError for the first of these (name, tokens) that cannot be sampled; see `prompt_errors`."""
    for error in prompt_errors(model, prompts, settings, fill).values():
        raise error


def prompt_errors(
    model: Any,
    prompts: Sequence[tuple[str, Sequence[int]]],
    settings: Mapping[str, Any],
    fill: str | None = None,
) -> dict[int, DlmBridgeError]:
    """Why prompts (name, tokens) cannot be sampled, by their number: a file of them is checked before hours are spent
    on its first part.

    Args:
        fill: what the caller's users give to have masks filled; None: they cannot.

    Raises:
        DlmBridgeError: settings that no prompt can be sampled with.
    """
    longest = max((len(ids) for _, ids in prompts), default=0)
    limits: PromptLimits | None = None
    if is_diffusion(model):
        found = resolve_settings(model, None, settings, prompt_width=longest)
        limits = found.limits
        remedy = f"remove it, or fill it with {fill}" if fill is not None and found.sampler.infills else "remove it"
    else:
        check = gemma.check_gemma_prompt if gemma.is_gemma(model) else autoregressive.check_prompt
        given = call_keywords(model, settings, longest)
    errors = {}
    for number, (name, ids) in enumerate(prompts):
        try:
            if limits is not None:
                check_row(limits.with_masks(ids), name, limits, remedy)
            else:
                check(model, ids, given)
        except DlmBridgeError as error:
            errors[number] = error if limits is not None else DlmBridgeError(f"{name}: {error}")
    return errors


def call_keywords(model: Any, settings: Mapping[str, Any], longest: int = 0) -> dict[str, Any]:
    """Keyword arguments of transformers' `generate` of a model that it samples from, and `seed`; `longest`: tokens of
    the longest prompt."""
    if gemma.is_gemma(model):
        return gemma.gemma_keywords(model, settings)
    return autoregressive.generate_keywords(model, settings, longest)


def copies_of(model: Any, settings: Mapping[str, Any]) -> int:
    """The number of texts that each prompt gets (`num_return_sequences`)."""
    if is_diffusion(model):
        return resolve_settings(model, None, settings, prompt_width=1).num_return_sequences
    stored = None if gemma.is_gemma(model) else getattr(model.generation_config, "num_return_sequences", None)
    return int(call_keywords(model, settings).get("num_return_sequences") or stored or 1)


def draws(model: Any, settings: Mapping[str, Any]) -> bool:
    """True if each text of a prompt is a draw of its own; False for beams, and for greedy decoding by transformers."""
    if is_diffusion(model) or gemma.is_gemma(model):
        return True
    return autoregressive.draws(model, call_keywords(model, settings))


def seeds_of(model: Any, prompts: Sequence[Sequence[int]], settings: Mapping[str, Any]) -> list[int] | None:
    """Seeds of the texts of all prompts, those of a prompt next to each other; None without a seed. With them the
    texts do not depend on how the prompts are batched, not even for a repeated prompt."""
    if is_diffusion(model):
        found = resolve_settings(model, None, settings, prompt_width=max(map(len, prompts)))
        seed, mask = found.seed, found.limits.mask_token_id or 0
        prompts = [[mask if token == MASK else token for token in prompt] for prompt in prompts]
    else:
        seed = call_keywords(model, settings).get("seed")
    if seed is None:
        return None
    copies = copies_of(model, settings)
    return row_seeds(seed, [prompt for prompt in prompts for _ in range(copies)])


class PromptSampler:
    """Samples all prompts through one engine, the longest first, so that requests of similar length run together.

    Args:
        settings: keyword arguments of `generate`; `num_return_sequences` and `seed` may be among them.
        replicas: processes that each sample a share of the requests.
        skip: names of requests that are not sampled.
        record: see `SamplingEngine`.

    Attributes:
        copies: requests per prompt. The name of a request is the prompt's number times `copies`, plus the copy's.
        engine: the engine.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        prompts: Sequence[Sequence[int]],
        settings: Mapping[str, Any],
        max_rows: int,
        replicas: Replicas = ALONE,
        *,
        record: bool = False,
        skip: Container[int] = (),
    ) -> None:
        self.copies = copies_of(model, settings)
        rows = [prompt for prompt in prompts for _ in range(self.copies)]
        seeds = seeds_of(model, prompts, settings)
        own = {name: value for name, value in settings.items() if name not in ("num_return_sequences", "seed")}
        length = None
        if is_diffusion(model):
            width = max(map(len, prompts))
            length = width + resolve_settings(model, None, settings, prompt_width=width).limits.gen_length
        elif seeds is None:
            seeds = drawn_seeds(len(rows))
        self.engine = open_engine(
            model, tokenizer, own, max_rows=min(max_rows, len(rows)), max_length=length, record=record
        )
        wanted = sorted((n for n in range(len(rows)) if n not in skip), key=lambda number: -len(rows[number]))
        for number in replicas.share(wanted):
            seed = None if seeds is None else seeds[number]
            self.engine.submit(Request(number, rows[number], seed=seed, stream=False))

    def __iter__(self) -> Iterator[Ended | Failed]:
        """The requests as they end or fail. Raises DlmBridgeError for an error that is not a single request's."""
        try:
            while not self.engine.idle:
                for event in self.engine.step():
                    if isinstance(event, Failed) and not isinstance(event.error, RowError):
                        raise event.error
                    if isinstance(event, Ended | Failed):
                        yield event
        finally:
            self.engine.close()


def write_texts(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Sequence[int]],
    settings: Mapping[str, Any],
    *,
    streamer: Any = None,
) -> GeneratedTexts:
    """Sample a text for each prompt, all at once, padded on the left.

    Args:
        prompts: token ids, `MASK` at positions to fill.
        settings: keyword arguments of `dlm_bridge.generation.generate` for a diffusion model, of transformers'
            `generate` for an autoregressive one, with `gen_length` and `seed` in addition; a temperature implies
            `do_sample`. Those of DiffusionGemma are `gemma.SETTINGS`.
        streamer: the `streamer` of that `generate`.

    Raises:
        DlmBridgeError: a setting or a prompt that the model cannot be sampled with.
        NonFiniteError: logits that are NaN, of the prompts that it names or of all.
    """
    if settings.get("span_lengths") and len(prompts) > 1:
        raise DlmBridgeError("span_lengths makes rows of different lengths: sample one prompt at a time (batch 1)")
    width = max(len(prompt) for prompt in prompts)
    if settings.get("infill") and is_diffusion(model):
        limits = resolve_settings(model, None, settings, prompt_width=width).limits
        prompts = [limits.with_masks(prompt) for prompt in prompts]
    input_ids = torch.tensor([[0] * (width - len(ids)) + list(ids) for ids in prompts], dtype=torch.long)
    mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts])
    input_ids, mask = input_ids.view(len(prompts), width), mask.view(len(prompts), width)
    began = time.perf_counter()
    rate: float | None = None
    if is_diffusion(model):
        given = {**settings, "tokenizer": tokenizer}  # for stop_strings, the caller's or the checkpoint's
        if streamer is not None:
            given["streamer"] = streamer
        output = model.generate(input_ids, attention_mask=mask, return_dict_in_generate=True, **given)
        rows, ends = output.sequences.tolist(), output.row_ends.tolist()
        forwards, rate = output.forwards, output.tokens_per_forward
    else:
        if gemma.is_gemma(model):
            found = gemma.sample_drafts(model, tokenizer, input_ids, mask, settings, streamer)
        else:
            seeds = seeds_of(model, prompts, settings) if draws(model, settings) else None
            own = settings if seeds is None else {name: value for name, value in settings.items() if name != "seed"}
            found = autoregressive.sample(model, tokenizer, input_ids, mask, own, streamer, seeds)
        rows, forwards = found.sequences.tolist(), found.forwards
        stop = autoregressive.stop_condition(model, tokenizer, settings)
        ends = [width + (stop.end_of(row[width:]) or len(row) - width) for row in rows]
        failed = found.failed(ends)
        if failed:
            copies = len(rows) // len(prompts)
            raise NonFiniteError(rows=sorted({row // copies for row in failed}) if len(failed) < len(rows) else ())
    seconds = time.perf_counter() - began  # the tokens have arrived
    copies = len(rows) // len(prompts)  # of each prompt
    pairs = [
        _text_ids(row, prompts[number // copies], width, end, settings)
        for number, (row, end) in enumerate(zip(rows, ends, strict=True))
    ]
    token_ids, counts = tuple(ids for ids, _ in pairs), tuple(count for _, count in pairs)
    texts = tuple(tokenizer.decode(ids, skip_special_tokens=True) for ids in token_ids)
    if rate is None:
        rate = sum(counts) / len(counts) / max(forwards, 1)
    return GeneratedTexts(texts, token_ids, counts, forwards, rate, seconds)


def _text_ids(
    row: Sequence[int], prompt: Sequence[int], width: int, end: int, settings: Mapping[str, Any]
) -> tuple[tuple[int, ...], int]:
    """The tokens of a row's text, and the number of new ones. A row is padding and prompt up to `width`, then new
    tokens, up to `end`."""
    if not settings.get("infill"):
        return tuple(row[width:end]), end - width
    begin = 0 if settings.get("span_lengths") else width - len(prompt)  # with span_lengths a single row
    filled = tuple(row[begin:end])
    return filled, len(filled) - sum(token != MASK for token in prompt)

"""Sampling of given prompts: the engine for a model, one closed call, and files of prompts over processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dlm_bridge.errors import NonFiniteError, RowError, SettingError, counted
from dlm_bridge.generation import autoregressive, gemma
from dlm_bridge.generation.callbacks import StepObserver
from dlm_bridge.generation.engine import Prefill, SamplingEngine, SamplingPlan
from dlm_bridge.generation.prompts import PromptLimits, check_row
from dlm_bridge.generation.request import MASK, Ended, Engine, Event, Failed, Request, TextConstraint
from dlm_bridge.generation.settings import resolve_settings
from dlm_bridge.generation.token_sampling import drawn_seeds, row_seeds
from dlm_bridge.registration import load
from dlm_bridge.replicas import ALONE, Replicas


@dataclass(frozen=True)
class GeneratedTexts:
    """Texts generated for a batch of prompts.

    Args:
        texts: text per row, without special tokens; with `infill`, including the prompt.
        token_ids: tokens of each text, up to and including the one that ends the row.
        counts: number of new tokens per row.
        forwards: number of forward passes of the model for all rows.
        tokens_per_forward: mean number of new tokens of a row per forward pass that it took part in.
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
        """Tokens, time, speed and forward passes on one line."""
        speed = self.tokens / max(self.seconds, 1e-9)
        rate = f"{speed:.{int(speed < 10)}f} tokens/s"
        passes = counted(self.forwards, "forward pass", "forward passes")
        passes += f" of {self.tokens_per_forward:.2f} tokens per row"
        return f"{counted(self.tokens, 'token')} in {self.seconds:.2f} s ({rate}), {passes}"


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
    observers: Sequence[StepObserver] = (),
    deliver: Callable[[list[Event]], None] | None = None,
    prefill: Prefill | None = None,
) -> Engine:
    """Create the engine for a diffusion or autoregressive model.

    Args:
        settings: keyword arguments of `generate`, without a seed; for DiffusionGemma, `gemma.GemmaSettings`.
        max_rows, max_length, stream, record: see `SamplingEngine`.
        observers: see `SamplingEngine`, and `gemma.GemmaEngine`; only of diffusion models.
        deliver: for engines with closed batches, see `AutoregressiveEngine`.
        prefill: see `SamplingEngine`.

    Raises:
        SettingError: the model does not support a setting.
    """
    if is_diffusion(model):
        options: dict[str, Any] = {"max_rows": max_rows, "max_length": max_length, "tokenizer": tokenizer}
        options["prefill"] = prefill
        return SamplingEngine(model, settings, stream=stream, record=record, observers=observers, **options)
    if not gemma.is_gemma(model):
        return autoregressive.AutoregressiveEngine(model, tokenizer, settings, max_rows=max_rows, deliver=deliver)
    if gemma.supports_drafts(model, gemma.gemma_keywords(model, settings)):
        return gemma.GemmaEngine(model, tokenizer, settings, max_rows=max_rows, stream=stream, observers=observers)
    return gemma.GemmaLoopEngine(model, tokenizer, settings, max_rows=max_rows, deliver=deliver)


def check_prompts(
    model: Any,
    prompts: Sequence[tuple[str, Sequence[int]]],
    settings: Mapping[str, Any],
    fill: str | None = None,
) -> None:
    """Raise the first of `prompt_errors`."""
    for error in prompt_errors(model, prompts, settings, fill).values():
        raise error


def prompt_errors(
    model: Any,
    prompts: Sequence[tuple[str, Sequence[int]]],
    settings: Mapping[str, Any],
    fill: str | None = None,
) -> dict[int, RowError]:
    """Check prompts (name, tokens) before any of them is sampled. Returns the errors by index.

    Args:
        fill: how users request that masks are filled in, for the error; None: they cannot.

    Raises:
        SettingError: the model does not support a setting.
    """
    longest = max((len(ids) for _, ids in prompts), default=0)
    limits: PromptLimits | None = None
    if is_diffusion(model):
        found = resolve_settings(model, None, settings, prompt_width=longest)
        limits = found.limits
        remedy = f"remove it, or fill it in with {fill}" if fill is not None and found.sampler.infills else "remove it"
    else:
        check = gemma.check_gemma_prompt if gemma.is_gemma(model) else autoregressive.check_prompt
        given = call_keywords(model, settings, longest)
    errors = {}
    for number, (name, ids) in enumerate(prompts):
        try:
            if limits is not None:
                check_row(limits.with_masks(ids), name, limits, remedy)
            else:
                check(model, ids, given, name)
        except RowError as error:
            errors[number] = error
    return errors


def compile_constraint(
    model: Any, tokenizer: Any, constraint: Any, name: str, prompt: Sequence[int], settings: Mapping[str, Any]
) -> TextConstraint:
    """Compile a `structured.Constraint` for a model, and check that the text after a prompt can satisfy it.

    Raises:
        SettingError, RowError: the constraint is invalid, no text of the maximum length satisfies it, or the sampler
            cannot keep it. `name`: the prompt's name in errors.
    """
    if is_diffusion(model):
        found = resolve_settings(model, None, settings, prompt_width=len(prompt))
        bound: TextConstraint
        (bound,) = load("features", "constraint")(constraint, tokenizer, found, 1)
        bound.check(Request(name, prompt), found.limits.gen_length, SamplingPlan.of(found, None, len(prompt)))
        return bound
    if gemma.is_gemma(model) and not gemma.supports_drafts(model, call_keywords(model, settings)):
        raise SettingError("constraint", "transformers' loop for DiffusionGemma cannot keep it")
    ends = autoregressive.end_tokens(model, settings) or autoregressive.end_tokens(model, {})
    bound = load("features", "constraint for a model")(
        constraint,
        tokenizer,
        vocabulary_size=model.config.get_text_config().vocab_size,
        mask_token_id=None,
        eos_token_ids=ends,
        pad_token_id=getattr(model.generation_config, "pad_token_id", None),
    )
    bound.check(Request(name, prompt), _new_tokens(model, settings, len(prompt)))
    return bound


def _new_tokens(model: Any, settings: Mapping[str, Any], longest: int) -> int:
    """Maximum number of new tokens of an autoregressive model after a prompt of this length."""
    given = call_keywords(model, settings, longest)
    return int(given["max_new_tokens"] if "max_new_tokens" in given else given["max_length"] - longest)


def call_keywords(model: Any, settings: Mapping[str, Any], longest: int = 0) -> dict[str, Any]:
    """Keyword arguments of transformers' `generate` for a model that it samples from, and `seed`. `longest`: number of
    tokens of the longest prompt."""
    if gemma.is_gemma(model):
        return gemma.gemma_keywords(model, settings)
    return autoregressive.generate_keywords(model, settings, longest)


def ending_tokens(model: Any, settings: Mapping[str, Any]) -> tuple[int, ...]:
    """Tokens that end a text, for displays; none with `infill`."""
    if not is_diffusion(model):
        return autoregressive.end_tokens(model, settings)
    if settings.get("infill"):
        return ()
    return resolve_settings(model, None, settings, prompt_width=1).eos_token_ids


def copies_of(model: Any, settings: Mapping[str, Any]) -> int:
    """Number of texts per prompt (`num_return_sequences`)."""
    if is_diffusion(model):
        return resolve_settings(model, None, settings, prompt_width=1).num_return_sequences
    stored = None if gemma.is_gemma(model) else getattr(model.generation_config, "num_return_sequences", None)
    return int(call_keywords(model, settings).get("num_return_sequences") or stored or 1)


def draws(model: Any, settings: Mapping[str, Any]) -> bool:
    """True if the texts of a prompt are independent draws; False for beams and transformers' greedy decoding."""
    if is_diffusion(model) or gemma.is_gemma(model):
        return True
    return autoregressive.draws(model, call_keywords(model, settings))


def seeds_of(model: Any, prompts: Sequence[Sequence[int]], settings: Mapping[str, Any]) -> list[int] | None:
    """Seeds of the texts of all prompts, those of one prompt in sequence; None without a seed. With these seeds, texts
    do not depend on the batches, even for repeated prompts."""
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
    """Samples all prompts with one engine, the longest first, so that requests of similar length run together.

    Args:
        settings: keyword arguments of `generate`, including `num_return_sequences` and `seed`.
        replicas: processes that each sample a part of the requests.
        skip: names of requests that are not sampled.
        record: see `SamplingEngine`.
        constraints: one per prompt, see `Request.constraint`; empty: none.

    Attributes:
        copies: requests per prompt. The name of a request is the prompt's index times `copies` plus the copy's index.
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
        constraints: Sequence[Any] = (),
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
            constraint = constraints[number // self.copies] if constraints else None
            self.engine.submit(Request(number, rows[number], seed=seed, stream=False, constraint=constraint))

    def __iter__(self) -> Iterator[Ended | Failed]:
        """Iterate over requests as they end or fail. Raises errors that affect all requests."""
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
    constraint: Any = None,
) -> GeneratedTexts:
    """Sample texts for all prompts in one batch, padded on the left.

    Args:
        prompts: token ids, with `MASK` at positions to fill in.
        settings: keyword arguments of `dlm_bridge.generation.generate` for a diffusion model; of transformers'
            `generate`, with `gen_length` and `seed`, for an autoregressive model, where a temperature implies
            `do_sample`; `gemma.GemmaSettings` for DiffusionGemma.
        streamer: the `streamer` of that `generate`.
        constraint: language that the texts belong to, a `structured.Constraint`.

    Raises:
        SettingError: the model does not support a setting.
        RowError: a prompt cannot be sampled.
        NonFiniteError: logits are NaN or infinite, for the named prompts or for all.
    """
    if settings.get("span_lengths") and len(prompts) > 1:
        raise SettingError("span_lengths", "gives rows different lengths: sample one prompt at a time")
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
        given = {**settings, "tokenizer": tokenizer}  # for stop_strings
        if streamer is not None:
            given["streamer"] = streamer
        if constraint is not None:
            given["constraint"] = constraint
        output = model.generate(input_ids, attention_mask=mask, return_dict_in_generate=True, **given)
        rows, ends = output.sequences.tolist(), output.row_ends.tolist()
        forwards, rate = output.forwards, output.tokens_per_forward
    else:
        if constraint is not None and gemma.is_gemma(model):
            raise SettingError(
                "constraint", "DiffusionGemma keeps it in files of prompts and in the server: use `jsonl`"
            )
        if constraint is not None:
            bound = [compile_constraint(model, tokenizer, constraint, "prompt", ids, settings) for ids in prompts]
            processor = bound[0].processor(bound, width, _new_tokens(model, settings, width))
            processors = [*(settings.get("logits_processor") or ()), processor]
            settings = {**settings, "logits_processor": processors}
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
    seconds = time.perf_counter() - began
    copies = len(rows) // len(prompts)
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
    """Tokens of a row's text, and the number of new ones. The row consists of padding and prompt up to `width`, and
    new tokens up to `end`."""
    if not settings.get("infill"):
        return tuple(row[width:end]), end - width
    begin = 0 if settings.get("span_lengths") else width - len(prompt)  # span_lengths: a single row
    filled = tuple(row[begin:end])
    return filled, len(filled) - sum(token != MASK for token in prompt)

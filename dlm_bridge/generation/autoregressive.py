"""Sampling of autoregressive models with transformers' `generate`, as an engine.

transformers' continuous batching (5.24) is not used: it draws all rows from one seed, so that a row's tokens would
depend on the other rows.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteriaList,
    StopStringCriteria,
)

from dlm_bridge.errors import DlmBridgeError, NonFiniteError, RowError, SettingError, counted, one_line
from dlm_bridge.generation.config import check_values, diffusion_fields, eos_token_ids, merge_names
from dlm_bridge.generation.prompts import check_vocabulary
from dlm_bridge.generation.request import Ended, Event, Extended, Failed, Request
from dlm_bridge.generation.stopping import StopCondition, check_stop_strings
from dlm_bridge.generation.token_sampling import MIN_TEMPERATURE, Noise, draw_token, drawn_seeds, shared_seed
from dlm_bridge.settings import nearest

MISSING = torch.iinfo(torch.long).max  # in place of a column
NEW_TOKENS = 128  # default for autoregressive models


@dataclass(frozen=True)
class Completions:
    """Result of transformers' `generate`.

    Args:
        sequences: [B, P + new] tokens.
        forwards: number of forward passes of the model.
        finite: [B], the first column of each row with NaN or infinite logits; P + new if there is none.
    """

    sequences: torch.Tensor
    forwards: int
    finite: list[int]

    def failed(self, ends: Sequence[int]) -> list[int]:
        """Rows with NaN or infinite logits before their `ends`, the columns after their texts."""
        return [row for row, (column, end) in enumerate(zip(self.finite, ends, strict=True)) if column < end]


class AutoregressiveEngine:
    """Engine with closed batches: the first `max_rows` waiting requests run together until all have ended.

    Each request has its own seed. Its tokens do not depend on the other requests, except through the rounding of
    matrix products.

    Args:
        settings: keyword arguments of transformers' `generate`; `gen_length` is an alias of `max_new_tokens`.
        deliver: called after each token, while `step` runs, with the new events of requests that stream; may cancel
            requests. None: `step` returns all events.

    Raises:
        SettingError: transformers does not have the setting, or its value is invalid.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        settings: Mapping[str, Any],
        *,
        max_rows: int,
        deliver: Callable[[list[Event]], None] | None = None,
    ) -> None:
        self._model, self._tokenizer, self._max_rows, self._deliver = model, tokenizer, max_rows, deliver
        self._settings = {name: value for name, value in settings.items() if name != "seed"}
        self._given = self._keywords(self._settings)
        self._stop = stop_condition(model, tokenizer, settings)
        self._waiting: deque[Request] = deque()
        self._running: dict[Hashable, Request] = {}
        self.forwards = 0

    def _keywords(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        return generate_keywords(self._model, settings)

    @property
    def idle(self) -> bool:
        """True if there is no waiting request."""
        return not self._waiting

    def submit(self, request: Request) -> None:
        """Queue a request. Raises RowError for a prompt that the model cannot continue."""
        own = self._given if request.gen_length is None else {**self._given, "max_new_tokens": request.gen_length}
        if request.gen_length is None:
            own = generate_keywords(self._model, self._settings, len(request.prompt))
        check_prompt(self._model, request.prompt, own, request.name)
        if request.constraint is not None:
            if self._stop.has_strings:
                raise SettingError("stop_strings", "excludes `constraint`: the text would end in its middle")
            new = own["max_new_tokens"] if "max_new_tokens" in own else own["max_length"] - len(request.prompt)
            request.constraint.check(request, new)
        self._waiting.append(request)

    def cancel(self, name: Hashable) -> bool:
        """Drop a request. `deliver` may call this while a batch runs; the batch ends when it has no requests."""
        for request in self._waiting:
            if request.name == name:
                self._waiting.remove(request)
                return True
        return self._running.pop(name, None) is not None

    def close(self) -> None:
        """Drop all requests."""
        self._waiting.clear()
        self._running.clear()

    def step(self) -> list[Event]:
        """Sample the next batch, of waiting requests with the `gen_length` of the first one."""
        if not self._waiting:
            return []
        length = self._waiting[0].gen_length
        batch = [one for one in self._waiting if one.gen_length == length][: self._max_rows]
        for request in batch:
            self._waiting.remove(request)
        self._running = {request.name: request for request in batch}
        own: dict[str, Any] = {} if length is None else {"gen_length": length, "max_new_tokens": None}
        watch = _TokenWatch(self._running, batch, self._stop, self._deliver)
        width = max(len(request.prompt) for request in batch)
        input_ids = torch.tensor([[0] * (width - len(one.prompt)) + list(one.prompt) for one in batch])
        mask = torch.tensor([[0] * (width - len(one.prompt)) + [1] * len(one.prompt) for one in batch])
        try:
            constraints = [request.constraint for request in batch]
            if (constraint := next(filter(None, constraints), None)) is not None:
                given = generate_keywords(self._model, {**self._settings, **own}, width)
                new = given["max_new_tokens"] if "max_new_tokens" in given else given["max_length"] - width
                processors = self._settings.get("logits_processor") or []
                own["logits_processor"] = [*processors, constraint.processor(constraints, width, new)]
            seeds = [request.seed for request in batch]
            found = self._sample(input_ids, mask, {**self._settings, **own}, watch, seeds)
        except AbandonedError:
            return []
        except DlmBridgeError as error:
            return [Failed(name, error) for name in self._running]
        self.forwards += found.forwards
        new = found.sequences[:, width:].tolist()
        events: list[Event] = []
        lengths = [self._stop.end_of(tokens) or len(tokens) for tokens in new]
        failed = {batch[row].name for row in found.failed([width + length for length in lengths])}
        for request, tokens in zip(batch, new, strict=True):
            if request.name in failed and request.name in self._running:
                events.append(Failed(request.name, NonFiniteError(rows=[request.name])))
            elif request.name in self._running:
                events += watch.ended(request, tokens, found.forwards)
        self._running = {}
        return events

    def _sample(
        self,
        input_ids: torch.Tensor,
        mask: torch.Tensor,
        settings: Mapping[str, Any],
        streamer: Any,
        seeds: Sequence[int | None],
    ) -> Completions:
        own = None
        if draws(self._model, self._given):
            own = [drawn_seeds(1)[0] if seed is None else seed for seed in seeds]
        return sample(self._model, self._tokenizer, input_ids, mask, settings, streamer, own)


class AbandonedError(Exception):
    """All requests of the running batch have been cancelled."""


class _TokenWatch:
    """Streamer for transformers' `generate` that reports the tokens of a batch."""

    def __init__(
        self,
        running: dict[Hashable, Request],
        batch: Sequence[Request],
        stop: StopCondition,
        deliver: Callable[[list[Event]], None] | None,
    ) -> None:
        self._running, self._batch, self._stop, self._deliver = running, batch, stop, deliver
        self._tokens: list[list[int]] = [[] for _ in batch]
        self._complete = [False] * len(batch)
        self._prompts_came = False

    def put(self, value: torch.Tensor) -> None:
        if not self._prompts_came:
            self._prompts_came = True
            return
        if self._deliver is not None:
            new = value.reshape(len(self._batch), -1).tolist()
            found = (self._extended(number, request, new[number]) for number, request in enumerate(self._batch))
            self._deliver([event for event in found if event is not None])
        if not self._running:
            raise AbandonedError

    def fail(self, numbers: Sequence[int]) -> None:
        """Report rows with NaN logits, possibly after their end."""
        for number in numbers:
            request = self._batch[number]
            if self._deliver is not None and not self._complete[number] and request.name in self._running:
                del self._running[request.name]
                self._deliver([Failed(request.name, NonFiniteError(rows=[request.name]))])

    def end(self) -> None:
        """Called by transformers at the end; does nothing."""

    def ended(self, request: Request, tokens: list[int], forwards: int) -> list[Event]:
        """Last events of a request. `tokens`: its new tokens, possibly with padding."""
        end = self._stop.end_of(tokens)
        kept = tokens if end is None else tokens[:end]
        number = self._batch.index(request)
        rest = kept[len(self._tokens[number]) :]
        more: list[Event] = [Extended(request.name, len(kept) - len(rest), tuple(rest))] if rest else []
        more = more if request.stream else []
        return [*more, Ended(request.name, tuple(kept), "length" if end is None else "stop", forwards)]

    def _extended(self, number: int, request: Request, new: list[int]) -> Event | None:
        """Event of a request's new tokens; None if there are none to report."""
        if self._complete[number] or request.name not in self._running or not request.stream:
            return None
        tokens = self._tokens[number]
        whole = tokens + new if request.gen_length is None else (tokens + new)[: request.gen_length]
        end = self._stop.end_of(whole)
        self._complete[number] = end is not None  # padding follows
        self._tokens[number] = whole = whole if end is None else whole[:end]
        if len(whole) == len(tokens):
            return None
        return Extended(request.name, len(tokens), tuple(whole[len(tokens) :]))


def sample(
    model: Any,
    tokenizer: Any,
    input_ids: torch.Tensor,
    mask: torch.Tensor,
    settings: Mapping[str, Any],
    streamer: Any = None,
    own_seeds: Sequence[int] | None = None,
) -> Completions:
    """Continue prompts [B, P], padded on the left, with `mask` 1 at real tokens.

    Args:
        settings: keyword arguments of transformers' `generate`, and `seed`.
        streamer: if it has a method `fail`, it receives the rows with NaN logits, and sampling continues.
        own_seeds: one seed per row. None: all rows draw from torch's random state.

    Raises:
        SettingError: transformers does not have the setting, or refuses its value.
        RowError: the model cannot continue a prompt.
        NonFiniteError: logits are NaN or infinite; raised before a streamer without `fail` receives the row's tokens.
    """
    prompts = rows_of(input_ids, mask)
    given = generate_keywords(model, settings, max(map(len, prompts)))
    seed = given.pop("seed", None)
    for number, prompt in enumerate(prompts):
        check_prompt(model, prompt, given, number)
    if own_seeds is not None:
        seed = own_seeds[0]  # torch.multinomial then has one token to draw; preserves the caller's random state
        given["custom_generate"] = drawing_from(own_seeds)
        stored = getattr(model.generation_config, "stop_strings", None)
        if strings := check_stop_strings(given.get("stop_strings", stored)):
            # With custom_generate, `generate` drops the tokenizer that stop strings need.
            given["stopping_criteria"] = StoppingCriteriaList([StopStringCriteria(tokenizer, list(strings))])
            given["stop_strings"] = None
    return run_generate(model, model, _generate, tokenizer, input_ids, mask, given, seed, streamer)


def run_generate(
    model: Any,
    counted: nn.Module,
    generate: Callable[[Any, torch.Tensor, torch.Tensor, Mapping[str, Any]], torch.Tensor],
    tokenizer: Any,
    input_ids: torch.Tensor,
    mask: torch.Tensor,
    given: dict[str, Any],
    seed: int | list[int] | None,
    streamer: Any,
) -> Completions:
    """Call a `generate` of transformers with the random state of a seed.

    Args:
        counted: module whose forward passes are counted.
        given: keyword arguments.
    """
    if isinstance(seed, list):
        if len(seed) != 1 or len(input_ids) != 1:
            raise SettingError(
                "seed", f"lists {counted(len(seed), 'number')}, but rows share one random stream: set one number"
            )
        seed = seed[0]
    elif seed is None:
        seed = shared_seed(model)
    check = FiniteLogits(len(input_ids))
    given["logits_processor"] = LogitsProcessorList([*(given.get("logits_processor") or ()), check])
    if streamer is not None:
        given["streamer"] = _CheckedStreamer(streamer, check)
    if "pad_token_id" not in given and getattr(model.generation_config, "pad_token_id", None) is None:
        ends = end_tokens(model, given)
        given["pad_token_id"] = ends[0] if ends else 0  # transformers' default, without its warning
    device = model.get_input_embeddings().weight.device
    if device.type == "meta":  # offloaded: accelerate moves the input
        device = torch.device("cpu")
    input_ids, mask = input_ids.to(device), mask.to(device)
    with refusals_named(), random_state_preserved(enabled=seed is not None):
        if seed is not None:
            torch.manual_seed(seed)
        with _forwards_of(counted) as forwards:
            sequences = generate(model, input_ids, mask, {**given, "tokenizer": tokenizer})
    return Completions(sequences, len(forwards), check.finite(len(sequences), sequences.shape[1]))


def rows_of(input_ids: torch.Tensor, mask: torch.Tensor) -> list[list[int]]:
    """Real tokens of each row."""
    return [
        [token for token, is_real in zip(row, real, strict=True) if is_real]
        for row, real in zip(input_ids.tolist(), mask.bool().tolist(), strict=True)
    ]


def generate_keywords(model: Any, settings: Mapping[str, Any], longest: int = 0) -> dict[str, Any]:
    """Keyword arguments of the model's `generate`, and `seed`. The default number of new tokens is reduced to the room
    in the model's context after a prompt of `longest` tokens. Raises SettingError for unknown settings."""
    given = set_values(settings)
    check_values(given)
    words = given.get("bad_words_ids")
    if isinstance(words, list) and any(
        type(token) is bool for word in words if isinstance(word, list) for token in word
    ):
        raise SettingError("bad_words_ids", f"must be a list of lists of token ids, not {words!r}")
    known = {*vars(GenerationConfig()), *inspect.signature(model.generate).parameters, "seed"}
    for name in given:
        if name in diffusion_fields() and name != "seed":
            raise SettingError(
                name, f"is a setting of diffusion samplers, {type(model).__name__} is autoregressive: remove it"
            )
        if name not in known:
            hint = nearest(name, known, "transformers' generate does not have it", mark="`")
            raise SettingError(name, f"is unknown: {hint}")
    stored = model.generation_config
    if "max_new_tokens" not in given and "max_length" not in given:
        usual = NEW_TOKENS if stored.max_new_tokens is None else stored.max_new_tokens
        context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        given["max_new_tokens"] = usual if context is None else min(usual, max(context - longest, 1))
    if "temperature" in given:
        if given.get("do_sample") is False and given["temperature"]:
            raise SettingError(
                "do_sample", f"False contradicts `temperature={given['temperature']}`: remove one of them"
            )
        given["do_sample"] = given["temperature"] >= MIN_TEMPERATURE
        if not given["do_sample"]:  # avoids transformers' warnings in greedy decoding
            given |= {"temperature": None, "top_k": None, "top_p": None}
    return given


def draws(model: Any, given: Mapping[str, Any]) -> bool:
    """True if tokens are drawn with these keyword arguments, without beams."""
    stored = getattr(model, "generation_config", None)
    samples = given.get("do_sample", getattr(stored, "do_sample", False))
    return bool(samples) and (given.get("num_beams") or getattr(stored, "num_beams", None) or 1) == 1


def set_values(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings under transformers' names, without None except for `eos_token_id`, where it disables stopping."""
    return {
        name: value for name, value in merge_names(settings).items() if name == "eos_token_id" or value is not None
    }


def check_prompt(model: Any, prompt: Sequence[int], given: Mapping[str, Any], name: object) -> None:
    """Raise RowError for a prompt that is empty, has a token outside the vocabulary, or does not fit into the context
    with its new tokens. `name`: the prompt's name in errors."""
    text = model.config.get_text_config()
    check_tokens(prompt, text.vocab_size, name)
    context, count = getattr(text, "max_position_embeddings", None), len(prompt)
    new = given.get("max_new_tokens")
    if context is not None and new is not None and count + new > context:
        raise RowError(
            f"the prompt's {counted(count, 'token')} and {counted(new, 'new token')} make {count + new}, beyond the "
            f"model's context of "
            f"{context}: reduce `gen_length`",
            [name],
        )


def check_tokens(prompt: Sequence[int], vocabulary: int, name: object) -> None:
    """Raise RowError for a prompt that is empty or has a token outside the vocabulary."""
    if not len(prompt):
        raise RowError("this model needs a prompt of at least one token", [name])
    check_vocabulary(prompt, vocabulary, name)


def end_tokens(model: Any, settings: Mapping[str, Any]) -> tuple[int, ...]:
    """End-of-sequence tokens, with the precedence of `generate`."""
    if "eos_token_id" in settings:
        return eos_token_ids(settings["eos_token_id"])
    stored = getattr(model.generation_config, "eos_token_id", None)
    if stored is None:
        stored = getattr(model.config.get_text_config(), "eos_token_id", None)
    return eos_token_ids(stored)


def stop_condition(model: Any, tokenizer: Any, settings: Mapping[str, Any]) -> StopCondition:
    """Stop condition, with the precedence of `generate`."""
    stored = getattr(model.generation_config, "stop_strings", None)
    strings = check_stop_strings(settings.get("stop_strings", stored))
    return StopCondition(end_tokens(model, settings), torch.device("cpu"), strings, tokenizer)


@contextmanager
def refusals_named() -> Iterator[None]:
    """Context manager that converts the errors of transformers' `generate` about settings to SettingError."""
    try:
        yield
    except DlmBridgeError:
        raise
    except (ValueError, TypeError, ImportError) as error:
        raise SettingError(None, f"transformers' generate refuses the settings: {one_line(error)[:300]}") from error


@contextmanager
def random_state_preserved(enabled: bool = True) -> Iterator[None]:
    """Context manager that restores torch's random state on the CPU and the current GPU."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices, enabled=enabled):
        yield


def drawing_from(seeds: Sequence[int]) -> Callable[..., torch.Tensor]:
    """A `custom_generate` for transformers: its sampling loop with one seed per row."""

    def decode(model: Any, input_ids: torch.Tensor, logits_processor: Any, **rest: Any) -> torch.Tensor:
        logits_processor.append(_KeyedDraws(Noise(seeds, input_ids.device)))
        sequences: torch.Tensor = model._sample(input_ids, logits_processor=logits_processor, **rest)
        return sequences

    return decode


class FiniteLogits(LogitsProcessor):
    """Finds rows with NaN or plus infinity in the logits of a call of transformers' `generate`, on the device.

    Such logits are replaced, because drawing from them would end the process's CUDA context.
    """

    def __init__(self, prompts: int) -> None:
        self._prompts = prompts
        self._columns: torch.Tensor | None = None  # [B], first column with such logits; MISSING: none

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Check [B, V] scores of the column after `input_ids`, or [B, N, V] of a draft."""
        bad = ~(scores.amax(dim=-1) < torch.inf)
        now_B = torch.where(bad.view(len(scores), -1).any(dim=1), input_ids.shape[1], MISSING)
        self._columns = now_B if self._columns is None else torch.minimum(self._columns, now_B)
        return scores.masked_fill(bad[..., None], 0.0)

    def finite(self, rows: int, width: int) -> list[int]:
        """First column with such logits of each row, at most `width`; for beams, the first of all the prompt's
        beams."""
        if self._columns is None:
            return [width] * rows
        columns = self._columns
        if len(columns) != rows:
            columns = columns.view(self._prompts, -1).amin(dim=1).repeat_interleave(rows // self._prompts)
        return list(columns.clamp(max=width).tolist())


class _CheckedStreamer:
    """Wraps a streamer so that it receives no tokens of rows with NaN logits. The check is read when tokens arrive."""

    def __init__(self, streamer: Any, check: FiniteLogits) -> None:
        self._streamer, self._check = streamer, check
        self._width = 0  # number of columns that have arrived
        if hasattr(streamer, "put_draft"):
            self.put_draft = self._put_draft
            self._takes_logits = getattr(streamer, "_takes_logits", False)

    def put(self, value: torch.Tensor) -> None:
        self._width += value.shape[1] if value.dim() > 1 else 1
        self._refuse(len(value), self._width)
        self._streamer.put(value)

    def _put_draft(self, **draft: torch.Tensor) -> None:
        self._refuse(len(next(iter(draft.values()))), self._width + 1)
        self._streamer.put_draft(**draft)

    def end(self) -> None:
        self._streamer.end()

    def _refuse(self, rows: int, width: int) -> None:
        bad = [row for row, column in enumerate(self._check.finite(rows, width)) if column < width]
        if bad and hasattr(self._streamer, "fail"):
            self._streamer.fail(bad)
        elif bad:
            raise NonFiniteError(rows=bad if len(bad) < rows else ())


class _KeyedDraws(LogitsProcessor):
    """Draws each row's token with the row's own random number, and sets all other scores to minus infinity."""

    def __init__(self, noise: Noise) -> None:
        self._noise = noise

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Draw from [B, V] scores, which other processors have already changed."""
        uniform_B1 = self._noise.uniform(range(len(scores)), torch.zeros_like(input_ids[:, :1]))
        drawn_B1 = draw_token(scores[:, None], uniform_B1)
        return torch.full_like(scores, -torch.inf).scatter(1, drawn_B1, 0.0)


def _generate(model: Any, input_ids: torch.Tensor, mask: torch.Tensor, given: Mapping[str, Any]) -> torch.Tensor:
    sequences: torch.Tensor = model.generate(input_ids, attention_mask=mask, **given)
    return sequences


@contextmanager
def _forwards_of(module: nn.Module) -> Iterator[list[None]]:
    """Context manager: a list that grows by one with each forward pass of the module."""
    forwards: list[None] = []
    handle = module.register_forward_pre_hook(lambda *_: forwards.append(None))
    try:
        yield forwards
    finally:
        handle.remove()

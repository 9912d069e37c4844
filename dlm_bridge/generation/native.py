"""Sampling by transformers' own `generate`: autoregressive models, and DiffusionGemma with its canvases."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
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

from dlm_bridge.errors import DlmBridgeError, NonFiniteError, one_line, rows_named
from dlm_bridge.generation import canvases
from dlm_bridge.generation.canvas_batch import CanvasBatch, batches_canvases
from dlm_bridge.generation.config import check_values, diffusion_fields, eos_token_ids, merge_names
from dlm_bridge.generation.rows import check_stop_strings
from dlm_bridge.generation.settings import check_adapters
from dlm_bridge.generation.token_sampling import (
    MIN_TEMPERATURE,
    Noise,
    draw_token,
    drawn_seeds,
    row_seeds,
    shared_seed,
)

MISSING = torch.iinfo(torch.long).max
NEW_TOKENS = 128  # default of autoregressive models; diffusion samplers have their own


@dataclass(frozen=True)
class NativeOutput:
    """What transformers' `generate` gave: [B, P + new] tokens, after so many forward passes, and the first column of
    each row whose logits were NaN or infinite, P + new where none were."""

    sequences: torch.Tensor
    forwards: int
    finite: list[int]

    def failed(self, ends: Sequence[int]) -> list[int]:
        """The rows that have such logits before the column in which their text ends."""
        return [row for row, (column, end) in enumerate(zip(self.finite, ends, strict=True)) if column < end]


def sample(
    model: Any,
    tokenizer: Any,
    input_ids: torch.Tensor,
    mask: torch.Tensor,
    settings: Mapping[str, Any],
    streamer: Any = None,
    own_seeds: Sequence[int] | None = None,
) -> NativeOutput:
    """Tokens behind prompts that are padded on the left; `seed` is a setting.

    With `own_seeds`, of an autoregressive model, each row draws by its own: its tokens depend neither on the other
    rows nor on their number, but for the rounding of matrix products. A `streamer` with a method `fail` is told the
    rows whose logits are NaN, and goes on. Raises DlmBridgeError, and NonFiniteError before another streamer gets
    tokens of such a row.
    """
    prompts = [
        [token for token, is_real in zip(row, real, strict=True) if is_real]
        for row, real in zip(input_ids.tolist(), mask.bool().tolist(), strict=True)
    ]
    given = native_settings(model, settings, max(map(len, prompts)))
    for prompt in prompts:
        check_prompt(model, prompt, given)
    seed = given.pop("seed", None)
    # A streamer of several rows gets them side by side, which only transformers' loop runs like that.
    if batches_canvases(model, given) and (streamer is None or len(prompts) == 1):
        return _canvases(model, input_ids, prompts, given, seed, streamer)
    if own_seeds is not None:
        given["custom_generate"] = drawing_from(own_seeds)
        stored = getattr(model.generation_config, "stop_strings", None)
        if strings := check_stop_strings(given.get("stop_strings", stored)):
            # With a function of one's own `generate` forgets the tokenizer that they need.
            given["stopping_criteria"] = StoppingCriteriaList([StopStringCriteria(tokenizer, list(strings))])
            given["stop_strings"] = None
    elif isinstance(seed, list):
        if len(seed) != 1 or len(prompts) != 1:
            raise DlmBridgeError(f"seed lists {len(seed)} numbers: rows draw from one stream here, give one number")
        seed = seed[0]
    elif seed is None:
        seed = shared_seed(model)
    check = FiniteLogits(len(prompts))
    given["logits_processor"] = LogitsProcessorList([*(given.get("logits_processor") or ()), check])
    if streamer is not None:
        given["streamer"] = _CheckedStreamer(streamer, check)
    if "pad_token_id" not in given and getattr(model.generation_config, "pad_token_id", None) is None:
        ends = end_tokens(model, settings)
        given["pad_token_id"] = ends[0] if ends else 0  # transformers' own choice, without its warning
    device = model.get_input_embeddings().weight.device
    if device.type == "meta":  # offloaded: accelerate moves the input
        device = torch.device("cpu")
    input_ids, mask = input_ids.to(device), mask.to(device)
    with refusals_named(), random_state_preserved(enabled=seed is not None):
        if seed is not None:
            torch.manual_seed(seed)
        counted, generate = model, _generate
        if canvases.has_canvas(model):
            counted, generate = canvases.decoder(model), canvases.generate
        with _forwards_of(counted) as forwards:
            sequences = generate(model, input_ids, mask, {**given, "tokenizer": tokenizer})
    return NativeOutput(sequences, len(forwards), check.finite(len(sequences), sequences.shape[1]))


def _canvases(
    model: Any,
    input_ids: torch.Tensor,
    prompts: Sequence[Sequence[int]],
    given: dict[str, Any],
    seed: int | list[int] | None,
    streamer: Any,
) -> NativeOutput:
    """By `CanvasBatch`, all rows at once."""
    copies = given.pop("num_return_sequences", 1)
    rows = [prompt for prompt in prompts for _ in range(copies)]
    if streamer is not None and copies > 1:
        raise DlmBridgeError(f"a streamer shows one text, num_return_sequences asks for {copies}: leave one out")
    batch = CanvasBatch(model, given, len(rows))
    seeds = drawn_seeds(len(rows)) if seed is None else row_seeds(seed, rows)
    with rows_named(lambda number: number // copies):
        texts = {text.number: text.tokens for text in batch.run(rows, seeds, range(len(rows)), streamer)}
    width = max(map(len, texts.values()))
    padding = given.get("pad_token_id", (given["eos_token_id"] or [0])[0])  # behind an end token
    new = [texts[number] + [padding] * (width - len(texts[number])) for number in range(len(rows))]
    sequences = torch.cat([input_ids.repeat_interleave(copies, dim=0).cpu(), torch.tensor(new)], dim=1)
    return NativeOutput(sequences, batch.forwards, [sequences.shape[1]] * len(sequences))


def native_settings(model: Any, settings: Mapping[str, Any], longest: int = 0) -> dict[str, Any]:
    """The keywords of the model's `generate`, and `seed`. A default number of new tokens is shortened to the room that
    the model's context has behind the `longest` prompt. Raises DlmBridgeError for unknown ones."""
    given = {
        name: value for name, value in merge_names(settings).items() if name == "eos_token_id" or value is not None
    }
    if canvases.has_canvas(model):
        check_adapters(model)
        ends = end_tokens(model, settings)
        return canvases.keywords(model, given, ends)
    check_values(given)
    words = given.get("bad_words_ids")
    if isinstance(words, list) and any(
        type(token) is bool for word in words if isinstance(word, list) for token in word
    ):
        raise DlmBridgeError(f"bad_words_ids must be lists of token ids, not {words!r}")
    known = {*vars(GenerationConfig()), *inspect.signature(model.generate).parameters, "seed"}
    for name in given:
        if name in diffusion_fields() and name != "seed":
            raise DlmBridgeError(
                f"{name} is a setting of diffusion samplers, {type(model).__name__} is autoregressive: leave it out"
            )
        if name not in known:
            raise DlmBridgeError(f"transformers' generate has no setting '{name}'")
    stored = model.generation_config
    if "max_new_tokens" not in given and "max_length" not in given:
        usual = NEW_TOKENS if stored.max_new_tokens is None else stored.max_new_tokens
        context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        given["max_new_tokens"] = usual if context is None else min(usual, max(context - longest, 1))
    if "temperature" in given:
        if given.get("do_sample") is False and given["temperature"]:
            raise DlmBridgeError(
                f"do_sample=False contradicts temperature {given['temperature']}: leave one of them out"
            )
        given["do_sample"] = given["temperature"] >= MIN_TEMPERATURE
        if not given["do_sample"]:  # transformers warns about them in greedy decoding
            given |= {"temperature": None, "top_k": None, "top_p": None}
    return given


def check_prompt(model: Any, prompt: Sequence[int], given: Mapping[str, Any]) -> None:
    """Raise DlmBridgeError for a prompt that the model cannot continue under these keywords: an empty one, one with a
    token that is none of the vocabulary, or one that leaves no room in the context."""
    if canvases.has_canvas(model):
        canvases.check_prompt(model, prompt, given)
        return
    count = len(prompt)
    if not count:
        raise DlmBridgeError("an autoregressive model needs a prompt of at least one token: this one has none")
    text = model.config.get_text_config()
    outside = next((token for token in prompt if not 0 <= token < text.vocab_size), None)
    if outside is not None:
        raise DlmBridgeError(f"the prompt holds token {outside}, outside the vocabulary of {text.vocab_size}")
    context = getattr(text, "max_position_embeddings", None)
    new = given.get("max_new_tokens")
    if context is not None and new is not None and count + new > context:
        raise DlmBridgeError(
            f"a prompt of {count} tokens and {new} new ones make {count + new}, beyond the model's context of "
            f"{context}: use a shorter gen_length"
        )


def end_tokens(model: Any, settings: Mapping[str, Any]) -> tuple[int, ...]:
    """The end-of-sequence tokens, with the precedence of `generate`."""
    if "eos_token_id" in settings:
        return eos_token_ids(settings["eos_token_id"])
    stored = getattr(model.generation_config, "eos_token_id", None)
    if stored is None:
        config = model.config.get_text_config() if canvases.has_canvas(model) else model.config
        stored = getattr(config, "eos_token_id", None)
    return eos_token_ids(stored)


@contextmanager
def refusals_named() -> Iterator[None]:
    """Raise DlmBridgeError for settings, of a call or stored with the model, that transformers' `generate` refuses."""
    try:
        yield
    except (ValueError, TypeError, ImportError) as error:
        raise DlmBridgeError(f"generate refuses: {one_line(error)[:300]}") from error


@contextmanager
def random_state_preserved(enabled: bool = True) -> Iterator[None]:
    """Restore torch's random state, on the CPU and on the current GPU, at the end."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices, enabled=enabled):
        yield


def drawing_from(seeds: Sequence[int]) -> Callable[..., torch.Tensor]:
    """transformers' sampling loop, as the `custom_generate` of a call, in which each row draws by its own seed."""

    def decode(model: Any, input_ids: torch.Tensor, logits_processor: Any, **rest: Any) -> torch.Tensor:
        logits_processor.append(_RowDraws(Noise(seeds, input_ids.device)))
        sequences: torch.Tensor = model._sample(input_ids, logits_processor=logits_processor, **rest)
        return sequences

    return decode


class FiniteLogits(LogitsProcessor):
    """Finds the rows of one call of transformers' `generate` whose logits are NaN or plus infinity, on their device.

    Such logits are replaced, since drawing from them would end the process's CUDA context.
    """

    def __init__(self, prompts: int) -> None:
        self._prompts = prompts
        self._columns: torch.Tensor | None = None  # [B], the first column with such logits; MISSING: there is none

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """[B, V] scores of the column behind `input_ids`, or [B, N, V] of those of a canvas."""
        bad = ~(scores.amax(dim=-1) < torch.inf)
        now_B = torch.where(bad.view(len(scores), -1).any(dim=1), input_ids.shape[1], MISSING)
        self._columns = now_B if self._columns is None else torch.minimum(self._columns, now_B)
        return scores.masked_fill(bad[..., None], 0.0)

    def finite(self, rows: int, width: int) -> list[int]:
        """The first such column of each row, `width` at most; of beams, the first of any of the prompt's."""
        if self._columns is None:
            return [width] * rows
        columns = self._columns
        if len(columns) != rows:
            columns = columns.view(self._prompts, -1).amin(dim=1).repeat_interleave(rows // self._prompts)
        return list(columns.clamp(max=width).tolist())


class _CheckedStreamer:
    """A streamer that gets no token of a row whose logits are NaN: the check is read when tokens have arrived."""

    def __init__(self, streamer: Any, check: FiniteLogits) -> None:
        self._streamer, self._check = streamer, check
        self._width = 0  # columns that have arrived
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


class _RowDraws(LogitsProcessor):
    """Draws each row's token by a random number of its own, and leaves no other a probability."""

    def __init__(self, noise: Noise) -> None:
        self._noise = noise

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """[B, V] scores after the sampler's own processors."""
        uniform_B1 = self._noise.uniform(range(len(scores)), torch.zeros_like(input_ids[:, :1]))
        drawn_B1 = draw_token(scores[:, None], uniform_B1)
        return torch.full_like(scores, -torch.inf).scatter(1, drawn_B1, 0.0)


def _generate(model: Any, input_ids: torch.Tensor, mask: torch.Tensor, given: Mapping[str, Any]) -> torch.Tensor:
    sequences: torch.Tensor = model.generate(input_ids, attention_mask=mask, **given)
    return sequences


@contextmanager
def _forwards_of(module: nn.Module) -> Iterator[list[None]]:
    """A list that grows by one with each forward pass of the module."""
    forwards: list[None] = []
    handle = module.register_forward_pre_hook(lambda *_: forwards.append(None))
    try:
        yield forwards
    finally:
        handle.remove()

"""DiffusionGemma's sampler for many prompts: a continuous batch of canvases, each row with its own random numbers.

    a row enters:    the encoder reads its prompt;  canvas = uniform random tokens
    each step, of all rows together, n counted down from `max_denoising_steps` for each row:
        logits = decoder(canvas, behind the row's text, given the row's last logits) / temperature(n)
        drawn = a draw from softmax(logits) at each position;  H = its entropy
        accept the drawn tokens of lowest H while the sum of the H before them is at most `entropy_bound`
        the others become uniform random tokens
    a row whose best tokens were stable and certain, or whose steps are over, commits its best tokens:
        it leaves where they hold an end token or nothing is missing; else the encoder reads them

It is transformers' `DiffusionGemmaGenerationMixin.generate` (5.23, 5.24) row by row: with the same random numbers a
row's tokens are those of that function for its prompt alone. There all rows of a batch take the decoder passes of the
slowest one, canvas by canvas, and of the longest text; here a row that is done makes room for the next, and its random
numbers are a function of its own seed.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dlm_bridge.errors import NonFiniteError
from dlm_bridge.generation.batch_rows import RowFailed
from dlm_bridge.generation.canvases import check_length, check_prompt, has_canvas
from dlm_bridge.generation.encoded_rows import EncodedRow, EncodedRows, cache_of
from dlm_bridge.generation.rows import to_device
from dlm_bridge.generation.runtime.runner import tensor_parallel_group
from dlm_bridge.generation.token_sampling import Noise, draw_token
from dlm_bridge.objectives.noise import random_tokens

ENCODED_TOGETHER = 4  # rows wait for one encoder pass until they are 1/4 of all that run or wait for it
OWN = ("cache_implementation", "disable_compile")  # settings of transformers' loop alone


@dataclass(frozen=True)
class CanvasTokens:
    """New tokens of a text that one more canvas adds: its number, the tokens, and the decoder passes so far."""

    number: int
    tokens: list[int]
    forwards: int


@dataclass(frozen=True)
class CanvasText:
    """A text that has ended: the number of its prompt, its new tokens, and the decoder passes that it took part in."""

    number: int
    tokens: list[int]
    forwards: int


def batches_canvases(model: Any, settings: Mapping[str, Any]) -> bool:
    """Whether `CanvasBatch` can sample from the model under these settings; else transformers' own loop has to."""
    plain = _plain(model)
    if not has_canvas(plain) or "self_conditioning_mask" not in inspect.signature(plain.forward).parameters:
        return False  # no such model, or one of a transformers whose decoder conditions all rows or none
    devices = {str(device) for device in (getattr(plain, "hf_device_map", None) or {"": plain.device}).values()}
    attention = {module.config._attn_implementation for module in (plain.model.decoder, plain.model.encoder)}
    whole = tensor_parallel_group(plain) is None
    return len(devices) == 1 and attention <= {"sdpa", "eager"} and whole and not any(name in settings for name in OWN)


class CanvasBatch:
    """A continuous batch of canvases.

    Args:
        given: `canvases.keywords` of the call.
        rows: the most rows that run together. Others wait, in the order of their arrival.
    """

    def __init__(self, model: Any, given: Mapping[str, Any], rows: int) -> None:
        self._model = _plain(model)
        self._given = given
        self._rows = rows
        self.forwards = 0  # decoder passes, of all rows together
        check_length(self._model, given.get("block_length"))
        self._settings = _Settings.of(self._model, given)
        self._device = self._model.model.decoder.embed_tokens.weight.device
        self._cache = EncodedRows(self._model)
        self._noise = Noise([], self._device)
        self._drawing: list[_Row] = []  # row i of the noise, running or unread
        self._waiting: deque[_Row] = deque()
        self._unread: list[_Row] = []  # with tokens that the encoder has not read
        self._running: list[_Row] = []  # row i of the canvases
        self._canvases: _Canvases | None = None

    @property
    def idle(self) -> bool:
        """Whether no row is waiting or running."""
        return not (self._waiting or self._unread or self._running)

    def submit(self, number: int, prompt: Sequence[int], seed: int, new_tokens: int | None = None) -> None:
        """Add a row to those that wait, with `max_new_tokens` of its own, if given. Raises DlmBridgeError for a prompt
        that the model cannot continue."""
        new_tokens = self._given["max_new_tokens"] if new_tokens is None else new_tokens
        check_prompt(self._model, prompt, {**self._given, "max_new_tokens": new_tokens})
        self._waiting.append(_Row(number, list(prompt), new_tokens, seed))

    def cancel(self, numbers: Collection[int]) -> None:
        """Drop these rows, of which there is nothing more to tell."""
        self._waiting = deque(row for row in self._waiting if row.number not in numbers)
        self._unread = [row for row in self._unread if row.number not in numbers]
        self._keep([place for place, row in enumerate(self._running) if row.number not in numbers])
        self._forget(numbers)

    def run(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], order: Sequence[int], streamer: Any = None
    ) -> Iterator[CanvasText]:
        """The texts of the prompts with these numbers, as they end; they enter in this order.

        A `streamer`, of one prompt, is told what transformers' loop would tell it. Raises DlmBridgeError for a prompt
        that the model cannot continue, NonFiniteError for one whose logits are NaN.
        """
        for number in order:
            self.submit(number, prompts[number], seeds[number])
            if streamer is not None:
                streamer.put(torch.tensor([prompts[number]]))
        while not self.idle:
            for event in self.advance(streamer):
                if isinstance(event, RowFailed):
                    raise event.error
                if isinstance(event, CanvasText):
                    yield event
                elif streamer is not None:
                    streamer.put(torch.tensor([event.tokens]))
        if streamer is not None:
            streamer.end()

    @torch.no_grad()
    def advance(self, streamer: Any = None) -> list[CanvasTokens | CanvasText | RowFailed]:
        """A denoising step of the rows that run, after others have entered where there is room: the canvases that it
        has completed, the texts that have ended with them, and the rows whose logits are NaN, which leave. A
        `streamer` with `put_draft` gets the best tokens."""
        room = self._rows - len(self._drawing)
        if self._waiting and room > 0:
            self._enter([self._waiting.popleft() for _ in range(min(room, len(self._waiting)))])
        if self._unread and len(self._unread) * ENCODED_TOGETHER >= min(self._rows, len(self._drawing)):
            self._read()
        if self._canvases is None:
            return []
        flags_A = self._step(self._canvases)
        failed = [row.number for row, (_, bad) in zip(self._running, flags_A, strict=True) if bad]
        events: list[CanvasTokens | CanvasText | RowFailed] = [
            RowFailed(number, NonFiniteError(rows=[number])) for number in failed
        ]
        self.cancel(failed)
        if self._canvases is None:
            return events
        ended_A = [ended for ended, bad in flags_A if not bad]
        if hasattr(streamer, "put_draft"):
            assert self._canvases.logits is not None, "a step has been taken"
            logits = getattr(streamer, "_takes_logits", False)
            streamer.put_draft(self._canvases.logits.cpu() if logits else self._canvases.best.cpu())
        if not any(ended_A):
            return events
        for row, ended, best in zip(self._running, ended_A, self._canvases.best.tolist(), strict=True):
            if not ended:
                continue
            before = len(row.new)
            complete = row.commit(best, self._settings)
            events.append(CanvasTokens(row.number, row.new[before:], row.forwards))
            if complete:
                events.append(CanvasText(row.number, row.new, row.forwards))
            else:
                self._unread.append(row)
        self._keep([place for place, ended in enumerate(ended_A) if not ended])
        self._forget({event.number for event in events if isinstance(event, CanvasText)})
        return events

    def _enter(self, rows: list[_Row]) -> None:
        """Rows that the encoder has to read."""
        self._noise.admit([row.seed for row in rows])
        self._drawing = rows + self._drawing
        self._unread += rows
        self._number_draws()

    def _forget(self, numbers: Collection[int]) -> None:
        """Drop the random numbers of these rows."""
        left = [place for place, row in enumerate(self._drawing) if row.number not in numbers]
        if len(left) < len(self._drawing):
            self._noise.select_rows(left)
            self._drawing = [self._drawing[place] for place in left]
            self._number_draws()

    def _number_draws(self) -> None:
        for place, row in enumerate(self._drawing):
            row.place = place

    def _read(self) -> None:
        """Let the encoder read the rows that it has not read, and begin their next canvases."""
        rows, self._unread = self._unread, []
        self._cache.read([row.encoded for row in rows], [row.unread() for row in rows])
        begun = _Canvases.begin(rows, self._noise, self._settings, self._cache.dtype)
        self._canvases = begun if self._canvases is None else self._canvases.joined(begun)
        self._running += rows
        self._cache.show([row.encoded for row in self._running], self._settings.length)

    def _keep(self, places: list[int]) -> None:
        """Go on with the running rows at these places."""
        if len(places) == len(self._running):
            return
        assert self._canvases is not None
        self._running = [self._running[place] for place in places]
        self._canvases = self._canvases.selected(places)
        if self._running:
            self._cache.show([row.encoded for row in self._running], self._settings.length)

    def _step(self, canvases: _Canvases) -> list[list[bool]]:
        """A denoising step of the running rows: of each, whether it has ended its canvas, and whether its logits are
        NaN or plus infinity."""
        for row in self._running:
            row.forwards += 1
        self.forwards += 1
        logits_AQV = self._model(
            decoder_input_ids=canvases.tokens,
            **cache_of(self._model, self._cache),
            decoder_attention_mask=self._cache.masks,
            decoder_position_ids=self._cache.positions,
            self_conditioning_logits=canvases.logits,
            self_conditioning_mask=None if canvases.logits is None else canvases.conditioned,
        ).logits
        flags_A2: list[list[bool]] = canvases.denoise(logits_AQV, self._running, self._noise, self._settings).tolist()
        return flags_A2


@dataclass(frozen=True)
class _Settings:
    """The sampler's numbers. A canvas has `length` tokens."""

    length: int
    vocabulary: int
    steps: int
    bound: float
    t_min: float
    t_max: float
    stability: int | None  # None: a canvas takes all of its steps
    confidence: float
    ends: frozenset[int]

    @classmethod
    def of(cls, model: Any, given: Mapping[str, Any]) -> _Settings:
        stored, defaults = model.generation_config, model.generation_config._get_default_generation_params()

        def value(name: str) -> Any:
            found = given.get(name, getattr(stored, name, None))
            return defaults[name] if found is None else found

        bound = given.get("entropy_bound")
        return cls(
            length=given.get("block_length") or model.config.canvas_length,
            vocabulary=model.config.text_config.vocab_size,
            steps=value("max_denoising_steps"),
            bound=value("sampler_config").entropy_bound if bound is None else bound,
            t_min=value("t_min"),
            t_max=value("t_max"),
            stability=value("stability_threshold"),
            confidence=value("confidence_threshold"),
            ends=frozenset(given["eos_token_id"] or ()),
        )


@dataclass
class _Row:
    """A prompt with what was written behind it."""

    number: int
    text: list[int]  # the prompt and the committed canvases
    new_tokens: int  # at most
    seed: int
    place: int = 0  # among the rows of the noise
    new: list[int] = field(default_factory=list)
    encoded: EncodedRow = field(default_factory=EncodedRow)
    forwards: int = 0

    def unread(self) -> list[int]:
        return self.text[self.encoded.length :]

    def commit(self, canvas: list[int], settings: _Settings) -> bool:
        """Write a canvas behind the text. Whether the text is complete: at an end token, and where no token is
        missing."""
        end = next((place for place, token in enumerate(canvas) if token in settings.ends), None)
        self.text += canvas
        self.new += canvas if end is None else canvas[: end + 1]
        missing = self.new_tokens - len(self.new)
        self.new = self.new[: self.new_tokens]
        return end is not None or missing <= 0


_PER_ROW = ("tokens", "best", "history", "left", "conditioned")


@dataclass
class _Canvases:
    """The canvases of A rows, of Q tokens each, and what their next step needs."""

    tokens: torch.Tensor  # [A, Q]
    best: torch.Tensor  # [A, Q], the likeliest ones after the last step
    history: torch.Tensor  # [A, stability, Q], those after the steps before; -1 where there was none
    left: torch.Tensor  # [A] int32, steps
    logits: torch.Tensor | None  # [A, Q, V] of the last step, over its temperature; None where no row has had one
    conditioned: torch.Tensor  # [A] bool, rows that have had one
    dtype: torch.dtype  # of what the decoder is given of them

    @classmethod
    def begin(cls, rows: Sequence[_Row], noise: Noise, settings: _Settings, dtype: torch.dtype) -> _Canvases:
        tokens = _random_tokens(rows, noise, settings)
        return cls(
            tokens=tokens,
            best=tokens,
            history=tokens.new_full((len(rows), settings.stability or 0, settings.length), -1),
            left=torch.full((len(rows),), settings.steps, dtype=torch.int32, device=tokens.device),
            logits=None,
            conditioned=torch.zeros(len(rows), dtype=torch.bool, device=tokens.device),
            dtype=dtype,
        )

    def joined(self, others: _Canvases) -> _Canvases:
        """These rows, then the others, which have had no step."""
        parts = {name: torch.cat([getattr(self, name), getattr(others, name)]) for name in _PER_ROW}
        logits = self.logits
        if logits is not None:
            logits = torch.cat([logits, logits.new_zeros(len(others.tokens), *logits.shape[1:])])
        return _Canvases(**parts, logits=logits, dtype=self.dtype)

    def selected(self, places: list[int]) -> _Canvases | None:
        """Some of the rows; None of none."""
        if not places:
            return None
        places_A = to_device(places, self.tokens.device)
        parts = {name: getattr(self, name)[places_A] for name in _PER_ROW}
        return _Canvases(**parts, logits=None if self.logits is None else self.logits[places_A], dtype=self.dtype)

    def denoise(
        self, logits_AQV: torch.Tensor, rows: Sequence[_Row], noise: Noise, settings: _Settings
    ) -> torch.Tensor:
        """One step, in place: [A, 2] bool, the canvases that have ended, and those whose logits are not finite."""
        temperature_A = settings.t_min + (settings.t_max - settings.t_min) * (self.left / settings.steps)
        logits_AQV = logits_AQV / temperature_A[:, None, None]
        highest_AQ, self.best = logits_AQV.max(dim=-1)
        bad_A = ~(highest_AQ < torch.inf).all(dim=-1)
        probabilities_AQV = logits_AQV.softmax(dim=-1, dtype=torch.float32)
        logs_AQV = logits_AQV - logits_AQV.logsumexp(dim=-1, keepdim=True)
        lowest = torch.finfo(logs_AQV.dtype).min
        entropy_AQ = -(logs_AQV.clamp(min=lowest) * probabilities_AQV).sum(dim=-1)
        drawn_AQ = draw_token(logits_AQV, _uniform(rows, noise, settings))
        sorted_AQ, order_AQ = entropy_AQ.sort(dim=-1)
        within_AQ = sorted_AQ.cumsum(dim=-1) - sorted_AQ <= settings.bound
        accepted_AQ = torch.zeros_like(within_AQ).scatter(-1, order_AQ, within_AQ)
        self.tokens = torch.where(accepted_AQ, drawn_AQ, _random_tokens(rows, noise, settings))
        self.logits = logits_AQV.to(self.dtype)
        self.conditioned = torch.ones_like(self.conditioned)
        self.left = self.left - 1
        ended_A = self.left == 0
        if settings.stability is not None:
            stable_A = (self.history == self.best[:, None]).all(dim=-1).all(dim=-1)
            ended_A = ended_A | stable_A & (entropy_AQ.mean(dim=-1) < settings.confidence)
            self.history = torch.cat([self.history, self.best[:, None]], dim=1)[:, 1:]
        return torch.stack([ended_A, bad_A], dim=1)


def _uniform(rows: Sequence[_Row], noise: Noise, settings: _Settings) -> torch.Tensor:
    """float64 [A, Q], the rows' next numbers on (0, 1)."""
    places_AQ = torch.arange(settings.length, device=noise.device).expand(len(rows), -1)
    return noise.uniform([row.place for row in rows], places_AQ)


def _random_tokens(rows: Sequence[_Row], noise: Noise, settings: _Settings) -> torch.Tensor:
    """[A, Q], all tokens equally likely."""
    return random_tokens(_uniform(rows, noise, settings), settings.vocabulary, mask_token_id=-1)


def _plain(model: Any) -> Any:
    """The model itself, also where PEFT wraps it."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model

"""DiffusionGemma's sampler for many prompts: a continuous batch of canvases, each row with its own random numbers.

    a row enters:    the encoder reads its prompt;  canvas = uniform random tokens
    each step, of all rows together, n counted down from `max_denoising_steps` for each row:
        logits = decoder(canvas, behind the row's text, given the row's last logits) / temperature(n)
        drawn = a draw from softmax(logits) at each position;  H = its entropy
        accept the drawn tokens of lowest H while the sum of the H before them is at most `entropy_bound`
        the others become uniform random tokens
    a row whose best tokens were stable and certain, or whose steps are over, commits its best tokens:
        it leaves where they hold an end token or nothing is missing; else the encoder reads them

It is transformers' `DiffusionGemmaGenerationMixin.generate` (5.23, 5.24) row by row: a row's tokens are those of that
function for its prompt alone after `torch.manual_seed` of the row's seed. There all rows of a batch take the decoder
passes of the slowest one, canvas by canvas, and of the longest text; here a row that is done makes room for the next.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dlm_bridge.generation.canvases import check_length, check_prompt, has_canvas
from dlm_bridge.generation.encoded_rows import EncodedRow, EncodedRows, cache_of
from dlm_bridge.generation.token_sampling import seeded_generators

ENCODED_TOGETHER = 4  # a fraction of the rows, 1/4, waits for one encoder pass
OWN = ("cache_implementation", "disable_compile")  # settings of transformers' loop alone


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
    whole = (getattr(plain, "_tp_size", None) or 1) == 1
    return len(devices) == 1 and attention <= {"sdpa", "eager"} and whole and not any(name in settings for name in OWN)


class CanvasBatch:
    """A continuous batch of canvases.

    Args:
        given: `canvases.keywords` of the call.
        rows: the most rows that run together.
    """

    def __init__(self, model: Any, given: Mapping[str, Any], rows: int) -> None:
        self._model = _plain(model)
        self._given = given
        self._rows = rows
        self.forwards = 0  # decoder passes, of all rows together

    def run(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], order: Sequence[int]
    ) -> Iterator[CanvasText]:
        """The texts of the prompts with these numbers, as they end; they enter in this order. Raises DlmBridgeError
        for a prompt that the model cannot continue."""
        for number in order:
            check_prompt(self._model, prompts[number], self._given)
        check_length(self._model, self._given.get("block_length"))
        device = self._model.model.decoder.embed_tokens.weight.device
        generators = seeded_generators([seeds[number] for number in order], device)
        rows = [_Row(number, list(prompts[number]), noise) for number, noise in zip(order, generators, strict=True)]
        yield from self._run(rows, _Settings.of(self._model, self._given))

    def _run(self, waiting: list[_Row], settings: _Settings) -> Iterator[CanvasText]:
        cache = EncodedRows(self._model)
        running: list[_Row] = []  # row i of the canvases
        unread: list[_Row] = []  # with tokens that the encoder has not read
        canvases: _Canvases | None = None
        while waiting or running or unread:
            entering = self._rows - len(running) - len(unread)
            unread, waiting = [*unread, *waiting[:entering]], waiting[entering:]
            if unread and (not running or len(unread) * ENCODED_TOGETHER >= self._rows):
                cache.read([row.encoded for row in unread], [row.unread() for row in unread])
                begun = _Canvases.begin(unread, settings, cache.dtype)
                canvases = begun if canvases is None else canvases.joined(begun)
                running, unread = [*running, *unread], []
                cache.show([row.encoded for row in running], settings.length)
            assert canvases is not None, "a row runs"
            ended_A = self._step(running, canvases, cache, settings)
            if not any(ended_A):
                continue
            for row, ended, best in zip(running, ended_A, canvases.best.tolist(), strict=True):
                if ended and row.commit(best, settings):
                    yield CanvasText(row.number, row.new, row.forwards)
                elif ended:
                    unread.append(row)
            left = [place for place, ended in enumerate(ended_A) if not ended]
            running, canvases = [running[place] for place in left], canvases.selected(left)
            if running:
                cache.show([row.encoded for row in running], settings.length)

    @torch.no_grad()
    def _step(self, running: list[_Row], canvases: _Canvases, cache: EncodedRows, settings: _Settings) -> list[bool]:
        """A denoising step of the running rows: which of them have ended their canvas."""
        for row in running:
            row.forwards += 1
        self.forwards += 1
        logits_AQV = self._model(
            decoder_input_ids=canvases.tokens,
            **cache_of(self._model, cache),
            decoder_attention_mask=cache.masks,
            decoder_position_ids=cache.positions,
            self_conditioning_logits=canvases.logits,
            self_conditioning_mask=None if canvases.logits is None else canvases.conditioned,
        ).logits
        ended: list[bool] = canvases.denoise(logits_AQV, running, settings).tolist()
        return ended


@dataclass(frozen=True)
class _Settings:
    """The sampler's numbers. A canvas has `length` tokens."""

    length: int
    vocabulary: int
    new_tokens: int
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
            new_tokens=given["max_new_tokens"],
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
    generator: torch.Generator
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
        missing = settings.new_tokens - len(self.new)
        self.new = self.new[: settings.new_tokens]
        return end is not None or missing <= 0

    def random_tokens(self, settings: _Settings) -> torch.Tensor:
        """[Q] uniform random tokens."""
        noise = self.generator
        return torch.randint(0, settings.vocabulary, (settings.length,), generator=noise, device=noise.device)


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
    def begin(cls, rows: Sequence[_Row], settings: _Settings, dtype: torch.dtype) -> _Canvases:
        tokens = torch.stack([row.random_tokens(settings) for row in rows])
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
        parts = {name: getattr(self, name)[places] for name in _PER_ROW}
        return _Canvases(**parts, logits=None if self.logits is None else self.logits[places], dtype=self.dtype)

    def denoise(self, logits_AQV: torch.Tensor, rows: Sequence[_Row], settings: _Settings) -> torch.Tensor:
        """One step, in place: [A] bool, the canvases that have ended."""
        temperature_A = settings.t_min + (settings.t_max - settings.t_min) * (self.left / settings.steps)
        logits_AQV = logits_AQV / temperature_A[:, None, None]
        self.best = logits_AQV.argmax(dim=-1)
        probabilities_AQV = logits_AQV.softmax(dim=-1, dtype=torch.float32)
        logs_AQV = logits_AQV - logits_AQV.logsumexp(dim=-1, keepdim=True)
        lowest = torch.finfo(logs_AQV.dtype).min
        entropy_AQ = -(logs_AQV.clamp(min=lowest) * probabilities_AQV).sum(dim=-1)
        # torch.multinomial of one draw is the largest ratio to exponential noise, here with each row's own numbers.
        for row, noise_QV in zip(rows, logs_AQV, strict=True):
            noise_QV.exponential_(generator=row.generator)
        drawn_AQ = (probabilities_AQV / logs_AQV).argmax(dim=-1)
        sorted_AQ, order_AQ = entropy_AQ.sort(dim=-1)
        within_AQ = sorted_AQ.cumsum(dim=-1) - sorted_AQ <= settings.bound
        accepted_AQ = torch.zeros_like(within_AQ).scatter(-1, order_AQ, within_AQ)
        random_AQ = torch.stack([row.random_tokens(settings) for row in rows])
        self.tokens = torch.where(accepted_AQ, drawn_AQ, random_AQ)
        self.logits = logits_AQV.to(self.dtype)
        self.conditioned = torch.ones_like(self.conditioned)
        self.left = self.left - 1
        ended_A = self.left == 0
        if settings.stability is not None:
            stable_A = (self.history == self.best[:, None]).all(dim=-1).all(dim=-1)
            ended_A = ended_A | stable_A & (entropy_AQ.mean(dim=-1) < settings.confidence)
            self.history = torch.cat([self.history, self.best[:, None]], dim=1)[:, 1:]
        return ended_A


def _plain(model: Any) -> Any:
    """The model itself, also where PEFT wraps it."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model

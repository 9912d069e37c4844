"""DiffusionGemma's engine: drafts behind an encoder, many requests together, each with its own random numbers.

    a request enters:   the encoder reads its prompt;  draft = uniform random tokens
    each step, of all rows together, n counted down from `max_denoising_steps` for each row:
        logits = decoder(draft, behind the row's text, given the row's last logits) / temperature(n)
        drawn = a draw from softmax(logits) at each position;  H = its entropy
        accept the drawn tokens of lowest H while the sum of the H before them is at most `entropy_bound`
        the others become uniform random tokens
    a row whose best tokens were stable and certain, or whose steps are over, commits its best tokens:
        it leaves where they hold an end token or nothing is missing; else the encoder reads them

The sampler is the entropy-bound one (arXiv 2505.24857) under a temperature that falls from `t_max` to `t_min`. It is
transformers' `DiffusionGemmaGenerationMixin.generate` (5.23, 5.24) row by row: with the same random numbers a row's
tokens are those of that function for its prompt alone. There all rows of a batch take the decoder passes of the
slowest one, draft by draft, and of the longest text; here a row that is done makes room for the next, and its random
numbers are a function of its own seed.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections import deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from dlm_bridge.errors import DlmBridgeError, NonFiniteError
from dlm_bridge.generation.autoregressive import (
    AutoregressiveEngine,
    Completions,
    end_tokens,
    rows_of,
    run_generate,
    set_values,
    stop_condition,
)
from dlm_bridge.generation.canvas import to_device
from dlm_bridge.generation.request import Committed, Ended, Event, Extended, Failed, Request
from dlm_bridge.generation.runtime.runner import tensor_parallel_group
from dlm_bridge.generation.samplers import Check, check_value
from dlm_bridge.generation.settings import check_adapters
from dlm_bridge.generation.token_sampling import Noise, draw_token, drawn_seeds, row_seeds
from dlm_bridge.objectives.noise import random_tokens

logger = logging.getLogger(__name__)

# The settings, under transformers' names; `entropy_bound` is that of its EntropyBoundSamplerConfig.
SETTINGS: dict[str, Check | None] = {
    "max_new_tokens": Check("int", minimum=1),
    "max_denoising_steps": Check("int", minimum=1),
    "entropy_bound": Check("float", above=0),
    "t_min": Check("float", minimum=0),
    "t_max": Check("float", above=0),
    "stability_threshold": Check("int", minimum=0),
    "confidence_threshold": Check("float", above=0),
    "block_length": Check("int", minimum=1),
    "cache_implementation": Check("str"),
    "disable_compile": Check("bool"),
    "eos_token_id": None,
    "pad_token_id": Check("int", minimum=0),
    "num_return_sequences": Check("int", minimum=1),
    "stop_strings": None,
    "seed": None,
}
IGNORED = ("do_sample", "transformers_version", "use_cache")  # which transformers' clients send
OTHER_NAMES = {"steps": "max_denoising_steps", "block_size": "block_length", "canvas_length": "block_length"}
NUMBERS = ("entropy_bound", "t_min", "t_max", "confidence_threshold")  # which transformers takes as floats only
IMAGE_TOKENS = ("image_token_id", "boi_token_id", "eoi_token_id")


def is_gemma(model: Any) -> bool:
    """Whether this is a DiffusionGemma model, plain or wrapped by PEFT."""
    return getattr(model.config, "canvas_length", None) is not None


def image_token_ids(config: Any) -> tuple[int, ...]:
    """The tokens that stand for images in a model's text, by its config; other models have none."""
    ids = (getattr(config, name, None) for name in IMAGE_TOKENS)
    return tuple(token for token in ids if token is not None)


def gemma_keywords(model: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a call under transformers' names, checked, with the number of new tokens and the tokens that end
    a text. Raises DlmBridgeError for one that the sampler does not have or whose value is wrong."""
    check_adapters(model)
    found: dict[str, Any] = {}
    for name, value in set_values(settings).items():
        own = OTHER_NAMES.get(name, name)
        if own in IGNORED:
            continue
        if own not in SETTINGS:
            more = ": it falls from t_max to t_min" if name == "temperature" else ""
            raise DlmBridgeError(
                f"DiffusionGemma's sampler has no setting '{name}'{more}: it has "
                f"{', '.join(sorted(SETTINGS.keys() | OTHER_NAMES.keys()))}"
            )
        if own in found:
            raise DlmBridgeError(f"{name} and {own} are the same setting: give one of them")
        check_value(name, SETTINGS[own], value)
        found[own] = float(value) if own in NUMBERS else value
    stored, defaults = model.generation_config, model.generation_config._get_default_generation_params()
    t_min, t_max = (found.get(name, getattr(stored, name, None)) for name in ("t_min", "t_max"))
    t_min, t_max = defaults["t_min"] if t_min is None else t_min, defaults["t_max"] if t_max is None else t_max
    if t_min >= t_max:
        raise DlmBridgeError(f"t_min {t_min} is not below t_max {t_max}, from which the temperature falls to it")
    if "max_new_tokens" not in found:
        found["max_new_tokens"] = stored.max_new_tokens or defaults["max_new_tokens"]
    found["eos_token_id"] = list(end_tokens(model, settings)) or None
    return found


def check_gemma_prompt(model: Any, prompt: Sequence[int], given: Mapping[str, Any]) -> None:
    """Raise DlmBridgeError for an empty prompt, one with an image, and where its drafts leave the context."""
    config, text = model.config, model.config.get_text_config()
    if not len(prompt):
        raise DlmBridgeError("DiffusionGemma needs a prompt of at least one token: this one has none")
    image = next((token for token in image_token_ids(config) if token in prompt), None)
    if image is not None:
        raise DlmBridgeError(
            f"the prompt holds an image (token id {image}): only text is sampled here, leave images out"
        )
    outside = next((token for token in prompt if not 0 <= token < text.vocab_size), None)
    if outside is not None:
        raise DlmBridgeError(f"the prompt holds token {outside}, outside the vocabulary of {text.vocab_size}")
    length = given.get("block_length") or config.canvas_length
    context = text.max_position_embeddings
    if length > context:
        raise DlmBridgeError(
            f"a draft of {length} tokens is longer than the model's context of {context}: use a shorter block_length"
        )
    last = len(prompt) + math.ceil(given["max_new_tokens"] / length) * length
    if last > context:
        raise DlmBridgeError(
            f"a prompt of {len(prompt)} tokens and drafts of {length} for {given['max_new_tokens']} new ones make "
            f"{last}, beyond the model's context of {context}: use a shorter gen_length"
        )


OWN = ("cache_implementation", "disable_compile")  # settings of transformers' loop alone
ENCODED_TOGETHER = 4  # rows wait for one encoder pass until they are 1/4 of all that run or wait for it


def supports_drafts(model: Any, settings: Mapping[str, Any]) -> bool:
    """True if `GemmaEngine` can sample from the model under these settings; otherwise transformers' loop has to."""
    plain = _plain(model)
    if not is_gemma(plain) or "self_conditioning_mask" not in inspect.signature(plain.forward).parameters:
        return False  # no such model, or one of a transformers whose decoder conditions all rows or none
    devices = {str(device) for device in (getattr(plain, "hf_device_map", None) or {"": plain.device}).values()}
    attention = {module.config._attn_implementation for module in (plain.model.decoder, plain.model.encoder)}
    whole = tensor_parallel_group(plain) is None
    return len(devices) == 1 and attention <= {"sdpa", "eager"} and whole and not any(name in settings for name in OWN)


class GemmaEngine:
    """The engine of DiffusionGemma; see `dlm_bridge.generation.request.Engine`.

    Args:
        settings: `SETTINGS`, or other names of them.
        max_rows: requests that run at once. Others wait, in the order of their arrival.
        stream: report `Committed` and `Extended` of requests that stream, each time a draft is committed.
        on_draft: is called after each step with the best tokens [A, Q] of all drafts, or with their logits [A, Q, V]
            if its attribute `_takes_logits` is true.

    Raises:
        DlmBridgeError: a setting that the sampler does not have.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        settings: Mapping[str, Any],
        *,
        max_rows: int,
        stream: bool = False,
        on_draft: Any = None,
    ) -> None:
        self._model = _plain(model)
        self._given = gemma_keywords(model, settings)
        self._rows = max_rows
        self._stop = stop_condition(model, tokenizer, settings)
        self._stream, self._on_draft = stream, on_draft
        self.forwards = 0  # decoder passes, of all rows together
        warn_of_another_length(self._model, self._given.get("block_length"))
        self._settings = _Settings.of(self._model, self._given)
        self._device = self._model.model.decoder.embed_tokens.weight.device
        self._cache = EncoderCache(self._model)
        self._noise = Noise([], self._device)
        self._drawing: list[_Row] = []  # row i of the noise, running or unread
        self._waiting: deque[_Row] = deque()
        self._unread: list[_Row] = []  # with tokens that the encoder has not read
        self._running: list[_Row] = []  # row i of the drafts
        self._drafts: _Drafts | None = None

    @property
    def idle(self) -> bool:
        """True if no request waits or runs."""
        return not (self._waiting or self._unread or self._running)

    def submit(self, request: Request) -> None:
        """Queue a request. Raises DlmBridgeError for a prompt that the model cannot continue."""
        new = self._given["max_new_tokens"] if request.gen_length is None else request.gen_length
        check_gemma_prompt(self._model, request.prompt, {**self._given, "max_new_tokens": new})
        seed = drawn_seeds(1)[0] if request.seed is None else request.seed
        self._waiting.append(_Row(request, list(request.prompt), new, seed))

    def cancel(self, name: Hashable) -> bool:
        """Drop a request. False if there is none of this name."""
        before = len(self._waiting) + len(self._drawing)
        self._waiting = deque(row for row in self._waiting if row.request.name != name)
        self._unread = [row for row in self._unread if row.request.name != name]
        self._keep([place for place, row in enumerate(self._running) if row.request.name != name])
        self._forget([row for row in self._drawing if row.request.name == name])
        return len(self._waiting) + len(self._drawing) < before

    def close(self) -> None:
        """Drop all requests."""
        for row in [*self._waiting, *self._drawing]:
            self.cancel(row.request.name)

    @torch.no_grad()
    def step(self) -> list[Event]:
        """A denoising step of the rows that run, after others have entered where there is room. Returns the events of
        the drafts that it has completed."""
        room = self._rows - len(self._drawing)
        if self._waiting and room > 0:
            self._enter([self._waiting.popleft() for _ in range(min(room, len(self._waiting)))])
        if self._unread and len(self._unread) * ENCODED_TOGETHER >= min(self._rows, len(self._drawing)):
            self._read()
        if self._drafts is None:
            return []
        flags_A = self._denoise(self._drafts)
        failed = [row.request.name for row, (_, bad) in zip(self._running, flags_A, strict=True) if bad]
        events: list[Event] = [Failed(name, NonFiniteError(rows=[name])) for name in failed]
        for name in failed:
            self.cancel(name)
        if self._drafts is None:
            return events
        ended_A = [ended for ended, bad in flags_A if not bad]
        if self._on_draft is not None:
            assert self._drafts.logits is not None, "a step has been taken"
            logits = getattr(self._on_draft, "_takes_logits", False)
            self._on_draft(self._drafts.logits.cpu() if logits else self._drafts.best.cpu())
        if not any(ended_A):
            return events
        for row, ended, best in zip(self._running, ended_A, self._drafts.best.tolist(), strict=True):
            if ended:
                events += self._committed(row, best)
        self._keep([place for place, ended in enumerate(ended_A) if not ended])
        over = {event.name for event in events if isinstance(event, Ended)}
        self._forget([row for row in self._drawing if row.request.name in over])
        return events

    def _committed(self, row: _Row, draft: list[int]) -> list[Event]:
        """Write a completed draft behind the row's text."""
        before = len(row.new)
        complete = row.commit(draft, self._settings)
        end = self._stop.end_of(row.new)
        row.new = row.new if end is None else row.new[:end]
        events: list[Event] = []
        new, name = tuple(row.new[before:]), row.request.name
        if self._stream and row.request.stream and new:
            events += [
                Committed(name, row.forwards, tuple(range(before, len(row.new))), new),
                Extended(name, before, new),
            ]
        if complete or end is not None:
            return [*events, Ended(name, tuple(row.new), "length" if end is None else "stop", row.forwards)]
        self._unread.append(row)
        return events

    def _enter(self, rows: list[_Row]) -> None:
        """Add rows that the encoder has to read."""
        self._noise.admit([row.seed for row in rows])
        self._drawing = rows + self._drawing
        self._unread += rows
        self._number_draws()

    def _forget(self, rows: Sequence[_Row]) -> None:
        """Drop the random numbers of these rows."""
        if rows:
            left = [place for place, row in enumerate(self._drawing) if row not in rows]
            self._noise.select_rows(left)
            self._drawing = [self._drawing[place] for place in left]
            self._number_draws()

    def _number_draws(self) -> None:
        for place, row in enumerate(self._drawing):
            row.place = place

    def _read(self) -> None:
        """Let the encoder read the rows that it has not read, and begin their next drafts."""
        rows, self._unread = self._unread, []
        self._cache.read([row.encoded for row in rows], [row.unread() for row in rows])
        begun = _Drafts.begin(rows, self._noise, self._settings, self._cache.dtype)
        self._drafts = begun if self._drafts is None else self._drafts.joined(begun)
        self._running += rows
        self._cache.show([row.encoded for row in self._running], self._settings.length)

    def _keep(self, places: list[int]) -> None:
        """Go on with the running rows at these places."""
        if len(places) == len(self._running):
            return
        assert self._drafts is not None
        self._running = [self._running[place] for place in places]
        self._drafts = self._drafts.selected(places)
        if self._running:
            self._cache.show([row.encoded for row in self._running], self._settings.length)

    def _denoise(self, drafts: _Drafts) -> list[list[bool]]:
        """A denoising step of the running rows. Returns for each if it has ended its draft, and if its logits are NaN
        or plus infinity."""
        for row in self._running:
            row.forwards += 1
        self.forwards += 1
        logits_AQV = self._model(
            decoder_input_ids=drafts.tokens,
            **cache_of(self._model, self._cache),
            decoder_attention_mask=self._cache.masks,
            decoder_position_ids=self._cache.positions,
            self_conditioning_logits=drafts.logits,
            self_conditioning_mask=None if drafts.logits is None else drafts.conditioned,
        ).logits
        flags_A2: list[list[bool]] = drafts.denoise(logits_AQV, self._running, self._noise, self._settings).tolist()
        return flags_A2


class GemmaLoopEngine(AutoregressiveEngine):
    """DiffusionGemma by transformers' own loop, in closed batches, where `supports_drafts` is false. Rows draw from
    one stream."""

    def _keywords(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        return gemma_keywords(self._model, settings)

    def submit(self, request: Request) -> None:
        """Queue a request. Raises DlmBridgeError for a prompt that the model cannot continue."""
        own = self._given if request.gen_length is None else {**self._given, "max_new_tokens": request.gen_length}
        check_gemma_prompt(self._model, request.prompt, own)
        self._waiting.append(request)

    def _sample(
        self,
        input_ids: torch.Tensor,
        mask: torch.Tensor,
        settings: Mapping[str, Any],
        streamer: Any,
        seeds: Sequence[int | None],
    ) -> Completions:
        own = {} if seeds[0] is None else {"seed": seeds[0]}
        return gemma_loop(self._model, self._tokenizer, input_ids, mask, {**settings, **own}, streamer)


def sample_drafts(
    model: Any,
    tokenizer: Any,
    input_ids: torch.Tensor,
    mask: torch.Tensor,
    settings: Mapping[str, Any],
    streamer: Any = None,
) -> Completions:
    """Continue prompts [B, P] that are padded on the left, whose real tokens have `mask` 1.

    Args:
        streamer: as for transformers' `generate`; its `put_draft` gets what `GemmaEngine.on_draft` does.

    Raises DlmBridgeError.
    """
    given = gemma_keywords(model, settings)
    prompts = rows_of(input_ids, mask)
    # A streamer of several rows gets them side by side, which only transformers' loop runs like that.
    if not supports_drafts(model, given) or (streamer is not None and len(prompts) > 1):
        return gemma_loop(model, tokenizer, input_ids, mask, settings, streamer)
    copies, seed = given.pop("num_return_sequences", 1), given.pop("seed", None)
    if streamer is not None and copies > 1:
        raise DlmBridgeError(f"a streamer shows one text, num_return_sequences asks for {copies}: leave one out")
    rows = [prompt for prompt in prompts for _ in range(copies)]
    seeds = drawn_seeds(len(rows)) if seed is None else row_seeds(seed, rows)
    on_draft = getattr(streamer, "put_draft", None)
    own = {name: value for name, value in settings.items() if name not in ("seed", "num_return_sequences")}
    engine = GemmaEngine(model, tokenizer, own, max_rows=len(rows), stream=streamer is not None, on_draft=on_draft)
    if streamer is not None:
        streamer.put(torch.tensor([rows[0]]))
    for number, (prompt, row_seed) in enumerate(zip(rows, seeds, strict=True)):
        engine.submit(Request(number, prompt, seed=row_seed))
    texts: dict[Any, tuple[int, ...]] = {}
    while not engine.idle:
        for event in engine.step():
            if isinstance(event, Ended):
                texts[event.name] = event.tokens
            elif isinstance(event, Extended):
                streamer.put(torch.tensor([event.tokens]))
            elif isinstance(event, Failed):
                raise NonFiniteError(rows=[event.name // copies] if len(rows) > 1 else ())
    if streamer is not None:
        streamer.end()
    width = max(map(len, texts.values()))
    padding = given.get("pad_token_id", (given["eos_token_id"] or [0])[0])  # behind an end token
    new = [[*texts[number], *[padding] * (width - len(texts[number]))] for number in range(len(rows))]
    sequences = torch.cat([input_ids.repeat_interleave(copies, dim=0).cpu(), torch.tensor(new)], dim=1)
    return Completions(sequences, engine.forwards, [sequences.shape[1]] * len(sequences))


def gemma_loop(
    model: Any,
    tokenizer: Any,
    input_ids: torch.Tensor,
    mask: torch.Tensor,
    settings: Mapping[str, Any],
    streamer: Any = None,
) -> Completions:
    """As `sample_drafts`, by transformers' loop."""
    given = gemma_keywords(model, settings)
    for prompt in rows_of(input_ids, mask):
        check_gemma_prompt(model, prompt, given)
    seed = given.pop("seed", None)
    # The decoder's forward passes are the denoising steps; the encoder's, one per draft, are not counted.
    counted = _plain(model).model.decoder
    return run_generate(model, counted, _generate, tokenizer, input_ids, mask, given, seed, streamer)


def _generate(model: Any, input_ids: torch.Tensor, mask: torch.Tensor, given: Mapping[str, Any]) -> torch.Tensor:
    """[B, P + new] tokens: the last draft is cut where `max_new_tokens` end."""
    own = dict(given)
    for name in ("tokenizer", "stop_strings"):  # a text is cut at its first stop string by the caller
        own.pop(name, None)
    new, copies = own["max_new_tokens"], own.pop("num_return_sequences", 1)
    if "entropy_bound" in own:
        from transformers.models.diffusion_gemma.generation_diffusion_gemma import EntropyBoundSamplerConfig

        own["sampler_config"] = EntropyBoundSamplerConfig(entropy_bound=own.pop("entropy_bound"))
    with _drafts_of(model, own.pop("block_length", None)):
        found = model.generate(
            input_ids=input_ids.repeat_interleave(copies, dim=0),
            attention_mask=mask.repeat_interleave(copies, dim=0),
            return_dict_in_generate=False,
            **own,
        )
    sequences: torch.Tensor = found[:, : input_ids.shape[1] + new]
    return sequences


def warn_of_another_length(model: Any, length: int | None) -> None:
    """Warn of drafts of another length than the model was trained with."""
    trained = model.config.canvas_length
    if length not in (None, trained):
        logger.warning(
            f"drafts of {length} tokens: the model was trained with {trained} (canvas_length in config.json)"
        )


@contextmanager
def _drafts_of(model: Any, length: int | None) -> Iterator[None]:
    """Context manager that gives the model drafts of another length, which it was not trained with."""
    warn_of_another_length(model, length)
    trained = model.config.canvas_length
    model.config.canvas_length = length or trained
    try:
        yield
    finally:
        model.config.canvas_length = trained


# ---- What the encoder has read.

Pair = tuple[torch.Tensor, torch.Tensor]  # keys and values


@dataclass
class EncodedPrompt:
    """What is kept of one row."""

    length: int = 0  # tokens that the encoder has read
    kept: list[Pair] = field(default_factory=list)  # [H, K, D] by layer, of the last K of them


def cache_of(tower: Any, cache: Any) -> dict[str, Any]:
    """A cache as the keyword of a tower of transformers', or of the whole model: `cache` from 5.24 on."""
    name = "cache" if "cache" in inspect.signature(tower.forward).parameters else "past_key_values"
    return {name: cache}


@dataclass
class _Layer:
    """Keys and values of some rows, [A, H, K, D], padded on the right; the names are those of transformers' layers."""

    keys: torch.Tensor
    values: torch.Tensor


class EncoderCache:
    """The rows that the encoder or the decoder runs on, as their cache."""

    is_compileable = False  # transformers' decoder puts the draft's keys behind those of a layer

    def __init__(self, model: Any) -> None:
        self._encoder = model.model.encoder
        self._config = model.config.text_config
        embedding = model.model.decoder.embed_tokens.weight
        self._device, self.dtype = embedding.device, embedding.dtype
        self._additive = model.model.decoder.config._attn_implementation == "eager"
        self.layers: list[_Layer] = []
        self.masks: dict[str, torch.Tensor | None] = {}  # by the type of a layer
        self.positions = torch.empty(0)  # [A, Q], of the drafts

    @torch.no_grad()
    def read(self, rows: Sequence[EncodedPrompt], tokens: Sequence[list[int]]) -> None:
        """One encoder pass over new tokens of the rows, of any number each."""
        width = max(map(len, tokens))
        ids = torch.tensor([row + [0] * (width - len(row)) for row in tokens], device=self._device)
        lengths = torch.tensor([row.length for row in rows], device=self._device)
        counts = [self._kept(row.length) for row in rows]
        self._lay_out(rows)
        masks = {kind: self._causal(width, [count[kind] for count in counts], kind) for kind in self._kinds}
        positions = lengths[:, None] + torch.arange(width, device=self._device)
        self._encoder(input_ids=ids, attention_mask=masks, position_ids=positions, **cache_of(self._encoder, self))
        for place, (row, new) in enumerate(zip(rows, tokens, strict=True)):
            row.length += len(new)
            row.kept = [
                self._of_row(layer, place, counts[place][kind], layer.keys.shape[2] - width, row, len(new), kind)
                for layer, kind in zip(self.layers, self._config.layer_types, strict=True)
            ]

    def show(self, rows: Sequence[EncodedPrompt], length: int) -> None:
        """Lay the cache out for the decoder, on drafts of `length` tokens behind these rows."""
        self._lay_out(rows)
        for place, row in enumerate(rows):  # views, so that nothing is held twice
            row.kept = [
                (layer.keys[place, :, : keys.shape[1]], layer.values[place, :, : keys.shape[1]])
                for layer, (keys, _) in zip(self.layers, row.kept, strict=True)
            ]
        self.masks = {
            kind: self._behind([self._kept(row.length)[kind] for row in rows], length) for kind in self._kinds
        }
        lengths = torch.tensor([row.length for row in rows], device=self._device)
        self.positions = lengths[:, None] + torch.arange(length, device=self._device)

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer: int, *_: Any, **__: Any) -> Pair:
        """The encoder's new keys and values behind those of a layer, as transformers' caches do it."""
        if layer == len(self.layers):  # of rows that have none
            self.layers.append(_Layer(keys, values))
        else:
            held = self.layers[layer]
            self.layers[layer] = _Layer(torch.cat([held.keys, keys], dim=2), torch.cat([held.values, values], dim=2))
        return self.layers[layer].keys, self.layers[layer].values

    @property
    def _kinds(self) -> set[str]:
        return set(self._config.layer_types)

    def _window(self, kind: str) -> int | None:
        return self._config.sliding_window if kind == "sliding_attention" else None

    def _kept(self, length: int) -> dict[str, int]:
        """How many of so many tokens the layers of a type keep."""
        windows = {kind: self._window(kind) for kind in self._kinds}
        return {kind: length if window is None else min(length, window - 1) for kind, window in windows.items()}

    def _lay_out(self, rows: Sequence[EncodedPrompt]) -> None:
        """Set `layers` to what is kept of the rows, padded; to none where there is nothing yet."""
        self.layers = []
        first = next((row for row in rows if row.kept), None)
        for number in range(0 if first is None else len(first.kept)):
            assert first is not None
            laid = []
            for part in (0, 1):
                kept = [row.kept[number][part] if row.kept else None for row in rows]
                like = first.kept[number][part]
                width = max(one.shape[1] for one in kept if one is not None)
                whole = like.new_zeros(len(rows), like.shape[0], width, like.shape[2])
                for place, one in enumerate(kept):
                    if one is not None:
                        whole[place, :, : one.shape[1]] = one
                laid.append(whole)
            self.layers.append(_Layer(*laid))

    def _of_row(
        self, layer: _Layer, place: int, held: int, width: int, row: EncodedPrompt, new: int, kind: str
    ) -> Pair:
        """What a layer keeps of a row: `held` columns and, behind the `width` that all rows have, `new` ones."""
        last = self._kept(row.length)[kind]

        def kept(whole: torch.Tensor) -> torch.Tensor:
            own = torch.cat([whole[place, :, :held], whole[place, :, width : width + new]], dim=1)
            return own[:, own.shape[1] - last :]

        return kept(layer.keys), kept(layer.values)

    def _causal(self, width: int, held: list[int], kind: str) -> torch.Tensor:
        """[G, 1, N, K + N]: which of the columns that are held, and of the new ones, each new token attends to."""
        window, past = self._window(kind), max(held)
        held_G11 = torch.tensor(held, device=self._device)[:, None, None]
        query_N1 = torch.arange(width, device=self._device)[:, None]
        column_K = torch.arange(past, device=self._device)
        before_GNK = (column_K < held_G11).expand(-1, width, -1)
        behind_NN = query_N1 - query_N1.t()
        new_NN = behind_NN >= 0
        if window is not None:
            before_GNK = before_GNK & (query_N1 + held_G11 - column_K < window)
            new_NN = new_NN & (behind_NN < window)
        return self._mask(torch.cat([before_GNK, new_NN.expand(len(held), -1, -1)], dim=-1))

    def _behind(self, held: list[int], length: int) -> torch.Tensor | None:
        """[A, 1, Q, K + Q]: a draft attends to all that is held of its row and to itself; None where that is all."""
        if min(held) == max(held):
            return None
        held_A1 = torch.tensor(held, device=self._device)[:, None]
        columns = torch.arange(max(held) + length, device=self._device)
        shown_AK = (columns < held_A1) | (columns >= max(held))
        return self._mask(shown_AK[:, None].expand(-1, length, -1))

    def _mask(self, shown: torch.Tensor) -> torch.Tensor:
        if not self._additive:
            return shown[:, None]
        hidden = torch.zeros(shown.shape, dtype=self.dtype, device=self._device)
        return hidden.masked_fill(~shown, torch.finfo(self.dtype).min)[:, None]


# ---- Drafts.


@dataclass(frozen=True)
class _Settings:
    """The sampler's numbers. A draft has `length` tokens."""

    length: int
    vocabulary: int
    steps: int
    bound: float
    t_min: float
    t_max: float
    stability: int | None  # None: a draft takes all of its steps
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


@dataclass(eq=False)
class _Row:
    """A prompt with what was written behind it."""

    request: Request
    text: list[int]  # the prompt and the committed drafts
    new_tokens: int  # at most
    seed: int
    place: int = 0  # among the rows of the noise
    new: list[int] = field(default_factory=list)
    encoded: EncodedPrompt = field(default_factory=EncodedPrompt)
    forwards: int = 0

    def unread(self) -> list[int]:
        return self.text[self.encoded.length :]

    def commit(self, draft: list[int], settings: _Settings) -> bool:
        """Write a draft behind the text. Whether the text is complete: at an end token, and where no token is
        missing."""
        end = next((place for place, token in enumerate(draft) if token in settings.ends), None)
        self.text += draft
        self.new += draft if end is None else draft[: end + 1]
        missing = self.new_tokens - len(self.new)
        self.new = self.new[: self.new_tokens]
        return end is not None or missing <= 0


_PER_ROW = ("tokens", "best", "history", "left", "conditioned")


@dataclass
class _Drafts:
    """The drafts of A rows, of Q tokens each, and what their next step needs."""

    tokens: torch.Tensor  # [A, Q]
    best: torch.Tensor  # [A, Q], the likeliest ones after the last step
    history: torch.Tensor  # [A, stability, Q], those after the steps before; -1 where there was none
    left: torch.Tensor  # [A] int32, steps
    logits: torch.Tensor | None  # [A, Q, V] of the last step, over its temperature; None where no row has had one
    conditioned: torch.Tensor  # [A] bool, rows that have had one
    dtype: torch.dtype  # of what the decoder is given of them

    @classmethod
    def begin(cls, rows: Sequence[_Row], noise: Noise, settings: _Settings, dtype: torch.dtype) -> _Drafts:
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

    def joined(self, others: _Drafts) -> _Drafts:
        """These rows, then the others, which have had no step."""
        parts = {name: torch.cat([getattr(self, name), getattr(others, name)]) for name in _PER_ROW}
        logits = self.logits
        if logits is not None:
            logits = torch.cat([logits, logits.new_zeros(len(others.tokens), *logits.shape[1:])])
        return _Drafts(**parts, logits=logits, dtype=self.dtype)

    def selected(self, places: list[int]) -> _Drafts | None:
        """Some of the rows; None of none."""
        if not places:
            return None
        places_A = to_device(places, self.tokens.device)
        parts = {name: getattr(self, name)[places_A] for name in _PER_ROW}
        return _Drafts(**parts, logits=None if self.logits is None else self.logits[places_A], dtype=self.dtype)

    def denoise(
        self, logits_AQV: torch.Tensor, rows: Sequence[_Row], noise: Noise, settings: _Settings
    ) -> torch.Tensor:
        """One step, in place. Returns [A, 2] bool: drafts that have ended, and those whose logits are not finite."""
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

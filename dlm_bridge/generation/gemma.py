"""DiffusionGemma's engine: continuous batching of drafts after an encoder.

    a request enters:   the encoder reads its prompt;  draft = uniform random tokens
    each step, for all rows together, n counts down from `max_denoising_steps` for each row:
        logits = decoder(draft, after the row's text, given the row's last logits) / temperature(n)
        drawn = a draw from softmax(logits) at each position;  H = its entropy
        accept the drawn tokens of lowest H while the sum of the lower H is at most `entropy_bound`
        the others become uniform random tokens
    a row whose best tokens are stable and certain, or that has no more steps, commits its best tokens:
        it leaves if they contain an end token or complete its length; else the encoder reads them

The sampler is entropy-bounded (arXiv 2505.24857), with a temperature that falls from `t_max` to `t_min`. With the same
random numbers, a row's tokens are those of transformers' `DiffusionGemmaGenerationMixin.generate` (5.23, 5.24) for its
prompt alone. In that function, all rows of a batch take as many decoder passes as the slowest one; here, a finished
row makes room for the next request, and its random numbers depend on its own seed only.
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

from dlm_bridge.errors import NonFiniteError, RowError, SettingError, counted
from dlm_bridge.generation.autoregressive import (
    AutoregressiveEngine,
    Completions,
    check_tokens,
    end_tokens,
    rows_of,
    run_generate,
    set_values,
    stop_condition,
)
from dlm_bridge.generation.canvas import to_device
from dlm_bridge.generation.options import check_value
from dlm_bridge.generation.request import Committed, Ended, Event, Extended, Failed, Request
from dlm_bridge.generation.runtime.runner import tensor_parallel_group, unwrapped
from dlm_bridge.generation.settings import check_adapters
from dlm_bridge.generation.token_sampling import Noise, draw_token, drawn_seeds, row_seeds
from dlm_bridge.objectives.noise import random_tokens
from dlm_bridge.settings import option, options_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class GemmaSettings:
    """Settings of DiffusionGemma under transformers' names. None: the checkpoint's value."""

    max_new_tokens: int | None = option(None, "Maximum number of new tokens.", minimum=1)  # `merge_names` renames
    max_denoising_steps: int | None = option(None, "Denoising steps per draft.", minimum=1, aliases=("steps",))
    entropy_bound: float | None = option(None, "Bound on the entropy that a step accepts.", above=0)
    t_min: float | None = option(None, "Temperature of the last step.", minimum=0)
    t_max: float | None = option(None, "Temperature of the first step.", above=0)
    stability_threshold: int | None = option(None, "Unchanged steps after which a draft may end.", minimum=0)
    confidence_threshold: float | None = option(None, "Mean entropy below which a draft may end.", above=0)
    block_length: int | None = option(None, "Tokens per draft.", minimum=1, aliases=("block_size", "canvas_length"))
    cache_implementation: str | None = option(None, "KV cache of transformers' loop.")
    disable_compile: bool | None = option(None, "Do not compile transformers' loop.")
    eos_token_id: Any = option(None, "One or several tokens that end a text.")
    pad_token_id: int | None = option(None, "Token after the end of a text.", minimum=0)
    num_return_sequences: int | None = option(None, "Texts per prompt.", minimum=1)
    stop_strings: Any = option(None, "Strings that end a text.")
    seed: Any = option(None, "Seed of the random numbers.")


SETTINGS = options_of(GemmaSettings)
OTHER_NAMES = {alias: name for name, declared in SETTINGS.items() for alias in declared.aliases}
IGNORED = ("do_sample", "transformers_version", "use_cache")  # sent by transformers' clients
# transformers does not accept integers for these settings.
FLOATS = {name for name, declared in SETTINGS.items() if "float" in str(declared.type)}
IMAGE_TOKENS = ("image_token_id", "boi_token_id", "eoi_token_id")


def is_gemma(model: Any) -> bool:
    """True for a DiffusionGemma model, plain or wrapped by PEFT."""
    return getattr(model.config, "canvas_length", None) is not None


def image_token_ids(config: Any) -> tuple[int, ...]:
    """Tokens that represent images in a model's text, by its config; empty for other models."""
    ids = (getattr(config, name, None) for name in IMAGE_TOKENS)
    return tuple(token for token in ids if token is not None)


def gemma_keywords(model: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Check the settings of a call. Returns them under transformers' names, with `max_new_tokens` and `eos_token_id`.

    Raises:
        SettingError: the sampler does not have the setting, or its value is invalid.
    """
    check_adapters(model)
    found: dict[str, Any] = {}
    for name, value in set_values(settings).items():
        own = OTHER_NAMES.get(name, name)
        if own in IGNORED:
            continue
        if own not in SETTINGS:
            more = " (its temperature falls from `t_max` to `t_min`)" if name == "temperature" else ""
            names = ", ".join(sorted(SETTINGS.keys() | OTHER_NAMES.keys()))
            raise SettingError(name, f"DiffusionGemma's sampler does not have it{more}: it has {names}")
        if own in found:
            raise SettingError(name, f"is the same setting as `{own}`: set one of them")
        check_value(name, SETTINGS[own], value)
        found[own] = float(value) if own in FLOATS else value
    stored, defaults = model.generation_config, model.generation_config._get_default_generation_params()
    t_min, t_max = (found.get(name, getattr(stored, name, None)) for name in ("t_min", "t_max"))
    t_min, t_max = defaults["t_min"] if t_min is None else t_min, defaults["t_max"] if t_max is None else t_max
    if t_min >= t_max:
        raise SettingError("t_min", f"{t_min} must be below `t_max={t_max}`")
    if "max_new_tokens" not in found:
        found["max_new_tokens"] = stored.max_new_tokens or defaults["max_new_tokens"]
    found["eos_token_id"] = list(end_tokens(model, settings)) or None
    return found


def check_gemma_prompt(model: Any, prompt: Sequence[int], given: Mapping[str, Any], name: object) -> None:
    """Raise RowError for a prompt that is empty, contains an image, or does not fit into the context with its drafts.
    Raises SettingError for drafts longer than the context. `name`: the prompt's name in errors."""
    config, text = model.config, model.config.get_text_config()
    image = next((token for token in image_token_ids(config) if token in prompt), None)
    if image is not None:
        raise RowError(f"contains an image (token id {image}): only text is supported", [name])
    check_tokens(prompt, text.vocab_size, name)
    length = given.get("block_length") or config.canvas_length
    context = text.max_position_embeddings
    if length > context:
        raise SettingError("block_length", f"{length} is longer than the model's context of {context}")
    last = len(prompt) + math.ceil(given["max_new_tokens"] / length) * length
    if last > context:
        raise RowError(
            f"the prompt's {counted(len(prompt), 'token')} and drafts of {length} for "
            f"{counted(given['max_new_tokens'], 'new token')} make "
            f"{last}, beyond the model's context of {context}: reduce `gen_length`",
            [name],
        )


OWN = ("cache_implementation", "disable_compile")  # settings of transformers' loop only
ENCODED_TOGETHER = 4  # rows wait for an encoder pass until they are 1/4 of all running and waiting rows


def supports_drafts(model: Any, settings: Mapping[str, Any]) -> bool:
    """True if `GemmaEngine` can sample from the model under these settings; otherwise transformers' loop has to."""
    plain = unwrapped(model)
    if not is_gemma(plain):
        return False
    devices = {str(device) for device in (getattr(plain, "hf_device_map", None) or {"": plain.device}).values()}
    attention = {module.config._attn_implementation for module in (plain.model.decoder, plain.model.encoder)}
    whole = tensor_parallel_group(plain) is None
    return len(devices) == 1 and attention <= {"sdpa", "eager"} and whole and not any(name in settings for name in OWN)


class GemmaEngine:
    """Engine for DiffusionGemma; see `dlm_bridge.generation.request.Engine`.

    Args:
        settings: `GemmaSettings`, also under their aliases.
        max_rows: maximum number of running requests. Further requests wait, in the order of their arrival.
        stream: report `Committed` and `Extended` of requests that stream, when a draft is committed.
        on_draft: called after each step with the best tokens [A, Q] of all drafts, or with their logits [A, Q, V] if
            its attribute `_takes_logits` is true.
        observers: their `draft` is called for each completed draft, with the request's name, the position of its first
            token, its tokens and their logits [Q, V].

    Raises:
        SettingError: the sampler does not have the setting, or its value is invalid.
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
        observers: Sequence[Any] = (),
    ) -> None:
        self._model = unwrapped(model)
        self._observers = observers
        self._given = gemma_keywords(model, settings)
        self._rows = max_rows
        self._stop = stop_condition(model, tokenizer, settings)
        self._stream, self._on_draft = stream, on_draft
        self.forwards = 0  # decoder passes over all rows
        warn_of_another_length(self._model, self._given.get("block_length"))
        self._settings = _Settings.of(self._model, self._given)
        self._device = self._model.model.decoder.embed_tokens.weight.device
        self._cache = EncoderCache(self._model)
        self._noise = Noise([], self._device)
        self._drawing: list[_Row] = []  # rows of the noise: running and unread
        self._waiting: deque[_Row] = deque()
        self._unread: list[_Row] = []  # rows with tokens that the encoder has not read
        self._running: list[_Row] = []  # rows of the drafts
        self._drafts: _Drafts | None = None
        self._logits: Any = None  # [A, Q, V] of the last step, for the observers

    @property
    def idle(self) -> bool:
        """True if there is no waiting or running request."""
        return not (self._waiting or self._unread or self._running)

    def submit(self, request: Request) -> None:
        """Queue a request. Raises RowError for a prompt that the model cannot continue."""
        new = self._given["max_new_tokens"] if request.gen_length is None else request.gen_length
        check_gemma_prompt(self._model, request.prompt, {**self._given, "max_new_tokens": new}, request.name)
        if request.constraint is not None:
            request.constraint.check(request, new)
        seed = drawn_seeds(1)[0] if request.seed is None else request.seed
        self._waiting.append(_Row(request, list(request.prompt), new, seed))

    def cancel(self, name: Hashable) -> bool:
        """Drop a request. Returns False if there is no request of this name."""
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
        """Admit waiting requests, then run a denoising step of all running rows. Returns the events of completed
        drafts."""
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
            assert self._drafts.logits is not None, "set by a step"
            logits = getattr(self._on_draft, "_takes_logits", False)
            self._on_draft(self._drafts.logits.cpu() if logits else self._drafts.best.cpu())
        if not any(ended_A):
            return events
        for place, (row, best) in enumerate(zip(self._running, self._drafts.best.tolist(), strict=True)):
            if ended_A[place]:
                for observer in self._observers:
                    observer.draft(row.request.name, len(row.new), best, self._logits[place])
                events += self._committed(row, best)
        self._keep([place for place, ended in enumerate(ended_A) if not ended])
        over = {event.name for event in events if isinstance(event, Ended)}
        self._forget([row for row in self._drawing if row.request.name in over])
        return events

    def _committed(self, row: _Row, draft: list[int]) -> list[Event]:
        """Append a completed draft to the row's text. Returns its events."""
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
        """Run the encoder over the unread rows, and begin their next drafts."""
        rows, self._unread = self._unread, []
        self._cache.read([row.encoded for row in rows], [row.unread() for row in rows])
        begun = _Drafts.begin(rows, self._noise, self._settings, self._cache.dtype)
        self._drafts = begun if self._drafts is None else self._drafts.joined(begun)
        self._running += rows
        self._cache.show([row.encoded for row in self._running], self._settings.length)

    def _keep(self, places: list[int]) -> None:
        """Keep only the running rows at these places."""
        if len(places) == len(self._running):
            return
        assert self._drafts is not None
        self._running = [self._running[place] for place in places]
        self._drafts = self._drafts.selected(places)
        if self._running:
            self._cache.show([row.encoded for row in self._running], self._settings.length)

    def _denoise(self, drafts: _Drafts) -> list[list[bool]]:
        """Run a denoising step of the running rows. Returns for each whether its draft has ended, and whether its
        logits are NaN or plus infinity."""
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
        self._logits = logits_AQV if self._observers else None
        flags_A2: list[list[bool]] = drafts.denoise(logits_AQV, self._running, self._noise, self._settings).tolist()
        return flags_A2


class GemmaLoopEngine(AutoregressiveEngine):
    """Engine with transformers' loop, in closed batches, if `supports_drafts` is false. Rows share a random stream."""

    def _keywords(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        return gemma_keywords(self._model, settings)

    def submit(self, request: Request) -> None:
        """Queue a request. Raises RowError for a prompt that the model cannot continue."""
        if request.constraint is not None:
            raise SettingError("constraint", "transformers' loop for DiffusionGemma cannot keep it")
        own = self._given if request.gen_length is None else {**self._given, "max_new_tokens": request.gen_length}
        check_gemma_prompt(self._model, request.prompt, own, request.name)
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
    """Continue prompts [B, P], padded on the left, with `mask` 1 at real tokens.

    Args:
        streamer: as for transformers' `generate`; its `put_draft` is called like `GemmaEngine.on_draft`.

    Raises:
        SettingError: the sampler does not have the setting, or its value is invalid.
        RowError: the model cannot continue a prompt.
        NonFiniteError: logits are NaN or infinite.
    """
    given = gemma_keywords(model, settings)
    prompts = rows_of(input_ids, mask)
    # A streamer of several rows needs them in step, as in transformers' loop.
    if not supports_drafts(model, given) or (streamer is not None and len(prompts) > 1):
        return gemma_loop(model, tokenizer, input_ids, mask, settings, streamer)
    copies, seed = given.pop("num_return_sequences", 1), given.pop("seed", None)
    if streamer is not None and copies > 1:
        raise SettingError("streamer", f"shows one text: it excludes `num_return_sequences={copies}`")
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
    padding = given.get("pad_token_id", (given["eos_token_id"] or [0])[0])  # after an end token
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
    """`sample_drafts` by transformers' loop."""
    given = gemma_keywords(model, settings)
    for number, prompt in enumerate(rows_of(input_ids, mask)):
        check_gemma_prompt(model, prompt, given, number)
    seed = given.pop("seed", None)
    # Count the decoder's forward passes, without the encoder's (one per draft).
    counted = unwrapped(model).model.decoder
    return run_generate(model, counted, _generate, tokenizer, input_ids, mask, given, seed, streamer)


def _generate(model: Any, input_ids: torch.Tensor, mask: torch.Tensor, given: Mapping[str, Any]) -> torch.Tensor:
    """[B, P + new] tokens. The last draft is cut at `max_new_tokens`."""
    own = dict(given)
    for name in ("tokenizer", "stop_strings"):  # the caller cuts texts at stop strings
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
    """Warn about drafts of another length than in training."""
    trained = model.config.canvas_length
    if length not in (None, trained):
        logger.warning(
            f"block_length {length}: the model was trained with drafts of {trained} tokens (canvas_length in its "
            "config.json)"
        )


@contextmanager
def _drafts_of(model: Any, length: int | None) -> Iterator[None]:
    """Context manager that changes the length of the model's drafts."""
    warn_of_another_length(model, length)
    trained = model.config.canvas_length
    model.config.canvas_length = length or trained
    try:
        yield
    finally:
        model.config.canvas_length = trained


# ---- KV cache of the encoder.

Pair = tuple[torch.Tensor, torch.Tensor]  # keys and values


@dataclass
class EncodedPrompt:
    """Cached keys and values of one row."""

    length: int = 0  # number of tokens that the encoder has read
    kept: list[Pair] = field(default_factory=list)  # [H, K, D] per layer, of the last K tokens


def cache_of(tower: Any, cache: Any) -> dict[str, Any]:
    """Keyword argument for the cache of transformers' encoder, decoder or model: `cache` from 5.24 on."""
    name = "cache" if "cache" in inspect.signature(tower.forward).parameters else "past_key_values"
    return {name: cache}


@dataclass
class _Layer:
    """Keys and values [A, H, K, D], padded on the right, with the attribute names of transformers' cache layers."""

    keys: torch.Tensor
    values: torch.Tensor


class EncoderCache:
    """KV cache of the rows that the encoder or the decoder runs on."""

    is_compileable = False  # transformers' decoder then appends the draft's keys to a layer's

    def __init__(self, model: Any) -> None:
        self._encoder = model.model.encoder
        self._config = model.config.text_config
        embedding = model.model.decoder.embed_tokens.weight
        self._device, self.dtype = embedding.device, embedding.dtype
        self._additive = model.model.decoder.config._attn_implementation == "eager"
        self.layers: list[_Layer] = []
        self.masks: dict[str, torch.Tensor | None] = {}  # by layer type
        self.positions = torch.empty(0)  # [A, Q], of the drafts

    @torch.no_grad()
    def read(self, rows: Sequence[EncodedPrompt], tokens: Sequence[list[int]]) -> None:
        """Run the encoder over new tokens of the rows, which may differ in number."""
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
        """Prepare the cache for the decoder, with drafts of `length` tokens after these rows."""
        self._lay_out(rows)
        for place, row in enumerate(rows):  # views, which need no memory
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
        """Append the encoder's new keys and values to those of a layer, as transformers' caches do."""
        if layer == len(self.layers):  # the first tokens of the rows
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
        """Number of cached tokens for a row of `length` tokens, by layer type."""
        windows = {kind: self._window(kind) for kind in self._kinds}
        return {kind: length if window is None else min(length, window - 1) for kind, window in windows.items()}

    def _lay_out(self, rows: Sequence[EncodedPrompt]) -> None:
        """Set `layers` to the rows' cached keys and values, padded; to an empty list without any."""
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
        """Keys and values that a layer keeps of a row: the last of `held` old columns and of the `new` ones, which
        start at column `width`."""
        last = self._kept(row.length)[kind]

        def kept(whole: torch.Tensor) -> torch.Tensor:
            own = torch.cat([whole[place, :, :held], whole[place, :, width : width + new]], dim=1)
            return own[:, own.shape[1] - last :]

        return kept(layer.keys), kept(layer.values)

    def _causal(self, width: int, held: list[int], kind: str) -> torch.Tensor:
        """[G, 1, N, K + N] mask of the cached and the new columns that each new token attends to."""
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
        """[A, 1, Q, K + Q] mask: a draft attends to its row's cached columns and to itself; None: to all columns."""
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
    """Resolved settings of the sampler. A draft has `length` tokens."""

    length: int
    vocabulary: int
    steps: int
    bound: float
    t_min: float
    t_max: float
    stability: int | None  # None: a draft takes all its steps
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
    """A request with its committed text."""

    request: Request
    text: list[int]  # prompt and committed drafts
    new_tokens: int  # maximum
    seed: int
    place: int = 0  # row of the noise
    new: list[int] = field(default_factory=list)
    encoded: EncodedPrompt = field(default_factory=EncodedPrompt)
    forwards: int = 0

    def unread(self) -> list[int]:
        return self.text[self.encoded.length :]

    def commit(self, draft: list[int], settings: _Settings) -> bool:
        """Append a draft to the text. Returns True if it has an end token or completes the length."""
        end = next((place for place, token in enumerate(draft) if token in settings.ends), None)
        self.text += draft
        self.new += draft if end is None else draft[: end + 1]
        missing = self.new_tokens - len(self.new)
        self.new = self.new[: self.new_tokens]
        return end is not None or missing <= 0


_PER_ROW = ("tokens", "best", "history", "left", "conditioned")


@dataclass
class _Drafts:
    """Drafts of A rows, of Q tokens each, and the state for their next step."""

    tokens: torch.Tensor  # [A, Q]
    best: torch.Tensor  # [A, Q], most probable tokens after the last step
    history: torch.Tensor  # [A, stability, Q], `best` of earlier steps; -1: none
    left: torch.Tensor  # [A] int32, remaining steps
    logits: torch.Tensor | None  # [A, Q, V] of the last step, divided by its temperature; None before the first one
    conditioned: torch.Tensor  # [A] bool, True after a row's first step
    dtype: torch.dtype  # of the logits that condition the decoder

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
        """Concatenation with drafts that have not taken a step."""
        parts = {name: torch.cat([getattr(self, name), getattr(others, name)]) for name in _PER_ROW}
        logits = self.logits
        if logits is not None:
            logits = torch.cat([logits, logits.new_zeros(len(others.tokens), *logits.shape[1:])])
        return _Drafts(**parts, logits=logits, dtype=self.dtype)

    def selected(self, places: list[int]) -> _Drafts | None:
        """Drafts of the rows at these places; None if there are none."""
        if not places:
            return None
        places_A = to_device(places, self.tokens.device)
        parts = {name: getattr(self, name)[places_A] for name in _PER_ROW}
        return _Drafts(**parts, logits=None if self.logits is None else self.logits[places_A], dtype=self.dtype)

    def denoise(
        self, logits_AQV: torch.Tensor, rows: Sequence[_Row], noise: Noise, settings: _Settings
    ) -> torch.Tensor:
        """Take a step in place. Returns [A, 2] bool: ended drafts, and drafts with non-finite logits."""
        temperature_A = settings.t_min + (settings.t_max - settings.t_min) * (self.left / settings.steps)
        logits_AQV = logits_AQV / temperature_A[:, None, None]
        highest_AQ, self.best = logits_AQV.max(dim=-1)
        constraints = [row.request.constraint for row in rows]
        if (constraint := next(filter(None, constraints), None)) is not None:
            texts, lengths = [row.new for row in rows], [row.new_tokens for row in rows]
            self.best = constraint.draft(constraints, texts, lengths, logits_AQV, self.best)
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
    """float64 [A, Q], the rows' next random numbers on (0, 1)."""
    places_AQ = torch.arange(settings.length, device=noise.device).expand(len(rows), -1)
    return noise.uniform([row.place for row in rows], places_AQ)


def _random_tokens(rows: Sequence[_Row], noise: Noise, settings: _Settings) -> torch.Tensor:
    """[A, Q] uniformly random tokens."""
    return random_tokens(_uniform(rows, noise, settings), settings.vocabulary, mask_token_id=-1)

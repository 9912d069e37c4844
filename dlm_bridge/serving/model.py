"""The served model: requests become rows, rows become texts."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.generation.samplers import SpecialTokens
from dlm_bridge.generation.settings import eos_token_ids, resolve_settings
from dlm_bridge.generation.texts import NEW_TOKENS, check_prompts, encode_chat, encode_text, write_texts
from dlm_bridge.generation.token_sampling import row_seeds
from dlm_bridge.loading import LoadedModel
from dlm_bridge.serving.protocol import RequestError, TextRequest
from dlm_bridge.serving.scheduler import Committed, Ended, Row, RowEvent, Scheduler

CONVERSATION = "the conversation"  # its name in errors
LENGTHS = ("gen_length", "max_new_tokens", "max_length")  # settings that say how many new tokens


@dataclass(frozen=True)
class ServedModel:
    """A model, its tokenizer, and what the server says of them.

    Args:
        name: of the model in answers.
        defaults: settings of requests that do not name them.
        max_length: tokens of a prompt and its new ones together, at most; None: what the model was made for.
    """

    loaded: LoadedModel
    name: str
    defaults: Mapping[str, Any]
    max_length: int | None = None

    def check(self) -> None:
        """Raise DlmBridgeError where the model cannot be sampled from, or with the defaults."""
        settings = dict(self.defaults)
        if not self.loaded.diffusion:
            settings.setdefault("gen_length", 1)
        check_prompts(self.loaded.model, [(self.name, [0])], settings, diffusion=self.loaded.diffusion)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of new tokens, without special ones."""
        return str(self.loaded.tokenizer.decode(list(tokens), skip_special_tokens=True))

    def ends(self, settings: Mapping[str, Any]) -> frozenset[int]:
        """The tokens that end a row."""
        model = self.loaded.model
        if self.loaded.diffusion:
            return frozenset(resolve_settings(model, None, settings, prompt_width=1).eos_token_ids)
        return frozenset(eos_token_ids(settings.get("eos_token_id", model.generation_config.eos_token_id)))

    def rows(self, request: TextRequest, listen: Callable[[int], Callable[[RowEvent], None]]) -> list[Row]:
        """The rows of a request, checked; `listen` gives the listener of a choice. Raises RequestError."""
        try:
            return self._rows(request, listen)
        except DlmBridgeError as error:
            raise RequestError(str(error)) from error

    def _rows(self, request: TextRequest, listen: Callable[[int], Callable[[RowEvent], None]]) -> list[Row]:
        settings = {**self.defaults, **request.settings}
        prompts = self._prompts(request)
        names = [f"prompt[{number}]" for number in range(len(prompts))]
        if len(prompts) == 1:
            names = [CONVERSATION if request.chat else "the prompt"]
        lengths = [self._settled(prompt, name, settings) for prompt, name in zip(prompts, names, strict=True)]
        seed = request.seed if request.seed is not None else self._stored_seed(settings)
        copies = [(prompt, own) for prompt, own in zip(prompts, lengths, strict=True) for _ in range(request.choices)]
        seeds = self._seeds(seed, [prompt for prompt, _ in copies])
        rows = []
        for index, ((prompt, own), row_seed) in enumerate(zip(copies, seeds, strict=True)):
            group = json.dumps(own, sort_keys=True)
            if row_seed is not None and not self.loaded.diffusion:
                group = f"{group} {secrets.token_hex(8)}"  # transformers draws for a batch from one stream
            rows.append(Row(tuple(prompt), own, row_seed, group, listen(index)))
        return rows

    def _prompts(self, request: TextRequest) -> list[list[int]]:
        tokenizer = self.loaded.tokenizer
        if request.chat:
            return [encode_chat(tokenizer, request.messages, self.name)]
        return [encode_text(tokenizer, one) if isinstance(one, str) else list(one) for one in request.prompts]

    def _settled(self, prompt: list[int], name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The settings of a prompt's rows, with the number of new tokens as `gen_length`. Raises DlmBridgeError or
        RequestError."""
        model, diffusion = self.loaded.model, self.loaded.diffusion
        given = {key: value for key, value in settings.items() if key not in LENGTHS}
        new: Any
        named = [settings[key] for key in ("gen_length", "max_new_tokens") if settings.get(key) is not None]
        if diffusion:
            found = resolve_settings(model, None, settings, prompt_width=len(prompt))
            found.sampler.spec(SpecialTokens(found.pad_token_id, found.eos_token_ids, found.end_token_ids))
            new, context = found.limits.gen_length, found.limits.context
        else:
            new = named[0] if named else getattr(model.generation_config, "max_new_tokens", None) or NEW_TOKENS
            context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        limit = min((one for one in (context, self.max_length) if one is not None), default=None)
        if limit is not None and not diffusion and not named:
            new = min(new, max(limit - len(prompt), 1))  # as far as there is room
        own = {**given, "gen_length": new}
        if limit is not None and isinstance(new, int) and len(prompt) + new > limit:
            raise RequestError(
                f"{name} has {len(prompt)} tokens; with {new} new ones (max_tokens) that is {len(prompt) + new}, "
                f"above the limit of {limit}",
                param="messages" if name == CONVERSATION else "prompt",
                code="context_length_exceeded",
            )
        check_prompts(model, [(name, prompt)], own, diffusion=diffusion)
        return own

    def _stored_seed(self, settings: Mapping[str, Any]) -> int | None:
        if not self.loaded.diffusion:
            return None
        return resolve_settings(self.loaded.model, None, settings, prompt_width=1).seed

    def _seeds(self, seed: int | None, prompts: list[list[int]]) -> list[int | None]:
        """Of each row. Those of a diffusion model are as `generate` with this seed has them."""
        if self.loaded.diffusion:
            return list(row_seeds(secrets.randbits(62) if seed is None else seed, prompts))
        return [None if seed is None else seed + number for number in range(len(prompts))]


class AbandonedError(Exception):
    """Nobody waits for any row of the batch."""


class ClosedBatches:
    """Samples rows in closed batches."""

    def __init__(self, served: ServedModel) -> None:
        self._served = served

    def run(self, rows: Sequence[Row], scheduler: Scheduler) -> None:
        loaded = self._served.loaded
        settings = dict(rows[0].settings)
        seeds: list[int] | None = None
        if loaded.diffusion:
            seeds = [row.seed or 0 for row in rows]
        else:
            settings["seed"] = secrets.randbits(62) if rows[0].seed is None else rows[0].seed
        ends = self._served.ends(settings)
        watch = _Watch(rows, ends, scheduler)
        prompts = [row.prompt for row in rows]
        try:
            found = write_texts(
                loaded.model,
                loaded.tokenizer,
                prompts,
                settings,
                diffusion=loaded.diffusion,
                streamer=watch,
                seeds=seeds,
            )
        except AbandonedError:
            return
        scheduler.forwards += found.forwards
        for row, tokens in zip(rows, found.token_ids, strict=True):
            stopped = len(tokens) < settings["gen_length"] or bool(ends & set(tokens[-1:]))
            scheduler.tell(row, Ended(tokens, stopped))


class _Watch:
    """A step callback and a streamer that tells the rows of a batch what is committed."""

    def __init__(self, rows: Sequence[Row], ends: frozenset[int], scheduler: Scheduler) -> None:
        self._rows, self._ends, self._scheduler = rows, ends, scheduler
        self._width = max(len(row.prompt) for row in rows)
        self._final: list[tuple[int, ...]] = [() for _ in rows]
        self._prompts_came = False

    def on_step(self, step: Any) -> None:
        if all(row.cancelled for row in self._rows):
            raise AbandonedError
        tokens, committed = step.tokens[:, self._width :].tolist(), step.committed[:, self._width :].tolist()
        for number, row in enumerate(self._rows):
            places = tuple(place for place, is_new in enumerate(committed[number]) if is_new)
            if places:
                new = tuple(tokens[number][place] for place in places)
                self._scheduler.tell(row, Committed(step.forwards, places, new, self._final[number]))

    def put(self, value: torch.Tensor) -> None:
        if not self._prompts_came:
            self._prompts_came = True
            return
        if all(row.cancelled for row in self._rows):
            raise AbandonedError
        for number, (row, tokens) in enumerate(zip(self._rows, value.view(len(self._rows), -1).tolist(), strict=True)):
            for token in tokens:
                if not self._ends & set(self._final[number][-1:]):  # behind the end is padding
                    self._final[number] += (token,)
            self._scheduler.tell(row, Committed(0, (), (), self._final[number]))

    def end(self) -> None:
        pass

"""What samples the rows: closed batches of `generate`."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import torch

from dlm_bridge.generation.callbacks import DenoisingStep
from dlm_bridge.generation.settings import eos_token_ids, resolve_settings
from dlm_bridge.generation.texts import write_texts
from dlm_bridge.serving.model import ServedModel
from dlm_bridge.serving.scheduler import Committed, Ended, Extended, Row, RowSampler, Scheduler


def row_sampler(served: ServedModel) -> RowSampler:
    """What samples the model's rows."""
    return ClosedBatches(served)


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
            ends = frozenset(resolve_settings(loaded.model, None, settings, prompt_width=1).eos_token_ids)
        else:
            settings["seed"] = secrets.randbits(62) if rows[0].seed is None else rows[0].seed
            ends = frozenset(eos_token_ids(settings.get("eos_token_id", loaded.model.generation_config.eos_token_id)))
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


class AbandonedError(Exception):
    """Nobody waits for any row of the batch."""


class _Watch:
    """A step callback and a streamer that tells the rows of a batch their tokens."""

    def __init__(self, rows: Sequence[Row], ends: frozenset[int], scheduler: Scheduler) -> None:
        self._rows, self._ends, self._scheduler = rows, ends, scheduler
        self._open = dict(enumerate(rows))
        self._width = max(len(row.prompt) for row in rows)
        self._prompts_came = False

    def on_step(self, step: DenoisingStep) -> None:
        if all(row.cancelled for row in self._rows):
            raise AbandonedError
        tokens, committed = step.tokens[:, self._width :].tolist(), step.committed[:, self._width :].tolist()
        for row, own, fresh in zip(self._rows, tokens, committed, strict=True):
            places = tuple(place for place, is_fresh in enumerate(fresh) if is_fresh)
            if places:
                self._scheduler.tell(row, Committed(step.forwards, places, tuple(own[place] for place in places)))

    def put(self, value: torch.Tensor) -> None:
        if not self._prompts_came:
            self._prompts_came = True
            return
        if all(row.cancelled for row in self._rows):
            raise AbandonedError
        runs = value.view(len(self._rows), -1).tolist()
        for number, row in list(self._open.items()):
            run = runs[number]
            end = next((place for place, token in enumerate(run) if token in self._ends), None)
            self._scheduler.tell(row, Extended(tuple(run if end is None else run[: end + 1])))
            if end is not None:
                del self._open[number]  # behind it is padding

    def end(self) -> None:
        """There is nothing left to tell."""

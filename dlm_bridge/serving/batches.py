"""What samples the rows: continuous batches for diffusion models, closed ones for autoregressive models."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import count
from typing import Any, Protocol

import torch

from dlm_bridge.errors import DlmBridgeError, NonFiniteError
from dlm_bridge.generation.batching import ContinuousBatch, RowCommits, RowEnded, RowFailed, RowRequest, RowTokens
from dlm_bridge.generation.canvas_batch import CanvasBatch, CanvasTokens
from dlm_bridge.generation.native import end_tokens, native_settings
from dlm_bridge.generation.texts import stop_condition, write_texts
from dlm_bridge.serving.model import ServedModel
from dlm_bridge.serving.scheduler import Committed, Ended, Extended, Failed, Row, RowEvent, RowSampler, Scheduler


def row_sampler(served: ServedModel) -> RowSampler:
    """What samples the model's rows."""
    return SampledRows(served)


class SampledRows:
    """Samples the rows of a group in the kind of batch that their settings allow."""

    def __init__(self, served: ServedModel) -> None:
        self._served = served

    def run(self, rows: Sequence[Row], scheduler: Scheduler) -> None:
        served = self._served
        if not served.continuous(rows[0].settings):
            AutoregressiveRows(served).run(rows, scheduler)
            return
        settings = {name: value for name, value in rows[0].settings.items() if name != "gen_length"}
        kind = _DiffusionBatch if served.loaded.diffusion else _CanvasBatch
        run_continuously(kind(served, settings, scheduler.batch_size), rows, scheduler)


class RowBatch(Protocol):
    """A batch that rows enter while it runs, and leave when they end."""

    @property
    def forwards(self) -> int:
        """Forward passes of the model."""

    def submit(self, name: int, row: Row) -> None:
        """Add a row under this name. Raises DlmBridgeError for one that cannot be sampled."""

    def advance(self) -> Iterator[tuple[int, RowEvent]]:
        """Run a step; what has happened to the rows of these names."""

    def cancel(self, names: Collection[int]) -> None:
        """Drop these rows, of which nothing more is told."""

    def close(self) -> None:
        """Let others use the model."""


def run_continuously(batch: RowBatch, rows: Sequence[Row], scheduler: Scheduler) -> None:
    """Sample the rows, and those of their group that arrive later, until none is left."""
    group, names, running = rows[0].group, count(), dict[int, Row]()
    entering = list(rows)
    try:
        while entering or running:
            for row in entering:
                name = next(names)
                try:
                    batch.submit(name, row)
                    running[name] = row
                except DlmBridgeError as error:
                    scheduler.tell(row, Failed(error))
            for name, event in batch.advance():
                row = running.pop(name) if isinstance(event, Ended | Failed) else running[name]
                scheduler.tell(row, event)
            cancelled = [name for name, row in running.items() if row.cancelled]
            if cancelled:
                batch.cancel(cancelled)
            for name in cancelled:
                scheduler.drop(running.pop(name))
            entering = scheduler.take(group, scheduler.batch_size - len(running))
    finally:
        batch.close()
        scheduler.forwards += batch.forwards


class _DiffusionBatch:
    """Rows of a diffusion model of ours."""

    def __init__(self, served: ServedModel, settings: Mapping[str, Any], rows: int) -> None:
        loaded = served.loaded
        own = {**settings, "tokenizer": loaded.tokenizer}
        self._batch = ContinuousBatch(loaded.model, own, max_rows=rows, max_length=served.limit)

    @property
    def forwards(self) -> int:
        return self._batch.forwards

    def submit(self, name: int, row: Row) -> None:
        self._batch.submit(RowRequest(name, row.prompt, row.settings["gen_length"], row.seed, live=row.live))

    def advance(self) -> Iterator[tuple[int, RowEvent]]:
        for event in self._batch.advance():
            if isinstance(event, RowCommits):
                yield event.name, Committed(event.step, event.places, event.tokens)
            elif isinstance(event, RowTokens):
                yield event.name, Extended(event.tokens)
            elif isinstance(event, RowEnded):
                yield event.name, Ended(event.tokens, stopped=event.finish_reason == "stop")
            else:
                yield event.name, Failed(event.error)

    def cancel(self, names: Collection[int]) -> None:
        for name in names:
            self._batch.cancel(name)

    def close(self) -> None:
        self._batch.close()


class _CanvasBatch:
    """Rows of DiffusionGemma. A row that a stop string ends leaves with the canvas that holds it."""

    def __init__(self, served: ServedModel, settings: Mapping[str, Any], rows: int) -> None:
        model = served.loaded.model
        self._batch = CanvasBatch(model, native_settings(model, settings), rows)
        self._stop = stop_condition(model, served.loaded.tokenizer, settings)
        self._tokens: dict[int, list[int]] = {}

    @property
    def forwards(self) -> int:
        return self._batch.forwards

    def submit(self, name: int, row: Row) -> None:
        seed = secrets.randbits(62) if row.seed is None else row.seed
        self._batch.submit(name, row.prompt, seed, row.settings["gen_length"])
        self._tokens[name] = []

    def advance(self) -> Iterator[tuple[int, RowEvent]]:
        for event in self._batch.advance():
            if isinstance(event, RowFailed):
                del self._tokens[event.name]
                yield event.name, Failed(event.error)
                continue
            tokens = self._tokens.get(event.number)
            if tokens is None:  # a stop string has ended it
                continue
            if isinstance(event, CanvasTokens):
                before = len(tokens)
                tokens += event.tokens
                end = self._stop.end_of(tokens)
                if end is not None:
                    del tokens[end:]
                new = tuple(tokens[before:])
                yield event.number, Committed(event.forwards, tuple(range(before, len(tokens))), new)
                yield event.number, Extended(new)
                if end is None:
                    continue
                self.cancel([event.number])
            self._tokens.pop(event.number, None)
            yield event.number, Ended(tuple(tokens), stopped=self._stop.end_of(tokens) is not None)

    def cancel(self, names: Collection[int]) -> None:
        self._batch.cancel(names)
        for name in names:
            self._tokens.pop(name, None)

    def close(self) -> None:
        """The model is nobody's."""


class AutoregressiveRows:
    """Samples rows in closed batches, by transformers' `generate`: autoregressive models, and DiffusionGemma where
    `CanvasBatch` cannot."""

    def __init__(self, served: ServedModel) -> None:
        self._served = served

    def run(self, rows: Sequence[Row], scheduler: Scheduler) -> None:
        loaded = self._served.loaded
        settings = dict(rows[0].settings)
        seed = secrets.randbits(62) if rows[0].seed is None else rows[0].seed
        settings["seed"] = [seed] if len(rows) == 1 else seed  # a row's own
        ends = frozenset(end_tokens(loaded.model, settings))
        watch = _Watch(rows, ends, scheduler)
        prompts = [row.prompt for row in rows]
        try:
            found = write_texts(loaded.model, loaded.tokenizer, prompts, settings, diffusion=False, streamer=watch)
        except AbandonedError:
            return
        scheduler.forwards += found.forwards
        for number, (row, tokens) in enumerate(zip(rows, found.token_ids, strict=True)):
            if number in watch.failed:
                continue
            stopped = len(tokens) < settings["gen_length"] or bool(ends & set(tokens[-1:]))
            scheduler.tell(row, Ended(tokens, stopped))


class AbandonedError(Exception):
    """Nobody waits for any row of the batch."""


class _Watch:
    """A streamer of transformers that tells the rows of a batch their tokens."""

    def __init__(self, rows: Sequence[Row], ends: frozenset[int], scheduler: Scheduler) -> None:
        self._rows, self._ends, self._scheduler = rows, ends, scheduler
        self._open = dict(enumerate(rows))
        self._told = [0] * len(rows)  # how many tokens
        self._prompts_came = False
        self.failed: set[int] = set()  # rows whose logits were NaN

    def put(self, value: torch.Tensor) -> None:
        if not self._prompts_came:
            self._prompts_came = True
            return
        if all(row.cancelled or number in self.failed for number, row in enumerate(self._rows)):
            raise AbandonedError
        rows: list[list[int]] = value.reshape(len(self._rows), -1).tolist()  # a token of each, or a canvas
        for number, row in list(self._open.items()):
            tokens = rows[number][: row.settings["gen_length"] - self._told[number]]
            end = next((place for place, token in enumerate(tokens) if token in self._ends), None)
            if end is not None:
                del self._open[number]  # behind it is padding
                tokens = tokens[: end + 1]
            self._told[number] += len(tokens)
            if tokens:
                self._scheduler.tell(row, Extended(tuple(tokens)))

    def fail(self, numbers: Sequence[int]) -> None:
        """These rows have NaN for logits, perhaps behind their end."""
        for number in numbers:
            if (row := self._open.pop(number, None)) is not None:
                self.failed.add(number)
                self._scheduler.tell(row, Failed(NonFiniteError()))

    def end(self) -> None:
        """There is nothing left to tell."""

"""What samples the rows: continuous batching for diffusion models, closed batches for autoregressive ones."""

from __future__ import annotations

import secrets
from collections.abc import Hashable, Sequence
from itertools import count

import torch

from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.generation.batching import ContinuousBatch, RowCommits, RowEnded, RowRequest, RowTokens
from dlm_bridge.generation.native import end_tokens
from dlm_bridge.generation.texts import write_texts
from dlm_bridge.serving.model import ServedModel
from dlm_bridge.serving.scheduler import Committed, Ended, Extended, Failed, Row, RowSampler, Scheduler


def row_sampler(served: ServedModel) -> RowSampler:
    """What samples the model's rows."""
    return DiffusionRows(served) if served.loaded.diffusion else AutoregressiveRows(served)


class DiffusionRows:
    """Samples rows in a continuous batch: they enter it while it runs, and leave it when they end."""

    def __init__(self, served: ServedModel) -> None:
        self._served = served

    def run(self, rows: Sequence[Row], scheduler: Scheduler) -> None:
        loaded, group = self._served.loaded, rows[0].group
        settings = {name: value for name, value in rows[0].settings.items() if name != "gen_length"}
        batch = ContinuousBatch(
            loaded.model,
            {**settings, "tokenizer": loaded.tokenizer},
            max_rows=scheduler.batch_size,
            max_length=self._served.limit,
        )
        names, running = count(), dict[Hashable, Row]()
        entering = list(rows)
        try:
            while entering or running:
                for row in entering:
                    self._submit(batch, row, next(names), running, scheduler)
                for event in batch.advance():
                    row = running[event.name]
                    if isinstance(event, RowCommits):
                        scheduler.tell(row, Committed(event.step, event.places, event.tokens))
                    elif isinstance(event, RowTokens):
                        scheduler.tell(row, Extended(event.tokens))
                    else:
                        del running[event.name]
                        if isinstance(event, RowEnded):
                            scheduler.tell(row, Ended(event.tokens, stopped=event.finish_reason == "stop"))
                        else:
                            scheduler.tell(row, Failed(event.error))
                for name in [name for name, row in running.items() if row.cancelled]:
                    batch.cancel(name)
                    scheduler.drop(running.pop(name))
                entering = scheduler.take(group, scheduler.batch_size - len(running))
        finally:
            batch.close()
            scheduler.forwards += batch.forwards

    def _submit(
        self, batch: ContinuousBatch, row: Row, name: int, running: dict[Hashable, Row], scheduler: Scheduler
    ) -> None:
        try:
            batch.submit(RowRequest(name, row.prompt, row.settings["gen_length"], row.seed, live=row.live))
            running[name] = row
        except DlmBridgeError as error:
            scheduler.tell(row, Failed(error))


class AutoregressiveRows:
    """Samples rows in closed batches, by transformers' `generate`: autoregressive models, and DiffusionGemma."""

    def __init__(self, served: ServedModel) -> None:
        self._served = served

    def run(self, rows: Sequence[Row], scheduler: Scheduler) -> None:
        loaded = self._served.loaded
        settings = dict(rows[0].settings)
        settings["seed"] = secrets.randbits(62) if rows[0].seed is None else rows[0].seed
        ends = frozenset(end_tokens(loaded.model, settings))
        watch = _Watch(rows, ends, scheduler)
        prompts = [row.prompt for row in rows]
        try:
            found = write_texts(loaded.model, loaded.tokenizer, prompts, settings, diffusion=False, streamer=watch)
        except AbandonedError:
            return
        scheduler.forwards += found.forwards
        for row, tokens in zip(rows, found.token_ids, strict=True):
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

    def put(self, value: torch.Tensor) -> None:
        if not self._prompts_came:
            self._prompts_came = True
            return
        if all(row.cancelled for row in self._rows):
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

    def end(self) -> None:
        """There is nothing left to tell."""

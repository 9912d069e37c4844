"""The base class of every engine's trainer: the training loop, evaluation, checkpoints, metrics, and when to stop."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sized
from pathlib import Path
from typing import Any

from rich.console import Console

from dlm_bridge.train.config import TrainConfig
from dlm_bridge.train.metrics import MetricsFile, StepMetrics, TrainingProgress
from dlm_bridge.train.monitoring import TextSamples, Trackers

EVAL_BATCHES = 8  # an evaluation reads at most so many global batches, always the same


class TrainingLoop(abc.ABC):
    """One process's share of a run. The main process writes the metrics; all processes take every step together."""

    config: TrainConfig
    output: Path
    console: Console
    tokenizer: Any
    plain_model: Any  # the Hub-side model that is trained, without its wrappers
    valid: Sized  # validation blocks

    @property
    @abc.abstractmethod
    def main(self) -> bool:
        """Whether this process writes and shows what all of them share."""

    @abc.abstractmethod
    def step(self, step: int, want_stop: bool) -> tuple[StepMetrics, bool]:
        """One optimizer step, counted from 1: its figures, and whether any process wants to stop after it."""

    @abc.abstractmethod
    def evaluate(self) -> float:
        """The validation loss, over the same blocks with the same noise every time."""

    def start(self, step: int, want_stop: bool) -> tuple[Callable[[], StepMetrics], bool]:
        """As `step`, but the figures are asked for once they are needed: by default they are there at once. An engine
        whose device works on its own returns as soon as the device has the step's work."""
        row, stop = self.step(step, want_stop)
        return (lambda: row), stop

    def evaluated(self, row: StepMetrics) -> StepMetrics:
        """A step's figures with those of an evaluation after it."""
        return dataclasses.replace(row, eval_loss=self.evaluate())

    @abc.abstractmethod
    def save(self, step: int, metrics: MetricsFile | None) -> Path:
        """Write the checkpoint of `step`; the main process has the metrics."""

    def sample(self, samples: TextSamples, step: int) -> None:
        """Let the model write, as it is after `step`. All processes call it."""
        samples.write(step, self.plain_model)

    def run(self, step: int) -> Path:
        """Train from after `step` and return the last checkpoint's folder."""
        config = self.config
        metrics = MetricsFile(self.output / "metrics.jsonl", step) if self.main else None
        trackers = Trackers(config, self.output) if self.main and config.logging.trackers else None
        samples = None
        if config.logging.sample_interval:
            samples = TextSamples(config, self.tokenizer, self.output, step, self.main)
            if step == 0:  # to compare with, and a prompt that cannot be sampled ends the run before it began
                self.sample(samples, 0)
        deadline = (
            math.inf
            if config.schedule.exit_duration is None
            else time.monotonic() + 60 * config.schedule.exit_duration
        )
        with (
            catch_sigterm() as terminated,
            TrainingProgress(self.console, config.schedule.steps, step, self.main) as progress,
        ):

            def write(row: StepMetrics) -> None:
                if metrics is not None:
                    metrics.append(row)
                if trackers is not None:
                    trackers.log(row)
                progress.show(row)

            before: Callable[[], StepMetrics] | None = None  # the figures of a step that the device may still work on
            while True:
                step += 1
                try:
                    figures, stop = self.start(step, terminated.is_set() or time.monotonic() >= deadline)
                finally:
                    if before is not None:
                        write(before())
                        before = None
                last = stop or step == config.schedule.steps
                evaluates = bool(
                    len(self.valid)
                    and config.logging.eval_interval
                    and (step % config.logging.eval_interval == 0 or last)
                )
                saves = (
                    last
                    or step in config.checkpoint.saves
                    or (config.checkpoint.save_interval and step % config.checkpoint.save_interval == 0)
                )
                samples_now = samples is not None and (step % config.logging.sample_interval == 0 or last)
                if not (evaluates or saves or samples_now):
                    before = figures
                    continue
                row = figures()
                write(self.evaluated(row) if evaluates else row)
                if samples is not None and samples_now:
                    self.sample(samples, step)
                if saves:
                    folder = self.save(step, metrics)
                if last:
                    break
        if trackers is not None:
            trackers.close()
        if metrics is not None:
            metrics.close()
            done = "done" if step == config.schedule.steps else f"stopped early (continue with --resume), step {step}"
            self.console.print(f"{done}: the model is at {folder}", highlight=False, soft_wrap=True)
        return folder


@contextlib.contextmanager
def catch_sigterm() -> Iterator[threading.Event]:
    """An event that SIGTERM sets; outside the main thread, where handlers cannot be set, nobody sets it."""
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event
        return
    previous = signal.signal(signal.SIGTERM, lambda *_: event.set())
    try:
        yield event
    finally:
        signal.signal(signal.SIGTERM, previous)

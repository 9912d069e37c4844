"""What a person sees of a run: a progress bar on a terminal, now and then a line elsewhere."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from dlm_bridge.train.metrics import Row

LINE_EVERY = 15.0  # seconds


class TrainingProgress:
    """Use as a context manager; `enabled` on one process only."""

    def __init__(self, console: Console, steps: int, step: int, enabled: bool) -> None:
        self.console = console
        self.steps = steps
        self.enabled = enabled
        self.bar = Progress(
            TextColumn("[bold]training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not (enabled and console.is_terminal),
        )
        self.task = self.bar.add_task("training", total=steps, completed=step, figures="")
        self.last_line = 0.0

    def __enter__(self) -> TrainingProgress:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def show(self, row: Row) -> None:
        if not self.enabled:
            return
        figures = row.shown()
        self.bar.update(self.task, completed=row.step, figures=figures)
        now = time.monotonic()
        if not self.console.is_terminal and (
            row.step in (1, self.steps) or row.was_evaluated or now - self.last_line >= LINE_EVERY
        ):
            self.last_line = now
            self.console.print(f"step {row.step}/{self.steps}  {figures}", highlight=False)

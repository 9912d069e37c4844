"""Early stopping: the lowest validation loss of a run, its checkpoint, and the checkpoints that are kept."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass
class EarlyStopping:
    """Lowest validation loss of a run. It depends on the validations alone, so that a resumed run ends where an
    uninterrupted one does.

    Args:
        patience: number of validations without a lower loss after which the run ends.
        loss: lowest loss so far.
        step: step of that loss, 0 before the first validation.
        previous: step of the lowest loss before it.
        waited: number of validations since.
    """

    patience: int
    loss: float = math.inf
    step: int = 0
    previous: int = 0
    waited: int = 0

    def add(self, step: int, loss: float) -> bool:
        """Add the validation of a step. Returns True if its loss is the lowest."""
        if not loss < self.loss:  # NaN is not lower either
            self.waited += 1
            return False
        self.loss, self.step, self.previous, self.waited = loss, step, self.step, 0
        return True

    def add_rows(self, rows: Iterable[dict[str, Any]]) -> None:
        """Add the validations of a run so far, rows of metrics.jsonl."""
        for row in rows:
            if (loss := row.get("eval_loss")) is not None:
                self.add(row["step"], loss)

    @property
    def ends(self) -> bool:
        """True if the run ends."""
        return self.waited >= self.patience


@dataclass(frozen=True)
class KeptCheckpoints:
    """Checkpoints that stay when a new one is complete.

    Args:
        newest: number of newest checkpoints; 0: all.
        best: step of the lowest validation loss, which stays too; 0: none.
        superseded: step of the best checkpoint before, which was saved for that reason only; 0: none.
    """

    newest: int = 0
    best: int = 0
    superseded: int = 0

    def removed(self, found: Sequence[tuple[int, Path]]) -> list[Path]:
        """Folders to remove of all (step, folder) of a run, oldest first."""
        old = found[: -self.newest] if self.newest else ()
        return [
            folder
            for step, folder in found
            if step != self.best and (step == self.superseded or (step, folder) in old)
        ]

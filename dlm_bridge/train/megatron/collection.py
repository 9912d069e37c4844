"""Python's cycle collector, at the same moment on every process: left alone each stops when it likes, and all the
others wait for it in their next collective."""

from __future__ import annotations

import gc

FULL_EVERY = 100  # steps; the others go over the objects of late


class Collection:
    """Runs the collector between steps only, from the first step to `close`."""

    def __init__(self) -> None:
        self._steps: int | None = None  # since this took over

    def step(self) -> None:
        """Between two steps, while the device has work: cycles may hold memory of it."""
        if self._steps is None:
            if gc.isenabled():
                gc.collect()
                gc.freeze()  # the model stays
                gc.disable()
                self._steps = 0
            return
        self._steps += 1
        gc.collect(2 if self._steps % FULL_EVERY == 0 else 1)

    def close(self) -> None:
        """Let the collector run by itself again."""
        if self._steps is not None:
            gc.unfreeze()
            gc.enable()
            self._steps = None

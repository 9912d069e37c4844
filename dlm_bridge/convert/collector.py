"""Python's cycle collector, out of the way where objects are only made: its work grows faster than their number."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Without Python's cycle collector, which goes over all objects again and again while a plan only adds some."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()

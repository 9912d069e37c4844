"""Output of the command line besides its results: log messages, other packages' warnings, a line while a model loads.

As a library the package prints none of this: all of it begins with `set_verbosity`, which only the command line calls.
"""

from __future__ import annotations

import logging
import os
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from dlm_bridge.distributed import is_main

Verbosity = Literal["quiet", "normal", "verbose"]
VERBOSE_FLAGS = ("-v", "--verbose")
_OWN = "dlm_bridge"
# Verbosity of libraries whose loggers have handlers of their own, which they read when they are imported.
_LIBRARIES = ("TRANSFORMERS_VERBOSITY", "DATASETS_VERBOSITY", "HF_HUB_VERBOSITY")
_HIDDEN = "ignore::Warning"  # in the environment of processes that the command line starts
_verbosity: list[Verbosity] = []  # the command line's, if it runs
_loading: list[str] = []  # names of models that are being loaded
logger = logging.getLogger(__name__)


def silence_libraries() -> None:
    """Hide warnings of other packages here and in processes that are started, unless the user has set Python's own
    filters. Called before the first of them is imported, once per process of the command line."""
    inherited = os.environ.get("PYTHONWARNINGS") == _HIDDEN
    if (sys.warnoptions or "PYTHONWARNINGS" in os.environ) and not inherited:
        return
    os.environ["PYTHONWARNINGS"] = _HIDDEN
    warnings.simplefilter("ignore")
    warnings.filterwarnings("default", module=_OWN)
    warnings.filterwarnings("ignore", category=ResourceWarning)  # as Python does by default
    for name in _LIBRARIES:
        os.environ.setdefault(name, "error")


def set_verbosity(chosen: Verbosity) -> None:
    """Set which log messages are printed: of this package errors, warnings, or INFO too; of others errors, or with
    "verbose" warnings."""
    _verbosity[:] = [chosen]
    levels = {"quiet": logging.ERROR, "normal": logging.NOTSET, "verbose": logging.INFO}
    logging.getLogger(_OWN).setLevel(levels[chosen])
    last = logging.lastResort  # the handler of loggers without one
    if last is not None:
        last.setLevel(logging.INFO if chosen == "verbose" else logging.WARNING)
        last.filters[:] = [_is_shown]


def _is_shown(record: logging.LogRecord) -> bool:
    own = record.name.split(".")[0] == _OWN
    return own or record.levelno >= (logging.WARNING if verbosity() == "verbose" else logging.ERROR)


def verbosity() -> Verbosity | None:
    """The command line's verbosity; None in a process without it."""
    return _verbosity[0] if _verbosity else None


def is_quiet() -> bool:
    """True if only errors and results are printed."""
    return verbosity() == "quiet"


@contextmanager
def loading(name: str) -> Iterator[None]:
    """Context manager in which a model loads: a line with the time on stderr, if that is a terminal of the command
    line, and at its end a log message. A model that is loaded for another has no line of its own."""
    _loading.append(name)
    start = time.monotonic()
    try:
        with _line(name):
            yield
    finally:
        _loading.pop()
    logger.info(f"loaded {name} in {time.monotonic() - start:.1f} s")


@contextmanager
def _line(name: str) -> Iterator[None]:
    if len(_loading) > 1 or not _verbosity or is_quiet() or not (is_main() and sys.stderr.isatty()):
        yield
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("loading {task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        bar.add_task(escape(name))
        yield

"""Exceptions for bad input. Each message is one line that names the problem and the remedy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

_HEAD, _TAIL = 1000, 400  # characters kept of a long message: it begins with the problem and ends with the remedy


class DlmBridgeError(ValueError):
    """Bad usage or bad input. The command line prints the message and exits with code 2, without a traceback.

    The message may quote the contents of a file, so it is made `printable`, and a very long one loses its middle.
    """

    def __init__(self, message: str) -> None:
        super().__init__(shortened(message))


class WorkerKilledError(DlmBridgeError):
    """A worker process was killed. The results of the other processes are not lost."""


LOGITS = (
    "the model's logits are NaN or infinite: look for NaN in its weights, and at settings that change logits; float16 "
    "overflows where bfloat16 does not"
)


class RowError(DlmBridgeError):
    """An error that affects single rows; the others can go on.

    Args:
        reason: the problem and the remedy.
        rows: the affected rows, by index or name; empty if all are.
    """

    def __init__(self, reason: str, rows: Iterable[Any] = ()) -> None:
        self.reason, self.rows = reason, tuple(rows)
        names = [f"row {row}" if isinstance(row, int) else str(row) for row in self.rows]
        more = f" (and {len(names) - 3} more)" if len(names) > 3 else ""
        super().__init__(f"{', '.join(names[:3])}{more}: {reason}" if names else reason)


class NonFiniteError(RowError):
    """Logits, or values computed from them, are NaN or infinite; see `RowError`."""

    def __init__(self, reason: str = LOGITS, rows: Iterable[Any] = ()) -> None:
        super().__init__(reason, rows)


@contextmanager
def rows_named(name: Callable[[Any], Any]) -> Iterator[None]:
    """Context manager that renames the rows of a RowError."""
    try:
        yield
    except RowError as error:
        raise type(error)(error.reason, dict.fromkeys(map(name, error.rows))) from error


def shortened(text: str) -> str:
    """Make a text `printable`, and remove the middle of a very long one."""
    text = printable(text)
    return text if len(text) <= _HEAD + _TAIL else f"{text[:_HEAD]} ... {text[-_TAIL:]}"


def printable(text: str) -> str:
    """Escape control characters, which could control a terminal, and lone surrogates, which cannot be encoded."""
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() or each in " \n\t\u00a0" else each.encode("unicode_escape").decode()
        for each in text
    )


def one_line(error: BaseException) -> str:
    """Message of an exception on one line."""
    return " ".join(str(error).split()) or type(error).__name__


def first_of(names: Iterable[str]) -> str:
    """Format names as "a (and 3 more)"."""
    found = sorted(names)
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    return f"{found[0]}{more}"

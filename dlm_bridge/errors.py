"""The one exception for bad input: its message is one line that names the thing and the remedy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

_HEAD, _TAIL = 1000, 400  # characters of a message that is cut: what is wrong stands first, the remedy last


class DlmBridgeError(ValueError):
    """Bad usage or bad input. The command line prints the message and exits with code 2, without a traceback.

    The message may quote what a file holds: it is made `printable`, and what is far too long loses its middle.
    """

    def __init__(self, message: str) -> None:
        super().__init__(shortened(message))


class WorkerKilledError(DlmBridgeError):
    """A process was ended from outside; what the others have done is not lost."""


LOGITS = (
    "the model's logits are NaN or infinite: look for NaN in its weights, and at settings that change logits; float16 "
    "overflows where bfloat16 does not"
)


class RowError(DlmBridgeError):
    """An error of single rows: the others are not affected.

    Args:
        reason: what is wrong, and the remedy.
        rows: the rows concerned, by number or by name; none where all are.
    """

    def __init__(self, reason: str, rows: Iterable[Any] = ()) -> None:
        self.reason, self.rows = reason, tuple(rows)
        names = [f"row {row}" if isinstance(row, int) else str(row) for row in self.rows]
        more = f" (and {len(names) - 3} more)" if len(names) > 3 else ""
        super().__init__(f"{', '.join(names[:3])}{more}: {reason}" if names else reason)


class NonFiniteError(RowError):
    """Logits, or figures made of them, that are NaN or infinite; see `RowError`."""

    def __init__(self, reason: str = LOGITS, rows: Iterable[Any] = ()) -> None:
        super().__init__(reason, rows)


@contextmanager
def rows_named(name: Callable[[Any], Any]) -> Iterator[None]:
    """Context in which the rows of a RowError get other names."""
    try:
        yield
    except RowError as error:
        raise type(error)(error.reason, dict.fromkeys(map(name, error.rows))) from error


def shortened(text: str) -> str:
    """The text, `printable`, and where it is far too long without its middle."""
    text = printable(text)
    return text if len(text) <= _HEAD + _TAIL else f"{text[:_HEAD]} ... {text[-_TAIL:]}"


def printable(text: str) -> str:
    """The text with its control characters and lone surrogates escaped, which could drive a terminal or cannot be
    encoded."""
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() or each in " \n\t\u00a0" else each.encode("unicode_escape").decode()
        for each in text
    )


def one_line(error: BaseException) -> str:
    """An exception's message on one line."""
    return " ".join(str(error).split()) or type(error).__name__


def first_of(names: Iterable[str]) -> str:
    """ "a (and 3 more)": one line whatever the number of names."""
    found = sorted(names)
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    return f"{found[0]}{more}"

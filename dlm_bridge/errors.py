"""The one exception for bad input: its message is one line that names the thing and the remedy."""

from __future__ import annotations

from collections.abc import Iterable


class DlmBridgeError(ValueError):
    """Bad usage or bad input. The command line prints the message and exits with code 2, without a traceback."""


def one_line(error: BaseException) -> str:
    """An exception's message on one line."""
    return " ".join(str(error).split()) or type(error).__name__


def first_of(names: Iterable[str]) -> str:
    """ "a (and 3 more)": one line whatever the number of names."""
    found = sorted(names)
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    return f"{found[0]}{more}"

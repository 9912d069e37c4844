"""The errors that users meet. Callers distinguish them by class; `field` names what is at fault, `reason` says why.

```text
DlmBridgeError             base of all
├── SettingError           a setting's value is refused, or contradicts another's
├── LayoutError            the model or the batch does not fit the parallel layout
├── InputFileError         a file of data, prompts or settings is missing, unreadable or malformed
├── CheckpointError        a checkpoint is damaged, incomplete or of an unknown kind
├── ChangedTensorsError    tensors differ from the digests recorded when they were written
├── MissingExtraError      a package, a program or a device that the task needs is missing
├── ResourceError          not enough memory, disk space or time
├── WorkerError            another process was killed or does not answer
└── RowError               rows of a batch or of a file failed, the others can go on
    └── NonFiniteError     logits, a loss or a gradient are NaN or infinite
```
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

_HEAD, _TAIL = 1000, 400  # characters kept of a long message: it begins with the problem and ends with the remedy


class DlmBridgeError(ValueError):
    """Bad usage or bad input. The command line prints it on one line and exits with code 2, without a traceback.

    Both parts may quote the contents of a file, so they are made `printable`, and a very long one loses its middle.

    Args:
        field: what is at fault: the name of a setting as in Python (`seq_length`), a path, or the name of a tensor.
        reason: the problem and the remedy. It names other settings in backquotes, with a value or without:
            "`seq_length`", "`format=torch`"; the command line prints these as its flags.
    """

    def __init__(self, field: object, reason: str | None = None) -> None:
        if reason is None:  # torch's DataLoader makes a worker's error again from its text alone
            field, reason = None, str(field)
        self.field = shortened(str(field)) if field not in (None, "") else None
        self.reason = shortened(reason)
        super().__init__(self.field, self.reason)

    def __str__(self) -> str:
        return self.reason if self.field is None else f"{self.field}: {self.reason}"


class SettingError(DlmBridgeError):
    """A setting's value is refused, or contradicts another setting's. `field` is the setting."""


class LayoutError(DlmBridgeError):
    """The model or the batch does not fit the parallel layout. `field` is the setting to change, such as `tp`."""


class InputFileError(DlmBridgeError):
    """A file of data, prompts or settings is missing, unreadable or malformed. `field` is its path, with the line."""


class CheckpointError(DlmBridgeError):
    """A checkpoint or adapter is damaged, incomplete or of an unknown kind. `field` is its path."""


class ChangedTensorsError(DlmBridgeError):
    """Tensors or files (`names`) of a checkpoint differ from the digests recorded when they were written."""

    def __init__(self, field: object, names: Iterable[str]) -> None:
        self.names = sorted(names)
        super().__init__(
            field,
            f"differs from its recorded digests in {first_of(self.names, 3)}: restore what is damaged, or set "
            "`accept_changed_tensors` if it was changed on purpose",
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.field, self.names)


class MissingExtraError(DlmBridgeError):
    """A package, a program or a device is missing that a setting needs. `field` is the setting, or what is missing."""


class ResourceError(DlmBridgeError):
    """Not enough memory, disk space or time, or a disk that cannot be written. `field` is the setting or the path."""


class WorkerError(DlmBridgeError):
    """Another process of the task was killed or does not answer. Results that other processes finished are kept."""


LOGITS = (
    "the model's logits are NaN or infinite: look for NaN in its weights, and at settings that change logits; float16 "
    "overflows where bfloat16 does not"
)


class RowError(DlmBridgeError):
    """An error that affects single rows; the others can go on. `field` names up to three of them.

    Args:
        reason: the problem and the remedy.
        rows: the affected rows, by index or name; empty if all are.
    """

    def __init__(self, reason: str, rows: Iterable[Any] = ()) -> None:
        self.rows = tuple(rows)
        names = [f"row {row}" if isinstance(row, int) else str(row) for row in self.rows]
        super().__init__(_first(names, 3), reason)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.reason, self.rows)


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


def counted(number: int, one: str, many: str = "") -> str:
    """Number with its noun in singular or plural: "1 row", "1,024 rows", "2 copies". `many` is `one` + "s" unless
    given."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def one_line(error: BaseException) -> str:
    """Message of an exception on one line."""
    return " ".join(str(error).split()) or type(error).__name__


def first_of(names: Iterable[str], count: int = 1) -> str:
    """Format the first `count` names in alphabetical order, such as "a (and 3 more)"."""
    return _first(sorted(names), count)


def _first(names: Sequence[str], count: int) -> str:
    more = f" (and {len(names) - count} more)" if len(names) > count else ""
    return f"{', '.join(names[:count])}{more}"

"""What a test claims about an error: its class and the field that it names, never its wording."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import pytest

from dlm_bridge.errors import DlmBridgeError

E = TypeVar("E", bound=DlmBridgeError)


@contextmanager
def refused(kind: type[E], field: object = None, *named: str) -> Iterator[pytest.ExceptionInfo[E]]:
    """Expect an error of exactly this class, whose field is `field` (not compared if None) and whose message contains
    the values or settings `named`, such as the line of a file or the other setting of a contradiction."""
    with pytest.raises(kind) as raised:
        yield raised
    assert type(raised.value) is kind
    assert field is None or raised.value.field == str(field), raised.value
    for name in named:
        assert name in str(raised.value)


def hide(patch: pytest.MonkeyPatch, *packages: str) -> None:
    """Let these packages, and no others, look uninstalled to `importlib.util.find_spec`. A replacement that finds no
    package at all would leave an empty table of extensions behind, which is read once per process."""
    find = importlib.util.find_spec

    def find_spec(name: str, package: str | None = None) -> object:
        return None if name.partition(".")[0] in packages else find(name, package)

    patch.setattr(importlib.util, "find_spec", find_spec)

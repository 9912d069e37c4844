"""Other packages: the entry points through which they register families, samplers, objectives and platforms, and the
versions of those that this one stands on."""

from __future__ import annotations

import logging
import os
import re
from functools import cache
from importlib.metadata import PackageNotFoundError, entry_points, version
from typing import Any

from dlm_bridge.errors import one_line

logger = logging.getLogger(__name__)

# The oldest and the newest versions that the tests pass with, by distribution; Transformer Engine's on GPUs.
TESTED = {"torch": ("2.11", "2.15"), "transformers": ("5.23", "5.24"), "transformer-engine": ("2.20", "2.20")}


@cache
def load_entry_points(group: str) -> dict[str, Any]:
    """Objects that installed packages register under an entry point group, by entry point name.

    A group is loaded once per process. An entry point that fails to import is left out with a one-line warning that
    names its package.
    """
    loaded: dict[str, Any] = {}
    for point in entry_points(group=group):
        try:
            loaded[point.name] = point.load()
        except Exception as error:  # a foreign package may raise anything while it is imported
            package = point.dist.name if point.dist is not None else point.value
            cause = one_line(error)[:300]
            logger.warning(f"{package}: entry point '{point.name}' of {group} fails to import, left out: {cause}")
    return loaded


def untested(distribution: str) -> str | None:
    """A sentence about an installed distribution of `TESTED` that is older or newer than what was tested."""
    oldest, newest = TESTED[distribution]
    try:
        found = version(distribution)
    except PackageNotFoundError:
        return None
    if _minor(oldest) <= _minor(found) <= _minor(newest):
        return None
    tested = newest if oldest == newest else f"{oldest} to {newest}"
    return f"{distribution} {found} is untested: dlm-bridge was tested with {tested}"


@cache
def warn_if_untested(distribution: str) -> None:
    """Log `untested` once a process, on the first of a launcher's processes."""
    sentence = untested(distribution)
    if sentence is not None and os.environ.get("RANK", "0") == "0":
        logger.warning(sentence)


def _minor(found: str) -> tuple[int, ...]:
    """The first two numbers of a version."""
    return tuple(int(number) for number in re.findall(r"\d+", found)[:2])

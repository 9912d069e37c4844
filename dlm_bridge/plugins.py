"""Entry points through which other packages register families, samplers, objectives and platforms."""

from __future__ import annotations

import logging
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from dlm_bridge.errors import one_line

logger = logging.getLogger(__name__)


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

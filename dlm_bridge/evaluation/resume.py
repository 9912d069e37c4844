"""Finished parts of an interrupted evaluation, which a resumed one does not compute again."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

from dlm_bridge.files.partial import PartialOutput
from dlm_bridge.files.reading import bytes_digest
from dlm_bridge.replicas import Replicas


class FinishedParts:
    """Values of an evaluation by section (such as the texts of all requests) and index, written as they are computed.

    A section's name consists of its kind, a digest of its inputs, and a counter, so that it is the same in a resumed
    evaluation.
    """

    def __init__(
        self, partial: PartialOutput | None = None, known: Mapping[str, Mapping[int, Any]] | None = None
    ) -> None:
        self._partial, self._known = partial, known or {}
        self._counts = Counter[str]()

    @classmethod
    def open(cls, partial: PartialOutput, resume: bool, overwrite: bool, replicas: Replicas) -> FinishedParts:
        """Load the values of an interrupted evaluation, in all processes. Raises SettingError for values that would be
        lost, or of other settings."""
        known: dict[str, dict[int, Any]] = {}
        for rows in replicas.gather(partial.start(resume, overwrite)):
            for row in rows.values():
                known.setdefault(row["section"], {}).update((int(index), value) for index, value in row["values"])
        return cls(partial if replicas.leads_share else None, known)

    def section(self, kind: str, content: Any) -> tuple[str, Mapping[int, Any]]:
        """Return the name of the next section with this kind and content, and its known values."""
        name = f"{kind} {bytes_digest(json.dumps(content, sort_keys=True, default=str).encode())}"
        self._counts[name] += 1
        name = f"{name} {self._counts[name]}"
        return name, self._known.get(name, {})

    def add(self, section: str, values: Mapping[int, Any]) -> None:
        """Write the finite values of a section. Raises ResourceError for disk errors."""
        values = {index: value for index, value in values.items() if _is_finite(value)}
        if self._partial is not None and values:
            row = {"section": section, "values": list(values.items())}
            self._partial.add(f"{section} {min(values)}", row)


def _is_finite(value: Any) -> bool:
    """False for a log-likelihood that is NaN or infinite, alone or as the first of a pair."""
    figure = value[0] if isinstance(value, (list, tuple)) else value
    return not isinstance(figure, float) or math.isfinite(figure)

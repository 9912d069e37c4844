"""Animated page of a denoising trace: one self-contained HTML file."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping
from importlib import resources
from typing import Any

from dlm_bridge.generation.display.trace import DenoisingTrace


def page(film: DenoisingTrace, title: str, facts: Mapping[str, Any]) -> str:
    """The page's HTML; `facts` are shown below the text. Every text in it is escaped, and it loads nothing."""
    template = resources.files(__package__).joinpath("player.html").read_text("utf-8")
    facts_text = " \u00b7 ".join(f"{name} {value}" for name, value in facts.items())
    data = json.dumps(trace_data(film), ensure_ascii=False, separators=(",", ":"))
    # Inside a script element only these could end it or begin a comment; as JSON escapes they are the same text.
    for character in "<>&\u2028\u2029":
        data = data.replace(character, f"\\u{ord(character):04x}")
    values = {"title": html.escape(title), "facts": html.escape(facts_text), "film": data}
    return re.sub(r"\{\{(title|facts|film)\}\}", lambda place: values[place[1]], template)


def trace_data(film: DenoisingTrace) -> dict[str, Any]:
    """What the page plays: `length` places, and for each frame `forwards` and what it changes, each as [place, text or
    null where nothing is settled, whether it was given, the model's probability of it or null where that is unknown].
    """
    frames: list[dict[str, Any]] = []
    before: tuple[tuple[str | None, int], ...] = ()
    for frame in film.frames:
        changes = [
            [place, piece, since == 0, None if sure is None else round(sure, 3)]
            for place, (piece, since, sure) in enumerate(zip(frame.pieces, frame.since, frame.confidence, strict=True))
            if place >= len(before) or before[place] != (piece, since)
        ]
        frames.append({"forwards": frame.forwards, "changes": changes})
        before = tuple(zip(frame.pieces, frame.since, strict=True))
    return {"length": max(len(frame.pieces) for frame in film.frames), "frames": frames}

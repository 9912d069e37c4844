"""Checks of what a command or an example shows: words that exist, texts that end, figures that move.

`make check-docs` applies those that a page names above a block (`<!-- shows: words; end -->`), the tests those of the
examples.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

import quality_stories

WORD = re.compile(r"[^\W\d_]+")
QUOTES = "\"'])} \n"  # that may follow the end of a sentence
MOVES = re.compile(r"(?P<name>\w+) (?P<direction>rises|falls) by (?P<least>[\d.]+) in (?P<run>\S+)")
PATTERN = re.compile(r"/.+/")


@cache
def story_words() -> frozenset[str]:
    """Every word of the demo's stories."""
    return frozenset(word for text, _ in quality_stories.batch(0, 0, 3000) for word in WORD.findall(text))


def unknown_words(text: str, also: str = "") -> list[str]:
    """Words of a text that neither a story nor the text `also` has, in order."""
    known = story_words() | set(WORD.findall(also))
    return [word for word in WORD.findall(text) if word not in known]


def ends(text: str) -> bool:
    """True if a text is not empty and ends with a sentence."""
    return text.rstrip(QUOTES).endswith((".", "!", "?"))


def movement(metrics: Path, name: str) -> float:
    """Mean of a metric over the last tenth of a run's steps, minus that over the first tenth."""
    values = [json.loads(line)[name] for line in metrics.read_text().splitlines()]
    part = max(1, len(values) // 10)
    return (sum(values[-part:]) - sum(values[:part])) / part


def names(checks: str) -> list[str]:
    """The checks of a mark, which are separated by semicolons. Raises ValueError for one that does not exist."""
    found = [check.strip() for check in checks.split(";")]
    for name in found:
        if name not in ("words", "end") and not MOVES.fullmatch(name) and not PATTERN.fullmatch(name):
            raise ValueError(f"{name!r} is not a check")
    return found


def problem(checks: str, output: str, code: str, folder: Path) -> str | None:
    """The first of the checks that does not hold for the `output` of `code`, which ran in `folder`."""
    for name in names(checks):
        if name == "words":
            if unknown := unknown_words(output, code):
                return f"words that do not exist: {', '.join(unknown)}"
            if not WORD.search(output):
                return "no words"
        elif name == "end":
            if not ends(output):
                return "the text does not end"
        elif found := MOVES.fullmatch(name):
            moved = movement(folder / found["run"] / "metrics.jsonl", found["name"])
            if (moved if found["direction"] == "rises" else -moved) < float(found["least"]):
                return f"{found['name']} moved by {moved:.3f} only"
        elif not re.search(name[1:-1], output):
            return f"nothing matches {name}"
    return None

"""The page of `--html` as a browser would find and play it."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any


class Page(HTMLParser):
    """What a browser finds: the scripts' texts, every attribute, the text outside of scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.scripts: list[tuple[dict[str, Any], str]] = []
        self.attributes: list[tuple[str, str, str | None]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value) for name, value in attributes]
        self.open.append(tag)
        if tag == "script":
            self.scripts.append((dict(attributes), ""))

    def handle_endtag(self, tag: str) -> None:
        while self.open and self.open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts[-1] = (self.scripts[-1][0], self.scripts[-1][1] + data)
        else:
            self.text += data


def played(trace: dict[str, Any]) -> list[list[str | None]]:
    """The text of each place in each frame, as the page plays it."""
    places: list[str | None] = [""] * trace["length"]
    frames = []
    for frame in trace["frames"]:
        for place, piece, *_ in frame["changes"]:
            places[place] = piece
        frames.append(list(places))
    return frames

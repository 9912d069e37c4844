"""Animated SVG of a denoising trace: masks turn into tokens, coloured by confidence.

The file has no scripts, loads nothing and plays when it is shown as an image, such as in a README. Every frame has the
layout of the final text, so that nothing moves while tokens appear.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from xml.sax.saxutils import escape, quoteattr

from dlm_bridge.display.trace import DenoisingTrace, confidence_colour
from dlm_bridge.errors import counted

COLUMNS = 64  # characters per line
CHARACTER, LINE, FONT_SIZE, MARGIN = 9.0, 26, 15, 24  # in pixels; a character is 0.6 of the font size wide
FRAME_SECONDS, LONGEST_SECONDS, PAUSE_SECONDS = 0.25, 12.0, 4.0  # per frame, maximum in total, pause at the end
GIVEN, MASKED, INK, PAPER = "#6b7280", "#d5dae0", "#1b1f24", "#ffffff"
NOT_XML = re.compile("[\x00-\x08\x0b-\x1f\ufffe\uffff]")


@dataclass(frozen=True)
class _Shown:
    """Text of one position over a range of frames."""

    text: str | None  # None: a mask
    colour: str
    first: int
    end: int  # exclusive


def svg(trace: DenoisingTrace, title: str) -> str:
    """SVG of `trace`. All texts are escaped."""
    shown = [_history(trace, place) for place in range(len(trace.last.strings))]
    places, lines = _layout([_visible(history[-1].text) for history in shown])
    count = len(trace.frames)
    moving = min(FRAME_SECONDS * count, LONGEST_SECONDS)
    seconds = moving + PAUSE_SECONDS
    width, height = round(COLUMNS * CHARACTER + 2 * MARGIN), round((lines + 1.5) * LINE + 2 * MARGIN)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
        f' role="img" aria-label={quoteattr(title)}>',
        f"<title>{escape(title)}</title>",
        f'<rect width="{width}" height="{height}" rx="8" fill="{PAPER}"/>',
        f'<g font-family="ui-monospace,SFMono-Regular,Menlo,Consolas,monospace" font-size="{FONT_SIZE}">',
    ]
    for history, runs in zip(shown, places, strict=True):
        for one in history:
            timing = _timing(one, count, moving / seconds, seconds)
            parts.extend(f"{element}{timing}</g>" for element in _drawn(one, runs))
    parts.append("</g>")
    parts.append(_legend(trace, title, height))
    return "\n".join([*parts, "</svg>", ""])


def _history(trace: DenoisingTrace, place: int) -> list[_Shown]:
    """Texts of one position in temporal order."""
    found: list[_Shown] = []
    for number, frame in enumerate(trace.frames):
        known = place < len(frame.strings)
        text = frame.strings[place] if known else ""
        confidence = frame.confidence[place] if known else None
        given = known and text is not None and not frame.committed_at[place]
        colour = MASKED if text is None else GIVEN if given else INK
        if text is not None and confidence is not None and not given:
            colour = confidence_colour(confidence)
        if found and (found[-1].text, found[-1].colour) == (text, colour):
            found[-1] = _Shown(text, colour, found[-1].first, number + 1)
        else:
            found.append(_Shown(text, colour, number, number + 1))
    return found


def _visible(text: str | None) -> str:
    return "\u2591" if text is None else NOT_XML.sub("\ufffd", text.replace("\t", "    ").replace("\r", ""))


def _layout(texts: list[str]) -> tuple[list[list[tuple[int, int, str]]], int]:
    """Lay the texts out in lines, broken at newlines and, at the right edge, before a text that begins a word if
    possible. Returns the runs (column, line, characters) of each text, and the number of lines."""
    places, column, line = [], 0, 0
    for text in texts:
        runs = []
        if text.startswith(" ") and column + len(text.split("\n")[0]) > COLUMNS:
            text, column, line = text[1:], 0, line + 1
        for number, piece in enumerate(text.split("\n")):
            if number:
                column, line = 0, line + 1
            while piece:
                if column == COLUMNS:
                    column, line = 0, line + 1
                run, piece = piece[: COLUMNS - column], piece[COLUMNS - column :]
                runs.append((column, line, run))
                column += len(run)
        places.append(runs)
    return places, line + 1


def _drawn(one: _Shown, runs: list[tuple[int, int, str]]) -> Iterator[str]:
    """Opened SVG groups of one position: a box per run for a mask, else the text.

    Leading spaces become an offset, because browsers drop them.
    """
    for number, (column, line, final) in enumerate(runs):
        lead = len(final) - len(final.lstrip(" "))
        x, y = MARGIN + (column + lead) * CHARACTER, MARGIN + line * LINE
        if one.text is None:
            width = max(len(final) - lead, 1) * CHARACTER - 2
            yield f'<g><rect x="{x + 1:g}" y="{y}" width="{width:g}" height="18" rx="4" fill="{MASKED}"/>'
            continue
        known = _visible(one.text)
        text = (final if number or final.strip() in known else known).strip(" \n")
        if text:
            place = f'x="{x:g}" y="{y + 14}" textLength="{len(text) * CHARACTER:g}" style="white-space:pre"'
            yield f'<g><text {place} fill="{one.colour}">{escape(text)}</text>'


def _timing(one: _Shown, frames: int, moving: float, seconds: float) -> str:
    """SVG animation of the visibility. `moving` is the fraction of `seconds` before the pause."""
    if one.first == 0 and one.end == frames:
        return ""
    begin, end = (moving * place / frames for place in (one.first, one.end))
    times, values = [0.0], ["visible" if one.first == 0 else "hidden"]
    if one.first:
        times.append(begin)
        values.append("visible")
    if one.end < frames:
        times.append(end)
        values.append("hidden")
    steps = ";".join(f"{time:.4f}" for time in times)
    return (
        f'<animate attributeName="visibility" calcMode="discrete" values="{";".join(values)}" keyTimes="{steps}"'
        f' dur="{seconds:g}s" repeatCount="indefinite"/>'
    )


def _legend(trace: DenoisingTrace, title: str, height: int) -> str:
    y = height - MARGIN
    words = f'<text x="{MARGIN}" y="{y}" font-family="system-ui,sans-serif" font-size="12" fill="{GIVEN}">'
    parts = [f"{words}{escape(title)}, {counted(trace.last.forwards, 'forward pass', 'forward passes')}</text>"]
    if any(confidence is not None for frame in trace.frames for confidence in frame.confidence):
        right = COLUMNS * CHARACTER + MARGIN
        parts.extend(
            f'<rect x="{right - 100 + 10 * step:g}" y="{y - 9}" width="10" height="9" '
            f'fill="{confidence_colour((step + 0.5) / 10)}"/>'
            for step in range(10)
        )
        label = words.replace(f'x="{MARGIN}"', f'x="{right - 108:g}" text-anchor="end"')
        parts.append(f"{label}probability when committed, 0 to 1</text>")
    return "\n".join(parts)

"""Live terminal view of a denoising trace."""

from __future__ import annotations

import colorsys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

from dlm_bridge.generation.display.trace import DenoisingTrace, TraceFrame

MASKED = "\u2591"  # a light shade, for each token that is not settled
BAR = "\u2588"  # a full block, of the legend
GIVEN_STYLE, OPEN_STYLE = "dim", "bright_black"
FRESH_STYLE = "reverse"  # beside its colour: what the last forward settled
STEPS = 10  # of the scale from red to green


@contextmanager
def live(film: DenoisingTrace, console: Console) -> Iterator[None]:
    """Show a film as it grows. Nothing of it stays behind; nothing happens where `console` is no terminal."""
    if not console.is_terminal:
        yield
        return
    # What does not fit is cut off at the top: samplers go from left to right.
    with Live(_TraceView(film), console=console, transient=True, refresh_per_second=15, vertical_overflow="crop"):
        yield


def frame_text(frame: TraceFrame) -> Text:
    """One frame, coloured."""
    text = Text()
    for piece, since, confidence in zip(frame.pieces, frame.since, frame.confidence, strict=True):
        if piece is None:
            text.append(MASKED, OPEN_STYLE)
        elif not since:
            text.append(piece, GIVEN_STYLE)
        else:
            colour = "" if confidence is None else confidence_colour(confidence)
            text.append(piece, f"{FRESH_STYLE} {colour}".strip() if since == frame.forwards else colour)
    return text


def confidence_colour(confidence: float) -> str:
    """From red for a probability of 0 over yellow to green for 1, in a few steps; neither dark nor light, so that it
    can be read on any background."""
    share = min(int(confidence * STEPS), STEPS - 1) / (STEPS - 1)
    rgb = colorsys.hls_to_rgb(share / 3, 0.42, 0.85)
    return "rgb({},{},{})".format(*(round(255 * part) for part in rgb))


def status(frame: TraceFrame) -> Text:
    """How far the film is, and what its colours mean."""
    settled = sum(1 for piece, since in zip(frame.pieces, frame.since, strict=True) if piece is not None and since)
    text = Text(f"forward {frame.forwards}, {settled} tokens settled", style=GIVEN_STYLE)
    if any(confidence is not None for confidence in frame.confidence):
        text.append("   probability 0 ")
        for step in range(STEPS):
            text.append(BAR, confidence_colour(step / STEPS))
        text.append(" 1")
    return text


class _TraceView:
    """The newest frame, made into text only as often as the screen is drawn."""

    def __init__(self, film: DenoisingTrace) -> None:
        self._film = film

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        frame = self._film.last
        room = max(console.height - 2, 1)
        lines = frame_text(frame).wrap(console, options.max_width)
        yield from lines[-room:]
        yield status(frame)

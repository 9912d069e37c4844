"""A film in the terminal, while it is being made: what is new stands out, what is open is a shade."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

from dlm_bridge.generation.show.film import Film, Frame

OPEN = "\u2591"  # a light shade, for each token that is not settled
GIVEN_STYLE, OPEN_STYLE = "dim", "bright_black"
# By how many forwards ago a token was settled; older ones have the terminal's own colour.
FRESH_STYLES = ("bold black on bright_green", "bright_green", "green", "green")


@contextmanager
def live(film: Film, console: Console) -> Iterator[None]:
    """Show a film as it grows. Nothing of it stays behind; nothing happens where `console` is no terminal."""
    if not console.is_terminal:
        yield
        return
    # What does not fit is cut off at the top: samplers go from left to right.
    with Live(_View(film), console=console, transient=True, refresh_per_second=15, vertical_overflow="crop"):
        yield


def frame_text(frame: Frame) -> Text:
    """One frame, coloured."""
    text = Text()
    for piece, since in zip(frame.pieces, frame.since, strict=True):
        if piece is None:
            text.append(OPEN, OPEN_STYLE)
        elif not since:
            text.append(piece, GIVEN_STYLE)
        else:
            age = frame.forwards - since
            text.append(piece, FRESH_STYLES[age] if age < len(FRESH_STYLES) else None)
    return text


class _View:
    """The newest frame, made into text only as often as the screen is drawn."""

    def __init__(self, film: Film) -> None:
        self._film = film

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        frame = self._film.last
        room = max(console.height - 2, 1)
        lines = frame_text(frame).wrap(console, options.max_width)
        yield from lines[-room:]
        settled = sum(1 for piece, since in zip(frame.pieces, frame.since, strict=True) if piece is not None and since)
        yield Text(f"forward {frame.forwards}, {settled} tokens settled", style=GIVEN_STYLE)

"""Live terminal view of a denoising trace: colours show the model's confidence, masks are a shade."""

from __future__ import annotations

import colorsys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

from dlm_bridge.generation.display.trace import DenoisingTrace, TraceFrame

MASKED = "\u2591"  # a light shade, for each mask
BAR = "\u2588"  # a full block, of the legend
GIVEN_STYLE, MASKED_STYLE = "dim", "bright_black"
NEW_STYLE = "reverse"  # in addition to the colour, for the tokens of the last forward pass
STEPS = 10  # of the scale from red to green


@contextmanager
def live(trace: DenoisingTrace, console: Console) -> Iterator[None]:
    """Show a trace as it grows, and remove it at the end; without effect where `console` is not a terminal."""
    if not console.is_terminal:
        yield
        return
    # What does not fit is cropped at the top: samplers go from left to right.
    with Live(_TraceView(trace), console=console, transient=True, refresh_per_second=15, vertical_overflow="crop"):
        yield


def frame_text(frame: TraceFrame) -> Text:
    """One frame, coloured."""
    text = Text()
    for string, step, confidence in zip(frame.strings, frame.committed_at, frame.confidence, strict=True):
        if string is None:
            text.append(MASKED, MASKED_STYLE)
        elif not step:
            text.append(string, GIVEN_STYLE)
        else:
            colour = "" if confidence is None else confidence_colour(confidence)
            text.append(string, f"{NEW_STYLE} {colour}".strip() if step == frame.forwards else colour)
    return text


def confidence_colour(confidence: float) -> str:
    """From red for a probability of 0 over yellow to green for 1, in a few steps, legible on any background."""
    fraction = min(int(confidence * STEPS), STEPS - 1) / (STEPS - 1)
    rgb = colorsys.hls_to_rgb(fraction / 3, 0.42, 0.85)
    return "rgb({},{},{})".format(*(round(255 * part) for part in rgb))


def status(frame: TraceFrame) -> Text:
    """The progress, and the legend of the colours."""
    text = Text(f"forward {frame.forwards}, {frame.committed} tokens committed", style=GIVEN_STYLE)
    if any(confidence is not None for confidence in frame.confidence):
        text.append("   probability 0 ")
        for step in range(STEPS):
            text.append(BAR, confidence_colour(step / STEPS))
        text.append(" 1")
    return text


class _TraceView:
    """The newest frame, rendered only as often as the screen is drawn."""

    def __init__(self, trace: DenoisingTrace) -> None:
        self._trace = trace

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        frame = self._trace.last
        lines = frame_text(frame).wrap(console, options.max_width)
        yield from lines[-max(console.height - 2, 1) :]
        yield status(frame)

"""Denoising trace of one row: token, commit step and confidence per position, after each forward pass.

`live` shows a growing trace in the terminal: colours are the model's confidence, masks are a shade. `page` returns a
self-contained HTML page that plays the trace, with a slider.
"""

from __future__ import annotations

import colorsys
import html
import json
import re
import threading
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from math import isnan
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

from dlm_bridge.errors import counted, printable
from dlm_bridge.generation.callbacks import DenoisingStep
from dlm_bridge.generation.request import MASK

REPLACEMENT_CHARACTER = "\ufffd"  # decoded from bytes of an incomplete character
MAX_CHARACTER_TOKENS = 4  # maximum number of bytes of a character in UTF-8
MASKED = "\u2591"  # a light shade, shown for a mask
BAR = "\u2588"  # a full block, shown in the legend
GIVEN_STYLE, MASKED_STYLE = "dim", "bright_black"
NEW_STYLE = "reverse"  # style of tokens of the last forward pass, in addition to the colour
STEPS = 10  # number of colours from red to green


class TokenStrings:
    """Texts of single tokens. The first of several tokens that together decode to a character has the text of all."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        # Some tokenizers drop the space at the start of a text: a token is decoded after another one.
        self._before = tokenizer.encode("a", add_special_tokens=False)[-1:]
        self._lead = self._decode(self._before)
        self._known: dict[tuple[int, ...], str] = {}

    def of(self, tokens: Sequence[int]) -> list[str | None]:
        """Texts of [S] tokens, None at `MASK`."""
        texts: list[str | None] = [None if token == MASK else self._text((token,)) for token in tokens]
        place = 0
        while place < len(tokens):
            incomplete = texts[place] is not None and REPLACEMENT_CHARACTER in str(texts[place])
            place += self._join(tokens, texts, place) if incomplete else 1
        return texts

    def _join(self, tokens: Sequence[int], texts: list[str | None], place: int) -> int:
        """Join the tokens from `place` on that form complete characters. Returns the number of joined tokens."""
        for count in range(2, MAX_CHARACTER_TOKENS + 1):
            group = tuple(tokens[place : place + count])
            if len(group) < count or MASK in group:
                break
            together = self._text(group)
            if REPLACEMENT_CHARACTER not in together:
                texts[place : place + count] = [together] + [""] * (count - 1)
                return count
        return 1

    def _text(self, tokens: tuple[int, ...]) -> str:
        if tokens not in self._known:
            self._known[tokens] = self._decode([*self._before, *tokens]).removeprefix(self._lead)
        return self._known[tokens]

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False))


@dataclass(frozen=True)
class TraceFrame:
    """State of the row after some forward passes.

    Args:
        forwards: forward passes of the model so far.
        strings: [S], the text of each token, None at masks.
        committed_at: [S], the forward pass that committed the token; 0 for given tokens and masks.
        confidence: [S], the model's probability of the token when it was committed; None for given tokens and masks,
            and for autoregressive models, whose streamers do not get it.
        end: position of the token that ends the text; S while there is none.
    """

    forwards: int
    strings: tuple[str | None, ...]
    committed_at: tuple[int, ...]
    confidence: tuple[float | None, ...]
    end: int

    @property
    def committed(self) -> int:
        """Number of tokens committed so far."""
        tokens = zip(self.strings, self.committed_at, strict=True)
        return sum(1 for string, step in tokens if string is not None and step)

    def after(self, begin: int) -> TraceFrame:
        """The frame without the first `begin` positions."""
        strings, committed_at, confidence = self.strings[begin:], self.committed_at[begin:], self.confidence[begin:]
        return TraceFrame(self.forwards, strings, committed_at, confidence, max(self.end - begin, 0))


class DenoisingTrace:
    """Step callback that records one row. `token_streamer()` does so for an autoregressive model.

    Args:
        end_token_ids: tokens that end the text.
    """

    def __init__(self, strings: TokenStrings, prompt: Sequence[int], end_token_ids: Container[int] = ()) -> None:
        self._strings = strings
        self._end_token_ids = end_token_ids
        self._tokens = list(prompt)
        self.frames: list[TraceFrame] = [_initial_frame(tuple(strings.of(prompt)))]

    @property
    def last(self) -> TraceFrame:
        return self.frames[-1]

    def on_step(self, step: DenoisingStep) -> None:
        """Record a forward pass of a diffusion model."""
        tokens = step.tokens[0].masked_fill(step.masked[0], MASK).tolist()
        if len(self.frames) == 1:  # the length and the given tokens of the row are known from the first step on
            new = step.committed[0].tolist()
            strings = zip(self._strings.of(tokens), new, strict=True)
            self.frames[0] = _initial_frame(tuple(None if is_new else string for string, is_new in strings))
            self._tokens = [MASK if is_new else token for token, is_new in zip(tokens, new, strict=True)]
        self.add(step.forwards, tokens, [None if isnan(one) else one for one in step.confidence[0].tolist()])

    def add(self, forwards: int, tokens: Sequence[int], confidence: Sequence[float | None]) -> None:
        """Record the row's tokens after `forwards` forward passes, and the model's probabilities of them."""
        before, committed_at, strings = self._tokens, self.last.committed_at, self._strings.of(tokens)
        now = [
            0 if string is None else committed_at[place] if before[place : place + 1] == [token] else forwards
            for place, (token, string) in enumerate(zip(tokens, strings, strict=True))
        ]
        ends = (place for place, token in enumerate(tokens) if now[place] and token in self._end_token_ids)
        self._tokens = list(tokens)
        self.frames.append(
            TraceFrame(forwards, tuple(strings), tuple(now), tuple(confidence), next(ends, len(tokens)))
        )

    def token_streamer(self) -> Any:
        """A streamer for transformers' generate that records a frame for each token."""
        return _TokenStreamer(self, list(self._tokens))


class LiveTrace(DenoisingTrace):
    """Denoising trace that another thread reads while it grows, and that another thread or a signal can stop."""

    def __init__(self, strings: TokenStrings, prompt: Sequence[int], end_token_ids: Container[int] = ()) -> None:
        super().__init__(strings, prompt, end_token_ids)
        self.changed, self.stopped = threading.Event(), threading.Event()

    def add(self, forwards: int, tokens: Sequence[int], confidence: Sequence[float | None]) -> None:
        """Record a forward pass. Raises StoppedError once `stopped` is set."""
        if self.stopped.is_set():
            raise StoppedError
        super().add(forwards, tokens, confidence)
        self.changed.set()


class StoppedError(Exception):
    """The call was stopped."""


def trace_of(tokenizer: Any, prompt: Sequence[int], end_token_ids: Container[int] = ()) -> DenoisingTrace:
    """Create the trace of a row with these prompt tokens; see `DenoisingTrace`."""
    return DenoisingTrace(TokenStrings(tokenizer), prompt, end_token_ids)


@contextmanager
def live(trace: DenoisingTrace, console: Console, begin: int = 0) -> Iterator[None]:
    """Show a growing trace and remove it at the end. Has no effect if `console` is not a terminal.

    Args:
        begin: first position to show.
    """
    if not console.is_terminal:
        yield
        return
    # Long texts are cropped at the top, because samplers go from left to right.
    view = _TraceView(trace, begin)
    with Live(view, console=console, transient=True, refresh_per_second=15, vertical_overflow="crop"):
        yield


def frame_text(frame: TraceFrame) -> Text:
    """Coloured text of one frame, grey from its end on."""
    text = Text()
    tokens = zip(frame.strings, frame.committed_at, frame.confidence, strict=True)
    for place, (string, step, confidence) in enumerate(tokens):
        if string is None:
            text.append(MASKED, MASKED_STYLE)
        elif not step:
            text.append(printable(string), GIVEN_STYLE)
        else:
            colour = "" if confidence is None else confidence_colour(confidence)
            colour = colour if place < frame.end else MASKED_STYLE
            text.append(printable(string), f"{NEW_STYLE} {colour}".strip() if step == frame.forwards else colour)
    return text


def confidence_colour(confidence: float) -> str:
    """CSS colour of a probability, from red (0) over yellow to green (1), legible on light and dark backgrounds."""
    fraction = min(int(confidence * STEPS), STEPS - 1) / (STEPS - 1)
    rgb = colorsys.hls_to_rgb(fraction / 3, 0.42, 0.85)
    return "rgb({},{},{})".format(*(round(255 * part) for part in rgb))


def status(frame: TraceFrame) -> Text:
    """The progress, and the legend of the colours."""
    text = Text(f"forward {frame.forwards}, {counted(frame.committed, 'token')} committed", style=GIVEN_STYLE)
    if any(confidence is not None for confidence in frame.confidence):
        text.append("   probability 0 ")
        for step in range(STEPS):
            text.append(BAR, confidence_colour(step / STEPS))
        text.append(" 1")
    return text


class _TraceView:
    """Renderable of the newest frame, which is formatted once per screen refresh."""

    def __init__(self, trace: DenoisingTrace, begin: int) -> None:
        self._trace, self._begin = trace, begin

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        frame = self._trace.last.after(self._begin)
        lines = frame_text(frame).wrap(console, options.max_width)
        yield from lines[-max(console.height - 2, 1) :]
        yield status(frame)


def page(trace: DenoisingTrace, title: str, facts: Mapping[str, Any]) -> str:
    """HTML page that plays the trace and loads nothing. All texts are escaped; `facts` are shown below the text."""
    template = resources.files(__package__).joinpath("player.html").read_text("utf-8")
    facts_text = " \u00b7 ".join(f"{name} {value}" for name, value in facts.items())
    data = json.dumps(trace_data(trace), ensure_ascii=False, separators=(",", ":"))
    # Only these characters can end a script element or begin a comment in it. JSON escapes preserve the text.
    for character in "<>&\u2028\u2029":
        data = data.replace(character, f"\\u{ord(character):04x}")
    values = {"title": html.escape(title), "facts": html.escape(facts_text), "trace": data}
    return re.sub(r"\{\{(title|facts|trace)\}\}", lambda place: values[place[1]], template)


def trace_data(trace: DenoisingTrace) -> dict[str, Any]:
    """Data of the page: `length` (number of positions), and for each frame `forwards` and `changes`. A change is
    [position, text (None at a mask), True if given, the model's probability (None if unknown)]."""
    frames: list[dict[str, Any]] = []
    before: tuple[tuple[str | None, int], ...] = ()
    for frame in trace.frames:
        now = tuple(zip(frame.strings, frame.committed_at, strict=True))
        changes = [
            [place, string, step == 0, None if confidence is None else round(confidence, 3)]
            for place, ((string, step), confidence) in enumerate(zip(now, frame.confidence, strict=True))
            if before[place : place + 1] != ((string, step),)
        ]
        frames.append({"forwards": frame.forwards, "changes": changes})
        before = now
    return {"length": max(len(frame.strings) for frame in trace.frames), "frames": frames}


def _initial_frame(strings: tuple[str | None, ...]) -> TraceFrame:
    return TraceFrame(0, strings, (0,) * len(strings), (None,) * len(strings), len(strings))


class _TokenStreamer:
    """Streamer that records a frame per `put`, and per draft of a model that denoises drafts (DiffusionGemma)."""

    def __init__(self, trace: DenoisingTrace, prompt: list[int]) -> None:
        self._trace = trace
        self._tokens = prompt
        self._forwards = -1  # the prompt comes first
        self._drafted = False

    def put(self, value: Any) -> None:
        if not self._drafted:
            self._forwards += 1
        if self._forwards:
            self._tokens = [*self._tokens, *value.reshape(-1).tolist()]
            self._show(self._tokens)
        self._drafted = False

    def put_draft(self, value: Any) -> None:
        """Record the draft after a denoising step."""
        self._forwards += 1
        self._drafted = True
        self._show([*self._tokens, *value.reshape(-1).tolist()])

    def end(self) -> None:
        pass

    def _show(self, tokens: list[int]) -> None:
        self._trace.add(self._forwards, tokens, [None] * len(tokens))

"""Incremental decoding of one choice of an answer."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

from dlm_bridge.generation.request import MASK, Ended, Extended
from dlm_bridge.serving.scores import Bounded, Scored, TokenScore

REPLACEMENT_CHARACTER = "\ufffd"  # decoded from bytes of an incomplete character

Decode = Callable[[Sequence[int]], str]


class TextStream:
    """Incremental decoder of a growing token sequence.

    A piece of text ends neither inside a character nor inside the possible beginning of a stop string. The pieces
    together are the text of all tokens before the first stop string. (`tokenizers.decoders.DecodeStream` drops an
    incomplete character at the end, and raises if later byte tokens change earlier text.)
    """

    def __init__(self, decode: Decode, stop_strings: Sequence[str] = ()) -> None:
        self._decode = decode
        self._stop_strings = tuple(stop_strings)
        # The text of a token may depend on the tokens before it: the last ones, from the beginning of a character on,
        # are decoded again with new ones.
        self._window: list[int] = []
        self._read = 0  # tokens of the window whose text was returned
        self._known = ""  # that text
        self._held = ""  # text held back: it may be the beginning of a stop string
        self.stopped = False

    def add(self, tokens: Sequence[int]) -> str:
        """The next piece of text, possibly empty."""
        if self.stopped or not tokens:
            return ""
        self._window += tokens
        text = self._decode(self._window)
        if text.endswith(REPLACEMENT_CHARACTER) or len(text) <= len(self._known):
            return ""
        new = text[len(self._known) :]
        newest = self._decode(self._window[self._read :])
        if newest:  # empty for special tokens
            self._window, text = self._window[self._read :], newest
        self._read, self._known = len(self._window), text
        return self._without_stop(new)

    def end(self) -> str:
        """The last piece: the text held back."""
        if self.stopped:
            return ""
        piece = self._without_stop(self._decode(self._window)[len(self._known) :])
        rest, self._held = "" if self.stopped else self._held, ""
        return piece + rest

    def _without_stop(self, new: str) -> str:
        """Held-back and new text up to the first stop string, or without the possible beginning of one."""
        text, self._held = self._held + new, ""
        places = [place for string in self._stop_strings if (place := text.find(string)) >= 0]
        if places:
            self.stopped = True
            return text[: min(places)]
        held = max((_overlap(text, string) for string in self._stop_strings), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


class Choice:
    """One choice of an answer.

    Args:
        prompt: token ids whose masks are filled in; empty otherwise.
        constraint: the text's compiled constraint, see `Request.constraint`; None: any text.
        calls: parser of the text's calls of tools, a `CallParser` of the extension `structured`; None: the text has
            none.

    Attributes:
        finish_reason: "stop", "length" or "tool_calls"; None while the choice is sampled.
        tokens: the final new tokens so far.
        forwards: number of forward passes that the text took part in, once it has ended.
        bound: bound of its log-likelihood, if the request asks for it.
    """

    def __init__(
        self,
        decode: Decode,
        stop_strings: Sequence[str] = (),
        prompt: Sequence[int] = (),
        *,
        constraint: Any = None,
        calls: Any = None,
    ) -> None:
        self._constraint = constraint
        self._decode, self._stop_strings, self.prompt = decode, tuple(stop_strings), prompt
        self._stream = TextStream(decode, stop_strings)
        self._pieces: list[str] = []
        self._calls = calls
        self._scores: list[TokenScore] = []
        self._sent_scores = self._sent_calls = 0
        self.tokens: list[int] = []
        self.finish_reason: str | None = None
        self.forwards = 0
        self.log_mass: float | None = None
        self.bound: Any = None

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self._pieces)

    @property
    def runs(self) -> list[tuple[int, int]] | None:
        """First token, and the one after the last, in place of each run of masks; None if a sampler changed the number
        of tokens of several runs, which then cannot be located."""
        runs, place = [], 0
        for is_mask, run in groupby(self.prompt, lambda token: token == MASK):
            length = len(list(run))
            if is_mask:
                runs.append((place, place + length))
            place += length
        if len(runs) == 1:
            begin, end = runs[0]
            runs = [(begin, max(len(self.tokens) - (len(self.prompt) - end), begin))]
        elif len(self.tokens) != len(self.prompt):
            return None
        return runs

    @property
    def infills(self) -> list[str] | None:
        """Text in place of each of the `runs`."""
        runs = self.runs
        return None if runs is None else [self._decode(self.tokens[begin:end]) for begin, end in runs]

    @property
    def scores(self) -> list[TokenScore]:
        """Scores of the tokens so far, if the request asks for them."""
        return self._scores[: len(self.tokens)]

    def new_scores(self) -> list[TokenScore]:
        """Scores since the last call."""
        found = self.scores[self._sent_scores :]
        self._sent_scores += len(found)
        return found

    @property
    def calls(self) -> list[dict[str, Any]]:
        """Calls of tools in the text so far, with all their arguments."""
        return [] if self._calls is None else list(self._calls.calls)

    def new_calls(self) -> list[dict[str, Any]]:
        """Calls since the last call, with their index."""
        found = [{"index": index, **call} for index, call in enumerate(self.calls) if index >= self._sent_calls]
        self._sent_calls += len(found)
        return found

    def add(self, event: Extended | Ended | Scored | Bounded) -> str:
        """The text that an event adds, without calls of tools. A stop string finishes the choice before its job has
        ended."""
        if self.finish_reason is not None:
            return ""
        if isinstance(event, Scored):
            self._scores[event.first :] = event.scores
            return ""
        if isinstance(event, Bounded):
            self.bound = event.bound
            return ""
        new = event.tokens if isinstance(event, Extended) else event.tokens[len(self.tokens) :]
        piece = self._stream.add(new)
        self.tokens += new
        if isinstance(event, Ended):
            piece += self._stream.end()
            # Where the number of tokens ends a text to which the constraint allows no more, this is its natural end.
            closed = self._constraint is not None and self._constraint.closes(self.tokens)
            self.finish_reason = "stop" if closed else event.finish_reason
            self.forwards, self.log_mass = event.forwards, event.constraint_log_mass
        if self._calls is not None:
            piece, _ = self._calls.add(piece, last=self.finish_reason is not None)
            if self.finish_reason is not None and self._calls.calls:
                self.finish_reason = "tool_calls"
        if self._stream.stopped:
            self.finish_reason = "stop"
            self.tokens = self.tokens[: self._stop()]
        self._pieces.append(piece)
        return piece

    def _stop(self) -> int:
        """Number of tokens that complete the first stop string."""

        def stopped(count: int) -> bool:
            text = self._decode(self.tokens[:count])
            return any(string in text for string in self._stop_strings)

        return bisect_left(range(len(self.tokens)), True, key=stopped)


def _overlap(text: str, string: str) -> int:
    """Length of the longest suffix of the text that is a proper prefix of the string."""
    return next((n for n in range(min(len(text), len(string) - 1), 0, -1) if text.endswith(string[:n])), 0)

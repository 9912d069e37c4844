"""A film of one row: after each forward, which token stands where, since when, and how sure the model was of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan
from typing import Any

from dlm_bridge.generation.observe import DenoisingStep
from dlm_bridge.generation.show.pieces import Pieces


@dataclass(frozen=True)
class Frame:
    """The row after so many forwards.

    Args:
        forwards: how many times the model has been run.
        pieces: [S] the text of each token, None where nothing is settled.
        since: [S] after how many forwards what stands there was settled; 0 for what was given and what is open.
        confidence: [S] the model's probability of what stands there when it was settled; None for what was given or is
            open, and all through an autoregressive model, whose streamers are not told.
    """

    forwards: int
    pieces: tuple[str | None, ...]
    since: tuple[int, ...]
    confidence: tuple[float | None, ...]


class Film:
    """Listens to `generate` on one prompt: itself as a diffusion sampler's `streamer`, with `tokens()` as others'."""

    def __init__(self, pieces: Pieces, prompt: Sequence[int]) -> None:
        self._pieces = pieces
        self._tokens = list(prompt)
        given = tuple(pieces.of(prompt))
        self.frames: list[Frame] = [_before_any_step(given)]

    @property
    def last(self) -> Frame:
        return self.frames[-1]

    def on_step(self, step: DenoisingStep) -> None:
        """After a forward of a diffusion model."""
        tokens = step.tokens[0].tolist()
        if len(self.frames) == 1:  # only now it is known how long the row is, and what of it was given
            settled = step.settled[0].tolist()
            pieces = zip(self._pieces.of(tokens), settled, strict=True)
            self.frames[0] = _before_any_step(tuple(None if new else piece for piece, new in pieces))
            self._tokens = [-1 if new else token for token, new in zip(tokens, settled, strict=True)]
        self.add(step.forwards, tokens, [None if isnan(one) else one for one in step.confidence[0].tolist()])

    def add(self, forwards: int, tokens: Sequence[int], confidence: Sequence[float | None]) -> None:
        """What stands in the row after `forwards` runs of the model, and the model's probability of it."""
        before, since, pieces = self._tokens, self.last.since, self._pieces.of(tokens)
        now = [
            0 if piece is None else since[place] if before[place : place + 1] == [token] else forwards
            for place, (token, piece) in enumerate(zip(tokens, pieces, strict=True))
        ]
        self._tokens = list(tokens)
        self.frames.append(Frame(forwards, tuple(pieces), tuple(now), tuple(confidence)))

    def tokens(self) -> Any:
        """A streamer for transformers' generate: a frame for each token."""
        return _TokenStreamer(self, list(self._tokens))


def _before_any_step(pieces: tuple[str | None, ...]) -> Frame:
    return Frame(0, pieces, (0,) * len(pieces), (None,) * len(pieces))


class _TokenStreamer:
    def __init__(self, film: Film, prompt: list[int]) -> None:
        self._film = film
        self._tokens = prompt
        self._forwards = -1  # the prompt comes first

    def put(self, value: Any) -> None:
        self._forwards += 1
        if self._forwards:
            self._tokens = [*self._tokens, *value.reshape(-1).tolist()]
            self._film.add(self._forwards, self._tokens, [None] * len(self._tokens))

    def end(self) -> None:
        pass

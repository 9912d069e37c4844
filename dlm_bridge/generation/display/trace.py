"""Denoising trace of one row: token, commit step and confidence per position, after each forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan
from typing import Any

from dlm_bridge.generation.callbacks import DenoisingStep

REPLACEMENT_CHARACTER = "\ufffd"  # what a tokenizer shows for bytes that are not a whole character
MAX_CHARACTER_TOKENS = 4  # bytes of a character in UTF-8


class TokenStrings:
    """Each token's text. Bytes that only together are a character are shown by the first of their tokens."""

    def __init__(self, tokenizer: Any, mask_token_id: int | None) -> None:
        self._tokenizer = tokenizer
        self._mask = mask_token_id
        # Some tokenizers drop the space that a text begins with: a token is decoded behind another one.
        self._before = tokenizer.encode("a", add_special_tokens=False)[-1:]
        self._lead = self._decode(self._before)
        self._known: dict[tuple[int, ...], str] = {}

    def of(self, tokens: Sequence[int]) -> list[str | None]:
        """[S] texts, None where the mask token stands."""
        texts: list[str | None] = [None if token == self._mask else self._text((token,)) for token in tokens]
        place = 0
        while place < len(tokens):
            if texts[place] is not None and REPLACEMENT_CHARACTER in str(texts[place]):
                place += self._join(tokens, texts, place)
            else:
                place += 1
        return texts

    def _join(self, tokens: Sequence[int], texts: list[str | None], place: int) -> int:
        """Put the tokens from `place` on together, as far as they make whole characters; how many those are."""
        for count in range(2, MAX_CHARACTER_TOKENS + 1):
            group = tuple(tokens[place : place + count])
            if len(group) < count or self._mask in group:
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


class DenoisingTrace:
    """Listens to `generate` on one prompt: itself as a diffusion sampler's `streamer`, with `tokens()` as others'."""

    def __init__(self, pieces: TokenStrings, prompt: Sequence[int]) -> None:
        self._pieces = pieces
        self._tokens = list(prompt)
        given = tuple(pieces.of(prompt))
        self.frames: list[TraceFrame] = [_initial_frame(given)]

    @property
    def last(self) -> TraceFrame:
        return self.frames[-1]

    def on_step(self, step: DenoisingStep) -> None:
        """After a forward of a diffusion model."""
        tokens = step.tokens[0].tolist()
        if len(self.frames) == 1:  # only now it is known how long the row is, and what of it was given
            settled = step.settled[0].tolist()
            pieces = zip(self._pieces.of(tokens), settled, strict=True)
            self.frames[0] = _initial_frame(tuple(None if new else piece for piece, new in pieces))
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
        self.frames.append(TraceFrame(forwards, tuple(pieces), tuple(now), tuple(confidence)))

    def tokens(self) -> Any:
        """A streamer for transformers' generate: a frame for each token."""
        return _TokenStreamer(self, list(self._tokens))


def _initial_frame(pieces: tuple[str | None, ...]) -> TraceFrame:
    return TraceFrame(0, pieces, (0,) * len(pieces), (None,) * len(pieces))


class _TokenStreamer:
    def __init__(self, film: DenoisingTrace, prompt: list[int]) -> None:
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

"""Single tokens as text, so that a text can be shown token by token while it is not yet whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

PART = "\ufffd"  # what a tokenizer shows for bytes that are not a whole character
LONGEST = 4  # bytes of a character in UTF-8


class Pieces:
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
            if texts[place] is not None and PART in str(texts[place]):
                place += self._join(tokens, texts, place)
            else:
                place += 1
        return texts

    def _join(self, tokens: Sequence[int], texts: list[str | None], place: int) -> int:
        """Put the tokens from `place` on together, as far as they make whole characters; how many those are."""
        for count in range(2, LONGEST + 1):
            group = tuple(tokens[place : place + count])
            if len(group) < count or self._mask in group:
                break
            together = self._text(group)
            if PART not in together:
                texts[place : place + count] = [together] + [""] * (count - 1)
                return count
        return 1

    def _text(self, tokens: tuple[int, ...]) -> str:
        if tokens not in self._known:
            self._known[tokens] = self._decode([*self._before, *tokens]).removeprefix(self._lead)
        return self._known[tokens]

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False))

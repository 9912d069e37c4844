"""Stop conditions: end-of-sequence tokens and stop strings."""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any

import torch

from dlm_bridge.errors import SettingError
from dlm_bridge.generation.request import MASK

Read = Callable[[torch.Tensor], list[Any]]  # copies a tensor's values to the host, see `canvas.read_flags`
KNOWN_TEXTS = 1024  # cached searches for stop strings; more than the running rows


class StopCondition:
    """End-of-sequence tokens and stop strings.

    Stop strings are searched in the decoded new tokens before the first mask; the row ends with the token that
    completes one. (transformers' StopStringCriteria checks the last token only, but denoising commits tokens in any
    order.) Text is decoded on the host, once for each row whose text has changed.

    Attributes:
        active: True if anything can end a row.
        has_strings: True if stop strings can.
    """

    def __init__(
        self,
        eos_token_ids: Sequence[int],
        device: torch.device,
        stop_strings: Sequence[str] = (),
        tokenizer: Any = None,
    ) -> None:
        if stop_strings and not hasattr(tokenizer, "decode"):
            raise SettingError("stop_strings", "needs `tokenizer`")
        self._eos_ids = frozenset(eos_token_ids)
        self._eos = torch.tensor(list(eos_token_ids), dtype=torch.long, device=device)
        self._stop_strings = tuple(stop_strings)
        self._tokenizer = tokenizer
        self.has_strings = bool(self._stop_strings)
        self.active = bool(self._eos_ids) or self.has_strings
        self._tokens_to_string = functools.lru_cache(maxsize=KNOWN_TEXTS)(self._search)

    def by_token(self, tokens_AN: torch.Tensor, new_AN: torch.Tensor) -> torch.Tensor:
        """[A, N] bool, True at new end-of-sequence tokens."""
        return torch.isin(tokens_AN, self._eos) & new_AN

    def texts(self, tokens_AN: torch.Tensor, new_AN: torch.Tensor) -> torch.Tensor:
        """[A, 2 + N], arguments of `string_end`: column of the first new token, number of new tokens before the first
        mask, and all tokens."""
        gapless_AN = (~new_AN | (tokens_AN != MASK)).cumprod(dim=1).bool() & new_AN
        counts_A2 = torch.stack([new_AN.int().argmax(dim=1), gapless_AN.sum(dim=1)], dim=1)
        return torch.cat([counts_A2, tokens_AN], dim=1)

    def string_end(self, text: Sequence[int]) -> int:
        """Column of the token that completes a row's first stop string; -1 without one.

        Args:
            text: a row of `texts`.
        """
        first, count, *tokens = text
        length = self._tokens_to_string(tuple(tokens[first : first + count]))
        return first + length - 1 if length else -1

    def read_ended(self, tokens_AN: torch.Tensor, new_AN: torch.Tensor, read: Read) -> list[bool]:
        """True for each row with a new token or string that ends it."""
        ended_A = self.by_token(tokens_AN, new_AN).any(dim=1)
        if not self.has_strings:
            return read(ended_A)
        rows = read(torch.cat([ended_A[:, None], self.texts(tokens_AN, new_AN)], dim=1))
        return [bool(ended) or self.string_end(text) >= 0 for ended, *text in rows]

    def end_of(self, tokens: Sequence[int]) -> int | None:
        """Number of new tokens up to and including the first one that ends the row; None if none does."""
        ends = [index + 1 for index, token in enumerate(tokens) if token in self._eos_ids][:1]
        if self.has_strings:
            gapless = takewhile(lambda token: token != MASK, tokens)
            if length := self._tokens_to_string(tuple(gapless)):
                ends.append(length)
        return min(ends, default=None)

    def _search(self, tokens: tuple[int, ...]) -> int:
        """Number of tokens that complete the first stop string; 0 without one."""

        def stopped(length: int) -> bool:
            text = self._tokenizer.decode(list(tokens[:length]))
            return any(string in text for string in self._stop_strings)

        if not tokens or not stopped(len(tokens)):
            return 0
        return 1 + bisect_left(range(1, len(tokens) + 1), True, key=stopped)


def check_stop_strings(value: Any) -> tuple[str, ...]:
    """Convert `stop_strings` to a tuple. Raises SettingError for other values than strings."""
    strings = tuple(value or ()) if value is None or isinstance(value, (list, tuple)) else (value,)
    if not all(isinstance(string, str) and string for string in strings):
        raise SettingError("stop_strings", f"must be a non-empty string or a list of them, not {value!r}")
    return strings

"""Ends of rows: end-of-sequence tokens and stop strings."""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dlm_bridge.errors import DlmBridgeError

Read = Callable[[torch.Tensor], list[Any]]  # gives a tensor's values on the host, as `canvas.read_flags`
KNOWN_TEXTS = 1024  # texts of which is known whether they hold a stop string: of more rows than run at once


class StopCondition:
    """End-of-sequence tokens and stop strings.

    A stop string is searched in the decoded new tokens, as far as the row is committed without a gap; the row ends
    with the token that completes it. Text is decoded on the host, once for each row whose text has changed.

    Attributes:
        active: whether anything can end a row.
        has_strings: whether stop strings can.
    """

    def __init__(
        self,
        eos_token_ids: Sequence[int],
        device: torch.device,
        stop_strings: Sequence[str] = (),
        tokenizer: Any = None,
    ) -> None:
        if stop_strings and not hasattr(tokenizer, "decode"):
            raise DlmBridgeError("stop_strings are searched in decoded text: pass tokenizer= as well")
        self._eos_ids = frozenset(eos_token_ids)
        self._eos = torch.tensor(list(eos_token_ids), dtype=torch.long, device=device)
        self._stop_strings = tuple(stop_strings)
        self._tokenizer = tokenizer
        self.has_strings = bool(self._stop_strings)
        self.active = bool(self._eos_ids) or self.has_strings
        self._tokens_to_string = functools.lru_cache(maxsize=KNOWN_TEXTS)(self._search)

    def marks(self, tokens_AN: torch.Tensor, new_AN: torch.Tensor, mask_token_id: int) -> torch.Tensor:
        """[A, N] bool, True at the new tokens that end a row, possibly several of one row. With stop strings the
        tokens are read: that syncs."""
        marks_AN = self.by_token(tokens_AN, new_AN)
        if not self.has_strings:
            return marks_AN
        ends = [self.string_end(text) for text in self.texts(tokens_AN, new_AN, mask_token_id).tolist()]
        columns_N = torch.arange(tokens_AN.shape[1], device=tokens_AN.device)
        return marks_AN | (columns_N == torch.tensor(ends, device=tokens_AN.device)[:, None])

    def by_token(self, tokens_AN: torch.Tensor, new_AN: torch.Tensor) -> torch.Tensor:
        """[A, N] bool, True at the new tokens that are end-of-sequence tokens."""
        return torch.isin(tokens_AN, self._eos) & new_AN

    def texts(self, tokens_AN: torch.Tensor, new_AN: torch.Tensor, mask_token_id: int) -> torch.Tensor:
        """[A, 2 + N], what `string_end` takes of each row: where its new tokens begin, how many are committed without
        a gap, and all tokens."""
        gapless_AN = (~new_AN | (tokens_AN != mask_token_id)).cumprod(dim=1).bool() & new_AN
        counts_A2 = torch.stack([new_AN.int().argmax(dim=1), gapless_AN.sum(dim=1)], dim=1)
        return torch.cat([counts_A2, tokens_AN], dim=1)

    def string_end(self, text: Sequence[int]) -> int:
        """The column of the token that completes a row's first stop string; -1 without one. A row of `texts`."""
        first, count, *tokens = text
        length = self._tokens_to_string(tuple(tokens[first : first + count]))
        return first + length - 1 if length else -1

    def read_ended(self, tokens_AN: torch.Tensor, new_AN: torch.Tensor, mask_token_id: int, read: Read) -> list[bool]:
        """Whether one of the new tokens ends the row."""
        ended_A = self.by_token(tokens_AN, new_AN).any(dim=1)
        if not self.has_strings:
            return read(ended_A)
        rows = read(torch.cat([ended_A[:, None], self.texts(tokens_AN, new_AN, mask_token_id)], dim=1))
        return [bool(ended) or self.string_end(text) >= 0 for ended, *text in rows]

    def end_of(self, tokens: Sequence[int]) -> int | None:
        """The number of these new tokens up to and including the first that ends the row; None: none does."""
        ends = [place + 1 for place, token in enumerate(tokens) if token in self._eos_ids][:1]
        if self.has_strings and (length := self._tokens_to_string(tuple(tokens))):
            ends.append(length)
        return min(ends, default=None)

    def _search(self, tokens: tuple[int, ...]) -> int:
        """How many tokens complete the first stop string; 0 without one."""

        def stopped(length: int) -> bool:
            text = self._tokenizer.decode(list(tokens[:length]))
            return any(string in text for string in self._stop_strings)

        if not tokens or not stopped(len(tokens)):
            return 0
        return 1 + bisect_left(range(1, len(tokens) + 1), True, key=stopped)


def check_stop_strings(value: Any) -> tuple[str, ...]:
    """`stop_strings` as a tuple. Raises DlmBridgeError for what is not strings."""
    strings = tuple(value or ()) if value is None or isinstance(value, (list, tuple)) else (value,)
    if not all(isinstance(string, str) and string for string in strings):
        raise DlmBridgeError(f"stop_strings must be a string or a list of them, none empty, not {value!r}")
    return strings

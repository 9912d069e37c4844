"""Where a row's text is over: at an end-of-sequence token, or where one of the caller's stop strings is complete."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import torch

from dlm_bridge.errors import DlmBridgeError


class Ending:
    """Finds the tokens that end a row.

    A stop string is looked for in the decoded new tokens, as far as the row is settled without a gap; the row ends
    with the token that completes it. Without end-of-sequence tokens and stop strings nothing ends.
    """

    def __init__(
        self,
        eos_token_ids: Sequence[int],
        device: torch.device,
        stop_strings: Sequence[str] = (),
        tokenizer: Any = None,
    ) -> None:
        if stop_strings and not hasattr(tokenizer, "decode"):
            raise DlmBridgeError("stop_strings are found in decoded text: pass tokenizer= as well")
        self._eos = torch.tensor(list(eos_token_ids), dtype=torch.long, device=device)
        self._stop_strings = tuple(stop_strings)
        self._tokenizer = tokenizer
        self.happens = bool(len(self._eos) or self._stop_strings)

    def marks(self, tokens_AN: torch.Tensor, new_AN: torch.Tensor, mask_token_id: int) -> torch.Tensor:
        """[A, N] bool, True at those of the new tokens that end a row, which may be several of one row."""
        marks_AN = torch.isin(tokens_AN, self._eos) & new_AN
        if not self._stop_strings:
            return marks_AN
        settled_AN = (~new_AN | (tokens_AN != mask_token_id)).cumprod(dim=1).bool() & new_AN
        for marks_N, tokens_N, settled_N in zip(marks_AN, tokens_AN, settled_AN, strict=True):
            places = settled_N.nonzero()[:, 0]
            length = self._stop(tokens_N[places].tolist())
            if length:
                marks_N[places[length - 1]] = True
        return marks_AN

    def _stop(self, tokens: list[int]) -> int:
        """How many of the tokens it takes to complete the first stop string; 0 where there is none."""

        def stopped(length: int) -> bool:
            text = self._tokenizer.decode(tokens[:length])
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

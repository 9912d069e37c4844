"""LLaDA's urge to end a thought: what closes it gets likelier the longer the text is (ML-GSAI/LLaDA, generate.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.generation.canvas import Canvas, Columns
from dlm_bridge.generation.execution.runner import Runner
from dlm_bridge.generation.predict import Growing, Predictor
from dlm_bridge.generation.transfers import send


@dataclass(frozen=True)
class EndThink:
    """What closes a thought, and how much it is urged.

    Args:
        token_ids: the tokens that close it, such as those of </think>.
        boost: what is added to a logit where all of the text is written.
        power: of the share of the text that is written, for what is added before.
        gen_length: new tokens, all of them.
    """

    token_ids: tuple[int, ...]
    boost: float
    power: float
    gen_length: int

    @classmethod
    def of(cls, token_ids: Any, boost: float, power: float, gen_length: int) -> EndThink | None:
        """None where nothing is urged. Raises DlmBridgeError for a boost of nothing."""
        if not boost:
            return None
        if not token_ids:
            raise DlmBridgeError(
                "end_think_logit_boost is about the tokens that close a thought: pass their ids as end_think_token_ids"
            )
        return cls(tuple(token_ids), boost, power, gen_length)


class Urging(Predictor):
    """As long as the closing tokens do not stand in a row's text, the one of them that comes next is likelier at the
    block's first mask."""

    def __init__(self, runner: Runner, canvas: Canvas, *, end_think: EndThink, **options: Any) -> None:
        super().__init__(runner, canvas, **options)
        self._end_think = end_think
        self._closing_L = send(list(end_think.token_ids), canvas.tokens.device)

    def __call__(self, rows: list[int] | None, columns: Columns, shift: bool | None = None) -> torch.Tensor:
        assert isinstance(columns, slice)
        logits_ANV = super().__call__(rows, columns, shift)
        known = logits_ANV.shape[-1]
        if max(self._end_think.token_ids) >= known:
            raise DlmBridgeError(
                f"end_think_token_ids {list(self._end_think.token_ids)} go beyond the vocabulary of {known}"
            )
        masked_AN = self.canvas.masked(rows, columns)
        place_A = masked_AN.int().argmax(dim=1)
        position_A, start_A = place_A + columns.start, self.canvas.first_new(rows)
        tokens_AS = self.canvas.take(rows, slice(0, self.canvas.width))
        share_A = ((position_A - start_A + 1).double() / self._end_think.gen_length).clamp(0, 1)
        open_A = masked_AN.any(dim=1) & (position_A >= start_A) & ~self._closed(tokens_AS, start_A)
        boost_A = torch.where(open_A, self._end_think.boost * share_A**self._end_think.power, 0.0)
        index = (
            torch.arange(len(tokens_AS), device=tokens_AS.device),
            place_A,
            self._next(tokens_AS, position_A, start_A),
        )
        urged_A = (logits_ANV[index].double() + boost_A).to(logits_ANV.dtype)
        return logits_ANV.index_put(index, urged_A)

    def _closed(self, tokens_AS: torch.Tensor, start_A: torch.Tensor) -> torch.Tensor:
        """[A], True where the closing tokens stand in a row behind the prompt."""
        count = len(self._closing_L)
        if tokens_AS.shape[1] < count:
            return torch.zeros_like(start_A, dtype=torch.bool)
        found_AW = (tokens_AS.unfold(1, count, 1) == self._closing_L).all(dim=-1)
        first_W = torch.arange(found_AW.shape[1], device=tokens_AS.device)
        return (found_AW & (first_W >= start_A[:, None])).any(dim=1)

    def _next(self, tokens_AS: torch.Tensor, position_A: torch.Tensor, start_A: torch.Tensor) -> torch.Tensor:
        """[A], the closing token that goes on with the longest part of them that stands before the position."""
        next_A = self._closing_L[:1].expand(len(tokens_AS))
        for count in range(1, len(self._closing_L)):
            before_AC = position_A[:, None] + torch.arange(-count, 0, device=tokens_AS.device)
            stands_A = (tokens_AS.gather(1, before_AC.clamp(min=0)) == self._closing_L[:count]).all(dim=1)
            next_A = torch.where(stands_A & (before_AC[:, 0] >= start_A), self._closing_L[count], next_A)
        return next_A


class UrgingGrowing(Urging, Growing):
    """The same where later blocks do not exist yet."""

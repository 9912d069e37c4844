"""WeDLM's sampler (arXiv 2512.22737)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from dlm_bridge.attention_mask import AttentionPattern, causal_mask
from dlm_bridge.generation.canvas import BlockLayout, Columns
from dlm_bridge.generation.commit_rules import OneOrMoreRule, Step, best, entropy
from dlm_bridge.generation.kv_cache import CacheMode
from dlm_bridge.generation.loop import SamplerSpec
from dlm_bridge.generation.predictors import Predictor
from dlm_bridge.generation.runtime.runner import CanvasView
from dlm_bridge.generation.samplers.base import Sampler, SpecialTokens
from dlm_bridge.generation.token_sampling import TokenSampling


class ReorderedPredictor(Predictor):
    """Causal attention in the order of knowledge: settled tokens first, masks last, each with its own position.

    So a mask sees every settled token, also those to its right, and the masks before it (WeDLM, arXiv 2512.22737).
    What stands before a row's first mask sees nothing else, whatever is settled later: with the cache "block" its keys
    and values are kept, and a forward runs the columns behind it, as far as the window reaches.
    """

    caches: ClassVar[tuple[CacheMode, ...]] = ("none", "block")

    def open(self, block: slice) -> None:
        super().open(block)
        self._rows = self.canvas.rows  # whose keys and values are kept
        self._kept_A = torch.zeros_like(self.canvas.first_new(None))  # of how many columns

    def __call__(self, rows: list[int] | None, columns: Columns, shift: bool | None = None) -> torch.Tensor:
        assert isinstance(columns, torch.Tensor)
        if self._cache == "block":
            return self._behind_kept(rows, columns)
        canvas = self.canvas
        tokens = canvas.take(rows, slice(0, canvas.width))
        positions, real = self._positions(rows, canvas.width)
        order = (tokens == canvas.mask_token_id).int().argsort(dim=1, stable=True)
        view = CanvasView(tokens.gather(1, order), causal_mask(real.gather(1, order)), positions.gather(1, order))
        return self._runner.reordered_logits(view, order.argsort(dim=1).gather(1, columns))

    def _behind_kept(self, rows: list[int] | None, columns_AN: torch.Tensor) -> torch.Tensor:
        """Logits [A, N, V] by a forward of Q columns of each row, from those that are kept on.

        In the new order what is settled without a gap stays where it is: so it is kept in its own columns. What is
        kept behind it, in columns of other tokens, is written anew by the next forward.
        """
        canvas = self.canvas
        self._drop_all_but(canvas.rows if rows is None else rows)
        width, end = self._reach(columns_AN.shape[1])
        first_A1 = self._kept_A.clamp(max=end - width)[:, None]
        own_AQ = first_A1 + torch.arange(width, device=first_A1.device)
        masked_AS = canvas.masked(rows, slice(0, canvas.width))
        order_AQ = masked_AS.gather(1, own_AQ).int().argsort(dim=1, stable=True)
        source_AQ = first_A1 + order_AQ
        positions_AS, real_AS = self._positions(rows, canvas.width)
        before_AQK = torch.arange(end, device=own_AQ.device) <= own_AQ[..., None]
        seen_AQK = (before_AQK & real_AS[:, None, :end]).scatter(2, own_AQ[..., None], True)  # padding sees itself
        view = CanvasView(
            canvas.take(rows, source_AQ), seen_AQK[:, None], positions_AS.gather(1, source_AQ), end=end, columns=own_AQ
        )
        hidden_AQH = self._runner.hidden(view, once=not self._fresh)
        self._fresh = True
        self._kept_A = masked_AS.int().argmax(dim=1)
        return self._runner.head_at(hidden_AQH, order_AQ.argsort(dim=1).gather(1, columns_AN - first_A1))

    def _reach(self, window: int) -> tuple[int, int]:
        """How many columns of each row a forward runs, and where the last of them ends."""
        canvas = self.canvas
        if any(canvas.holes):  # tokens behind the window, which it sees
            return canvas.width - int(self._kept_A.min()), canvas.width
        if not self._fresh:  # the prompt, too
            end = min(max(canvas.starts) + window, canvas.width)
            return end, end
        # A step settles no more than its window: always the same shape, wherever a row has got.
        return min(2 * window, canvas.width), canvas.width

    def _drop_all_but(self, rows: list[int]) -> None:
        """Rows that have no masks left do not come back in this block."""
        if len(rows) < len(self._rows):
            stay = [self._rows.index(row) for row in rows]
            self._runner.keep(stay)
            self._rows, self._kept_A = rows, self._kept_A[stay]


class DistancePenaltyRule(OneOrMoreRule):
    """WeDLM's: settles the lowest entropy + factor * distance to the first mask, and all below the threshold.

    Without a threshold only the lowest is settled.
    """

    def __init__(self, threshold: float | None, factor: float) -> None:
        self._threshold = threshold
        self._factor = factor

    def select(self, step: Step) -> torch.Tensor:
        position_N = torch.arange(step.masked.shape[1], device=step.masked.device)
        distance_AN = position_N - step.masked.int().argmax(dim=1)[:, None]
        adjusted_AN = entropy(step.logits) + distance_AN * self._factor
        adjusted_AN = adjusted_AN.masked_fill(~step.masked, torch.inf)
        lowest_AN = best(-adjusted_AN)
        return lowest_AN if self._threshold is None else lowest_AN | (adjusted_AN < self._threshold)


@dataclass(frozen=True, kw_only=True)
class WeDLMSampler(Sampler):
    """The decoder of WeDLM's engine (arXiv 2512.22737): the window begins at the first mask.

    Positions behind the last new token are part of the window, as they are there.
    """

    name: ClassVar[str] = "wedlm"
    attention_patterns: ClassVar[tuple[AttentionPattern, ...]] = ("causal",)

    gen_length: int = 64
    temperature: float = 0.2
    wedlm_window_size: int = 16
    wedlm_entropy_threshold: float | None = 0.4
    wedlm_pos_penalty_factor: float = 0.02

    def recipe(self, tokens: SpecialTokens) -> SamplerSpec:
        size = self.wedlm_window_size
        return SamplerSpec(
            layout=BlockLayout(self.gen_length + size, whole=True, spare=size),
            rule=DistancePenaltyRule(self.wedlm_entropy_threshold, self.wedlm_pos_penalty_factor),
            sampling=TokenSampling(self.temperature, self.top_k, self.top_p, order=("top_k", "top_p", "temperature")),
            predictor=ReorderedPredictor,
            predictor_options={},
            window=size,
        )

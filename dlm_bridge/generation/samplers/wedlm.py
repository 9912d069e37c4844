"""WeDLM's sampler (arXiv 2512.22737): a window of masks slides over the text, with causal attention after reordering.

    canvas = prompt + [MASK] * (gen_length + wedlm_window_size)
    while new tokens are masked:
        window = the wedlm_window_size columns from the first mask on
        order = committed tokens first, masks last, each with its own position
        logits = causal model(canvas[order])[window]
        scores = entropy + wedlm_pos_penalty_factor * distance to the first mask
        commit the mask with the lowest score, and all with score < wedlm_entropy_threshold

The window may extend past the last new token, as in the published engine.

Source: Tencent/WeDLM 0216110, wedlm/engine/wedlm_decoder.py and sampler.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from dlm_bridge.attention.masks import AttentionPattern, causal_mask
from dlm_bridge.generation.canvas import BlockLayout, Columns, to_device
from dlm_bridge.generation.commit_rules import OneOrMoreRule, Step, best, entropy
from dlm_bridge.generation.predictors import RowCachePredictor
from dlm_bridge.generation.request import MASK
from dlm_bridge.generation.runtime.runner import CanvasView
from dlm_bridge.generation.runtime.varlen import Packing
from dlm_bridge.generation.samplers import Presets, Sampler, SamplerSpec, SpecialTokens, parameter
from dlm_bridge.generation.token_sampling import TokenSampling


@dataclass(frozen=True, kw_only=True)
class WeDLMSampler(Sampler):
    """The decoder of WeDLM's engine."""

    name: ClassVar[str] = "wedlm"
    attention_patterns: ClassVar[tuple[AttentionPattern, ...]] = ("causal",)
    shifted: ClassVar[bool | None] = False
    presets: ClassVar[Presets] = {
        "fast": {"wedlm_entropy_threshold": 0.6},
        "careful": {"wedlm_entropy_threshold": None},
    }

    gen_length: int = parameter(64)
    temperature: float = parameter(0.2)
    wedlm_window_size: int = parameter(16, "Positions in the window.", minimum=1)
    wedlm_entropy_threshold: float | None = parameter(
        0.4, "Score below which a token is committed; None: only the lowest one.", minimum=0
    )
    wedlm_pos_penalty_factor: float = parameter(0.02, "Weight of the distance to the first mask.", minimum=0)

    def spec(self, tokens: SpecialTokens) -> SamplerSpec:
        size = self.wedlm_window_size
        return SamplerSpec(
            layout=BlockLayout(None, spare=size),
            rule=DistancePenaltyRule(self.wedlm_entropy_threshold, self.wedlm_pos_penalty_factor),
            sampling=TokenSampling(self.temperature, self.top_k, self.top_p, order=("top_k", "top_p", "temperature")),
            predictor=ReorderedPredictor,
            window=size,
        )


class DistancePenaltyRule(OneOrMoreRule):
    """Commits the position with the lowest score, entropy + factor * distance to the first mask, and all scores below
    the threshold."""

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


class ReorderedPredictor(RowCachePredictor):
    """Causal attention after reordering: committed tokens first and masks last, each with its own position.

    A mask attends to every committed token, including those to its right, and to the masks before it. Tokens before a
    row's first mask attend to no later ones, so the cache "block" stores their keys and values, and a forward pass
    runs the columns after them up to the end of the window.
    """

    def open_block(self, block: slice, rows: list[int]) -> None:
        super().open_block(block, rows)
        if len(rows) == len(self.canvas.rows):
            self._has_run = False

    def admit(self, count: int) -> None:
        """Cache the entering rows' prompts, unless the first forward pass of all rows does."""
        others = bool(self._rows)
        super().admit(count)
        if others and self.cache.stores:
            rows = list(range(count))
            self._runner.hidden(self.prompt_view(rows), once=True)
            self._cached_tokens[:count] = self.canvas.first_new(rows) - self.canvas.origin(rows)

    def __call__(self, rows: list[int] | None, columns: Columns, shift: bool | None = None) -> torch.Tensor:
        assert isinstance(columns, torch.Tensor)
        if self.cache.stores:
            return self._cached_logits(rows, columns)
        canvas = self.canvas
        tokens = canvas.take(rows, slice(0, canvas.width))
        positions, real = self._positions(rows, canvas.width)
        order = (tokens == MASK).int().argsort(dim=1, stable=True)
        tokens, positions, real = (each.gather(1, order) for each in (tokens, positions, real))
        packing = Packing(real, canvas.lengths(rows, canvas.width), causal=True)
        view = CanvasView(tokens, causal_mask(real), positions, packing=packing)
        return self._runner.logits_at(view, order.argsort(dim=1).gather(1, columns))

    @property
    def _cached_tokens(self) -> torch.Tensor:
        """[B], number of cached tokens at the start of each row."""
        return self.canvas.memory.tensor("cached tokens")

    def _cached_logits(self, rows: list[int] | None, columns_AN: torch.Tensor) -> torch.Tensor:
        """Logits [A, N, V] of a forward pass over Q columns of each row, after its cached ones.

        Reordering does not move the committed tokens before the first mask, which are cached in their own columns. The
        columns cached after them are overwritten by the next forward pass.
        """
        canvas = self.canvas
        chosen = canvas.rows if rows is None else rows
        self.keep_rows(chosen)
        index = canvas.index(chosen)
        cached_A, origin_A1 = self._cached_tokens[index], canvas.origin(rows)[:, None]
        width, end = self._reach(chosen, columns_AN.shape[1])
        first_A1 = cached_A.clamp(max=end - width)[:, None]
        own_AQ = first_A1 + torch.arange(width, device=first_A1.device)
        source_AQ = (origin_A1 + own_AQ).clamp(max=canvas.width - 1)
        real_AK = torch.arange(end, device=own_AQ.device) < canvas.real(rows).sum(dim=1, keepdim=True)
        masked_AS = canvas.masked(rows, slice(0, canvas.width))
        # Committed tokens, masks, padding.
        kind_AQ = torch.where(real_AK.gather(1, own_AQ), masked_AS.gather(1, source_AQ).long(), 2)
        order_AQ = kind_AQ.argsort(dim=1, stable=True)
        packing = None
        if not self._has_run and not canvas.has_holes:  # run each row's prompt and its window
            rooms = [canvas.starts[row] + columns_AN.shape[1] - canvas.origins[row] for row in chosen]
            lengths = tuple(min(room, width) for room in rooms)
            needed_AQ = torch.arange(width, device=own_AQ.device) < to_device(lengths, own_AQ.device)[:, None]
            packing = Packing(needed_AQ, lengths, causal=True)
        view = CanvasView(
            canvas.take(rows, source_AQ.gather(1, order_AQ)),
            real_AK & (torch.arange(end, device=own_AQ.device) < first_A1 + width),
            first_A1 + order_AQ,
            end=end,
            columns=own_AQ,
            block=1,
            packing=packing,
        )
        hidden_AQH = self._runner.hidden(view, once=not self._has_run)
        self._has_run = True
        self._cached_tokens[index] = (masked_AS.int().argmax(dim=1) - origin_A1[:, 0]).clamp(min=0)
        places_AN = columns_AN - origin_A1 - first_A1
        return self._runner.head_at(hidden_AQH, order_AQ.argsort(dim=1).gather(1, places_AN))

    def _reach(self, rows: list[int], window: int) -> tuple[int, int]:
        """Number of columns per row that a forward pass runs, and the column after the last one, counted from the
        row's first token."""
        canvas = self.canvas
        longest = max(canvas.ends[row] - canvas.origins[row] for row in rows)
        if canvas.has_holes:  # the window attends to tokens after it
            return longest - int(self._cached_tokens[canvas.index(rows)].min()), longest
        if not self._has_run:  # includes the prompt
            end = min(max(canvas.starts[row] - canvas.origins[row] for row in rows) + window, longest)
            return end, end
        # A step commits at most the window, so all rows share one shape.
        return min(2 * window, longest), longest

"""Fast-dLLM v2's sampler (arXiv 2509.26328)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from dlm_bridge.attention_mask import AttentionPattern
from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.generation.canvas import BlockLayout, Canvas, Columns
from dlm_bridge.generation.commit_rules import (
    MINUS_INFINITY,
    OneOrMoreRule,
    Step,
    best,
)
from dlm_bridge.generation.kv_cache import CacheMode
from dlm_bridge.generation.loop import SamplerSpec
from dlm_bridge.generation.predictors import BlockCausalPredictor
from dlm_bridge.generation.runtime.runner import CanvasView, ModelRunner
from dlm_bridge.generation.samplers.base import Sampler, SpecialTokens


class SmallBlockPredictor(BlockCausalPredictor):
    """A block is settled from small block to small block.

    With the cache "dual" (`use_block_cache` in the published code) a forward runs just a row's current small block and
    sees the others of the block as they were when the block was last run as a whole: that is in its first forward, and
    in each one in which the small block's first token is not settled yet, since the column before predicts it. So a
    row's tokens do not depend on the other rows: rows that are not equally far share forwards, of as many columns as
    one of them needs, and keep of them what they would keep alone. A step is about each row's small block, no more.
    """

    caches: ClassVar[tuple[CacheMode, ...]] = ("none", "block", "dual")

    def __init__(self, runner: ModelRunner, canvas: Canvas, *, small_block_length: int, **options: Any) -> None:
        super().__init__(runner, canvas, **options)
        self._small = small_block_length

    def launch_speculatively(self, *, done: bool = False) -> None:
        # What a row's next forward runs depends on what it has settled.
        if self._cache == "block" or done:
            super().launch_speculatively(done=done)

    def columns(self, rows: list[int] | None, block: slice) -> Columns:
        if self._cache != "dual":
            return block
        masked_BN = self.canvas.masked(None, block)
        first_B1 = masked_BN.int().argmax(dim=1, keepdim=True) // self._small * self._small
        self._whole_B1 = masked_BN.gather(1, first_B1)  # whether the row needs a look at the whole block
        self._first_B1 = block.start + first_B1
        small_BN = self._first_B1 + torch.arange(self._small, device=first_B1.device)
        return small_BN if rows is None else small_BN[self.canvas.index(rows)]

    def __call__(self, rows: list[int] | None, columns: Columns, shift: bool | None = None) -> torch.Tensor:
        if isinstance(columns, slice):
            return super().__call__(rows, columns, shift)
        view, first_B1 = self._look(self.canvas.rows if rows is None else rows)
        hidden_BQH = self._hidden(view) if view.columns is None else self._runner.hidden(view)
        # Of the first token of what is run nobody asks who predicts it: it is settled, or there is nothing before it.
        if rows is not None:
            index = self.canvas.index(rows)
            first_B1, hidden_BQH = first_B1[index], hidden_BQH[index]
        return self._runner.head_at(hidden_BQH, (columns - first_B1 - int(self.shift)).clamp(min=0))

    def _look(self, rows: list[int]) -> tuple[CanvasView, torch.Tensor]:
        """The next forward, of the whole batch, by what these rows of it need, and [B, 1] the first column that it
        runs of each row's block."""
        block, everywhere_B1 = self._block, torch.full_like(self._first_B1, self._block.start)
        if not self._fresh:
            self._fresh = True
            return self.view(None, block), everywhere_B1
        needs = torch.cat([self._first_B1, self._whole_B1.long()], dim=1).tolist()
        small_blocks, whole = {needs[row][0] for row in rows}, {needs[row][1] for row in rows}
        if whole == {1}:
            return self.view(None, block), everywhere_B1
        if whole == {0} and len(small_blocks) == 1:
            first = small_blocks.pop()
            return self._bidirectional(None, slice(first, first + self._small), block.stop), self._first_B1
        width = block.stop - block.start if 1 in whole else self._small
        return self._view_of_each(width), torch.where(self._whole_B1, everywhere_B1, self._first_B1)

    def _view_of_each(self, width: int) -> CanvasView:
        """So many columns of each row: its block or its small block, over and over where that is shorter."""
        canvas, block = self.canvas, self._block
        place_Q = torch.arange(width, device=self._first_B1.device)
        own_BQ = torch.where(self._whole_B1, block.start + place_Q, self._first_B1 + place_Q % self._small)
        positions_BS, real_BS = self._positions(None, canvas.width)
        # All of the canvas and a mask, not its columns as far as the block: one shape for every block.
        seen_BS = real_BS & (canvas.columns(None, slice(0, canvas.width)) < block.stop)
        return CanvasView(
            canvas.take(None, own_BQ), seen_BS, positions_BS.gather(1, own_BQ), end=canvas.width, columns=own_BQ
        )


class SmallBlockRule(OneOrMoreRule):
    """Settles positions with probability > threshold, at least the best, of the first small block with a mask left.

    Fast-dLLM v2: small blocks are denoised from left to right inside a block.
    """

    def __init__(self, threshold: float, small_block_size: int) -> None:
        self._threshold = threshold
        self._small_block_size = small_block_size

    def select(self, step: Step) -> torch.Tensor:
        small_N = torch.arange(step.masked.shape[1], device=step.masked.device) // self._small_block_size
        first_A = step.masked.int().argmax(dim=1)
        candidates_AN = step.masked & (small_N == small_N[first_A][:, None])
        scores_AN = step.probabilities().masked_fill(~candidates_AN, MINUS_INFINITY)
        return ((scores_AN > self._threshold) & candidates_AN) | best(scores_AN)


@dataclass(frozen=True, kw_only=True)
class FastDLLMv2Sampler(Sampler):
    """Fast-dLLM v2's `generate` (arXiv 2509.26328); with the cache "dual" that of `use_block_cache`.

    A block's first token is the best guess of the position before it, as in an autoregressive model; the others are
    settled from small block to small block. A prompt of exactly one block counts as context, too (there it is lost).
    """

    name: ClassVar[str] = "fast_dllm_v2"
    attention_patterns: ClassVar[tuple[AttentionPattern, ...]] = ("block_causal",)
    model_blocks: ClassVar[bool] = True

    gen_length: int = 2048
    block_size: int = 32
    small_block_size: int = 8
    threshold: float = 1.0
    top_p: float | None = 0.95

    def recipe(self, tokens: SpecialTokens) -> SamplerSpec:
        if self.block_size % self.small_block_size:
            raise DlmBridgeError(
                f"block_size {self.block_size} is not a multiple of small_block_size {self.small_block_size}"
            )
        return SamplerSpec(
            rule=SmallBlockRule(self.threshold, self.small_block_size),
            sampling=self.sampling(),
            seed="greedy",
            layout=BlockLayout(self.block_size, aligned=True),
            predictor=SmallBlockPredictor,
            predictor_options={"block_length": self.block_size, "small_block_length": self.small_block_size},
        )

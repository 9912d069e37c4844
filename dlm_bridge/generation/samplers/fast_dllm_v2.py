"""Fast-dLLM v2's sampler (arXiv 2509.26328): block-causal, with a logit shift, in small blocks within blocks.

    for block in blocks of block_length, counted from the text's first token:
        commit the block's first token: the best prediction of the position before it
        for small block in small blocks of small_block_size:
            while it has masks:
                tokens = argmax(logits), or draws with top_p;  scores = their probabilities
                commit those with score > threshold, and the best one
                # cache "dual": run the small block only, unless its first token is a mask

A prompt of exactly one block is context (the published code drops it).

Source: `generate` of Fast-dLLM v2's modeling code, NVlabs/Fast-dLLM 24cc59e, where "dual" is `use_block_cache`.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch

from dlm_bridge.attention.masks import AttentionPattern
from dlm_bridge.errors import SettingError
from dlm_bridge.generation.canvas import BlockLayout, Canvas, Columns, HostCopy
from dlm_bridge.generation.commit_rules import MINUS_INFINITY, OneOrMoreRule, Step, best
from dlm_bridge.generation.kv_cache import BlockKVCache, CacheMode, KVCache
from dlm_bridge.generation.predictors import BlockCausalPredictor
from dlm_bridge.generation.runtime.runner import CanvasView, ModelRunner
from dlm_bridge.generation.samplers import Presets, Sampler, SamplerSpec, SpecialTokens, largest_divisor, parameter


@dataclass(frozen=True, kw_only=True)
class FastDLLMv2Sampler(Sampler):
    """Fast-dLLM v2's `generate`."""

    name: ClassVar[str] = "fast_dllm_v2"
    attention_patterns: ClassVar[tuple[AttentionPattern, ...]] = ("block_causal",)
    model_blocks: ClassVar[bool] = True
    presets: ClassVar[Presets] = {"fast": {"threshold": 0.8}, "careful": {"threshold": 1.0}}

    gen_length: int = parameter(2048)
    block_length: int = parameter(32, "Tokens per block; published as `block_size`.")
    small_block_size: int = parameter(8, "Tokens of a block that are denoised before the next ones.", minimum=1)
    threshold: float = parameter(1.0, "Probability above which a token is committed.")
    top_p: float | None = parameter(0.95)

    def fitted(self, explicit: Container[str]) -> Self:
        if "small_block_size" in explicit:
            return self
        return replace(self, small_block_size=largest_divisor(self.block_length, self.small_block_size))

    def spec(self, tokens: SpecialTokens) -> SamplerSpec:
        if self.block_length % self.small_block_size:
            raise SettingError(
                "small_block_size", f"{self.small_block_size} does not divide `block_length={self.block_length}`"
            )
        return SamplerSpec(
            layout=BlockLayout(self.block_length, aligned=True),
            rule=SmallBlockRule(self.threshold, self.small_block_size),
            sampling=self.sampling(),
            predictor=SmallBlockPredictor,
            predictor_options={"block_length": self.block_length, "small_block_length": self.small_block_size},
            first_token="greedy",
        )


class SmallBlockRule(OneOrMoreRule):
    """Commits positions with probability > threshold and the best one, in the first small block that has masks."""

    def __init__(self, threshold: float, small_block_size: int) -> None:
        self._threshold = threshold
        self._small_block_size = small_block_size

    def select(self, step: Step) -> torch.Tensor:
        small_N = torch.arange(step.masked.shape[1], device=step.masked.device) // self._small_block_size
        first_A = step.masked.int().argmax(dim=1)
        candidates_AN = step.masked & (small_N == small_N[first_A][:, None])
        scores_AN = step.probabilities().masked_fill(~candidates_AN, MINUS_INFINITY)
        return ((scores_AN > self._threshold) & candidates_AN) | best(scores_AN)


class SmallBlockKVCache(BlockKVCache):
    """KV cache of committed blocks, and of the block's other small blocks as of the last pass over the whole block."""

    mode: ClassVar[CacheMode] = "dual"
    exact: ClassVar[bool] = False


class SmallBlockPredictor(BlockCausalPredictor):
    """Block-causal attention for blocks that are denoised in small blocks.

    With `SmallBlockKVCache`, a forward pass runs only a row's current small block. It runs the whole block in the
    block's first forward pass, and while the small block's first token, which the column before it predicts, is
    masked. A row's tokens do not depend on the other rows: rows in different small blocks share a forward pass of the
    largest width needed, and each row writes to the cache what it would write alone.
    """

    caches: ClassVar[tuple[type[KVCache], ...]] = (KVCache, BlockKVCache, SmallBlockKVCache)

    def __init__(
        self, runner: ModelRunner, canvas: Canvas, cache: KVCache, *, small_block_length: int, **options: Any
    ) -> None:
        super().__init__(runner, canvas, cache, **options)
        self._small = small_block_length
        self._by_small_block = isinstance(cache, SmallBlockKVCache)
        self._has_run = False  # in this block
        self._needs: HostCopy | None = None  # [B, 2], result of `_look` since the last forward pass

    def open_block(self, block: slice, rows: list[int]) -> None:
        super().open_block(block, rows)
        self._has_run, self._needs = False, None

    def launch_speculatively(self, *, done: bool = False) -> None:
        # The columns of a row's next forward pass depend on its committed tokens.
        if not self._by_small_block or done:
            super().launch_speculatively(done=done)
        else:
            self._look(self._block)

    def columns(self, rows: list[int] | None, block: slice) -> Columns:
        if not self._by_small_block:
            return block
        if self._needs is None:
            self._look(block)
        small_BN = self._first_B1 + torch.arange(self._small, device=self._first_B1.device)
        return small_BN if rows is None else small_BN[self.canvas.index(rows)]

    def _look(self, block: slice) -> None:
        """Find each row's current small block, and whether its next forward pass must run the whole block."""
        masked_BN = self.canvas.masked(None, block)
        first_B1 = masked_BN.int().argmax(dim=1, keepdim=True) // self._small * self._small
        self._whole_B1 = masked_BN.gather(1, first_B1)
        self._first_B1 = block.start + first_B1
        self._needs = HostCopy(torch.cat([self._first_B1, self._whole_B1.long()], dim=1))

    def __call__(self, rows: list[int] | None, columns: Columns, shift: bool | None = None) -> torch.Tensor:
        if isinstance(columns, slice):
            return super().__call__(rows, columns, shift)
        view, first_B1 = self._next_view(self.canvas.rows if rows is None else rows)
        hidden_BQH = self._hidden_of_block(view) if view.columns is None else self._runner.hidden(view)
        # The first column needs no prediction: it is committed, or no column precedes it.
        if rows is not None:
            index = self.canvas.index(rows)
            first_B1, hidden_BQH = first_B1[index], hidden_BQH[index]
        return self._runner.head_at(hidden_BQH, (columns - first_B1 - int(self.shift)).clamp(min=0))

    def _next_view(self, rows: list[int]) -> tuple[CanvasView, torch.Tensor]:
        """View of the next forward pass over all rows, for the needs of `rows`, and [B, 1] the first column that it
        runs in each row."""
        block, everywhere_B1 = self._block, torch.full_like(self._first_B1, self._block.start)
        copy, self._needs = self._needs, None
        assert copy is not None
        if not self._has_run:
            self._has_run = True
            return self.view(None, block), everywhere_B1
        needs = copy.values().tolist()
        small_blocks, whole = {needs[row][0] for row in rows}, {needs[row][1] for row in rows}
        if whole == {1}:
            return self.view(None, block), everywhere_B1
        if whole == {0} and len(small_blocks) == 1:
            first = small_blocks.pop()
            return self._bidirectional_view(None, slice(first, first + self._small), block.stop), self._first_B1
        width = block.stop - block.start if 1 in whole else self._small
        return self._ragged_view(width), torch.where(self._whole_B1, everywhere_B1, self._first_B1)

    def _ragged_view(self, count: int) -> CanvasView:
        """View of `count` columns per row: its block or its small block, repeated to fill the width."""
        canvas, block = self.canvas, self._block
        place_Q = torch.arange(count, device=self._first_B1.device)
        own_BQ = torch.where(self._whole_B1, block.start + place_Q, self._first_B1 + place_Q % self._small)
        width = min(canvas.width, canvas.cache_width)
        positions_BS, real_BS = self._positions(None, width)
        # Attending to the whole canvas with a mask gives all blocks one shape.
        attended_BS = real_BS & (canvas.columns(None, slice(0, width)) < block.stop)
        return CanvasView(
            canvas.take(None, own_BQ), attended_BS, positions_BS.gather(1, own_BQ), end=width, columns=own_BQ
        )

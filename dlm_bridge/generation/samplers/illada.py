"""iLLaDA's sampler of growing length."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch

from dlm_bridge.attention_mask import AttentionPattern
from dlm_bridge.generation.canvas import BlockLayout
from dlm_bridge.generation.commit_rules import (
    Score,
    TopScoresRule,
    even_schedule,
    low_confidence,
    random_order,
)
from dlm_bridge.generation.kv_cache import CacheMode
from dlm_bridge.generation.loop import SamplerSpec
from dlm_bridge.generation.predictors import Predictor
from dlm_bridge.generation.samplers.base import SpecialTokens, check_blocks
from dlm_bridge.generation.samplers.llada import EndThinkBias, EndThinkSampler


class GrowingPredictor(Predictor):
    """Bidirectional attention over a canvas that ends with the current block: later blocks do not exist yet.

    Guidance hides the finished blocks too, since iLLaDA's sampler takes them for its prompt.
    """

    caches: ClassVar[tuple[CacheMode, ...]] = ("none", "prefix")

    def end(self, block: slice) -> int:
        return self._block.stop

    def _given(self, rows: list[int] | None, columns: slice) -> torch.Tensor:
        given = torch.zeros_like(self.canvas.take(rows, slice(0, self.canvas.width)), dtype=torch.bool)
        given[:, : columns.start] = True
        return given


class GrowingEndThinkBias(EndThinkBias, GrowingPredictor):
    """The same where later blocks do not exist yet."""


@dataclass(frozen=True, kw_only=True)
class ILLaDASampler(EndThinkSampler):
    """iLLaDA's `var_generate`: masks are appended block by block until a row ends; a block sees no later one."""

    name: ClassVar[str] = "illada"
    attention_patterns: ClassVar[tuple[AttentionPattern, ...]] = ("bidirectional",)
    infills: ClassVar[bool] = False  # a block sees nothing of what follows
    shortens_block: ClassVar[bool] = True

    block_length: int = 32
    steps: int | None = None  # of each block; one for each of its tokens by default

    def recipe(self, tokens: SpecialTokens) -> SamplerSpec:
        check_blocks(self.gen_length, self.block_length)
        score: Score = random_order if self.remasking == "random" else low_confidence
        return SamplerSpec(
            layout=BlockLayout(self.block_length),
            rule=TopScoresRule(score, partial(even_schedule, steps=self.steps or self.block_length)),
            sampling=self.sampling(),
            **self._predictor(GrowingPredictor, GrowingEndThinkBias),
        )

"""Nemotron-Labs-Diffusion's block diffusion sampler."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from dlm_bridge.attention_mask import AttentionPattern, causal_mask
from dlm_bridge.generation.canvas import BlockLayout
from dlm_bridge.generation.commit_rules import CommitRule, ThresholdRule, TopScoresRule, even_schedule, low_confidence
from dlm_bridge.generation.loop import SamplerSpec
from dlm_bridge.generation.predictors import BlockCachePredictor
from dlm_bridge.generation.runtime.runner import CanvasView
from dlm_bridge.generation.samplers.base import Sampler, SpecialTokens, check_blocks


class CausalContextPredictor(BlockCachePredictor):
    """What stands before the current block is causal; the block sees all of that and itself (Nemotron)."""

    def _view_of_all(self, rows: list[int] | None, block: slice) -> CanvasView:
        positions, real = self._positions(rows, block.stop)
        return CanvasView(self.canvas.take(rows, slice(0, block.stop)), causal_mask(real, block.start), positions)


@dataclass(frozen=True, kw_only=True)
class NemotronSampler(Sampler):
    """The model's `generate` with `causal_context=True`: blocks start where the prompt ends.

    A block's first token is the causal model's next token; the others are settled at `threshold`, one a step without
    it.
    """

    name: ClassVar[str] = "nemotron"
    attention_patterns: ClassVar[tuple[AttentionPattern, ...]] = ("bidirectional",)
    families: ClassVar[tuple[str, ...]] = ("nemotron_labs_diffusion",)
    infills: ClassVar[bool] = False  # a block sees nothing of what follows, and begins where the prompt ends
    model_blocks: ClassVar[bool] = True
    shortens_block: ClassVar[bool] = True

    block_length: int = 32
    threshold: float | None = 0.9

    def recipe(self, tokens: SpecialTokens) -> SamplerSpec:
        check_blocks(self.gen_length, self.block_length)
        rule: CommitRule = TopScoresRule(
            low_confidence, partial(even_schedule, steps=self.block_length), on_canvas=False
        )
        if self.threshold is not None:
            rule = ThresholdRule(self.threshold, low_confidence)
        return SamplerSpec(
            layout=BlockLayout(self.block_length),
            rule=rule,
            sampling=self.sampling(),
            predictor=CausalContextPredictor,
            predictor_options={},
            seed="sampled",
        )

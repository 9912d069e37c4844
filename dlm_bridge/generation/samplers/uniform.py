"""Sampler for models trained with uniform noise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dlm_bridge.attention_mask import AttentionPattern
from dlm_bridge.generation.canvas import BlockLayout
from dlm_bridge.generation.loop import SamplerSpec
from dlm_bridge.generation.predictors import Predictor
from dlm_bridge.generation.samplers.base import Sampler, SpecialTokens
from dlm_bridge.generation.uniform import EntropyBoundResampling, PosteriorRule, ResamplingRule


@dataclass(frozen=True, kw_only=True)
class UniformSampler(Sampler):
    """The whole canvas starts as random tokens and is resampled, `steps` times; no mask token is needed.

    No family's own: for models whose config names no mask token, or that were trained this way.
    """

    name: ClassVar[str] = "uniform"
    attention_patterns: ClassVar[tuple[AttentionPattern, ...]] = ("bidirectional",)
    needs_mask: ClassVar[bool] = False

    temperature: float = 1.0
    steps: int = 128
    resampling: str = "posterior"
    entropy_bound: float = 0.1

    def recipe(self, tokens: SpecialTokens) -> SamplerSpec:
        rule: ResamplingRule = PosteriorRule(self.steps)
        if self.resampling == "entropy_bound":
            rule = EntropyBoundResampling(self.steps, self.entropy_bound)
        return SamplerSpec(BlockLayout(self.gen_length, whole=True), rule, self.sampling(), Predictor, {})

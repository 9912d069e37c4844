"""DiffuLLaMA's sampler (arXiv 2410.17891)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dlm_bridge.attention_mask import AttentionPattern
from dlm_bridge.generation.canvas import BlockLayout
from dlm_bridge.generation.commit_rules import AncestralRule
from dlm_bridge.generation.loop import SamplerSpec
from dlm_bridge.generation.predictors import Predictor
from dlm_bridge.generation.samplers.base import Sampler, SpecialTokens


@dataclass(frozen=True, kw_only=True)
class DiffuLLaMASampler(Sampler):
    """DiffuLLaMA's sampler (arXiv 2410.17891): step k of n reveals each mask with probability 1 / (n - k)."""

    name: ClassVar[str] = "diffullama"
    attention_patterns: ClassVar[tuple[AttentionPattern, ...]] = ("bidirectional",)

    temperature: float = 0.9
    diffusion_steps: int = 64
    top_p: float | None = 0.9

    def recipe(self, tokens: SpecialTokens) -> SamplerSpec:
        return SamplerSpec(
            layout=BlockLayout(self.gen_length, whole=True),
            rule=AncestralRule(self.diffusion_steps, eps=0.0),
            sampling=self.sampling(),
            predictor=Predictor,
            predictor_options={},
        )

"""dLLM's masked diffusion sampler, `MDLMSampler`: LLaDA's with a rounded schedule, for any lengths.

    canvas = prompt + [MASK] * gen_length
    for block in blocks of block_length, from left to right:
        for step in ceil(steps / blocks):
            count = round(masks left in the block * fraction of the noise level that the step removes)
            tokens, scores = as LLaDA's sampler
            commit the count masks of the block with the highest scores

Source: ZHZisZZ/dllm ca17675, `MDLMSampler.sample`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import ceil
from typing import Any, ClassVar

import torch

from dlm_bridge.attention.masks import AttentionPattern
from dlm_bridge.generation.canvas import BlockLayout
from dlm_bridge.generation.commit_rules import TopScoresRule, low_confidence, random_order
from dlm_bridge.generation.predictors import Predictor
from dlm_bridge.generation.samplers import Presets, Sampler, SamplerSpec, SpecialTokens, parameter


@dataclass(frozen=True, kw_only=True)
class MDLMSampler(Sampler):
    """dLLM's `MDLMSampler`."""

    name: ClassVar[str] = "mdlm"
    attention_patterns: ClassVar[tuple[AttentionPattern, ...]] = ("bidirectional",)
    presets: ClassVar[Presets] = {"careful": {"steps": 1024}}

    block_length: int = parameter(128, "Tokens per block; published as `block_size`.")
    steps: int = parameter(128, "Denoising steps in total, over all blocks.")
    cfg_scale: float = parameter(0.0)
    remasking: str = parameter(
        "low_confidence",
        "Positions that a step commits: low_confidence (the most probable) or random.",
        choices=("low_confidence", "random"),
    )

    def spec(self, tokens: SpecialTokens) -> SamplerSpec:
        steps = ceil(self.steps / ceil(self.gen_length / self.block_length))
        score = random_order if self.remasking == "random" else low_confidence
        predictor, options = self._predictor()
        return SamplerSpec(
            layout=BlockLayout(self.block_length),
            rule=TopScoresRule(score, partial(rounded_schedule, steps=steps)),
            sampling=self.sampling(),
            predictor=predictor,
            predictor_options={"cfg_scale": self.cfg_scale, **options},
        )

    def _predictor(self) -> tuple[type[Predictor], dict[str, Any]]:
        return Predictor, {}


def rounded_schedule(masks: int, steps: int) -> list[int]:
    """Tokens per step: the step's fraction of the remaining masks, rounded half to even, from float32 noise levels."""
    level = 1 - (1 - torch.arange(steps, -1, -1) / steps)
    fractions = 1 - (level[1:] / level[:-1]).double()
    schedule = []
    for fraction in fractions.tolist():
        count = min(round(masks * fraction), masks)
        if count:
            schedule.append(count)
            masks -= count
    return schedule

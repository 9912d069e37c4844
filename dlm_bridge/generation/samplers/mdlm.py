"""dLLM's masked diffusion sampler."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import ceil
from typing import Any, ClassVar

import torch

from dlm_bridge.attention_mask import AttentionPattern
from dlm_bridge.generation.canvas import BlockLayout
from dlm_bridge.generation.commit_rules import TopScoresRule, low_confidence, random_order
from dlm_bridge.generation.loop import SamplerSpec
from dlm_bridge.generation.predictors import Predictor
from dlm_bridge.generation.samplers.base import Sampler, SpecialTokens


def rounding_schedule(masks: int, steps: int) -> list[int]:
    """dLLM's schedule: each step settles its share of what is left, rounded half to even, with float32 levels."""
    level = 1 - (1 - torch.arange(steps, -1, -1) / steps)
    shares = 1 - (level[1:] / level[:-1]).double()
    num_transfer_tokens = []
    for share in shares.tolist():
        quota = min(round(masks * share), masks)
        if quota:
            num_transfer_tokens.append(quota)
            masks -= quota
    return num_transfer_tokens


@dataclass(frozen=True, kw_only=True)
class MDLMSampler(Sampler):
    """dLLM's `MDLMSampler`: LLaDA's sampler with another schedule, and any number of steps and of new tokens."""

    name: ClassVar[str] = "mdlm"
    attention_patterns: ClassVar[tuple[AttentionPattern, ...]] = ("bidirectional",)

    _ranks_canvas: ClassVar[bool] = True

    block_size: int = 128
    steps: int = 128  # over all blocks
    cfg_scale: float = 0.0
    remasking: str = "low_confidence"

    def recipe(self, tokens: SpecialTokens) -> SamplerSpec:
        steps = ceil(self.steps / ceil(self.gen_length / self.block_size))
        score = random_order if self.remasking == "random" else low_confidence
        return SamplerSpec(
            layout=BlockLayout(self.block_size),
            rule=TopScoresRule(score, partial(rounding_schedule, steps=steps), on_canvas=self._ranks_canvas),
            sampling=self.sampling(),
            **self._predictor(),
        )

    def _predictor(self) -> dict[str, Any]:
        return {"predictor": Predictor, "predictor_options": {"cfg_scale": self.cfg_scale}}

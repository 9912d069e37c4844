"""LLaDA2.0's sampler (arXiv 2512.15745)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dlm_bridge.attention_mask import AttentionPattern
from dlm_bridge.generation.commit_rules import DynamicThresholdRule, even_schedule
from dlm_bridge.generation.loop import SamplerSpec
from dlm_bridge.generation.samplers.base import Sampler, SpecialTokens, by_blocks


@dataclass(frozen=True, kw_only=True)
class LLaDA2Sampler(Sampler):
    """LLaDA2.0's `generate`: what has probability > threshold, or the schedule's share (arXiv 2512.15745)."""

    name: ClassVar[str] = "llada2"
    attention_patterns: ClassVar[tuple[AttentionPattern, ...]] = ("block_causal",)
    model_blocks: ClassVar[bool] = True

    gen_length: int = 2048
    block_length: int = 32
    steps: int = 32  # of each block
    threshold: float = 0.95
    minimal_topk: int = 1

    def recipe(self, tokens: SpecialTokens) -> SamplerSpec:
        steps = max(1, min(self.steps, self.gen_length // self.minimal_topk))
        rule = DynamicThresholdRule(even_schedule(self.block_length, steps), self.threshold)
        return SamplerSpec(rule=rule, sampling=self.sampling(), **by_blocks(self.block_length))

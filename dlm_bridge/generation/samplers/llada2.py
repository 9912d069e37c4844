"""LLaDA2.0's sampler (arXiv 2512.15745).

    for block in blocks of block_length, counted from the text's first token:
        for count in the block, divided evenly over min(steps, gen_length / minimal_topk):
            tokens = argmax(logits), or draws;  scores = their probabilities
            commit all with score > threshold, or the count best if these are more

Source: `generate` of modeling_llada2_moe.py, inclusionAI/dFactory 92b6890.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dlm_bridge.attention.masks import AttentionPattern
from dlm_bridge.generation.canvas import BlockLayout
from dlm_bridge.generation.commit_rules import DynamicThresholdRule, even_schedule
from dlm_bridge.generation.predictors import BlockCausalPredictor
from dlm_bridge.generation.samplers import Presets, Sampler, SamplerSpec, SpecialTokens, parameter


@dataclass(frozen=True, kw_only=True)
class LLaDA2Sampler(Sampler):
    """LLaDA2.0's `generate`."""

    name: ClassVar[str] = "llada2"
    attention_patterns: ClassVar[tuple[AttentionPattern, ...]] = ("block_causal",)
    model_blocks: ClassVar[bool] = True
    presets: ClassVar[Presets] = {"fast": {"threshold": 0.8}, "careful": {"threshold": 1.0}}

    gen_length: int = parameter(2048)
    block_length: int = parameter(32)
    steps: int = parameter(32, "Denoising steps per block.")
    threshold: float = parameter(0.95, "Probability above which a token is committed.")
    minimal_topk: int = parameter(1, "Limits the steps of a block to gen_length / minimal_topk.", minimum=1)

    def spec(self, tokens: SpecialTokens) -> SamplerSpec:
        steps = max(1, min(self.steps, self.gen_length // self.minimal_topk))
        return SamplerSpec(
            layout=BlockLayout(self.block_length, aligned=True),
            rule=DynamicThresholdRule(even_schedule(self.block_length, steps), self.threshold),
            sampling=self.sampling(),
            predictor=BlockCausalPredictor,
            predictor_options={"block_length": self.block_length},
        )

"""iLLaDA's sampler of growing length, `var_generate`.

    canvas = prompt
    while len(canvas) < len(prompt) + gen_length and the row has not ended:
        canvas += [MASK] * block_length                     # a block attends to no later one
        for count in the masks of the block, divided evenly over steps:
            logits = model(canvas)                          # guidance also masks all finished blocks
            tokens = argmax(logits / temperature + Gumbel noise)
            scores = softmax(logits)[tokens]                # remasking "random": uniform numbers
            commit the count masks with the highest scores

Source: `var_generate` of iLLaDA's modeling code on the Hub.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch

from dlm_bridge.attention.masks import AttentionPattern
from dlm_bridge.generation.canvas import BlockLayout
from dlm_bridge.generation.commit_rules import Score, TopScoresRule, even_schedule, low_confidence, random_order
from dlm_bridge.generation.kv_cache import KVCache, PrefixKVCache
from dlm_bridge.generation.predictors import Predictor
from dlm_bridge.generation.samplers import Presets, SamplerSpec, SpecialTokens, parameter
from dlm_bridge.generation.samplers.llada import GuidedSampler


@dataclass(frozen=True, kw_only=True)
class ILLaDASampler(GuidedSampler):
    """iLLaDA's `var_generate`."""

    name: ClassVar[str] = "illada"
    attention_patterns: ClassVar[tuple[AttentionPattern, ...]] = ("bidirectional",)
    infills: ClassVar[bool] = False  # a block does not attend to later tokens
    shortens_block: ClassVar[bool] = True
    whole_blocks: ClassVar[bool] = True
    presets: ClassVar[Presets] = {"fast": {"steps": 8}, "careful": {"steps": None}}

    block_length: int = parameter(32)
    steps: int | None = parameter(None, "Denoising steps per block; by default one per token.")

    def spec(self, tokens: SpecialTokens) -> SamplerSpec:
        score: Score = random_order if self.remasking == "random" else low_confidence
        return SamplerSpec(
            layout=BlockLayout(self.block_length),
            rule=TopScoresRule(score, partial(even_schedule, steps=self.steps or self.block_length)),
            sampling=self.sampling(),
            predictor=GrowingPredictor,
            predictor_options={"cfg_scale": self.cfg_scale},
            logits_bias=self.end_think_bias(),
        )


class GrowingPredictor(Predictor):
    """Bidirectional attention over a canvas that ends with the current block.

    Guidance masks the finished blocks as well as the prompt, as iLLaDA's sampler does.
    """

    caches: ClassVar[tuple[type[KVCache], ...]] = (KVCache, PrefixKVCache)

    def end(self, block: slice) -> int:
        return self._block.stop

    def _condition(self, rows: list[int] | None, columns: slice) -> torch.Tensor:
        condition = torch.zeros_like(self.canvas.take(rows, slice(0, self.canvas.width)), dtype=torch.bool)
        condition[:, : columns.start] = True
        return condition

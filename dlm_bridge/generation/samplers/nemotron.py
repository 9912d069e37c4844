"""Nemotron-Labs-Diffusion's block diffusion sampler with a causal prefix.

    for block in blocks of block_length, counted from the end of the prompt:
        commit the block's first token: the causal model's next token
        while the block has masks:
            logits = model(committed tokens causally, block bidirectionally)
            tokens = argmax(logits), or draws;  scores = softmax(logits)[tokens]
            commit those with score >= threshold, and the best one       # threshold None: the best one

Source: the model's `generate` with `causal_context=True`, in its modeling code on the Hub.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch

from dlm_bridge.attention.masks import AttentionPattern, causal_mask
from dlm_bridge.generation.canvas import BlockLayout
from dlm_bridge.generation.commit_rules import CommitRule, ThresholdRule, TopScoresRule, even_schedule, low_confidence
from dlm_bridge.generation.predictors import BlockCachePredictor
from dlm_bridge.generation.runtime.runner import CanvasView
from dlm_bridge.generation.runtime.varlen import Packing
from dlm_bridge.generation.samplers import Presets, Sampler, SamplerSpec, SpecialTokens, parameter


@dataclass(frozen=True, kw_only=True)
class NemotronSampler(Sampler):
    """The model's `generate` with `causal_context=True`."""

    name: ClassVar[str] = "nemotron"
    attention_patterns: ClassVar[tuple[AttentionPattern, ...]] = ("bidirectional",)
    families: ClassVar[tuple[str, ...]] = ("nemotron_labs_diffusion", "nemotron")
    infills: ClassVar[bool] = False  # blocks start after the prompt and do not attend to later tokens
    model_blocks: ClassVar[bool] = True
    shortens_block: ClassVar[bool] = True
    whole_blocks: ClassVar[bool] = True
    presets: ClassVar[Presets] = {"fast": {"threshold": 0.8}, "careful": {"threshold": None}}

    block_length: int = parameter(32)
    threshold: float | None = parameter(0.9, "Confidence from which a token is committed; None: one token per step.")

    @classmethod
    def trained_block(cls, config: Any, attention_pattern: AttentionPattern) -> int | None:
        return getattr(config, "block_size", None)

    def spec(self, tokens: SpecialTokens) -> SamplerSpec:
        schedule = partial(even_schedule, steps=self.block_length)
        rule: CommitRule = TopScoresRule(low_confidence, schedule)
        if self.threshold is not None:
            rule = ThresholdRule(self.threshold, low_confidence)
        return SamplerSpec(
            layout=BlockLayout(self.block_length),
            rule=rule,
            sampling=self.sampling(),
            predictor=CausalContextPredictor,
            first_token="sampled",
        )


class CausalContextPredictor(BlockCachePredictor):
    """Causal attention before the current block; the block attends to all columns up to its end."""

    causal_block = 1

    def _uncached_view(self, rows: list[int] | None, block: slice) -> CanvasView:
        positions, real = self._positions(rows, block.stop)
        tokens, mask, packing = self.canvas.take(rows, slice(0, block.stop)), causal_mask(real, block.start), None
        if self.canvas.padded:
            order = torch.arange(block.stop, device=real.device).clamp(max=block.start).expand_as(real)
            packing = Packing(real, self.canvas.lengths(rows, block.stop), blocks=order)
        return CanvasView(tokens, mask, positions, packing=packing)

"""dInfer's hierarchical decoding (arXiv 2510.08666): a step commits distant tokens, which divide the spans of masks.

    canvas = prompt + [MASK] * gen_length
    for block in blocks of block_length, from left to right:    # block-causal: counted from the first token
        while the block has masks:
            logits = model(canvas)
            tokens = argmax(logits / temperature + Gumbel noise)
            scores = softmax(logits)[tokens]
            for span in runs of neighbouring masks of the block:
                commit the span's best token if its score > low_threshold
            commit every token with score > threshold, and the block's best one

In the first step, the block is one span. Its best token divides it into two spans, whose best tokens are far apart and
nearly independent.

Source: inclusionAI/dInfer fce4e32, `HierarchyDecoder`, called as by `BlockWiseDiffusionLLM` and `BlockDiffusionLLM`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from dlm_bridge.attention.masks import AttentionPattern
from dlm_bridge.generation.commit_rules import MINUS_INFINITY, OneOrMoreRule, Step, best, low_confidence
from dlm_bridge.generation.samplers import Sampler, SamplerSpec, SpecialTokens, block_parts, parameter


@dataclass(frozen=True, kw_only=True)
class HierarchicalSampler(Sampler):
    """dInfer's hierarchical decoding."""

    name: ClassVar[str] = "hierarchical"
    attention_patterns: ClassVar[tuple[AttentionPattern, ...]] = ("bidirectional", "block_causal")
    model_blocks: ClassVar[bool] = True
    shortens_block: ClassVar[bool] = True

    block_length: int = parameter(128)
    threshold: float | None = parameter(0.9, "Confidence above which a token is committed anywhere; None: never.")
    low_threshold: float | None = parameter(
        0.3, "Confidence above which the best token of a span is committed; None: always.", minimum=0
    )

    def spec(self, tokens: SpecialTokens) -> SamplerSpec:
        return SamplerSpec(
            rule=HierarchicalRule(self.threshold, self.low_threshold),
            sampling=self.sampling(),
            **block_parts(self.block_length, tokens),
        )


class HierarchicalRule(OneOrMoreRule):
    """Commits the best token of each run of neighbouring masks if its confidence is above `low_threshold`, all tokens
    with confidence above `threshold`, and the best token of the block."""

    def __init__(self, threshold: float | None, low_threshold: float | None) -> None:
        self._threshold = threshold
        self._low_threshold = low_threshold

    def select(self, step: Step) -> torch.Tensor:
        scores_AN = low_confidence(step).masked_fill(~step.masked, MINUS_INFINITY)
        picked_AN = (scores_AN == best_of_spans(scores_AN, step.masked)) & step.masked
        if self._low_threshold is not None:
            picked_AN &= scores_AN > self._low_threshold
        if self._threshold is not None:
            picked_AN |= scores_AN > self._threshold
        return picked_AN | (best(scores_AN) & step.masked)


def best_of_spans(scores_AN: torch.Tensor, masked_AN: torch.Tensor) -> torch.Tensor:
    """[A, N], at each mask the highest score of its run of neighbouring masks."""
    starts_AN = masked_AN.clone()
    starts_AN[:, 1:] &= ~masked_AN[:, :-1]
    span_AN = (starts_AN.cumsum(dim=1) - 1).clamp(min=0)
    highest_AN = torch.full_like(scores_AN, MINUS_INFINITY).scatter_reduce(1, span_AN, scores_AN, "amax")
    return highest_AN.gather(1, span_AN)

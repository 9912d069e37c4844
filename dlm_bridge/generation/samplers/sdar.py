"""SDAR's and TraDo's sampler, `block_diffusion_generate` (arXiv 2510.06303); DreamReasoner's is modelled on it.

    for block in blocks of block_length, counted from the text's first token:
        for count in the block, divided evenly over steps:
            tokens = draw(softmax(logits / temperature), top_k, top_p);  scores = their probabilities
            low_confidence_dynamic: commit all with score > threshold, or the count best if these are more
            low_confidence_static:  commit the count best
            sequential:             commit the count leftmost masks
            entropy_bounded:        commit the lowest entropies while their sum is < eb_threshold, at least one

Differences from the published code: temperature 0, by which it divides, is greedy decoding; after `steps` steps a
block has no masks; prompt tokens are never overwritten.

Source: JetAstra/SDAR c2041a8, generate.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from dlm_bridge.attention.masks import AttentionPattern
from dlm_bridge.generation.canvas import BlockLayout, to_device
from dlm_bridge.generation.commit_rules import (
    CommitRule,
    DynamicThresholdRule,
    Step,
    all_in_last_step,
    even_schedule,
    one_each_then_rest,
    truncate_schedule,
)
from dlm_bridge.generation.predictors import BlockCausalPredictor
from dlm_bridge.generation.samplers import Presets, Sampler, SamplerSpec, SpecialTokens, parameter
from dlm_bridge.generation.token_sampling import Noise, TokenSampling

STRATEGIES = ("low_confidence_dynamic", "low_confidence_static", "sequential", "entropy_bounded")


@dataclass(frozen=True, kw_only=True)
class SDARSampler(Sampler):
    """SDAR's `block_diffusion_generate`."""

    name: ClassVar[str] = "sdar"
    attention_patterns: ClassVar[tuple[AttentionPattern, ...]] = ("block_causal",)
    aliases: ClassVar[Mapping[str, str]] = {
        **Sampler.aliases, "confidence_threshold": "threshold", "denoising_steps": "steps",
    }  # fmt: skip
    model_blocks: ClassVar[bool] = True
    presets: ClassVar[Presets] = {
        "fast": {"remasking_strategy": "low_confidence_dynamic", "threshold": 0.7},
        "careful": {"remasking_strategy": "low_confidence_static", "steps": None},
    }

    temperature: float = parameter(1.0)
    block_length: int = parameter(4)
    steps: int | None = parameter(
        None, "Denoising steps per block, by default one per token; published as `denoising_steps`."
    )
    remasking_strategy: str = parameter(
        "low_confidence_dynamic", f"Positions that a step commits: {', '.join(STRATEGIES)}.", choices=STRATEGIES
    )
    threshold: float = parameter(
        0.85,
        "Probability above which low_confidence_dynamic commits a token; published as `confidence_threshold`.",
    )
    eb_threshold: float = parameter(0.35, "Bound of entropy_bounded on the entropy that a step commits.", minimum=0)

    def spec(self, tokens: SpecialTokens) -> SamplerSpec:
        return SamplerSpec(
            layout=BlockLayout(self.block_length, aligned=True),
            rule=self._rule(),
            sampling=TokenSampling(self.temperature, self.top_k, self.top_p),
            predictor=BlockCausalPredictor,
            predictor_options={"block_length": self.block_length},
        )

    def _rule(self) -> CommitRule:
        steps = self.steps or self.block_length
        schedule = even_schedule(self.block_length, steps)
        if self.remasking_strategy == "sequential":
            return SequentialRule(schedule)
        if self.remasking_strategy == "entropy_bounded":
            return EntropyBoundRule(self.eb_threshold, steps)
        dynamic = self.remasking_strategy == "low_confidence_dynamic"
        return DynamicThresholdRule(schedule, self.threshold if dynamic else None)


class SequentialRule(CommitRule):
    """Commits the leftmost masks, as many per step as scheduled."""

    exact = True

    def __init__(self, schedule: list[int]) -> None:
        self._schedule = schedule

    def begin(self, masks: list[int], noise: Noise) -> list[list[int]]:
        return [truncate_schedule(self._schedule, count) for count in masks]

    def select(self, step: Step) -> torch.Tensor:
        rank_AN = step.masked.long().cumsum(dim=1)
        return step.masked & (rank_AN <= to_device(step.num_transfer_tokens, rank_AN.device)[:, None])


class EntropyBoundRule(CommitRule):
    """Commits the positions of lowest entropy whose entropies sum to less than the bound, at least one.

    The last of `steps` steps commits all remaining masks.
    """

    def __init__(self, bound: float, steps: int) -> None:
        self._bound = bound
        self._steps = steps

    def begin(self, masks: list[int], noise: Noise) -> list[list[int]]:
        return [one_each_then_rest(self._steps, count) for count in masks]

    def select(self, step: Step) -> torch.Tensor:
        # As published, with a floor under the probabilities, so that p log p is defined everywhere.
        probabilities = step.shaped.softmax(dim=-1).clamp(min=1e-12)
        entropies_AN = -(probabilities * probabilities.log()).sum(dim=-1)
        ordered_AN, order_AN = entropies_AN.masked_fill(~step.masked, torch.inf).sort(dim=1, stable=True)
        passed_AN = ordered_AN.cumsum(dim=1) < self._bound
        passed_AN[:, 0] = True
        picked_AN = torch.zeros_like(step.masked).scatter(1, order_AN, passed_AN)
        return (picked_AN | all_in_last_step(step, self._steps)) & step.masked

"""SDAR's sampler (arXiv 2510.06303)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from dlm_bridge.attention_mask import AttentionPattern
from dlm_bridge.generation.canvas import to_device
from dlm_bridge.generation.commit_rules import (
    CommitRule,
    DynamicThresholdRule,
    Step,
    all_in_last_step,
    even_schedule,
    one_each_then_rest,
    truncate_schedule,
)
from dlm_bridge.generation.loop import SamplerSpec
from dlm_bridge.generation.samplers.base import Sampler, SpecialTokens, by_blocks
from dlm_bridge.generation.token_sampling import Noise, TokenSampling


class SequentialRule(CommitRule):
    """Settles the left-most masks, so many a step as the schedule says (SDAR's sequential)."""

    exact = True

    def __init__(self, schedule: list[int]) -> None:
        self._schedule = schedule

    def begin(self, masks: list[int], noise: Noise) -> list[list[int]]:
        return [truncate_schedule(self._schedule, count) for count in masks]

    def select(self, step: Step) -> torch.Tensor:
        rank_AN = step.masked.long().cumsum(dim=1)
        return step.masked & (rank_AN <= to_device(step.num_transfer_tokens, rank_AN.device)[:, None])


class EntropyBoundRule(CommitRule):
    """Settles the positions of lowest entropy whose entropies add up to less than the bound, at least one.

    SDAR's entropy_bounded. The last of `steps` steps settles what is left.
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


@dataclass(frozen=True, kw_only=True)
class SDARSampler(Sampler):
    """SDAR's and TraDo's `block_diffusion_generate` (arXiv 2510.06303), and DreamReasoner's, which is made after it.

    Temperature 0, by which the published code divides, is greedy here. After `denoising_steps` steps nothing of a
    block is left masked, and prompt tokens are never overwritten (both can happen there).
    """

    name: ClassVar[str] = "sdar"
    attention_patterns: ClassVar[tuple[AttentionPattern, ...]] = ("block_causal",)
    model_blocks: ClassVar[bool] = True

    temperature: float = 1.0
    block_length: int = 4
    denoising_steps: int | None = None  # of each block; one for each of its tokens by default
    remasking_strategy: str = "low_confidence_dynamic"
    confidence_threshold: float = 0.85
    eb_threshold: float = 0.35

    def recipe(self, tokens: SpecialTokens) -> SamplerSpec:
        sampling = TokenSampling(self.temperature, self.top_k, self.top_p)
        return SamplerSpec(rule=self._rule(), sampling=sampling, **by_blocks(self.block_length))

    def _rule(self) -> CommitRule:
        steps = self.denoising_steps or self.block_length
        schedule = even_schedule(self.block_length, steps)
        if self.remasking_strategy == "sequential":
            return SequentialRule(schedule)
        if self.remasking_strategy == "entropy_bounded":
            return EntropyBoundRule(self.eb_threshold, steps)
        dynamic = self.remasking_strategy == "low_confidence_dynamic"
        return DynamicThresholdRule(schedule, self.confidence_threshold if dynamic else None)

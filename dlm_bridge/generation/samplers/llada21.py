"""LLaDA2.1's sampler, which edits committed tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from dlm_bridge.attention_mask import AttentionPattern
from dlm_bridge.generation.commit_rules import (
    MINUS_INFINITY,
    CommitRule,
    Step,
    probability,
    top_scores,
)
from dlm_bridge.generation.loop import SamplerSpec
from dlm_bridge.generation.samplers.base import Sampler, SpecialTokens, by_blocks
from dlm_bridge.generation.token_sampling import Noise


class EditingRule(CommitRule):
    """Settles masks with probability > threshold, or the `num_to_transfer` best if these are more; rewrites settled
    new tokens of the block where the proposal differs and has probability > editing_threshold.

    A block is done when it has no masks and nothing was edited, or after `max_post_steps` steps without masks.
    """

    edits = True

    def __init__(self, threshold: float, editing_threshold: float, max_post_steps: int, num_to_transfer: int) -> None:
        self._threshold = threshold
        self._editing_threshold = editing_threshold
        self._max_post_steps = max_post_steps
        self._num_to_transfer = num_to_transfer
        self._rows = 0
        self._post_steps: torch.Tensor | None = None  # [B], steps without masks that a row has had
        self._more_A: torch.Tensor | None = None

    def begin(self, masks: list[int], noise: Noise) -> list[list[int]]:
        self._post_steps = None
        self._rows = len(masks)
        return [[1] * count + [0] * self._max_post_steps for count in masks]

    def select(self, step: Step) -> torch.Tensor:
        scores_AN = probability(step)
        masked_scores_AN = scores_AN.masked_fill(~step.masked, MINUS_INFINITY)
        sure_AN = (masked_scores_AN > self._threshold) & step.masked
        best_AN = top_scores(masked_scores_AN, [min(self._num_to_transfer, scores_AN.shape[1])] * len(step.rows))
        enough_A1 = (sure_AN.sum(dim=1) >= self._num_to_transfer)[:, None]
        filled_AN = torch.where(enough_A1, sure_AN, best_AN)
        sure_AN = (scores_AN > self._editing_threshold) & (step.tokens != step.before)
        edits_AN = sure_AN & step.new & ~step.masked

        if self._post_steps is None:  # a block's first step
            self._post_steps = torch.zeros(self._rows, dtype=torch.long, device=scores_AN.device)
        full_A = ~step.masked.any(dim=1)
        self._post_steps[step.rows] += full_A
        masks_left_A = (step.masked & ~filled_AN).any(dim=1)
        may_edit_A = self._post_steps[step.rows] < self._max_post_steps
        self._more_A = masks_left_A | (~(full_A & ~edits_AN.any(dim=1)) & may_edit_A)
        return filled_AN | edits_AN

    def goes_on(self, step: Step, unfinished_A: torch.Tensor) -> torch.Tensor:
        # An end-of-sequence token does not end a row's block early: it may be edited away again.
        assert self._more_A is not None
        return self._more_A


@dataclass(frozen=True, kw_only=True)
class LLaDA21Sampler(Sampler):
    """LLaDA2.1's `generate`: settled tokens of the block are edited where the model has become sure of another."""

    name: ClassVar[str] = "llada2.1"
    attention_patterns: ClassVar[tuple[AttentionPattern, ...]] = ("block_causal",)
    model_blocks: ClassVar[bool] = True

    gen_length: int = 2048
    block_length: int = 32
    threshold: float = 0.95
    editing_threshold: float = 0.9
    max_post_steps: int = 16
    num_to_transfer: int = 1

    def recipe(self, tokens: SpecialTokens) -> SamplerSpec:
        rule = EditingRule(self.threshold, self.editing_threshold, self.max_post_steps, self.num_to_transfer)
        return SamplerSpec(rule=rule, sampling=self.sampling(), **by_blocks(self.block_length))

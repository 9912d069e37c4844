"""LLaDA2.1's sampler, which edits committed tokens of the block.

    for block in blocks of block_length, counted from the text's first token:
        until the block has no masks and a step edits no token, or after max_post_steps steps without masks:
            tokens = argmax(logits), or draws;  scores = their probabilities
            commit the masks with score > threshold, or the num_to_transfer best if these are more
            replace committed new tokens of the block that differ and have score > editing_threshold

Source: `generate` of modeling_llada2_moe.py; ZHZisZZ/dllm ca17675, its sampler of LLaDA2.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from dlm_bridge.attention.masks import AttentionPattern
from dlm_bridge.generation.canvas import BlockLayout, to_device
from dlm_bridge.generation.commit_rules import MINUS_INFINITY, CommitRule, Step, probability, top_scores
from dlm_bridge.generation.predictors import BlockCausalPredictor
from dlm_bridge.generation.samplers import Sampler, SamplerSpec, SpecialTokens, parameter
from dlm_bridge.generation.token_sampling import Noise


@dataclass(frozen=True, kw_only=True)
class LLaDA21Sampler(Sampler):
    """LLaDA2.1's `generate`."""

    name: ClassVar[str] = "llada2.1"
    attention_patterns: ClassVar[tuple[AttentionPattern, ...]] = ("block_causal",)
    model_blocks: ClassVar[bool] = True

    gen_length: int = parameter(2048)
    block_length: int = parameter(32)
    threshold: float = parameter(0.95, "Probability above which a mask is committed.")
    editing_threshold: float = parameter(0.9, "Probability above which a committed token is replaced.", minimum=0)
    max_post_steps: int = parameter(16, "Maximum steps of a block without masks.", minimum=0)
    num_to_transfer: int = parameter(1, "Minimum masks that a step commits.", minimum=1)

    def spec(self, tokens: SpecialTokens) -> SamplerSpec:
        return SamplerSpec(
            layout=BlockLayout(self.block_length, aligned=True),
            rule=EditingRule(self.threshold, self.editing_threshold, self.max_post_steps, self.num_to_transfer),
            sampling=self.sampling(),
            predictor=BlockCausalPredictor,
            predictor_options={"block_length": self.block_length},
        )


class EditingRule(CommitRule):
    """Commits masks by one threshold, and replaces committed new tokens of the block by another one."""

    edits = True

    def __init__(self, threshold: float, editing_threshold: float, max_post_steps: int, num_to_transfer: int) -> None:
        self._threshold = threshold
        self._editing_threshold = editing_threshold
        self._max_post_steps = max_post_steps
        self._num_to_transfer = num_to_transfer
        self._more_A: torch.Tensor | None = None

    def begin(self, masks: list[int], noise: Noise) -> list[list[int]]:
        return [[1] * count + [0] * self._max_post_steps for count in masks]

    def select(self, step: Step) -> torch.Tensor:
        scores_AN = probability(step)
        masked_scores_AN = scores_AN.masked_fill(~step.masked, MINUS_INFINITY)
        confident_AN = (masked_scores_AN > self._threshold) & step.masked
        best_AN = top_scores(masked_scores_AN, [min(self._num_to_transfer, scores_AN.shape[1])] * len(step.rows))
        enough_A1 = (confident_AN.sum(dim=1) >= self._num_to_transfer)[:, None]
        filled_AN = torch.where(enough_A1, confident_AN, best_AN)
        differs_AN = (scores_AN > self._editing_threshold) & (step.tokens != step.before)
        edits_AN = differs_AN & step.new & ~step.masked

        full_A = ~step.masked.any(dim=1)
        post_steps_B = self.memory.tensor("post steps")  # without masks, so far
        rows_A = to_device(step.rows, full_A.device)
        post_steps_A = post_steps_B[rows_A] + full_A
        post_steps_B[rows_A] = post_steps_A
        masks_left_A = (step.masked & ~filled_AN).any(dim=1)
        may_edit_A = post_steps_A < self._max_post_steps
        self._more_A = masks_left_A | (~(full_A & ~edits_AN.any(dim=1)) & may_edit_A)
        return filled_AN | edits_AN

    def continues(self, step: Step, unfinished_A: torch.Tensor) -> torch.Tensor:
        # An end-of-sequence token does not end a row's block early, because it may still be edited.
        assert self._more_A is not None
        return self._more_A

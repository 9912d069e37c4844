"""LLaDA2.1's rule: masks are settled by a threshold, and tokens that were settled before may still be edited."""

from __future__ import annotations

import torch

from dlm_bridge.generation.noise import Noise
from dlm_bridge.generation.rules.base import NEVER, CommitRule, Step, highest
from dlm_bridge.generation.rules.scores import probability


class Editing(CommitRule):
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
        masked_scores_AN = scores_AN.masked_fill(~step.masked, NEVER)
        sure_AN = (masked_scores_AN > self._threshold) & step.masked
        best_AN = highest(masked_scores_AN, [min(self._num_to_transfer, scores_AN.shape[1])] * len(step.rows))
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

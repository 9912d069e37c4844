"""Rules that settle every position that the model is sure enough of, and never fewer than one."""

from __future__ import annotations

import torch

from dlm_bridge.generation.noise import Noise
from dlm_bridge.generation.rules.base import NEVER, CommitRule, Step, best, highest, highest_on_canvas
from dlm_bridge.generation.rules.scores import Score, precise_confidence, probability
from dlm_bridge.generation.transfers import send


class OneByOne(CommitRule):
    """The steps of a rule that settles at least one position a step, until none is left."""

    def begin(self, masks: list[int], noise: Noise) -> list[list[int]]:
        return [[1] * count for count in masks]


class Threshold(OneByOne):
    """Settles the best position and all others with confidence >= threshold (Fast-dLLM v1, Nemotron).

    Of equally good ones it is the left-most: torch.topk would choose by how many columns a block has, which are fewer
    in the first block of a prompt to fill than in the same row's block of a wider batch.
    """

    def __init__(self, threshold: float, score: Score = precise_confidence) -> None:
        self._threshold = threshold
        self._score = score

    def select(self, step: Step) -> torch.Tensor:
        scores_AN = self._score(step).masked_fill(~step.masked, NEVER)
        sure_AN = (scores_AN >= self._threshold) & step.masked
        return sure_AN | (best(scores_AN) & (scores_AN > NEVER))  # NaN is above nothing


class Factor(OneByOne):
    """Settles the r most confident positions while the r-th has confidence >= 1 - factor / (r + 1) (Fast-dLLM v1).

    The most confident one is always settled.
    """

    def __init__(self, factor: float, score: Score = precise_confidence) -> None:
        self._factor = factor
        self._score = score

    def select(self, step: Step) -> torch.Tensor:
        scores_AN = self._score(step).masked_fill(~step.masked, NEVER)
        ordered_AN, order_AN = scores_AN.sort(dim=1, descending=True, stable=True)
        rank_N = torch.arange(1, scores_AN.shape[1] + 1, device=scores_AN.device)
        # Confidence falls and the bound rises with the rank: those that pass come first.
        passed_AN = ordered_AN >= 1 - self._factor / (rank_N + 1)
        passed_AN[:, 0] = True
        return torch.zeros_like(step.masked).scatter(1, order_AN, passed_AN) & step.masked


class SmallBlocks(OneByOne):
    """Settles positions with probability > threshold, at least the best, of the first small block with a mask left.

    Fast-dLLM v2: small blocks are denoised from left to right inside a block.
    """

    def __init__(self, threshold: float, small_block_size: int) -> None:
        self._threshold = threshold
        self._small_block_size = small_block_size

    def select(self, step: Step) -> torch.Tensor:
        small_N = torch.arange(step.masked.shape[1], device=step.masked.device) // self._small_block_size
        first_A = step.masked.int().argmax(dim=1)
        candidates_AN = step.masked & (small_N == small_N[first_A][:, None])
        scores_AN = step.probabilities().masked_fill(~candidates_AN, NEVER)
        return ((scores_AN > self._threshold) & candidates_AN) | best(scores_AN)


class Dynamic(CommitRule):
    """Settles all positions with probability > threshold, or the quota's best where those are fewer.

    SDAR's low_confidence_dynamic and LLaDA2.0's rule. The quotas are those of a whole block of masks; after the last
    scheduled step nothing is left. Without a threshold just the quota is settled (SDAR's low_confidence_static).
    """

    def __init__(self, schedule: list[int], threshold: float | None) -> None:
        self._schedule = schedule
        self._threshold = threshold

    def begin(self, masks: list[int], noise: Noise) -> list[list[int]]:
        return [cut(self._schedule, count) for count in masks]

    def select(self, step: Step) -> torch.Tensor:
        scores_AN = probability(step).masked_fill(~step.masked, NEVER)
        best_AN = highest(scores_AN, step.quotas)
        if self._threshold is None:
            return best_AN
        sure_AN = (scores_AN > self._threshold) & step.masked
        enough_A = sure_AN.sum(dim=1) >= send(step.quotas, sure_AN.device)
        return torch.where(enough_A[:, None], sure_AN, best_AN)


class Sequential(CommitRule):
    """Settles the left-most masks, so many a step as the schedule says (SDAR's sequential)."""

    exact = True

    def __init__(self, schedule: list[int]) -> None:
        self._schedule = schedule

    def begin(self, masks: list[int], noise: Noise) -> list[list[int]]:
        return [cut(self._schedule, count) for count in masks]

    def select(self, step: Step) -> torch.Tensor:
        rank_AN = step.masked.long().cumsum(dim=1)
        return step.masked & (rank_AN <= send(step.quotas, rank_AN.device)[:, None])


class Leftmost(OneByOne):
    """Settles one token a step, from left to right, as an autoregressive model writes."""

    def select(self, step: Step) -> torch.Tensor:
        return step.masked & (step.masked.long().cumsum(dim=1) == 1)


class Budget(CommitRule):
    """Fast-dLLM's confidence_threshold for Dream: a threshold within a step budget of equal shares.

    A step may settle its share and what earlier steps held back; of these, the best and all with probability >=
    threshold. Steps go on after the schedule's end until nothing is masked.
    """

    def __init__(self, threshold: float, steps: int) -> None:
        self._threshold = threshold
        self._steps = steps
        self._masks: list[int] = []

    def begin(self, masks: list[int], noise: Noise) -> list[list[int]]:
        self._masks = masks
        return [[1] * count for count in masks]

    def select(self, step: Step) -> torch.Tensor:
        scores_AN = probability(step).masked_fill(~step.masked, NEVER)
        # What the schedule leaves for later steps stays masked, however sure the model is.
        later = [max(0, self._masks[row] - self._masks[row] // self._steps * (step.index + 1)) for row in step.rows]
        left = step.masked.sum(dim=1).tolist()
        allowed_AN = highest_on_canvas(step, scores_AN, [a - b for a, b in zip(left, later, strict=True)])
        best_AN = highest_on_canvas(step, scores_AN, [1] * len(step.rows))
        return (allowed_AN & (scores_AN >= self._threshold)) | best_AN


def cut(schedule: list[int], masks: int) -> list[int]:
    """The schedule's first steps, as far as they have masks to settle."""
    quotas = []
    for quota in schedule:
        if masks:
            quotas.append(min(quota, masks))
            masks -= quotas[-1]
    return quotas

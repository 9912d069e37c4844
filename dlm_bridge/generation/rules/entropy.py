"""Rules that settle positions by the entropy of their prediction."""

from __future__ import annotations

import torch

from dlm_bridge.generation.noise import Noise
from dlm_bridge.generation.rules.base import NEVER, CommitRule, Step, best, chosen
from dlm_bridge.generation.rules.scores import entropy
from dlm_bridge.generation.rules.threshold import OneByOne


class EntropyBounded(CommitRule):
    """Settles the positions of lowest entropy whose entropies add up to less than the bound, at least one.

    SDAR's entropy_bounded. The last of `steps` steps settles what is left.
    """

    def __init__(self, bound: float, steps: int) -> None:
        self._bound = bound
        self._steps = steps

    def begin(self, masks: list[int], noise: Noise) -> list[list[int]]:
        return [_at_most(self._steps, count) for count in masks]

    def select(self, step: Step) -> torch.Tensor:
        # As published, with a floor under the probabilities, so that p log p is defined everywhere.
        probabilities = step.shaped.softmax(dim=-1).clamp(min=1e-12)
        entropies_AN = -(probabilities * probabilities.log()).sum(dim=-1)
        ordered_AN, order_AN = entropies_AN.masked_fill(~step.masked, torch.inf).sort(dim=1, stable=True)
        passed_AN = ordered_AN.cumsum(dim=1) < self._bound
        passed_AN[:, 0] = True
        picked_AN = torch.zeros_like(step.masked).scatter(1, order_AN, passed_AN)
        return (picked_AN | _all_when_last(step, self._steps)) & step.masked


class ErrorBounded(CommitRule):
    """RND1's eb_gamma: the most probable proposals, as long as their entropies but the largest add up to <= gamma.

    (Entropy-bounded unmasking, arXiv 2505.24857.) The last of `steps` steps settles what is left.
    """

    def __init__(self, gamma: float, steps: int) -> None:
        self._gamma = gamma
        self._steps = steps

    def begin(self, masks: list[int], noise: Noise) -> list[list[int]]:
        return [_at_most(self._steps, count) for count in masks]

    def select(self, step: Step) -> torch.Tensor:
        scores_AN = chosen(step.shaped.log_softmax(dim=-1), step.tokens).masked_fill(~step.masked, NEVER)
        order_AN = scores_AN.sort(dim=1, descending=True, stable=True).indices
        entropies_AN = entropy(step.shaped).gather(1, order_AN)
        bound_AN = entropies_AN.cumsum(dim=1) - entropies_AN.cummax(dim=1).values
        passed_AN = bound_AN <= self._gamma
        picked_AN = torch.zeros_like(step.masked).scatter(1, order_AN, passed_AN)
        return (picked_AN | _all_when_last(step, self._steps)) & step.masked


class DistancePenalised(OneByOne):
    """WeDLM's: settles the lowest entropy + factor * distance to the first mask, and all below the threshold.

    Without a threshold only the lowest is settled.
    """

    def __init__(self, threshold: float | None, factor: float) -> None:
        self._threshold = threshold
        self._factor = factor

    def select(self, step: Step) -> torch.Tensor:
        position_N = torch.arange(step.masked.shape[1], device=step.masked.device)
        distance_AN = position_N - step.masked.int().argmax(dim=1)[:, None]
        adjusted_AN = entropy(step.logits) + distance_AN * self._factor
        adjusted_AN = adjusted_AN.masked_fill(~step.masked, torch.inf)
        lowest_AN = best(-adjusted_AN)
        return lowest_AN if self._threshold is None else lowest_AN | (adjusted_AN < self._threshold)


def _at_most(steps: int, masks: int) -> list[int]:
    """At least one position in each of so many steps, in the last all that are left."""
    return [1] * masks if masks <= steps else [1] * (steps - 1) + [masks - steps + 1]


def _all_when_last(step: Step, steps: int) -> torch.Tensor:
    return step.masked if step.index == steps - 1 else torch.zeros_like(step.masked)

"""Rules that settle a number of positions known beforehand: the highest scores, or those whose time has come."""

from __future__ import annotations

from collections.abc import Callable

import torch

from dlm_bridge.generation.noise import Noise
from dlm_bridge.generation.rules.base import NEVER, CommitRule, Step, highest, highest_on_canvas
from dlm_bridge.generation.rules.schedules import times
from dlm_bridge.generation.rules.scores import Score


class Quota(CommitRule):
    """Settles the highest scores, so many in each step as the schedule says (LLaDA, Dream, RND1).

    With a `rank_temperature` the positions are drawn from softmax(score / rank_temperature) without replacement
    instead (Dream's alg_temp).
    """

    exact = True

    def __init__(
        self,
        score: Score,
        schedule: Callable[[int], list[int]],
        rank_temperature: float | None = None,
        *,
        on_canvas: bool = True,  # equal scores are told apart as in a ranking of the whole canvas, not of the block
    ) -> None:
        self._score = score
        self._schedule = schedule
        self._rank_temperature = rank_temperature
        self._on_canvas = on_canvas

    def begin(self, masks: list[int], noise: Noise) -> list[list[int]]:
        schedules = {count: self._schedule(count) for count in set(masks)}
        return [schedules[count] for count in masks]

    def select(self, step: Step) -> torch.Tensor:
        scores_AN = self._score(step)
        if self._rank_temperature:
            # The highest of score / T + Gumbel noise are draws without replacement.
            uniform_AS = step.noise.per_position(step.rows, step.width, step.origins)
            uniform_AN = uniform_AS[:, step.columns].clamp(min=1e-30)
            scores_AN = scores_AN / self._rank_temperature - uniform_AN.log().neg().log()
        scores_AN = scores_AN.masked_fill(~step.masked, NEVER)
        return highest_on_canvas(step, scores_AN, step.quotas) if self._on_canvas else highest(scores_AN, step.quotas)


class Ancestral(CommitRule):
    """Each position is revealed on its own, from noise level t to s with probability 1 - s / t, in the last step all.

    Dream's origin; with eps = 0 it is DiffuLLaMA's sampler, where step k of n reveals with probability 1 / (n - k).
    A position is masked after a step with the probability that the step's noise level is, so that one uniform number
    tells when it is revealed; steps that reveal nothing need no forward.
    """

    exact = True

    def __init__(self, steps: int, eps: float) -> None:
        self._rising_levels = times(steps, eps)[1:-1].flip(0)
        self._order: list[torch.Tensor] = []  # by row and mask, the step in which it is revealed
        self._masks: dict[int, torch.Tensor] = {}  # by row, where its masks were

    def begin(self, masks: list[int], noise: Noise) -> list[list[int]]:
        width = max(masks)
        uniform_BN = noise.per_position(range(len(masks)), width, [width - count for count in masks])
        # A position is still masked after the steps whose level is above its number.
        levels = self._rising_levels.to(uniform_BN.device)
        when_BN = len(levels) - torch.searchsorted(levels, uniform_BN, right=True)
        quotas, self._order = [], []
        for count, when_N in zip(masks, when_BN, strict=True):
            _, order, counts = when_N[width - count :].unique(return_inverse=True, return_counts=True)
            quotas.append(counts.tolist())
            self._order.append(order)
        return quotas

    def select(self, step: Step) -> torch.Tensor:
        if step.index == 0:
            self._masks = dict(zip(step.rows, step.masked, strict=True))
        picked_AN = torch.zeros_like(step.masked)
        for picked_N, row in zip(picked_AN, step.rows, strict=True):
            picked_N.masked_scatter_(self._masks[row], self._order[row] == step.index)
        return picked_AN

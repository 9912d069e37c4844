"""Dream's sampler, `diffusion_generate` (arXiv 2508.15487), with Fast-dLLM v1's confidence threshold.

    canvas = prompt + [MASK] * gen_length
    for t, s in neighbours of linspace(1, eps, steps + 1):
        tokens = draw(softmax(logits / temperature), top_p, top_k)
        alg "origin":  commit each mask with probability 1 - s / t, in the last step all
        alg "maskgit_plus", "topk_margin", "entropy":
            score = probability of the token, its margin over the second one, or minus the entropy
            commit the int(masks * (1 - s / t)) masks with the highest scores, in the last step all
            # alg_temp > 0: draw them from softmax(score / alg_temp) without replacement
        alg "confidence_threshold":
            of a step's equal share of the masks and what earlier steps left of theirs, commit the tokens with
            probability >= threshold, and the best one

Source: generation_utils.py, Gen-Verse/dLLM-RL 10b4fd1 and NVlabs/Fast-dLLM 24cc59e.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Self

import torch

from dlm_bridge.attention.masks import AttentionPattern
from dlm_bridge.errors import SettingError
from dlm_bridge.generation.canvas import BlockLayout, to_device
from dlm_bridge.generation.commit_rules import (
    MINUS_INFINITY,
    CommitRule,
    Step,
    TopScoresRule,
    probability,
    top_scores,
)
from dlm_bridge.generation.samplers import Presets, Sampler, SamplerSpec, SpecialTokens, largest_divisor, parameter
from dlm_bridge.generation.token_sampling import Noise, TokenSampling

ORDERS = ("origin", "maskgit_plus", "topk_margin", "entropy", "confidence_threshold")


@dataclass(frozen=True, kw_only=True)
class DreamSampler(Sampler):
    """Dream's `diffusion_generate`."""

    name: ClassVar[str] = "dream"
    attention_patterns: ClassVar[tuple[AttentionPattern, ...]] = ("bidirectional",)
    presets: ClassVar[Presets] = {
        "fast": {"alg": "confidence_threshold", "threshold": 0.9, "steps": 8},
        "careful": {"alg": "entropy", "steps": 512},
    }

    steps: int = parameter(512, "Denoising steps in total.")
    eps: float = parameter(1e-3, "Last noise level.", above=0, below=1)
    alg: str = parameter("origin", f"Order in which positions are committed: {', '.join(ORDERS)}.", choices=ORDERS)
    alg_temp: float | None = parameter(None, "Above 0: draw positions at this temperature.", minimum=0)
    threshold: float | None = parameter(
        None, "Confidence from which alg confidence_threshold commits a token; by default 0.9."
    )

    def fitted(self, explicit: Container[str]) -> Self:
        changed: dict[str, Any] = {}
        if self.alg != "confidence_threshold":
            changed["threshold"] = None
        elif "steps" not in explicit:
            changed["steps"] = largest_divisor(self.gen_length, self.steps)
        if self.alg in ("origin", "confidence_threshold"):
            changed["alg_temp"] = None
        return replace(self, **{name: value for name, value in changed.items() if name not in explicit})

    def spec(self, tokens: SpecialTokens) -> SamplerSpec:
        return SamplerSpec(
            layout=BlockLayout(None),
            rule=self._rule(),
            sampling=TokenSampling(self.temperature, self.top_k, self.top_p, order=("temperature", "top_p", "top_k")),
        )

    def _rule(self) -> CommitRule:
        scores = {"maskgit_plus": probability, "topk_margin": margin, "entropy": negative_entropy}
        budget = self.alg == "confidence_threshold"
        if self.threshold is not None and not budget:
            raise SettingError("threshold", f"needs `alg=confidence_threshold`, not `alg={self.alg}`")
        if self.alg_temp is not None and self.alg not in scores:
            raise SettingError("alg_temp", f"`alg={self.alg}` does not rank positions: remove it")
        if budget:
            if self.gen_length % self.steps:
                raise SettingError(
                    "steps",
                    f"`alg=confidence_threshold` commits as many tokens in each step: {self.steps} does not divide "
                    f"`gen_length={self.gen_length}`",
                )
            return StepBudgetRule(0.9 if self.threshold is None else self.threshold, self.steps)
        if self.alg == "origin":
            return AncestralRule(self.steps, self.eps)
        schedule = partial(noise_level_schedule, steps=self.steps, eps=self.eps)
        return TopScoresRule(scores[self.alg], schedule, self.alg_temp)


def margin(step: Step) -> torch.Tensor:
    """Margin of the most probable token over the second one (topk_margin)."""
    first, second = step.shaped.softmax(dim=-1).topk(2, dim=-1).values.unbind(dim=-1)
    return first - second


def negative_entropy(step: Step) -> torch.Tensor:
    """Negative entropy of the distribution that tokens are drawn from; with the published floor of probabilities."""
    probabilities = step.shaped.softmax(dim=-1)
    return (probabilities * (probabilities + 1e-10).log()).sum(dim=-1)


def noise_levels(steps: int, eps: float) -> torch.Tensor:
    """float32 [steps + 1], noise levels before and after each step, from 1 down to `eps`."""
    return torch.linspace(1, eps, steps + 1)


def noise_level_schedule(masks: int, steps: int, eps: float, first: int = 0) -> list[int]:
    """Tokens per step: int((1 - s / t) * masks) from noise level t to s; the last step commits the rest.

    Computed in float32, as published, because rounding decides between neighbouring counts. Dream's code uses the mean
    number of masks of the batch; here each row has its own. The schedule begins at step `first`.
    """
    level = noise_levels(steps, eps)
    fractions = 1 - level[1:] / level[:-1]
    schedule = []
    for step in range(first, steps):
        count = int(torch.tensor(float(masks)) * fractions[step]) if step < steps - 1 else masks
        if count:
            schedule.append(count)
        masks -= count
        if not masks:
            break
    return schedule


class AncestralRule(CommitRule):
    """Commits each position independently with probability 1 - s / t from noise level t to s; the last step commits
    all.

    A position is still masked after a step with a probability of the step's noise level. One uniform number per
    position therefore decides its step, and steps that commit nothing need no forward pass.
    """

    exact = True

    def __init__(self, steps: int, eps: float) -> None:
        self._rising_levels = noise_levels(steps, eps)[1:-1].flip(0)

    def begin(self, masks: list[int], noise: Noise) -> list[list[int]]:
        rows = [row for row, count in enumerate(masks) if count]
        counts, width = [masks[row] for row in rows], max(masks)
        uniform_AM = noise.uniform(rows, torch.arange(width, device=noise.device).expand(len(rows), -1))
        # A position is masked until the noise level falls below its number.
        levels = self._rising_levels.to(uniform_AM)
        when_AM = len(levels) - torch.searchsorted(levels, uniform_AM, right=True)
        is_mask_AM = torch.arange(width, device=when_AM.device) < to_device(counts, when_AM.device)[:, None]
        # Each mask's step, counted without the steps that commit nothing.
        ordered_AM, order_AM = when_AM.masked_fill(~is_mask_AM, len(levels) + 1).sort(dim=1)
        ranks_AM = torch.zeros_like(order_AM)
        ranks_AM[:, 1:] = (ordered_AM[:, 1:] > ordered_AM[:, :-1]).cumsum(dim=1)
        ranks_AM = torch.zeros_like(order_AM).scatter(1, order_AM, ranks_AM)
        commits_AM = torch.zeros_like(ranks_AM).scatter_add(1, ranks_AM, is_mask_AM.long())
        self.memory.tensor("ranks", width)[to_device(rows, ranks_AM.device)] = ranks_AM
        schedules: list[list[int]] = [[] for _ in masks]
        for row, commits in zip(rows, commits_AM.tolist(), strict=True):
            schedules[row] = [count for count in commits if count]
        return schedules

    def select(self, step: Step) -> torch.Tensor:
        width, rows_A = step.masked.shape[1], to_device(step.rows, step.masked.device)
        ranks_BN, index_A1 = self.memory.tensor("ranks", width), to_device(step.index, rows_A.device)[:, None]
        ranks_AN = ranks_BN[rows_A]
        if 0 in step.index:  # indexed by mask: index by column
            nth_AN = (step.masked.cumsum(dim=1) - 1).clamp(min=0)
            ranks_AN = torch.where(index_A1 == 0, ranks_AN.gather(1, nth_AN), ranks_AN)
            ranks_BN[rows_A] = ranks_AN
        return step.masked & (ranks_AN == index_A1)


class StepBudgetRule(CommitRule):
    """Fast-dLLM's confidence_threshold for Dream: a threshold, limited to a budget per step.

    The budget is an equal share of the masks plus what earlier steps left of theirs. Of the best tokens within the
    budget, a step commits the best one and all with probability >= threshold. After the schedule's end, steps continue
    until the row has no masks.
    """

    def __init__(self, threshold: float, steps: int) -> None:
        self._threshold = threshold
        self._steps = steps

    def begin(self, masks: list[int], noise: Noise) -> list[list[int]]:
        planned = self.memory.values("masks")
        for row, count in enumerate(masks):
            if count:
                planned[row] = count
        return [[1] * count for count in masks]

    def select(self, step: Step) -> torch.Tensor:
        scores_AN = probability(step).masked_fill(~step.masked, MINUS_INFINITY)
        masks = [self.memory.values("masks")[row] for row in step.rows]
        later = [
            max(0, count - count // self._steps * (done + 1)) for count, done in zip(masks, step.index, strict=True)
        ]
        allowed_AN = top_scores(scores_AN, step.masked.sum(dim=1) - to_device(later, scores_AN.device))
        best_AN = top_scores(scores_AN, [1] * len(step.rows))
        return (allowed_AN & (scores_AN >= self._threshold)) | best_AN

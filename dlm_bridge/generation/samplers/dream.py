"""Dream's sampler (arXiv 2508.15487)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch

from dlm_bridge.attention_mask import AttentionPattern
from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.generation.canvas import BlockLayout
from dlm_bridge.generation.commit_rules import (
    MINUS_INFINITY,
    AncestralRule,
    CommitRule,
    Step,
    TopScoresRule,
    noise_levels,
    probability,
    top_scores_on_canvas,
)
from dlm_bridge.generation.loop import SamplerSpec
from dlm_bridge.generation.predictors import Predictor
from dlm_bridge.generation.samplers.base import Sampler, SpecialTokens
from dlm_bridge.generation.token_sampling import Noise, TokenSampling


def noise_level_schedule(masks: int, steps: int, eps: float) -> list[int]:
    """Dream's whole-canvas schedule: from noise level t to s, int((1 - s / t) of the masks), the last step the rest.

    In float32, as published: rounding decides between neighbouring counts. Dream's code counts the mean of the batch,
    which reveals wrong numbers where rows differ; here each row counts its own masks.
    """
    level = noise_levels(steps, eps)
    fractions = 1 - level[1:] / level[:-1]
    num_transfer_tokens = []
    for step in range(steps):
        quota = int(torch.tensor(float(masks)) * fractions[step]) if step < steps - 1 else masks
        if quota:
            num_transfer_tokens.append(quota)
        masks -= quota
        if not masks:
            break
    return num_transfer_tokens


def margin(step: Step) -> torch.Tensor:
    """Dream's topk_margin: the most probable token's lead over the second."""
    first, second = step.shaped.softmax(dim=-1).topk(2, dim=-1).values.unbind(dim=-1)
    return first - second


def negative_entropy(step: Step) -> torch.Tensor:
    """Dream's entropy: minus the entropy of the distribution that is drawn from."""
    probabilities = step.shaped.softmax(dim=-1)
    return (probabilities * (probabilities + 1e-10).log()).sum(dim=-1)


class StepBudgetRule(CommitRule):
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
        scores_AN = probability(step).masked_fill(~step.masked, MINUS_INFINITY)
        # What the schedule leaves for later steps stays masked, however sure the model is.
        later = [max(0, self._masks[row] - self._masks[row] // self._steps * (step.index + 1)) for row in step.rows]
        left = step.masked.sum(dim=1).tolist()
        allowed_AN = top_scores_on_canvas(step, scores_AN, [a - b for a, b in zip(left, later, strict=True)])
        best_AN = top_scores_on_canvas(step, scores_AN, [1] * len(step.rows))
        return (allowed_AN & (scores_AN >= self._threshold)) | best_AN


SCORES = {"maskgit_plus": probability, "topk_margin": margin, "entropy": negative_entropy}


@dataclass(frozen=True, kw_only=True)
class DreamSampler(Sampler):
    """Dream's `diffusion_generate` (arXiv 2508.15487); `alg="confidence_threshold"` is Fast-dLLM's addition to it."""

    name: ClassVar[str] = "dream"
    attention_patterns: ClassVar[tuple[AttentionPattern, ...]] = ("bidirectional",)

    steps: int = 512
    eps: float = 1e-3
    alg: str = "origin"
    alg_temp: float | None = None
    threshold: float | None = None  # of confidence_threshold alone: 0.9

    def recipe(self, tokens: SpecialTokens) -> SamplerSpec:
        return SamplerSpec(
            layout=BlockLayout(self.gen_length, whole=True),
            rule=self._rule(),
            sampling=TokenSampling(self.temperature, self.top_k, self.top_p, order=("temperature", "top_p", "top_k")),
            predictor=Predictor,
            predictor_options={},
        )

    def _rule(self) -> CommitRule:
        budget = self.alg == "confidence_threshold"
        if self.threshold is not None and not budget:
            raise DlmBridgeError(f"threshold belongs to alg 'confidence_threshold', not to '{self.alg}': leave it out")
        if self.alg_temp is not None and self.alg not in SCORES:
            raise DlmBridgeError(f"alg '{self.alg}' ranks no positions: leave alg_temp out")
        if budget:
            if self.gen_length % self.steps:
                raise DlmBridgeError(
                    f"alg 'confidence_threshold' settles equal shares: gen_length {self.gen_length} is not a multiple "
                    f"of steps {self.steps}"
                )
            return StepBudgetRule(0.9 if self.threshold is None else self.threshold, self.steps)
        if self.alg == "origin":
            return AncestralRule(self.steps, self.eps)
        return TopScoresRule(
            SCORES[self.alg], partial(noise_level_schedule, steps=self.steps, eps=self.eps), self.alg_temp
        )

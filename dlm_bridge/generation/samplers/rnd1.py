"""RND1's sampler."""

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
    CommitRule,
    Step,
    TopScoresRule,
    all_in_last_step,
    entropy,
    one_each_then_rest,
)
from dlm_bridge.generation.loop import SamplerSpec
from dlm_bridge.generation.predictors import Predictor
from dlm_bridge.generation.samplers.base import Sampler, SpecialTokens
from dlm_bridge.generation.token_sampling import Noise, TokenSampling, gather_tokens


def rank_schedule(masks: int, steps: int) -> list[int]:
    """RND1's schedule: after step k of n, floor(masks * (n - k) / n) are still masked. In float32, as published."""
    left, num_transfer_tokens = masks, []
    for step in range(steps - 1, -1, -1):
        keep = int((torch.tensor(masks) * (step / steps)).long())
        if keep < left:
            num_transfer_tokens.append(left - keep)
            left = keep
    return num_transfer_tokens


class ErrorBoundRule(CommitRule):
    """RND1's eb_gamma: the most probable proposals, as long as their entropies but the largest add up to <= gamma.

    (Entropy-bounded unmasking, arXiv 2505.24857.) The last of `steps` steps settles what is left.
    """

    def __init__(self, gamma: float, steps: int) -> None:
        self._gamma = gamma
        self._steps = steps

    def begin(self, masks: list[int], noise: Noise) -> list[list[int]]:
        return [one_each_then_rest(self._steps, count) for count in masks]

    def select(self, step: Step) -> torch.Tensor:
        scores_AN = gather_tokens(step.shaped.log_softmax(dim=-1), step.tokens).masked_fill(
            ~step.masked, MINUS_INFINITY
        )
        order_AN = scores_AN.sort(dim=1, descending=True, stable=True).indices
        entropies_AN = entropy(step.shaped).gather(1, order_AN)
        bound_AN = entropies_AN.cumsum(dim=1) - entropies_AN.cummax(dim=1).values
        passed_AN = bound_AN <= self._gamma
        picked_AN = torch.zeros_like(step.masked).scatter(1, order_AN, passed_AN)
        return (picked_AN | all_in_last_step(step, self._steps)) & step.masked


@dataclass(frozen=True, kw_only=True)
class RND1Sampler(Sampler):
    """RND1's `diffusion_sample`: each step leaves the positions of highest entropy masked; or, with `eb_gamma`,
    settles the best within an entropy bound.

    As published, the last new token is not sampled where an end-of-sequence token is known: padding stands there from
    the start, or that token with `add_eos_at_end`.
    """

    name: ClassVar[str] = "rnd1"
    attention_patterns: ClassVar[tuple[AttentionPattern, ...]] = ("bidirectional",)

    gen_length: int = 256
    temperature: float = 0.1
    num_diffusion_steps: int = 256
    greedy: bool = False  # the best token; the temperature still shapes the entropies
    eb_gamma: float | None = None
    add_eos_at_end: bool = False

    def recipe(self, tokens: SpecialTokens) -> SamplerSpec:
        closing = None
        if tokens.eos_token_ids:
            closing = tokens.eos_token_ids[0] if self.add_eos_at_end else tokens.pad_token_id
            if self.gen_length < 2:
                raise DlmBridgeError(
                    "RND1 keeps the last new token for the end of the text: use gen_length 2 or more, or "
                    "eos_token_id=None"
                )
        rule: CommitRule = TopScoresRule(_surest, partial(rank_schedule, steps=self.num_diffusion_steps))
        if self.eb_gamma is not None:
            rule = ErrorBoundRule(self.eb_gamma, self.num_diffusion_steps)
        return SamplerSpec(
            layout=BlockLayout(self.gen_length - (closing is not None), whole=True, closing=closing),
            rule=rule,
            sampling=TokenSampling(self.temperature, self.top_k, self.top_p, greedy=self.greedy),
            predictor=Predictor,
            predictor_options={},
        )


def _surest(step: Step) -> torch.Tensor:
    return -entropy(step.shaped)

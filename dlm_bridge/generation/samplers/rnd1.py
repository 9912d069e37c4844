"""RND1's sampler, `diffusion_sample`.

    canvas = prompt + [MASK] * gen_length
    for k in 1 .. steps:
        tokens = draw(softmax(logits / temperature), top_k, top_p)      # greedy: the best token
        leave the floor(masks * (n - k) / n) positions of highest entropy masked, commit the others
        # eb_gamma: commit the most probable tokens while the sum of their entropies, without the largest, is at most
        #     eb_gamma

As published, if there is an end-of-sequence token, the last new token is not sampled: it is padding from the start, or
the end-of-sequence token with `add_eos_at_end`.

Source: RadicalNumerics/RND1 87d5f46, rnd/sampling.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch

from dlm_bridge.attention.masks import AttentionPattern
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
from dlm_bridge.generation.samplers import Presets, Sampler, SamplerSpec, SpecialTokens, parameter
from dlm_bridge.generation.token_sampling import Noise, TokenSampling, gather_tokens


@dataclass(frozen=True, kw_only=True)
class RND1Sampler(Sampler):
    """RND1's `diffusion_sample`."""

    name: ClassVar[str] = "rnd1"
    attention_patterns: ClassVar[tuple[AttentionPattern, ...]] = ("bidirectional",)
    aliases: ClassVar[Mapping[str, str]] = {"num_diffusion_steps": "steps"}
    published_names: ClassVar[tuple[str, ...]] = tuple(aliases)
    presets: ClassVar[Presets] = {"fast": {"eb_gamma": 0.1}, "careful": {"eb_gamma": None, "steps": 1024}}

    gen_length: int = parameter(256)
    temperature: float = parameter(0.1)
    steps: int = parameter(256, "Denoising steps in total; published as `num_diffusion_steps`.")
    greedy: bool = parameter(False, "Propose the best token; the temperature still shapes the entropies.")
    eb_gamma: float | None = parameter(
        None,
        "Bound on the entropy that a step commits (entropy-bounded unmasking, arXiv 2505.24857); None: no bound.",
        minimum=0,
    )
    add_eos_at_end: bool = parameter(False, "End the canvas with an end-of-sequence token instead of padding.")

    def spec(self, tokens: SpecialTokens) -> SamplerSpec:
        closing = None
        if tokens.eos_token_ids and self.gen_length > 1:  # a single new token is sampled
            closing = tokens.eos_token_ids[0] if self.add_eos_at_end else tokens.pad_token_id
        rule: CommitRule = TopScoresRule(_confidence, partial(rank_schedule, steps=self.steps))
        if self.eb_gamma is not None:
            rule = ErrorBoundRule(self.eb_gamma, self.steps)
        return SamplerSpec(
            layout=BlockLayout(None, closing=closing),
            rule=rule,
            sampling=TokenSampling(self.temperature, self.top_k, self.top_p, greedy=self.greedy),
        )


def _confidence(step: Step) -> torch.Tensor:
    return -entropy(step.shaped)


def rank_schedule(masks: int, steps: int) -> list[int]:
    """Tokens per step: after step k of n, floor(masks * (n - k) / n) positions are masked. In float32, as
    published."""
    left, schedule = masks, []
    for step in range(steps - 1, -1, -1):
        still_masked = int((torch.tensor(masks) * (step / steps)).long())
        if still_masked < left:
            schedule.append(left - still_masked)
            left = still_masked
    return schedule


class ErrorBoundRule(CommitRule):
    """Commits the most probable proposals while the sum of their entropies, without the largest, is <= gamma.

    The last of `steps` steps commits all remaining masks.
    """

    def __init__(self, gamma: float, steps: int) -> None:
        self._gamma = gamma
        self._steps = steps

    def begin(self, masks: list[int], noise: Noise) -> list[list[int]]:
        return [one_each_then_rest(self._steps, count) for count in masks]

    def select(self, step: Step) -> torch.Tensor:
        log_probabilities_AN = gather_tokens(step.shaped.log_softmax(dim=-1), step.tokens)
        scores_AN = log_probabilities_AN.masked_fill(~step.masked, MINUS_INFINITY)
        order_AN = scores_AN.sort(dim=1, descending=True, stable=True).indices
        entropies_AN = entropy(step.shaped).gather(1, order_AN)
        bound_AN = entropies_AN.cumsum(dim=1) - entropies_AN.cummax(dim=1).values
        passed_AN = bound_AN <= self._gamma
        picked_AN = torch.zeros_like(step.masked).scatter(1, order_AN, passed_AN)
        return (picked_AN | all_in_last_step(step, self._steps)) & step.masked

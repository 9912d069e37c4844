"""How sure a proposal is, [A, N]: what the rules rank by. The highest score is settled first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from dlm_bridge.generation.rules.base import Step

Score = Callable[[Step], torch.Tensor]


def low_confidence(step: Step) -> torch.Tensor:
    """LLaDA (arXiv 2502.09992, algorithm 5): the token's probability by the model's own logits.

    In the model's dtype, as published: in half precision the rounding decides between near ties.
    """
    return step.raw_probabilities()


def random_order(step: Step) -> torch.Tensor:
    """LLaDA's random remasking (algorithm 4)."""
    return step.noise.per_position(step.rows, step.width, step.origins)[:, step.columns]


def without_tokens(score: Score, tokens: tuple[int, ...]) -> Score:
    """The score as if the model's logits of these tokens were minus infinity: where they are proposed, it is zero.

    LLaDA's `confidence_eos_eot_inf` (appendix B.4), so that ends of text are settled last.
    """

    def scored(step: Step) -> torch.Tensor:
        logits = step.logits.clone()
        logits[..., [token for token in tokens if token < logits.shape[-1]]] = -torch.inf
        return score(replace(step, logits=logits))

    return scored


def precise_confidence(step: Step) -> torch.Tensor:
    """Fast-dLLM's: as LLaDA's, in float64."""
    return step.raw_probabilities(torch.float64)


def probability(step: Step) -> torch.Tensor:
    """The token's probability in the distribution that it was drawn from (SDAR, LLaDA2, Dream's maskgit_plus)."""
    return step.probabilities()


def margin(step: Step) -> torch.Tensor:
    """Dream's topk_margin: the most probable token's lead over the second."""
    first, second = step.shaped.softmax(dim=-1).topk(2, dim=-1).values.unbind(dim=-1)
    return first - second


def negative_entropy(step: Step) -> torch.Tensor:
    """Dream's entropy: minus the entropy of the distribution that is drawn from."""
    probabilities = step.shaped.softmax(dim=-1)
    return (probabilities * (probabilities + 1e-10).log()).sum(dim=-1)


def entropy(logits: torch.Tensor) -> torch.Tensor:
    """[A, N], the entropy of softmax(logits) in nats; a probability of zero adds nothing."""
    logarithms = logits.log_softmax(dim=-1)
    probabilities = logarithms.exp()
    return -(probabilities * logarithms.masked_fill(probabilities == 0, 0)).sum(dim=-1)

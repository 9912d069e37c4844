"""RND1's sampler: the whole canvas, the surest positions first."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch

from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.generation.algorithms.base import Algorithm, Tokens
from dlm_bridge.generation.canvas import Layout
from dlm_bridge.generation.loop import Recipe
from dlm_bridge.generation.predict import Predictor
from dlm_bridge.generation.propose import Sampling
from dlm_bridge.generation.rules.base import CommitRule, Step
from dlm_bridge.generation.rules.entropy import ErrorBounded
from dlm_bridge.generation.rules.quota import Quota
from dlm_bridge.generation.rules.schedules import by_rank
from dlm_bridge.generation.rules.scores import entropy
from dlm_bridge.models.spec import Topology


@dataclass(frozen=True, kw_only=True)
class RND1(Algorithm):
    """RND1's `diffusion_sample`: each step leaves the positions of highest entropy masked; or, with `eb_gamma`,
    settles the best within an entropy bound.

    As published, the last new token is not sampled where an end-of-sequence token is known: padding stands there from
    the start, or that token with `add_eos_at_end`.
    """

    name: ClassVar[str] = "rnd1"
    topologies: ClassVar[tuple[Topology, ...]] = ("bidirectional",)

    gen_length: int = 256
    temperature: float = 0.1
    num_diffusion_steps: int = 256
    greedy: bool = False  # the best token; the temperature still shapes the entropies
    eb_gamma: float | None = None
    add_eos_at_end: bool = False

    def recipe(self, tokens: Tokens) -> Recipe:
        closing = None
        if tokens.eos_token_ids:
            closing = tokens.eos_token_ids[0] if self.add_eos_at_end else tokens.pad_token_id
            if self.gen_length < 2:
                raise DlmBridgeError(
                    "RND1 keeps the last new token for the end of the text: use gen_length 2 or more, or "
                    "eos_token_id=None"
                )
        rule: CommitRule = Quota(_surest, partial(by_rank, steps=self.num_diffusion_steps))
        if self.eb_gamma is not None:
            rule = ErrorBounded(self.eb_gamma, self.num_diffusion_steps)
        return Recipe(
            layout=Layout(self.gen_length - (closing is not None), whole=True, closing=closing),
            rule=rule,
            sampling=Sampling(self.temperature, self.top_k, self.top_p, greedy=self.greedy),
            predictor=Predictor,
            predictor_options={},
        )


def _surest(step: Step) -> torch.Tensor:
    return -entropy(step.shaped)

"""Samplers that denoise all new tokens together on a schedule of noise levels: Dream's and DiffuLLaMA's."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.generation.algorithms.base import Algorithm, Tokens
from dlm_bridge.generation.canvas import Layout
from dlm_bridge.generation.loop import Recipe
from dlm_bridge.generation.predict import Predictor
from dlm_bridge.generation.propose import Sampling
from dlm_bridge.generation.rules.base import CommitRule
from dlm_bridge.generation.rules.quota import Ancestral, Quota
from dlm_bridge.generation.rules.schedules import by_time
from dlm_bridge.generation.rules.scores import margin, negative_entropy, probability
from dlm_bridge.generation.rules.threshold import Budget
from dlm_bridge.models.spec import Topology

SCORES = {"maskgit_plus": probability, "topk_margin": margin, "entropy": negative_entropy}


@dataclass(frozen=True, kw_only=True)
class Dream(Algorithm):
    """Dream's `diffusion_generate` (arXiv 2508.15487); `alg="confidence_threshold"` is Fast-dLLM's addition to it."""

    name: ClassVar[str] = "dream"
    topologies: ClassVar[tuple[Topology, ...]] = ("bidirectional",)

    steps: int = 512
    eps: float = 1e-3
    alg: str = "origin"
    alg_temp: float | None = None
    threshold: float | None = None  # of confidence_threshold alone: 0.9

    def recipe(self, tokens: Tokens) -> Recipe:
        return Recipe(
            layout=Layout(self.gen_length, whole=True),
            rule=self._rule(),
            sampling=Sampling(self.temperature, self.top_k, self.top_p, order=("temperature", "top_p", "top_k")),
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
            return Budget(0.9 if self.threshold is None else self.threshold, self.steps)
        if self.alg == "origin":
            return Ancestral(self.steps, self.eps)
        return Quota(SCORES[self.alg], partial(by_time, steps=self.steps, eps=self.eps), self.alg_temp)


@dataclass(frozen=True, kw_only=True)
class DiffuLLaMA(Algorithm):
    """DiffuLLaMA's sampler (arXiv 2410.17891): step k of n reveals each mask with probability 1 / (n - k)."""

    name: ClassVar[str] = "diffullama"
    topologies: ClassVar[tuple[Topology, ...]] = ("bidirectional",)

    temperature: float = 0.9
    diffusion_steps: int = 64
    top_p: float | None = 0.9

    def recipe(self, tokens: Tokens) -> Recipe:
        return Recipe(
            layout=Layout(self.gen_length, whole=True),
            rule=Ancestral(self.diffusion_steps, eps=0.0),
            sampling=self.sampling(),
            predictor=Predictor,
            predictor_options={},
        )

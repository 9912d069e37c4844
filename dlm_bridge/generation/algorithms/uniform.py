"""A sampler for models that were trained with uniform noise instead of masks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dlm_bridge.generation.algorithms.base import Algorithm, Tokens
from dlm_bridge.generation.canvas import Layout
from dlm_bridge.generation.loop import Recipe
from dlm_bridge.generation.predict import Predictor
from dlm_bridge.generation.uniform import EntropyBound, Posterior, Resampling
from dlm_bridge.models.spec import Topology


@dataclass(frozen=True, kw_only=True)
class Uniform(Algorithm):
    """The whole canvas starts as random tokens and is resampled, `steps` times; no mask token is needed.

    No family's own: for models whose config names no mask token, or that were trained this way.
    """

    name: ClassVar[str] = "uniform"
    topologies: ClassVar[tuple[Topology, ...]] = ("bidirectional",)
    needs_mask: ClassVar[bool] = False

    temperature: float = 1.0
    steps: int = 128
    resampling: str = "posterior"
    entropy_bound: float = 0.1

    def recipe(self, tokens: Tokens) -> Recipe:
        rule: Resampling = Posterior(self.steps)
        if self.resampling == "entropy_bound":
            rule = EntropyBound(self.steps, self.entropy_bound)
        return Recipe(Layout(self.gen_length, whole=True), rule, self.sampling(), Predictor, {})

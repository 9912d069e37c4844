"""WeDLM's sampler: a window of masks slides over the text, causal attention in the order of knowledge."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dlm_bridge.generation.algorithms.base import Algorithm, Tokens
from dlm_bridge.generation.canvas import Layout
from dlm_bridge.generation.loop import Recipe
from dlm_bridge.generation.predict import Reordered
from dlm_bridge.generation.propose import Sampling
from dlm_bridge.generation.rules.entropy import DistancePenalised
from dlm_bridge.models.spec import Topology


@dataclass(frozen=True, kw_only=True)
class WeDLM(Algorithm):
    """The decoder of WeDLM's engine (arXiv 2512.22737): the window begins at the first mask.

    Positions behind the last new token are part of the window, as they are there.
    """

    name: ClassVar[str] = "wedlm"
    topologies: ClassVar[tuple[Topology, ...]] = ("causal",)

    gen_length: int = 64
    temperature: float = 0.2
    wedlm_window_size: int = 16
    wedlm_entropy_threshold: float | None = 0.4
    wedlm_pos_penalty_factor: float = 0.02

    def recipe(self, tokens: Tokens) -> Recipe:
        size = self.wedlm_window_size
        return Recipe(
            layout=Layout(self.gen_length + size, whole=True, spare=size),
            rule=DistancePenalised(self.wedlm_entropy_threshold, self.wedlm_pos_penalty_factor),
            sampling=Sampling(self.temperature, self.top_k, self.top_p, order=("top_k", "top_p", "temperature")),
            predictor=Reordered,
            predictor_options={},
            window=size,
        )

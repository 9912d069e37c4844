"""The sampler of MegaDLMs' exports: LLaDA's, with a finer confidence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dlm_bridge.generation.algorithms.llada import LLaDA
from dlm_bridge.generation.propose import Sampling
from dlm_bridge.generation.rules.scores import Score, precise_confidence


@dataclass(frozen=True, kw_only=True)
class DiffLM(LLaDA):
    """`DiffLM.generate` of MegaDLMs: confidences are in float64, and top_p filters before the temperature."""

    name: ClassVar[str] = "difflm"

    gen_length: int = 256
    block_length: int = 256

    def sampling(self) -> Sampling:
        if not self.temperature:
            return Sampling()
        return Sampling(self.temperature, self.top_k, self.top_p, order=("top_k", "top_p", "temperature"))

    def _confidence(self) -> Score:
        return precise_confidence

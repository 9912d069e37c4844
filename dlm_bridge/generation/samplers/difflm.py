"""DiffLM's sampler (MegaDLMs)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dlm_bridge.generation.commit_rules import Score, precise_confidence
from dlm_bridge.generation.samplers.llada import LLaDASampler
from dlm_bridge.generation.token_sampling import TokenSampling


@dataclass(frozen=True, kw_only=True)
class DiffLMSampler(LLaDASampler):
    """`DiffLM.generate` of MegaDLMs: confidences are in float64, and top_p filters before the temperature."""

    name: ClassVar[str] = "difflm"

    gen_length: int = 256
    block_length: int = 256

    def sampling(self) -> TokenSampling:
        if not self.temperature:
            return TokenSampling()
        return TokenSampling(self.temperature, self.top_k, self.top_p, order=("top_k", "top_p", "temperature"))

    def _confidence(self) -> Score:
        return precise_confidence

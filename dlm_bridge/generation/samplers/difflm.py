"""Sampler of MegaDLMs' DiffLM exports: LLaDA's with float64 confidences and top-p before the temperature.

    as LLaDA's sampler (see `llada`), except
        scores = softmax(logits, dtype=float64)[tokens]
        filters in the order top_k, top_p, temperature

Source: JinjieNi/MegaDLMs bdf7545, modeling_dlm.py, `DiffLM.generate`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dlm_bridge.generation.commit_rules import Score, precise_confidence
from dlm_bridge.generation.samplers import parameter
from dlm_bridge.generation.samplers.llada import LLaDASampler
from dlm_bridge.generation.token_sampling import TokenSampling


@dataclass(frozen=True, kw_only=True)
class DiffLMSampler(LLaDASampler):
    """MegaDLMs' `DiffLM.generate`, with LLaDA's parameters."""

    name: ClassVar[str] = "difflm"

    gen_length: int = parameter(256)
    block_length: int = parameter(256)

    def sampling(self) -> TokenSampling:
        if not self.temperature:
            return TokenSampling()
        return TokenSampling(self.temperature, self.top_k, self.top_p, order=("top_k", "top_p", "temperature"))

    def _confidence(self) -> Score:
        return precise_confidence

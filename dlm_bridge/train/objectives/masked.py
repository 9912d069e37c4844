"""Masked diffusion: LLaDA's objective, and MegaDLMs' weighting of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from dlm_bridge.train.objectives.base import Objective, total
from dlm_bridge.train.objectives.clean import Clean
from dlm_bridge.train.objectives.noise import NoisyBatch, Uniforms


@dataclass(frozen=True)
class MaskedDiffusion(Objective):
    """LLaDA's objective (arXiv 2502.09992, equation 3, and GUIDELINES.md of the public repository).

    Per sequence t ~ U(0, 1) and p = (1 - eps) t + eps; each position is masked with probability p, independently; the
    loss is the cross-entropy at the masked positions over p, summed and divided by the number of positions.

    With weighting "fraction" (MegaDLMs) each sequence has at least one mask, and p is replaced in the weight by the
    masked share of the sequence's counted positions.
    """

    weighting: Literal["level", "fraction"] = "level"

    def corrupt(self, clean: Clean, uniforms: Uniforms) -> NoisyBatch:
        p_BL = self.probability(clean, uniforms)
        mask = (uniforms.token < p_BL) & clean.counted
        if self.weighting == "fraction":
            without_BL = clean.summed(mask.long()) == 0
            mask = mask | (without_BL & clean.lowest(uniforms.token, clean.counted))
            p_BL = clean.summed(mask.long()) / clean.summed(clean.counted.long())
        return NoisyBatch(
            input_ids=torch.where(mask, self.mask_token_id, clean.input_ids),
            **self.placed(clean),
            mask=mask,
            counted=clean.counted,
            targets=clean.targets[mask],
            weights=(1 / p_BL)[mask],
            terms=None,
            normaliser=total(clean.counted),
        )

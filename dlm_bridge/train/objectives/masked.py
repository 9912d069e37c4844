"""Masked diffusion: LLaDA's objective, and MegaDLMs' weighting of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dlm_bridge.train.objectives.base import Objective
from dlm_bridge.train.objectives.clean import Clean
from dlm_bridge.train.objectives.noise import NoisyBatch, Uniforms


@dataclass(frozen=True)
class MaskedDiffusion(Objective):
    """LLaDA's objective (arXiv 2502.09992, equation 3, and GUIDELINES.md of the public repository).

    Per sequence t ~ U(0, 1) and p = (1 - eps) t + eps; each position is masked with probability p, independently; the
    loss is the cross-entropy at the masked positions over p, summed and divided by the number of positions.
    """

    def corrupt(self, clean: Clean, uniforms: Uniforms) -> NoisyBatch:
        p_BL = self.probability(clean, uniforms)
        mask = self.masked(clean, p_BL, uniforms, clean.counted)
        weights_BL, normaliser = self.weighed(clean, p_BL, mask, clean.counted)
        return NoisyBatch(
            input_ids=torch.where(mask, self.mask_token_id, clean.input_ids),
            **self.placed(clean),
            mask=mask,
            counted=self.counts(mask, clean.counted),
            targets=clean.targets[mask],
            weights=weights_BL[mask],
            terms=None,
            normaliser=normaliser,
        )

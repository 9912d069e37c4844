"""Masked diffusion: LLaDA's objective, and MegaDLMs' weighting of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from dlm_bridge.train.objectives.base import Objective, total
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

    def corrupt(
        self,
        input_ids: torch.Tensor,
        targets: torch.Tensor,
        counted: torch.Tensor,
        real: torch.Tensor | None,
        uniforms: Uniforms,
    ) -> NoisyBatch:
        p_BL = self.probability(uniforms).expand_as(input_ids)
        mask = (uniforms.token < p_BL) & counted
        if self.weighting == "fraction":
            token_BL = uniforms.token.masked_fill(~counted, 2.0)
            lowest_BL = torch.zeros_like(mask).scatter(1, token_BL.argmin(dim=1, keepdim=True), True)
            mask = mask | (lowest_BL & counted & ~mask.any(dim=1, keepdim=True))
            p_BL = (mask.sum(dim=1, keepdim=True) / counted.sum(dim=1, keepdim=True)).expand_as(input_ids)
        return NoisyBatch(
            input_ids=torch.where(mask, self.mask_token_id, input_ids),
            attention_mask=real,
            position_ids=None,
            mask=mask,
            counted=counted,
            targets=targets[mask],
            weights=(1 / p_BL)[mask],
            terms=None,
            normaliser=total(counted),
        )

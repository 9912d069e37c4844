"""Shifted masked diffusion: models adapted from autoregressive ones, whose logits[i - 1] predicts token i."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F  # noqa: N812

from dlm_bridge.train.objectives.base import Objective, total
from dlm_bridge.train.objectives.noise import NoisyBatch, Uniforms, one_earlier, preceded


@dataclass(frozen=True)
class ShiftedDiffusion(Objective):
    """Dream's objective (arXiv 2508.15487 and copies of its trainer), and with eps 1e-3 DiffuLLaMA's (2410.17891).

    Per sequence t ~ U(0, 1), without a floor where eps is 0; each position is masked with probability t; the weighted
    cross-entropy at the masked positions is divided by their number. Weights are 1/t ("original") or depend on how
    near the visible tokens are ("cart", `cart_weights`).

    A position that no real one precedes, the first of a row above all, is never masked: nothing predicts it.
    """

    shift: ClassVar[bool] = True

    eps: float = 0.0
    weighting: Literal["original", "cart"] = "original"
    cart_p: float = 0.3

    def corrupt(
        self,
        input_ids: torch.Tensor,
        targets: torch.Tensor,
        counted: torch.Tensor,
        real: torch.Tensor | None,
        uniforms: Uniforms,
    ) -> NoisyBatch:
        everywhere = torch.ones_like(counted) if real is None else real
        t_B1 = self.probability(uniforms)
        mask = (uniforms.token < t_B1) & counted & preceded(everywhere)
        if self.weighting == "cart":
            weights_BL = cart_weights(everywhere & ~mask, self.cart_p)
        else:
            weights_BL = (1 / t_B1).expand(input_ids.shape)
        return NoisyBatch(
            input_ids=torch.where(mask, self.mask_token_id, input_ids),
            attention_mask=real,
            position_ids=None,
            mask=one_earlier(mask),  # moving a row's masks keeps their order, and with it that of the targets
            counted=one_earlier(mask),
            targets=targets[mask],
            weights=weights_BL[mask],
            terms=None,
            normaliser=total(mask),
        )


def cart_weights(visible_BL: torch.Tensor, p: float) -> torch.Tensor:
    """[B, L] fp32: w_n = 1/2 the sum over visible i != n of p (1 - p)^(|n - i| - 1) (Dream's context-adaptive noise
    rescheduling, arXiv 2508.15487). Terms below 1e-9 are left out."""
    reach = min(visible_BL.shape[1] - 1, math.ceil(math.log(1e-9) / math.log(1 - p)))
    distance = torch.arange(-reach, reach + 1, device=visible_BL.device).abs()
    kernel = torch.where(distance == 0, 0.0, 0.5 * p * (1 - p) ** (distance - 1.0))
    return F.conv1d(visible_BL.float()[:, None], kernel[None, None], padding=reach)[:, 0]

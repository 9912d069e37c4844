"""Objectives over the noisy tokens alone: masked diffusion, shifted masked diffusion, next-token prediction."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F  # noqa: N812

from dlm_bridge.attention_mask import AttentionPattern
from dlm_bridge.objectives.base import Normalisation, Objective, Weighting
from dlm_bridge.objectives.batches import CleanBatch, NoisyBatch, shift_left
from dlm_bridge.objectives.noise import Uniforms


@dataclass(frozen=True)
class MaskedDiffusion(Objective):
    """LLaDA's objective (arXiv 2502.09992, equation 3, and GUIDELINES.md of the public repository).

    Per sequence t ~ U(0, 1) and p = (1 - eps) t + eps; each position is masked with probability p, independently; the
    loss is the cross-entropy at the masked positions over p, summed and divided by the number of positions.
    """

    def corrupt(self, clean: CleanBatch, uniforms: Uniforms) -> NoisyBatch:
        p_BL = self.mask_probability(clean, uniforms)
        mask = self.sample_mask(clean, p_BL, uniforms, clean.counted)
        weights_BL, normaliser = self.position_weights(clean, p_BL, mask, clean.counted)
        return NoisyBatch(
            input_ids=torch.where(mask, self.mask_token_id, clean.input_ids),
            **self.attention_inputs(clean),
            mask=mask,
            counted=self.counted_positions(mask, clean.counted),
            targets=clean.targets[mask],
            weights=weights_BL[mask],
            normaliser=normaliser,
        )


@dataclass(frozen=True)
class ShiftedDiffusion(Objective):
    """Dream's objective (arXiv 2508.15487 and copies of its trainer), and with eps 1e-3 DiffuLLaMA's (2410.17891).

    Per sequence t ~ U(0, 1), without a floor where eps is 0; each position is masked with probability t; the weighted
    cross-entropy at the masked positions is divided by their number. Weights are 1/t, or with `loss_weighting` "cart"
    depend on how near the visible tokens are (`cart_weights`).

    A position that no real one precedes, the first of a document above all, is never masked: nothing predicts it.
    """

    shift: ClassVar[bool] = True
    weightings: ClassVar[tuple[Weighting, ...]] = ("level", "fraction", "uniform", "cart")

    eps: float = 0.0
    loss_normalisation: Normalisation = "predicted"
    cart_p: float = 0.3

    def corrupt(self, clean: CleanBatch, uniforms: Uniforms) -> NoisyBatch:
        t_BL = self.mask_probability(clean, uniforms)
        predictable = clean.counted & clean.preceded
        mask = self.sample_mask(clean, t_BL, uniforms, predictable)
        if self.loss_weighting == "cart":
            documents_BL = clean.documents if clean.packed else None
            weights_BL = cart_weights(clean.real_mask & ~mask, self.cart_p, documents_BL)
            weights_BL, normaliser = self.normalise_weights(clean, weights_BL, mask, predictable)
        else:
            weights_BL, normaliser = self.position_weights(clean, t_BL, mask, predictable)
        return NoisyBatch(
            input_ids=torch.where(mask, self.mask_token_id, clean.input_ids),
            **self.attention_inputs(clean),
            mask=shift_left(mask),  # moving a row's masks keeps their order, and with it that of the targets
            counted=shift_left(self.counted_positions(mask, predictable)),
            targets=clean.targets[mask],
            weights=weights_BL[mask],
            normaliser=normaliser,
        )


def cart_weights(visible_BL: torch.Tensor, p: float, documents_BL: torch.Tensor | None = None) -> torch.Tensor:
    """[B, L] fp32: w_n = 1/2 the sum over visible i != n, of the same document, of p (1 - p)^(|n - i| - 1) (Dream's
    context-adaptive noise rescheduling, arXiv 2508.15487). Terms below 1e-9 are left out. Documents count from 0."""
    reach = min(visible_BL.shape[1] - 1, math.ceil(math.log(1e-9) / math.log(1 - p)))
    distance = torch.arange(-reach, reach + 1, device=visible_BL.device).abs()
    kernel = torch.where(distance == 0, 0.0, 0.5 * p * (1 - p) ** (distance - 1.0))
    if documents_BL is None:
        return F.conv1d(visible_BL.float()[:, None], kernel[None, None], padding=reach)[:, 0]
    # Documents are moved apart, further than the kernel reaches.
    places_BL = torch.arange(visible_BL.shape[1], device=visible_BL.device) + reach * documents_BL
    spread = torch.zeros(len(places_BL), int(places_BL[:, -1].max()) + 1, device=visible_BL.device)
    spread.scatter_(1, places_BL, visible_BL.float())
    return F.conv1d(spread[:, None], kernel[None, None], padding=reach)[:, 0].gather(1, places_BL)


@dataclass(frozen=True)
class NextTokenPrediction(Objective):
    """The cross-entropy of every counted token given those before it, summed and divided by the number of tokens that
    are predicted (all but the first of a row): the loss of transformers' own classes, without the routers' auxiliary
    losses. Nothing is masked.
    """

    attention_patterns: ClassVar[tuple[AttentionPattern, ...]] = ("causal",)
    shift: ClassVar[bool] = True
    masks: ClassVar[bool] = False
    noise_ranges: ClassVar[bool] = False
    loss_fraction: ClassVar[float] = 1.0
    weightings: ClassVar[tuple[Weighting, ...]] = ("uniform",)
    normalisations: ClassVar[tuple[Normalisation, ...]] = ("predicted", "sequences")

    mask_token_id: int = -1
    loss_weighting: Weighting = "uniform"
    loss_normalisation: Normalisation = "predicted"

    def corrupt(self, clean: CleanBatch, uniforms: Uniforms) -> NoisyBatch:
        predicted = clean.counted & clean.preceded
        ones_BL = torch.ones(predicted.shape, device=predicted.device)
        weights_BL, normaliser = self.normalise_weights(clean, ones_BL, predicted, predicted)
        keep = shift_left(predicted)
        return NoisyBatch(
            input_ids=clean.input_ids,
            **self.attention_inputs(clean),
            mask=keep,
            counted=keep,
            targets=clean.targets[predicted],
            weights=weights_BL[predicted],
            normaliser=normaliser,
        )

"""Objectives over the noisy tokens alone: masked, shifted masked and uniform diffusion, next-token prediction."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from dlm_bridge.attention.masks import AttentionPattern
from dlm_bridge.errors import CheckpointError, SettingError
from dlm_bridge.lazy_import import LazyModule
from dlm_bridge.objectives.base import NoiseName, Normalisation, Objective, Weighting
from dlm_bridge.objectives.batches import CleanBatch, NoisyBatch, shift_left
from dlm_bridge.objectives.losses import NoisePositions
from dlm_bridge.objectives.noise import NoiseProcess, Uniforms, random_tokens

if TYPE_CHECKING:
    import torch
    import torch.nn.functional as F  # noqa: N812
else:
    torch = LazyModule("torch", globals())
    F = LazyModule("torch.nn.functional", globals(), "F")


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

    Per sequence t ~ U(0, 1), without a floor if eps is 0; each position is masked with probability t; the weighted
    cross-entropy at the masked positions is divided by their number. Weights are 1/t; with `loss_weighting` "cart"
    they depend on the distance of visible tokens (`cart_weights`).

    A position without a real token before it, such as the first of a document, is never masked: no logits predict it.
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
            mask=shift_left(mask),  # the shift keeps the order of masks and targets
            counted=shift_left(self.counted_positions(mask, predictable)),
            targets=clean.targets[mask],
            weights=weights_BL[mask],
            normaliser=normaliser,
        )


def cart_weights(visible_BL: torch.Tensor, p: float, documents_BL: torch.Tensor | None = None) -> torch.Tensor:
    """[B, L] fp32: w_n = 1/2 the sum over visible i != n, of the same document, of p (1 - p)^(|n - i| - 1) (Dream's
    context-adaptive noise rescheduling, arXiv 2508.15487). Terms below 1e-9 are omitted. Documents count from 0."""
    reach = min(visible_BL.shape[1] - 1, math.ceil(math.log(1e-9) / math.log(1 - p)))
    distance = torch.arange(-reach, reach + 1, device=visible_BL.device).abs()
    kernel = torch.where(distance == 0, 0.0, 0.5 * p * (1 - p) ** (distance - 1.0))
    if documents_BL is None:
        return F.conv1d(visible_BL.float()[:, None], kernel[None, None], padding=reach)[:, 0]
    # Documents are moved apart by more than the kernel's reach.
    places_BL = torch.arange(visible_BL.shape[1], device=visible_BL.device) + reach * documents_BL
    spread = torch.zeros(len(places_BL), int(places_BL[:, -1].max()) + 1, device=visible_BL.device)
    spread.scatter_(1, places_BL, visible_BL.float())
    return F.conv1d(spread[:, None], kernel[None, None], padding=reach)[:, 0].gather(1, places_BL)


@dataclass(frozen=True)
class UniformDiffusion(Objective):
    """UDLM's objective (arXiv 2412.10193): uniform noise and its bound in continuous time.

    Per sequence t = (1 - eps) u + eps, u ~ U(0, 1); each token is replaced with probability t, independently, by one
    of the N tokens of the vocabulary without the mask token. The model cannot identify replaced tokens: every position
    has a loss (see the formula in `losses`).

    `loss_weighting` is the weight of a position: "bound", the weight in the bound; "clipped", the same, at most
    `max_weight` (GIDD).
    """

    masks: ClassVar[bool] = False
    noise_process: ClassVar[NoiseName] = "uniform"
    noise_ranges: ClassVar[bool] = False
    forces_certainty: ClassVar[bool] = False
    loss_fraction: ClassVar[float] = 1.0
    weightings: ClassVar[tuple[Weighting, ...]] = ("bound", "clipped")

    loss_weighting: Weighting = "bound"
    vocabulary_size: int = 0
    max_weight: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.vocabulary_size < 2:
            raise CheckpointError("config.json", "no vocab_size, which noise of random tokens needs")

    @classmethod
    def settings(cls, config: Any) -> dict[str, Any]:
        return {"vocabulary_size": getattr(config, "vocab_size", 0)}

    @property
    def process(self) -> NoiseProcess:
        return NoiseProcess()

    @property
    def _unused_token(self) -> int:
        """The mask token, if neither texts nor this noise contain it; else -1."""
        return -1 if self.mask_token is None else self.mask_token

    def noise_level(self, clean: CleanBatch, uniforms: Uniforms) -> torch.Tensor:
        """[B, L] float64: t of each position."""
        return ((1 - self.eps) * clean.noise_levels(uniforms.level).double() + self.eps).expand_as(clean.input_ids)

    def corrupt(self, clean: CleanBatch, uniforms: Uniforms) -> NoisyBatch:
        assert uniforms.replacement is not None, "Uniforms.drawn needs replaces=True"
        mask_token, counted = self._unused_token, clean.counted
        count = self.vocabulary_size - (mask_token >= 0)
        t_BL = self.noise_level(clean, uniforms)
        keep_BL, masked_BL, replaced_BL = self.process.probabilities(t_BL)
        others = random_tokens(uniforms.replacement, self.vocabulary_size, mask_token)
        noisy = torch.where(uniforms.token < masked_BL + replaced_BL, others, clean.input_ids)
        noisy = torch.where(uniforms.token < masked_BL, mask_token, noisy)
        noisy = torch.where(counted, noisy, clean.input_ids)
        weights_BL, normaliser = self.normalise_weights(
            clean, self._weights(t_BL, clean.targets, noisy, count).float(), counted, counted
        )
        spread_BL = replaced_BL / count
        return NoisyBatch(
            input_ids=noisy,
            **self.attention_inputs(clean),
            mask=counted,
            counted=counted,
            targets=clean.targets[counted],
            weights=weights_BL[counted],
            normaliser=normaliser,
            noise=NoisePositions(
                tokens=noisy[counted],
                ratio=(keep_BL / spread_BL)[counted].float(),
                spread=spread_BL[counted].float(),
                mask_token_id=mask_token,
            ),
        )

    def _weights(self, t_BL: torch.Tensor, clean: torch.Tensor, noisy: torch.Tensor, count: int) -> torch.Tensor:
        """[B, L] float64: weight of each position's loss."""
        if self.loss_weighting == "dynamic":
            weights_BL = self.process.dynamic_weights(t_BL, clean, noisy, count, self._unused_token)
        else:
            weights_BL = self.process.weights(t_BL, clean, noisy, count, self._unused_token)
        return weights_BL if self.loss_weighting == "bound" else weights_BL.clamp(max=self.max_weight)


@dataclass(frozen=True)
class HybridDiffusion(UniformDiffusion):
    """GIDD's objective (arXiv 2503.04482): a hybrid of masks and uniform noise, in which `p_uniform` is the fraction
    of random tokens at t = 1/2; t = (1 - 2 eps) u + eps.

    `loss_weighting` "dynamic", as in the published configurations, drops the noise level's factor from the bound's
    weights.
    """

    masks: ClassVar[bool] = True
    noise_process: ClassVar[NoiseName] = "hybrid"
    weightings: ClassVar[tuple[Weighting, ...]] = ("dynamic", "clipped", "bound")

    eps: float = 1e-4
    loss_weighting: Weighting = "dynamic"
    p_uniform: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ordinary_mask:
            raise SettingError(
                "objective",
                f"noise of masks and random tokens needs a mask token that texts do not contain, unlike this model's "
                f"({self.mask_token_id})",
            )

    @classmethod
    def settings(cls, config: Any) -> dict[str, Any]:
        fraction = getattr(config, "p_uniform", None)
        return super().settings(config) | ({} if fraction is None else {"p_uniform": fraction})

    @property
    def model_config(self) -> dict[str, Any]:
        return super().model_config | {"p_uniform": self.p_uniform}

    @property
    def process(self) -> NoiseProcess:
        return NoiseProcess(self.p_uniform)

    def noise_level(self, clean: CleanBatch, uniforms: Uniforms) -> torch.Tensor:
        return ((1 - 2 * self.eps) * clean.noise_levels(uniforms.level).double() + self.eps).expand_as(clean.input_ids)


@dataclass(frozen=True)
class NextTokenPrediction(Objective):
    """Next-token prediction: mean cross-entropy of the counted tokens given the tokens before them, without masks (the
    loss of transformers' classes, without auxiliary losses of routers). The first token of a row is not predicted.
    """

    attention_patterns: ClassVar[tuple[AttentionPattern, ...]] = ("causal",)
    shift: ClassVar[bool] = True
    masks: ClassVar[bool] = False
    noise_ranges: ClassVar[bool] = False
    forces_certainty: ClassVar[bool] = False
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

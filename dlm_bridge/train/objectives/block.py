"""Block diffusion: noisy blocks are denoised with the clean blocks before them in view, all blocks in one pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.models.masks import Stream
from dlm_bridge.models.spec import Topology
from dlm_bridge.train.objectives.base import Normalisation, Objective, Weighting
from dlm_bridge.train.objectives.clean import Clean, one_earlier
from dlm_bridge.train.objectives.noise import NoisyBatch, Uniforms


@dataclass(frozen=True)
class TwoStreams(Objective):
    """An objective over [noisy | clean]: 2L tokens, position ids 0..L-1 twice, each stream in blocks of `block_size`
    that are counted from a document's first token. The loss of masks is on the noisy half."""

    topologies: ClassVar[tuple[Topology, ...]] = ("block_causal",)
    tokens_read: ClassVar[int] = 2
    noisy_stream: ClassVar[Stream] = "block"  # how a noisy block looks at itself
    clean_stream: ClassVar[Stream] = "block"  # how the clean tokens look at each other

    block_size: int = 32

    @classmethod
    def settings(cls, config: Any) -> dict[str, Any]:
        size = getattr(config, "block_size", None)
        if size is None:
            raise DlmBridgeError("--loss-weighting fraction needs one noise level a sequence: objective block has it")

    def corrupt(self, clean: Clean, uniforms: Uniforms) -> NoisyBatch:
        p_BL = self.probability(clean, uniforms)
        if self.level == "block":
            p_BL = (1 - self.eps) * self.block_levels(uniforms, clean) + self.eps
        mask = self.masked(clean, p_BL, uniforms, clean.counted)
        weights_BL, normaliser = self.weighed(clean, p_BL, mask, clean.counted)
        none = torch.zeros_like(mask)
        return NoisyBatch(
            input_ids=torch.cat([torch.where(mask, self.mask_token_id, clean.input_ids), clean.input_ids], dim=1),
            **self.placed(clean),
            mask=torch.cat([mask, none], dim=1),
            counted=torch.cat([self.counts(mask, clean.counted), none], dim=1),
            targets=clean.targets[mask],
            weights=weights_BL[mask],
            terms=None,
            normaliser=normaliser,
        )


@dataclass(frozen=True)
class ComplementaryBlockDiffusion(TwoStreams):
    """Fast-dLLM v2's objective (arXiv 2509.26328 and its public modeling.py).

    t per block, p = (1 - eps) t + eps; each sequence becomes two rows, masked where the other is not; the mean
    cross-entropy of all masked positions, without weights, each from the noisy logits one position earlier. The first
    token of a block is predicted by the noisy block before, as there; the first of a document is never masked.
    """

    shift: ClassVar[bool] = True
    tokens_read: ClassVar[int] = 4
    weightings: ClassVar[tuple[Weighting, ...]] = ("uniform",)
    normalisations: ClassVar[tuple[Normalisation, ...]] = ("predicted", "sequences")

    loss_weighting: Weighting = "uniform"
    loss_normalisation: Normalisation = "predicted"

    def corrupt(self, clean: Clean, uniforms: Uniforms) -> NoisyBatch:
        p_BL = (1 - self.eps) * self.block_levels(uniforms, clean) + self.eps
        predicted = clean.counted & clean.preceded
        below = uniforms.token < p_BL
        mask = torch.cat([below & predicted, ~below & predicted])
        # Each of the two rows of a sequence has some of its masks, both have them all.
        weights_BL, normaliser = self.weighed(clean, p_BL, predicted, predicted)
        keep = torch.cat([one_earlier(mask), torch.zeros_like(mask)], dim=1)
        twice = clean.repeated(2)
        return NoisyBatch(
            input_ids=torch.cat([torch.where(mask, self.mask_token_id, twice.input_ids), twice.input_ids], dim=1),
            **self.placed(twice),
            mask=keep,
            counted=keep,
            targets=twice.targets[mask],
            weights=weights_BL.repeat(2, 1)[mask],
            terms=None,
            normaliser=normaliser,
        )

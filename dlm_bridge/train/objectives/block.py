"""Block diffusion: noisy blocks are denoised with the clean blocks before them in view, all blocks in one pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.models.masks import Stream
from dlm_bridge.models.spec import Topology
from dlm_bridge.models.visibility import Visibility
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
            raise DlmBridgeError("the model's config has no block_size: set it in config.json")
        return {"block_size": size}

    def placed(self, clean: Clean, order: torch.Tensor | None = None) -> dict[str, Any]:
        """Who looks at whom and the position ids of both streams, as fields of a batch. `order` [B, L] says which
        clean position stands where in the noisy stream, each within its block."""
        documents, positions = clean.apart, clean.positions
        noisy_documents, noisy_positions = documents, positions
        if order is not None:
            documents = documents.expand_as(order)
            noisy_documents = documents.gather(1, order)
            noisy_positions = positions.expand_as(order).gather(1, order)
        visibility = Visibility.two_streams(
            documents, positions, self.block_size, self.noisy_stream, self.clean_stream, noisy_documents
        )
        return {
            "attention_mask": clean.real,
            "visibility": visibility,
            "position_ids": torch.cat([noisy_positions, positions.expand_as(noisy_positions)], dim=1),
        }

    def block_levels(self, uniforms: Uniforms, clean: Clean) -> torch.Tensor:
        """[B, L] the noise level of each position's block."""
        return uniforms.block.gather(1, clean.blocks(self.block_size))


@dataclass(frozen=True)
class BlockDiffusion(TwoStreams):
    """SDAR's objective (its public training code; the two streams are BD3-LM's, arXiv 2503.09573), which LLaDA2 and
    DreamReasoner share as far as their reports say.

    t per sequence (or per block), p = (1 - eps) t + eps; each position is masked with probability p; the loss is the
    cross-entropy at the masked positions over p, summed and divided by the number of counted positions.

    dLLM's bd3lm checkpoints are A2D models trained so, by a `block_size` in their config.json.
    """

    also: ClassVar[tuple[str, ...]] = ("a2d_qwen3", "a2d_qwen2", "a2d_llama")

    level: Literal["sequence", "block"] = "sequence"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.level == "block" and self.loss_weighting == "fraction":
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

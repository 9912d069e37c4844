"""Diffusion and autoregression at once: a noisy stream over a causal clean stream that predicts its next token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from dlm_bridge.models.masks import Stream
from dlm_bridge.models.spec import Topology
from dlm_bridge.train.objectives.base import Normalisation, Weighting, total
from dlm_bridge.train.objectives.block import TwoStreams
from dlm_bridge.train.objectives.clean import Clean, one_earlier
from dlm_bridge.train.objectives.noise import NoisyBatch, Uniforms


@dataclass(frozen=True)
class NemotronDiffusion(TwoStreams):
    """Nemotron-Labs-Diffusion's objective (forward step of the public Megatron-Bridge).

    As block diffusion with one t a sequence, but the clean stream is causal token by token, and its logits[i] predict
    token i + 1 as well. The loss is (alpha x CE/p of the masks + CE of the next tokens) / (masks + next tokens); alpha
    is 0.3 in the report, and the published configs leave it open.
    """

    topologies: ClassVar[tuple[Topology, ...]] = ("bidirectional",)
    families: ClassVar[tuple[str, ...]] = ("nemotron_labs_diffusion",)
    clean_stream: ClassVar[Stream] = "causal"
    weightings: ClassVar[tuple[Weighting, ...]] = ("level", "uniform")
    normalisations: ClassVar[tuple[Normalisation, ...]] = ("predicted",)

    loss_normalisation: Normalisation = "predicted"
    diffusion_weight: float = 0.3
    ar_weight: float = 1.0

    @classmethod
    def settings(cls, config: Any) -> dict[str, Any]:
        weights = {"diffusion_weight": config.dlm_loss_weight, "ar_weight": config.ar_loss_weight}
        return super().settings(config) | {key: value for key, value in weights.items() if value is not None}

    def corrupt(self, clean: Clean, uniforms: Uniforms) -> NoisyBatch:
        p_BL = self.probability(clean, uniforms)
        mask = (uniforms.token < p_BL) & clean.counted
        following = next_tokens(clean)
        keep = torch.cat([mask, following], dim=1)
        weights_BL = self.diffusion_weight * self.weighed(clean, p_BL, mask, clean.counted)[0]
        weights_BS = torch.cat([weights_BL, torch.full_like(p_BL, self.ar_weight)], dim=1)
        return NoisyBatch(
            input_ids=torch.cat([torch.where(mask, self.mask_token_id, clean.input_ids), clean.input_ids], dim=1),
            **self.placed(clean),
            mask=keep,
            counted=keep,
            targets=torch.cat([clean.targets, one_earlier(clean.targets)], dim=1)[keep],
            weights=weights_BS[keep],
            terms=None,
            normaliser=total(keep),
        )


@dataclass(frozen=True)
class WeDLMDiffusion(TwoStreams):
    """WeDLM's objective (the public fine-tuning code, arXiv 2512.22737).

    p ~ U(0, 1) per block, of whose n counted positions round(n p) are masked; the noisy tokens of a block are ordered
    visible first, masks last, each with its own position id, and look at each other causally, and at the clean blocks
    before; the clean stream is causal. A mask's logits predict its own token. The loss is
    (weighted mean of CE of the masks, weights 1/p + ar_weight x mean CE of the next tokens) / (1 + ar_weight).
    """

    topologies: ClassVar[tuple[Topology, ...]] = ("causal",)
    families: ClassVar[tuple[str, ...]] = ("wedlm",)
    terms: ClassVar[int] = 2
    noisy_stream: ClassVar[Stream] = "causal"
    clean_stream: ClassVar[Stream] = "causal"
    weightings: ClassVar[tuple[Weighting, ...]] = ("level", "uniform")
    normalisations: ClassVar[tuple[Normalisation, ...]] = ("predicted",)

    eps: float = 1e-8
    loss_normalisation: Normalisation = "predicted"
    ar_weight: float = 1.0

    @classmethod
    def settings(cls, config: Any) -> dict[str, Any]:
        size = getattr(config, "block_size", None)  # the published configs have none; 32 is the trainer's
        return {} if size is None else {"block_size": size}

    def corrupt(self, clean: Clean, uniforms: Uniforms) -> NoisyBatch:
        blocks = clean.blocks(self.block_size)
        p_BL = self.block_levels(uniforms, clean).clamp(min=self.eps)
        mask = self._exact(clean.counted, blocks, p_BL, uniforms.token)
        # Within a block: what is visible, then masks, then padding.
        kind = torch.where(clean.everywhere, mask.long(), 2)
        order = (3 * blocks + kind).argsort(dim=1, stable=True)
        noisy = torch.where(mask, self.mask_token_id, clean.input_ids).gather(1, order)
        masks, following = mask.gather(1, order), next_tokens(clean)
        keep = torch.cat([masks, following], dim=1)
        weights_BL = self.weighed(clean, p_BL, mask, clean.counted)[0].gather(1, order)
        weights_BS = torch.cat([weights_BL, torch.full_like(p_BL, self.ar_weight)], dim=1) / (1 + self.ar_weight)
        terms_BS = torch.cat([torch.zeros_like(order), torch.ones_like(order)], dim=1)
        return NoisyBatch(
            input_ids=torch.cat([noisy, clean.input_ids], dim=1),
            **self.placed(clean, order),
            mask=keep,
            counted=keep,
            targets=torch.cat([clean.targets.gather(1, order), one_earlier(clean.targets)], dim=1)[keep],
            weights=weights_BS[keep],
            terms=terms_BS[keep],
            normaliser=torch.cat([total(weights_BL[masks]), total(following)]),
        )

    @staticmethod
    def _exact(
        counted: torch.Tensor, blocks: torch.Tensor, p_BL: torch.Tensor, token_BL: torch.Tensor
    ) -> torch.Tensor:
        """[B, L] bool: in each block the round(n p) of its n counted positions that drew the lowest numbers."""
        sizes = torch.zeros_like(blocks).scatter_add(1, blocks, counted.long()).gather(1, blocks)
        wanted = (sizes * p_BL).round().long()
        # Sorted by block, counted before not counted, then by the number drawn; blocks are in order already.
        by_block = (2 * blocks + (~counted).long() + token_BL.double()).argsort(dim=1)
        rank = by_block.argsort(dim=1) - torch.searchsorted(blocks.contiguous(), blocks.contiguous())
        return counted & (rank < wanted)


def next_tokens(clean: Clean) -> torch.Tensor:
    """[B, L] bool: positions of the clean stream that predict a counted token, the one after them."""
    return one_earlier(clean.counted & clean.preceded)

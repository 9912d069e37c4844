"""Block diffusion: noisy blocks are denoised with the clean blocks before them in view, all blocks in one pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.models.masks import Stream, positions_of, two_stream_mask
from dlm_bridge.models.spec import Topology
from dlm_bridge.train.objectives.base import Objective, total
from dlm_bridge.train.objectives.noise import NoisyBatch, Uniforms, one_earlier, preceded


@dataclass(frozen=True)
class TwoStreams(Objective):
    """An objective over [noisy | clean]: 2L tokens, position ids 0..L-1 twice, each stream in blocks of `block_size`
    that are counted from a row's first real token. The loss of masks is on the noisy half."""

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

    def positions(self, input_ids: torch.Tensor, real: torch.Tensor | None) -> torch.Tensor:
        """[B or 1, L] positions within the row."""
        if real is None:
            return torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        return positions_of(real)

    def attention(self, positions: torch.Tensor, real_BS: torch.Tensor | None) -> torch.Tensor:
        """[B or 1, 1, 2L, 2L] bool. `real_BS` is for both streams."""
        return two_stream_mask(positions, self.block_size, real_BS, self.noisy_stream, self.clean_stream)

    def block_levels(self, uniforms: Uniforms, positions: torch.Tensor) -> torch.Tensor:
        """[B, L] the noise level of each position's block."""
        blocks = (positions // self.block_size).expand_as(uniforms.token)
        return uniforms.block.gather(1, blocks)


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

    def corrupt(
        self,
        input_ids: torch.Tensor,
        targets: torch.Tensor,
        counted: torch.Tensor,
        real: torch.Tensor | None,
        uniforms: Uniforms,
    ) -> NoisyBatch:
        positions = self.positions(input_ids, real)
        p_BL = self.probability(uniforms).expand_as(input_ids)
        if self.level == "block":
            p_BL = (1 - self.eps) * self.block_levels(uniforms, positions) + self.eps
        mask = (uniforms.token < p_BL) & counted
        none = torch.zeros_like(mask)
        return NoisyBatch(
            input_ids=torch.cat([torch.where(mask, self.mask_token_id, input_ids), input_ids], dim=1),
            attention_mask=self.attention(positions, None if real is None else real.repeat(1, 2)),
            position_ids=positions.repeat(1, 2),
            mask=torch.cat([mask, none], dim=1),
            counted=torch.cat([counted, none], dim=1),
            targets=targets[mask],
            weights=(1 / p_BL)[mask],
            terms=None,
            normaliser=total(counted),
        )


@dataclass(frozen=True)
class ComplementaryBlockDiffusion(TwoStreams):
    """Fast-dLLM v2's objective (arXiv 2509.26328 and its public modeling.py).

    t per block, p = (1 - eps) t + eps; each sequence becomes two rows, masked where the other is not; the mean
    cross-entropy of all masked positions, without weights, each from the noisy logits one position earlier. The first
    token of a block is predicted by the noisy block before, as there; the first of a row is never masked.
    """

    shift: ClassVar[bool] = True
    tokens_read: ClassVar[int] = 4

    def corrupt(
        self,
        input_ids: torch.Tensor,
        targets: torch.Tensor,
        counted: torch.Tensor,
        real: torch.Tensor | None,
        uniforms: Uniforms,
    ) -> NoisyBatch:
        positions = self.positions(input_ids, real)
        p_BL = (1 - self.eps) * self.block_levels(uniforms, positions) + self.eps
        predicted = counted & preceded(torch.ones_like(counted) if real is None else real)
        below = uniforms.token < p_BL
        mask = torch.cat([below & predicted, ~below & predicted])
        twice = torch.cat([input_ids, input_ids])
        keep = torch.cat([one_earlier(mask), torch.zeros_like(mask)], dim=1)
        attention = self.attention(positions, None if real is None else real.repeat(1, 2))
        return NoisyBatch(
            input_ids=torch.cat([torch.where(mask, self.mask_token_id, twice), twice], dim=1),
            attention_mask=attention if real is None else attention.repeat(2, 1, 1, 1),
            position_ids=positions.repeat(1 if real is None else 2, 2),
            mask=keep,
            counted=keep,
            targets=torch.cat([targets, targets])[mask],
            weights=torch.ones_like(mask, dtype=torch.float32)[mask],
            terms=None,
            normaliser=total(mask),
        )

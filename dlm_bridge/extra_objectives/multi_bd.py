"""Multi-block teacher forcing (MultiTF of MBD-LMs, arXiv 2606.29215), which trains a model for the sampler `multi_bd`.

    draw a layout: group size x of 2..buffer_size and shift s of 0..x-1, all pairs with the same probability
    group the document's blocks from the answer's first one on: s blocks (if s > 0), then x blocks each
    for each group:
        p = LOW + (HIGH - LOW) u                      # u, u', ... ~ U(0, 1)
        for each of its blocks, from the first: p = p + (HIGH - p) u'; mask its answer tokens with probability p
    loss = sum of CE / p over the masks, divided by the sum of 1 / p

A noisy block attends to itself, to the noisy blocks before it in its group, and to the clean blocks before the group.
This is a state of the Block Buffer: the group is the buffer, later blocks have more masks, and the cache contains the
blocks before it. Clean blocks attend block-causally, as in block diffusion.

Source: SJTU-DENG-Lab/mbd-lms f20911d, tasks/dataset/data_transform_multibd.py (`chain_uniform`, `coverage_mode` full)
and tasks/sdar/train_sdar_multi_tf.py. Differences: a layout is drawn for each document and step, where the public code
makes a copy of the row for every layout (and, for SDAR, two random ones); groups are counted from the answer's first
block instead of the prompt's; each token is masked with probability p, where the public code masks floor(n p) of a
block's n tokens, so that a block of 4 is never entirely masked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from dlm_bridge.attention.masks import MaskColumn, MaskDescriptor
from dlm_bridge.lazy_import import LazyModule
from dlm_bridge.objectives.base import Normalisation, Weighting, total
from dlm_bridge.objectives.batches import CleanBatch, NoisyBatch
from dlm_bridge.objectives.noise import Uniforms
from dlm_bridge.objectives.trajectory import per_group
from dlm_bridge.objectives.two_streams import TwoStreamObjective
from dlm_bridge.settings import check_minimum

if TYPE_CHECKING:
    import torch
else:
    torch = LazyModule("torch", globals())

HALF_BITS = 2.0**12  # a uniform fp32 number has 24 random bits


@dataclass(frozen=True)
class MultiBlockDiffusion(TwoStreamObjective):
    """Block diffusion with groups of up to `buffer_size` noisy blocks, as the sampler `multi_bd` sees them.

    Args:
        buffer_size: largest number of blocks of a group, the `buffer_size` of the sampler.
        noise_range: LOW and HIGH of the masking probabilities; by default the published ones.
    """

    weightings: ClassVar[tuple[Weighting, ...]] = ("level", "uniform")
    normalisations: ClassVar[tuple[Normalisation, ...]] = ("predicted",)
    loss_fraction: ClassVar[float] = 0.85

    loss_normalisation: Normalisation = "predicted"
    noise_range: tuple[float, float] | None = (0.001, 0.99001)
    buffer_size: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        check_minimum("buffer_size", self.buffer_size, 2)

    def corrupt(self, clean: CleanBatch, uniforms: Uniforms) -> NoisyBatch:
        before_BL, answer_BL = self.groups(clean, uniforms)
        p_BL = self.group_levels(clean, uniforms, before_BL, answer_BL)
        mask = self.sample_mask(clean, p_BL, uniforms, clean.counted)
        weights_M = self.position_weights(clean, p_BL, mask, clean.counted)[0][mask]
        none = torch.zeros_like(mask)
        keep = torch.cat([mask, none], dim=1)
        inputs = self.attention_inputs(clean)
        return NoisyBatch(
            input_ids=torch.cat([torch.where(mask, self.mask_token_id, clean.input_ids), clean.input_ids], dim=1),
            **{**inputs, "mask_descriptor": self._grouped(inputs["mask_descriptor"], before_BL)},
            mask=keep,
            counted=keep,
            targets=clean.targets[mask],
            weights=weights_M,
            normaliser=total(weights_M.double()),
        )

    def groups(self, clean: CleanBatch, uniforms: Uniforms) -> tuple[torch.Tensor, torch.Tensor]:
        """[B, L] int64, two tensors: number of blocks before each position's block in its group, and in the answer (of
        the position's document; negative before it)."""
        layouts = [(size, shift) for size in range(2, self.buffer_size + 1) for shift in range(size)]
        table = torch.tensor(layouts, device=clean.input_ids.device)
        drawn = (clean.noise_levels(uniforms.level) * len(layouts)).long().clamp(max=len(layouts) - 1)
        size_BL, shift_BL = table[drawn].expand(*clean.input_ids.shape, 2).unbind(dim=-1)
        blocks_BL = clean.blocks(self.block_size)
        answer_BL = blocks_BL - per_group(blocks_BL, clean.documents, clean.counted, "amin")
        return (answer_BL - shift_BL) % size_BL, answer_BL

    def group_levels(
        self, clean: CleanBatch, uniforms: Uniforms, before_BL: torch.Tensor, answer_BL: torch.Tensor
    ) -> torch.Tensor:
        """[B, L] masking probability of each block. HIGH - p is (HIGH - LOW) times the product of the numbers of the
        blocks up to this one in its group and answer, and of one number of the group."""
        blocks_BL = clean.blocks(self.block_size)
        chain_BL = torch.minimum(before_BL, answer_BL).clamp(min=0)
        left_BL = torch.ones_like(blocks_BL, dtype=uniforms.block.dtype)
        for step in range(self.buffer_size):
            number_BL = uniforms.block.gather(1, (blocks_BL - step).clamp(min=0)) * HALF_BITS
            high_BL = number_BL.floor()
            # The number of a group's first block is split into two.
            first_BL = torch.where(chain_BL == step, number_BL - high_BL, 1.0)
            left_BL = left_BL * torch.where(chain_BL >= step, high_BL / HALF_BITS * first_BL, 1.0)
        return self.probability(1 - left_BL)

    def _grouped(self, descriptor: MaskDescriptor, before_BL: torch.Tensor) -> MaskDescriptor:
        """The mask of block diffusion, with groups of noisy blocks in place of single ones."""
        length = before_BL.shape[1]
        codes = descriptor.codes.expand(len(before_BL), -1, -1).clone()
        noisy = codes[:, :length]
        begin_BL, block_BL = noisy[..., MaskColumn.CLEAN_LIMIT].clone(), noisy[..., MaskColumn.NOISY_BLOCK]
        noisy[..., MaskColumn.NOISY_LIMIT] = begin_BL + self.block_size
        noisy[..., MaskColumn.CLEAN_LIMIT] = begin_BL - before_BL * self.block_size
        # The group's first block; it may begin before the document, as no other group of the document does.
        noisy[..., MaskColumn.NOISY_BLOCK] = (block_BL - before_BL).clamp(min=0)
        return MaskDescriptor(codes)

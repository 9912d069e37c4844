"""Trajectory distillation: training on the states of a sampler's recorded trajectory instead of random masks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from dlm_bridge.errors import InputFileError, SettingError
from dlm_bridge.lazy_import import LazyModule
from dlm_bridge.objectives.base import Normalisation, Objective, Weighting
from dlm_bridge.objectives.batches import CleanBatch, NoisyBatch, shift_left
from dlm_bridge.objectives.noise import Uniforms
from dlm_bridge.objectives.two_streams import BlockDiffusion, TwoStreamObjective

if TYPE_CHECKING:
    import torch
else:
    torch = LazyModule("torch", globals())

NOT_RECORDED = -1  # commit step of a token outside a trajectory: prompt, padding


@dataclass(frozen=True)
class TrajectoryDistillation(Objective):
    """Path distillation as documented by dFactory (inclusionAI/dFactory 92b6890, trainable_parallel_decoding.rst,
    without public code); with `trajectory_block`, the positions with a loss are d3LLM's (hao-ai-lab/d3LLM e5bfcac,
    d3llm_llada_train.py).

    A trajectory of N steps, recorded by our sampler, gives the commit step of each answer token. With t ~ U(0, 1) and
    r = floor(t N) + 1, the tokens committed by the last r steps are masked: the state after N - r steps. With k
    uniform on 1..r, the tokens of the first k of these steps have a loss: the model learns to take k steps at once.
    The loss is the mean cross-entropy of these tokens.

    Differences from d3LLM: a state is drawn, and determines the block (d3LLM draws a block, unmasks the tokens before
    it, masks those after it, and takes the state with a given fraction of masks in the block); masks and tokens are
    both the trajectory's (d3LLM's tokens are another model's answers); the fraction of masks and the block size are
    constant during training; a complement replaces a state at random (d3LLM adds a second forward pass); there is no
    factor 1/4. d3LLM's entropy of right predictions is `certainty`, which also applies to complements.

    Args:
        trajectory_steps: fixed k, at most r.
        trajectory_block: block size; every mask in the block of the first mask has a loss, and no other mask.
        noise_range: lowest and highest fraction of steps that are masked.
        trajectory_complement: probability of replacing a state by its complement (of the answer, or of that block):
            committed tokens are masked and have a loss, masks are visible. A state without committed tokens there is
            not replaced.
    """

    trajectories: ClassVar[bool] = True
    weightings: ClassVar[tuple[Weighting, ...]] = ("uniform",)
    normalisations: ClassVar[tuple[Normalisation, ...]] = ("predicted", "tokens")

    eps: float = 0.0
    loss_weighting: Weighting = "uniform"
    loss_normalisation: Normalisation = "predicted"
    trajectory_steps: int | None = None
    trajectory_block: int | None = None
    trajectory_complement: float = 0.0

    def corrupt(self, clean: CleanBatch, uniforms: Uniforms) -> NoisyBatch:
        if clean.commit_steps is None:
            raise InputFileError(
                "commit_steps", f"{type(self).__name__} needs rows of dlm-bridge generate with recorded commit steps"
            )
        candidates = clean.counted & (clean.commit_steps != NOT_RECORDED)
        if self.shift:
            candidates = candidates & clean.preceded
        masked, predicted = self.state(clean, candidates, uniforms)
        weights_BL, normaliser = self.normalise_weights(
            clean, torch.ones(masked.shape, device=masked.device), predicted, candidates
        )
        tokens = torch.where(masked, self.mask_token_id, clean.input_ids)
        kept, counted = predicted, self.counted_positions(predicted, candidates)
        if self.shift:
            kept, counted = shift_left(kept), shift_left(counted)
        if self.streams == 2:
            none = torch.zeros_like(kept)
            tokens, kept, counted = (
                torch.cat([noisy, other], dim=1)
                for noisy, other in ((tokens, clean.input_ids), (kept, none), (counted, none))
            )
        return NoisyBatch(
            input_ids=tokens,
            **self.attention_inputs(clean),
            mask=kept,
            counted=counted,
            targets=clean.targets[predicted],
            weights=weights_BL[predicted],
            normaliser=normaliser,
        )

    def state(
        self, clean: CleanBatch, candidates: torch.Tensor, uniforms: Uniforms
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[B, L] bool, two tensors: the masks of a state of each trajectory, and the masks with a loss."""
        assert clean.commit_steps is not None
        groups, level = self.trajectories_of(clean, uniforms)
        every = torch.ones_like(candidates)
        place = torch.arange(groups.shape[1], device=groups.device).expand_as(groups)
        rank, count = commit_ranks(clean.commit_steps, groups, candidates)
        left = torch.minimum((self.probability(level) * count).long() + 1, count)
        masked = candidates & (rank >= count - left)
        if self.trajectory_steps is not None:
            taken = left.clamp(max=self.trajectory_steps)
        elif self.trajectory_block is not None:
            taken = left
        else:
            drawn = uniforms.token.gather(1, per_group(place, groups, every, "amin"))
            taken = torch.minimum((drawn * left).long() + 1, left)
        predicted, region = masked & (rank < count - left + taken), candidates
        if self.trajectory_block is not None:
            block = (place - per_group(place, groups, candidates, "amin")) // self.trajectory_block
            region = candidates & (block == per_group(block, groups, masked, "amin"))
            predicted = predicted & region
        if self.trajectory_complement:
            drawn = uniforms.token.gather(1, per_group(place, groups, every, "amax"))
            committed = region & ~masked
            some = per_group(committed.long(), groups, every, "amax").bool()
            replaced = (drawn < self.trajectory_complement) & some
            masked = torch.where(replaced, masked & ~region | committed, masked)
            predicted = torch.where(replaced, committed, predicted)
        return masked, predicted

    def trajectories_of(self, clean: CleanBatch, uniforms: Uniforms) -> tuple[torch.Tensor, torch.Tensor]:
        """[B, L], two tensors: index of each position's trajectory in its row, and the trajectory's t."""
        return clean.documents, clean.noise_levels(uniforms.level).expand_as(clean.input_ids)


@dataclass(frozen=True)
class ShiftedTrajectoryDistillation(TrajectoryDistillation):
    """Trajectory distillation for models whose logits at i - 1 predict token i. A position without a real token before
    it is never masked."""

    shift: ClassVar[bool] = True


@dataclass(frozen=True)
class BlockTrajectoryDistillation(TrajectoryDistillation, TwoStreamObjective):
    """Trajectory distillation over [noisy | clean] for block models: each block is a trajectory with its own state and
    k. With `trajectory_steps` of at least the block's steps, every mask of a block has a loss."""

    also: ClassVar[tuple[str, ...]] = BlockDiffusion.also

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.trajectory_block is not None:
            raise SettingError("trajectory_block", "the model has its own blocks: do not set it")

    def trajectories_of(self, clean: CleanBatch, uniforms: Uniforms) -> tuple[torch.Tensor, torch.Tensor]:
        return clean.blocks(self.block_size), self.block_levels(uniforms, clean)


def commit_ranks(
    steps_BL: torch.Tensor, groups_BL: torch.Tensor, candidates: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """[B, L] int64, two tensors, valid at `candidates`: rank of each position's commit step among the steps of its
    group that committed a candidate, from 0; and the number of these steps (at least 1)."""
    span = int(steps_BL.max()) + 1
    keys = torch.where(candidates, groups_BL * span + steps_BL, (int(groups_BL.max()) + 1) * span)
    ordered, order = keys.sort(dim=1)
    changes = torch.zeros_like(keys)
    changes[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    dense = torch.empty_like(keys).scatter(1, order, changes.cumsum(dim=1))
    first, last = (per_group(dense, groups_BL, candidates, reduce) for reduce in ("amin", "amax"))
    return dense - first, torch.where(candidates, last - first + 1, 1)


def per_group(
    values_BL: torch.Tensor, groups_BL: torch.Tensor, positions: torch.Tensor, reduce: Literal["amin", "amax"]
) -> torch.Tensor:
    """[B, L] minimum or maximum of `values_BL` over the `positions` of each group, at all positions of the group;
    undefined for groups without such positions."""
    bounds = torch.iinfo(values_BL.dtype)
    values_BL = values_BL.masked_fill(~positions, bounds.max if reduce == "amin" else bounds.min)
    found = torch.empty_like(values_BL).scatter_reduce(1, groups_BL, values_BL, reduce=reduce, include_self=False)
    return found.gather(1, groups_BL)

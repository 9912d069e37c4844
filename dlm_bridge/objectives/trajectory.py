"""Trajectory distillation: the states of a sampler's recorded trajectory in place of random masks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.objectives.base import Normalisation, Objective, Weighting
from dlm_bridge.objectives.batches import CleanBatch, NoisyBatch, shift_left
from dlm_bridge.objectives.noise import Uniforms
from dlm_bridge.objectives.two_streams import BlockDiffusion, TwoStreamObjective

NOT_RECORDED = -1  # the commit step of a token that no trajectory committed: prompt, padding


@dataclass(frozen=True)
class TrajectoryDistillation(Objective):
    """Path distillation as dFactory documents it (inclusionAI/dFactory 92b6890, trainable_parallel_decoding.rst; there
    is no code of it), and with `trajectory_block` the positions with a loss of d3LLM (hao-ai-lab/d3LLM e5bfcac,
    d3llm_llada_train.py).

    A trajectory of N steps, recorded by our sampler, has the commit step of each answer token. With t ~ U(0, 1) and
    r = floor(t N) + 1, the tokens that its last r steps committed are masked: exactly those that it had not committed
    after N - r steps. With k uniform on 1..r, the tokens of the first k of these steps have a loss: the model learns
    to take k steps of the trajectory at once. The loss is the mean cross-entropy of these tokens.

    `trajectory_steps` is a k of its own, at most r. `trajectory_block` asks for every mask of the block of that many
    answer tokens in which the first mask stands, and for none behind it. `noise_range` has the lowest and the highest
    fraction of steps that are masked, in place of t's 0 and 1.

    With probability `trajectory_complement` a state is replaced by its complement: of the answer, or of that block,
    what the state has committed is masked, has a loss, and its masks are shown. A state that has committed nothing
    there has no complement and stays.

    What differs from d3LLM: a state is drawn, and the block follows from it (there: a block, whose left is shown and
    whose right is masked, with the masks of the state at which a fraction of it would be masked); masks and tokens are
    both the trajectory's (its tokens are another model's answers); the fraction of masks and the block size are not
    raised during training; the complement takes the place of a state at random (there: a second forward pass of each
    step); no factor 1/4. Its entropy of right predictions is `certainty`, here of complements, too.
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
            raise DlmBridgeError(
                f"{type(self).__name__} needs the commit steps of its tokens: train it by dlm-bridge sft on rows of "
                "dlm-bridge generate --jsonl FILE --commit-steps"
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
        """[B, L] bool twice: the masks of a state of each trajectory, and those of them with a loss."""
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
        """[B, L] twice: which of its row's trajectories each position belongs to, and t of that."""
        return clean.documents, clean.noise_levels(uniforms.level).expand_as(clean.input_ids)


@dataclass(frozen=True)
class ShiftedTrajectoryDistillation(TrajectoryDistillation):
    """The same for models whose logits at i - 1 predict token i. A position that no real one precedes is never
    masked."""

    shift: ClassVar[bool] = True


@dataclass(frozen=True)
class BlockTrajectoryDistillation(TrajectoryDistillation, TwoStreamObjective):
    """The same over [noisy | clean] for models of blocks: each block has a trajectory, and draws a state and a k, of
    its own. With `trajectory_steps` at least its steps every mask of a block has a loss."""

    also: ClassVar[tuple[str, ...]] = BlockDiffusion.also

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.trajectory_block is not None:
            raise DlmBridgeError("--trajectory-block: the model has blocks of its own: leave it out")

    def trajectories_of(self, clean: CleanBatch, uniforms: Uniforms) -> tuple[torch.Tensor, torch.Tensor]:
        return clean.blocks(self.block_size), self.block_levels(uniforms, clean)


def commit_ranks(
    steps_BL: torch.Tensor, groups_BL: torch.Tensor, candidates: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """[B, L] int64 twice, of the positions in `candidates`: which of its group's steps committed each, counted from 0
    over the steps that committed any of them, and how many these steps are (at least 1)."""
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
    """[B, L] the least or greatest of `values_BL` at the group's `positions`, at all of the group's places; any number
    where it has none."""
    bounds = torch.iinfo(values_BL.dtype)
    values_BL = values_BL.masked_fill(~positions, bounds.max if reduce == "amin" else bounds.min)
    found = torch.empty_like(values_BL).scatter_reduce(1, groups_BL, values_BL, reduce=reduce, include_self=False)
    return found.gather(1, groups_BL)

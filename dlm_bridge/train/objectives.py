"""Training objectives as pure functions, shared by every engine: noise in, a loss sum and its normaliser out.

An engine draws `Uniforms` on the CPU, lets the objective make a `NoisyBatch` of them, runs the model on
`noisy.input_ids` with logits at `noisy.mask` only, and sums `objective.loss_sum` over its micro-batches and processes.
Dividing by the sum of `noisy.normaliser` over the whole global batch makes loss and gradients independent of how that
batch was cut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812

from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.train.keyed import Purpose, stream

IGNORE = -100  # the label of a position that is never masked and not counted: prompt, padding


@dataclass(frozen=True)
class Uniforms:
    """The random numbers behind a batch's noise, all uniform on [0, 1), fp32: everything else is deterministic."""

    level: torch.Tensor  # [B], the noise level t
    token: torch.Tensor  # [B, L], compared with the masking probability
    cut: torch.Tensor  # [B], whether the sequence is cut short
    cut_length: torch.Tensor  # [B], to what length

    @classmethod
    def keyed(
        cls, seed: int, step: int, samples: Sequence[int], length: int, purpose: Purpose = Purpose.TRAIN_NOISE
    ) -> Uniforms:
        """Numbers keyed by (seed, step, global sample index): `samples` are the indices of the B rows."""
        rows = np.empty((len(samples), 3 + length), dtype=np.float32)
        for row, sample in zip(rows, samples, strict=True):
            stream(seed, purpose, step, sample).random(out=row, dtype=np.float32)
        return cls._of(torch.from_numpy(rows))

    @classmethod
    def drawn(cls, generator: torch.Generator, batch: int, length: int) -> Uniforms:
        """Numbers from an explicit generator, on that generator's device."""
        return cls._of(torch.rand(batch, 3 + length, generator=generator, device=generator.device))

    @classmethod
    def _of(cls, rows: torch.Tensor) -> Uniforms:
        return cls(level=rows[:, 0], cut=rows[:, 1], cut_length=rows[:, 2], token=rows[:, 3:])

    def to(self, device: torch.device) -> Uniforms:
        return Uniforms(*(getattr(self, name).to(device) for name in ("level", "token", "cut", "cut_length")))


@dataclass(frozen=True)
class NoisyBatch:
    """What a model sees and what it is asked for. M is the number of masked positions, in row-major order."""

    input_ids: torch.Tensor  # [B, L], with mask tokens
    attention_mask: torch.Tensor | None  # [B, L] bool, None where every position is real
    mask: torch.Tensor  # [B, L] bool: the positions whose logits are needed
    targets: torch.Tensor  # [M] clean tokens
    weights: torch.Tensor  # [M] fp32
    normaliser: torch.Tensor  # scalar int64: what this batch adds to the divisor of the global loss

    def to(self, device: torch.device) -> NoisyBatch:
        """The same batch on another device, copied without waiting where the memory is pinned."""
        moved = {name: value.to(device, non_blocking=True) for name, value in vars(self).items() if value is not None}
        return NoisyBatch(**{"attention_mask": None, **moved})


@dataclass(frozen=True)
class MaskedDiffusion:
    """LLaDA's objective (arXiv 2502.09992, equation 3, and GUIDELINES.md of the public repository).

    Per sequence t ~ U(0, 1) and p = (1 - eps) t + eps; each position is masked with probability p, independently; the
    loss is the cross-entropy at the masked positions over p, summed and divided by the number of positions. A share
    `length_variation` of the sequences is cut to a length uniform on 1..L.
    """

    mask_token_id: int
    eps: float = 1e-3
    length_variation: float = 0.0

    def noise(
        self,
        input_ids: torch.Tensor,
        uniforms: Uniforms,
        labels: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
    ) -> NoisyBatch:
        """Mask a clean batch.

        Args:
            input_ids: [B, L] clean tokens.
            uniforms: of the same B and L.
            labels: [B, L], -100 (`IGNORE`) where a position is never masked and not counted, else the target.
            attention_mask: [B, L], zero at padding, which is never masked and not counted.
        """
        batch, length = input_ids.shape
        uniforms = uniforms.to(input_ids.device)
        real = None if attention_mask is None else attention_mask.to(input_ids.device).bool()
        if self.length_variation > 0:
            real = self._cut(uniforms, length, real)
        counted = torch.ones_like(input_ids, dtype=torch.bool) if real is None else real
        if labels is not None:
            counted = counted & (labels != IGNORE)
        p_B1 = ((1 - self.eps) * uniforms.level + self.eps)[:, None]
        mask = (uniforms.token < p_B1) & counted
        return NoisyBatch(
            input_ids=torch.where(mask, self.mask_token_id, input_ids),
            attention_mask=real,
            mask=mask,
            targets=(input_ids if labels is None else labels)[mask],
            weights=(1 / p_B1).expand(batch, length)[mask],
            normaliser=counted.sum(),
        )

    def _cut(self, uniforms: Uniforms, length: int, real: torch.Tensor | None) -> torch.Tensor | None:
        """Positions that are left after the length variation; None where no row is cut and none was padded."""
        cut_B = uniforms.cut < self.length_variation
        if not bool(cut_B.any()):
            return real
        lengths_B = torch.where(cut_B, 1 + (uniforms.cut_length * length).long().clamp(max=length - 1), length)
        kept = torch.arange(length, device=lengths_B.device) < lengths_B[:, None]
        return kept if real is None else kept & real

    def loss_sum(self, logits_MV: torch.Tensor, noisy: NoisyBatch) -> torch.Tensor:
        """The weighted cross-entropy summed over the masked positions, in fp32. Zero, with a graph, where M is 0."""
        losses_M = F.cross_entropy(logits_MV.float(), noisy.targets, reduction="none")
        return (losses_M * noisy.weights).sum()


OBJECTIVES: dict[str, Callable[..., MaskedDiffusion]] = {"masked": MaskedDiffusion}


def build_objective(name: str, mask_token_id: int, length_variation: float = 0.0) -> MaskedDiffusion:
    """The objective that `--objective NAME` means. Raises DlmBridgeError with the known names."""
    if name not in OBJECTIVES:
        raise DlmBridgeError(f"unknown objective '{name}': known are {', '.join(OBJECTIVES)}")
    return OBJECTIVES[name](mask_token_id=mask_token_id, length_variation=length_variation)


def masked_diffusion_loss(
    forward: Callable[..., torch.Tensor],
    input_ids: torch.Tensor,
    labels: torch.Tensor,
    generator: torch.Generator,
    mask_token_id: int,
    attention_mask: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """LLaDA's loss of one clean batch, a scalar: what `model(input_ids, labels=..., generator=...)` returns.

    Args:
        forward: called as forward(input_ids=..., attention_mask=..., logits_to_keep=mask, **kwargs), gives the logits
            [M, V] of the masked positions.
        labels: [B, L] clean tokens, -100 where a position is never masked and not counted.
        generator: where the noise comes from.
        attention_mask: [B, L], zero at padding; or 4-D, which says nothing about padding: then `labels` must.
    """
    objective = MaskedDiffusion(mask_token_id)
    uniforms = Uniforms.drawn(generator, *input_ids.shape)
    padding = attention_mask if attention_mask is not None and attention_mask.dim() == 2 else None
    noisy = objective.noise(input_ids, uniforms, labels, padding)
    logits_MV = forward(input_ids=noisy.input_ids, attention_mask=attention_mask, logits_to_keep=noisy.mask, **kwargs)
    return objective.loss_sum(logits_MV, noisy) / noisy.normaliser.clamp(min=1)

"""What every objective draws and what it hands to an engine: keyed random numbers in, a noisy batch out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dlm_bridge.models.visibility import Visibility
from dlm_bridge.train.keyed import Purpose, stream

IGNORE = -100  # the label of a position that is never masked and not counted: prompt, padding


@dataclass(frozen=True)
class Uniforms:
    """The random numbers behind a batch's noise, all uniform on [0, 1), fp32: everything else is deterministic."""

    level: torch.Tensor  # [B], the noise level t
    token: torch.Tensor  # [B, L], compared with the masking probability
    cut: torch.Tensor  # [B], whether the sequence is cut short
    cut_length: torch.Tensor  # [B], to what length
    block: torch.Tensor  # [B, L], the noise level of block b in column b, where blocks have their own

    @classmethod
    def keyed(
        cls, seed: int, step: int, samples: Sequence[int], length: int, purpose: Purpose = Purpose.TRAIN_NOISE
    ) -> Uniforms:
        """Numbers keyed by (seed, step, global sample index): `samples` are the indices of the B rows. A longer
        `length` only adds columns: padding changes no noise."""
        rows = np.empty((len(samples), 3 + length), dtype=np.float32)
        blocks = np.empty((len(samples), length), dtype=np.float32)
        for row, block, sample in zip(rows, blocks, samples, strict=True):
            stream(seed, purpose, step, sample).random(out=row, dtype=np.float32)
            stream(seed, purpose, step, sample, lane=1).random(out=block, dtype=np.float32)
        return cls._of(torch.from_numpy(rows), torch.from_numpy(blocks))

    @classmethod
    def drawn(cls, generator: torch.Generator, batch: int, length: int) -> Uniforms:
        """Numbers from an explicit generator, on that generator's device."""
        rows, blocks = (
            torch.rand(batch, columns, generator=generator, device=generator.device)
            for columns in (3 + length, length)
        )
        return cls._of(rows, blocks)

    @classmethod
    def _of(cls, rows: torch.Tensor, blocks: torch.Tensor) -> Uniforms:
        return cls(level=rows[:, 0], cut=rows[:, 1], cut_length=rows[:, 2], token=rows[:, 3:], block=blocks)

    def to(self, device: torch.device) -> Uniforms:
        return Uniforms(**{name: value.to(device) for name, value in vars(self).items()})


@dataclass(frozen=True)
class NoisyBatch:
    """What a model sees and what it is asked for.

    S is L for objectives that read the noisy tokens alone and 2L for those that read [noisy | clean]; an objective may
    also make several rows of one. M is the number of positions with a loss, in row-major order. The loss of a global
    batch is the sum over k of sum_k / normaliser_k, each summed over all of its micro-batches and processes first.
    """

    input_ids: torch.Tensor  # [B, S], with mask tokens
    attention_mask: torch.Tensor | None  # [B, L] bool, false at padding; None where every position is real
    visibility: Visibility | None  # [B or 1, S]: who looks at whom, padding included; None for the family's own way
    position_ids: torch.Tensor | None  # [B or 1, S]; None for 0..L-1
    mask: torch.Tensor  # [B, S] bool: the positions whose logits are needed
    counted: torch.Tensor  # [B, S] bool: a superset, as many as the normaliser where that counts positions
    targets: torch.Tensor  # [M] the token that the logits of each position predict
    weights: torch.Tensor  # [M] fp32
    terms: torch.Tensor | None  # [M] int64, which of the K sums a position belongs to; None where K is 1
    normaliser: torch.Tensor  # [K] float64: what this batch adds to the divisors of the global loss
    pairs: torch.Tensor | None = None  # [B, 1, S, S] bool, in place of `visibility` where no rule gives it

    def model_mask(self) -> torch.Tensor | None:
        """The attention mask of a Hub model's forward: [B, L] bool, or [B or 1, 1, S, S] bool (True: may look) where
        the batch has its own rule; it is made on the batch's device."""
        if self.pairs is not None:
            return self.pairs
        return self.attention_mask if self.visibility is None else self.visibility.dense()

    def logits(self, model: Any) -> torch.Tensor:
        """[M, V], those of the positions with a loss, by a Hub-side diffusion model on the batch's device."""
        logits: torch.Tensor = model(
            input_ids=self.input_ids,
            attention_mask=self.model_mask(),
            position_ids=self.position_ids,
            logits_to_keep=self.mask,
        ).logits
        return logits

    def to(self, device: torch.device) -> NoisyBatch:
        """The same batch on another device, copied without waiting where the memory is pinned."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def pin(self) -> NoisyBatch:
        """The same in pinned memory."""
        return self._each(lambda tensor: tensor.pin_memory())

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> NoisyBatch:
        values = dict(vars(self))
        for name, value in values.items():
            if isinstance(value, Visibility):
                values[name] = Visibility(change(value.codes))
            elif isinstance(value, torch.Tensor):
                values[name] = change(value)
        return NoisyBatch(**values)

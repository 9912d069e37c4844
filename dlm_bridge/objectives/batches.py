"""The batches on either side of an objective: clean tokens with their documents, and the noisy batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from dlm_bridge.attention.masks import MaskDescriptor, document_ids, position_ids_from_padding
from dlm_bridge.objectives.losses import Certainty, NoisePositions

GOLDEN_RATIO = 0.6180339887498949  # its fractional part


@dataclass(frozen=True)
class CleanBatch:
    """B rows of L tokens. Documents of a packed row are independent: no attention between them, positions and blocks
    count from the first token of each, and nothing predicts that token."""

    input_ids: torch.Tensor  # [B, L]
    targets: torch.Tensor  # [B, L]
    counted: torch.Tensor  # [B, L] bool: only these may be masked
    real: torch.Tensor | None  # [B, L] bool, false at padding; None where no position is padding
    document_numbers: torch.Tensor | None  # [B, L] document numbers of packed rows; None for one document a row
    commit_steps: torch.Tensor | None = None  # [B, L] int64, -1 outside a trajectory; None where none is recorded

    def repeated(self, times: int) -> CleanBatch:
        """The same rows, `times` over."""
        return CleanBatch(
            self.input_ids.repeat(times, 1),
            self.targets.repeat(times, 1),
            self.counted.repeat(times, 1),
            None if self.real is None else self.real.repeat(times, 1),
            None if self.document_numbers is None else self.document_numbers.repeat(times, 1),
            None if self.commit_steps is None else self.commit_steps.repeat(times, 1),
        )

    @property
    def packed(self) -> bool:
        return self.document_numbers is not None

    @cached_property
    def real_mask(self) -> torch.Tensor:
        """[B, L] bool: `real` as a tensor, also where every position is real."""
        return torch.ones_like(self.counted) if self.real is None else self.real

    @cached_property
    def document_starts(self) -> torch.Tensor:
        """[B, L] bool: the first token of each document, and of what follows padding."""
        same = preceded(self.real_mask)
        if self.document_numbers is not None:
            same[:, 1:] &= self.document_numbers[:, 1:] == self.document_numbers[:, :-1]
        return self.real_mask & ~same

    @cached_property
    def preceded(self) -> torch.Tensor:
        """[B, L] bool: a real token with another of its document before it."""
        return self.real_mask & ~self.document_starts

    @cached_property
    def documents(self) -> torch.Tensor:
        """[B, L] int64: each position's document, counted from 0 in its row; padding belongs to the one before."""
        if self.document_numbers is None:
            return torch.zeros_like(self.input_ids)
        return (self.document_starts.cumsum(dim=1) - 1).clamp(min=0)

    @cached_property
    def mask_documents(self) -> torch.Tensor:
        """[B or 1, L] int32: document ids for a `MaskDescriptor`; each padding position is a document of its own."""
        if self.real is None and self.document_numbers is None:
            return torch.zeros(1, self.input_ids.shape[1], dtype=torch.int32, device=self.input_ids.device)
        return document_ids(self.real_mask, self.documents)

    @cached_property
    def positions(self) -> torch.Tensor:
        """[B or 1, L] int64: positions within the document."""
        order = torch.arange(self.input_ids.shape[1], device=self.input_ids.device)[None]
        if self.document_numbers is not None:
            return order - torch.where(self.document_starts, order, 0).cummax(dim=1).values
        return order if self.real is None else position_ids_from_padding(self.real)

    def blocks(self, size: int) -> torch.Tensor:
        """[B, L] int64: the number of each position's block of `size` tokens, counted over the row's documents."""
        if self.document_numbers is None:
            return (self.positions // size).expand_as(self.input_ids)
        first = self.real_mask & (self.positions % size == 0)
        return (first.cumsum(dim=1) - 1).clamp(min=0)

    def noise_levels(self, level_B: torch.Tensor) -> torch.Tensor:
        """[B, 1] or, of packed rows, [B, L]: the noise level of each document, see `document_level`."""
        return document_level(level_B[:, None], self.documents) if self.packed else level_B[:, None]

    def sum_per_document(self, values_BL: torch.Tensor) -> torch.Tensor:
        """[B, L] each document's sum of `values_BL` at all of its positions."""
        return torch.zeros_like(values_BL).scatter_add(1, self.documents, values_BL).gather(1, self.documents)

    def count_per_document(self, candidates: torch.Tensor) -> torch.Tensor:
        """[B, L] int64: how many positions of `candidates` each document has, at all of its positions."""
        return self.sum_per_document(candidates.long())

    def num_documents(self, candidates: torch.Tensor) -> torch.Tensor:
        """How many documents have a position of `candidates`."""
        if self.document_numbers is None:
            return candidates.any(dim=1).sum()
        return (self.document_starts & (self.count_per_document(candidates) > 0)).sum()

    def lowest_per_document(self, values_BL: torch.Tensor, candidates: torch.Tensor) -> torch.Tensor:
        """[B, L] bool: the first position with the lowest value of each document's `candidates`."""
        found = self._min_per_document(values_BL.masked_fill(~candidates, torch.inf)) == values_BL
        order = torch.arange(values_BL.shape[1], device=values_BL.device).expand_as(values_BL)
        found = found & candidates
        return found & (self._min_per_document(order.masked_fill(~found, order.shape[1])) == order)

    def _min_per_document(self, values_BL: torch.Tensor) -> torch.Tensor:
        least = torch.empty_like(values_BL).scatter_reduce(
            1, self.documents, values_BL, reduce="amin", include_self=False
        )
        return least.gather(1, self.documents)


def document_level(level: torch.Tensor, document: torch.Tensor | int) -> torch.Tensor:
    """The noise level of a row's document number `document`, uniform on [0, 1) where the row's `level` is: steps of
    the golden ratio, which spread the documents of a row over all levels."""
    return ((level.double() + GOLDEN_RATIO * document) % 1).float().clamp(max=1 - 2**-24)


def preceded(positions_BL: torch.Tensor) -> torch.Tensor:
    """[B, L] bool: whether the position before in the row is one of `positions_BL`; false for the first of a row."""
    return torch.cat([torch.zeros_like(positions_BL[:, :1]), positions_BL[:, :-1]], dim=1)


def shift_left(values_BL: torch.Tensor) -> torch.Tensor:
    """`values_BL` moved to the position before, where the logits are that predict it; the last column gets zeros."""
    return torch.cat([values_BL[:, 1:], torch.zeros_like(values_BL[:, :1])], dim=1)


IGNORE_INDEX = -100  # the label of a position that is never masked and not counted: prompt, padding


@dataclass(frozen=True)
class NoisyBatch:
    """Input of a model, and the targets of its logits.

    S is L for objectives that read the noisy tokens alone and 2L for those that read [noisy | clean]; an objective may
    also make several rows of one. M is the number of positions with a loss, in row-major order. The loss of a global
    batch is the sum over k of sum_k / normaliser_k, each summed over all of its micro-batches and processes first.
    """

    input_ids: torch.Tensor  # [B, S], with noise
    attention_mask: torch.Tensor | None  # [B, L] bool, false at padding; None where every position is real
    mask_descriptor: MaskDescriptor | None  # [B or 1, S]: attention mask, padding included; None for the family's own
    position_ids: torch.Tensor | None  # [B or 1, S]; None for 0..L-1
    mask: torch.Tensor  # [B, S] bool: the positions whose logits are needed
    counted: torch.Tensor  # [B, S] bool: a superset, as many as the normaliser where that counts positions
    targets: torch.Tensor  # [M] the token that the logits of each position predict
    weights: torch.Tensor  # [M] fp32
    normaliser: torch.Tensor  # [K] float64: what this batch adds to the divisors of the global loss
    terms: torch.Tensor | None = None  # [M] int64, which of the K sums a position belongs to; None where K is 1
    rows: torch.Tensor | None = None  # [M] int64, each position's row of B, where the sums are balanced; else None
    pairs: torch.Tensor | None = None  # [B, 1, S, S] bool, in place of `mask_descriptor` where no rule gives it
    self_conditioned: torch.Tensor | None = None  # [B] bool: canvases whose first prediction the decoder is given
    noise: NoisePositions | None = None  # of random tokens; None where the loss is cross-entropy
    certainty: Certainty | None = None  # added to the cross-entropy

    def model_mask(self) -> torch.Tensor | None:
        """The attention mask of a Hub model's forward: [B, L] bool, or [B or 1, 1, S, S] bool (True: may look) where
        the batch has its own rule; it is made on the batch's device."""
        if self.pairs is not None:
            return self.pairs
        return self.attention_mask if self.mask_descriptor is None else self.mask_descriptor.dense()

    def logits(self, model: Any) -> torch.Tensor:
        """[M, V], those of the positions with a loss, by a Hub-side model on the batch's device, which may be wrapped
        for data parallelism."""
        inputs = {
            "input_ids": self.input_ids,
            "attention_mask": self.model_mask(),
            "position_ids": self.position_ids,
        }
        logits: torch.Tensor
        if hasattr(getattr(model, "module", model), "family"):
            logits = model(**inputs, logits_to_keep=self.mask).logits
            return logits
        # transformers' own classes keep whole columns.
        columns = self.mask.any(dim=0).nonzero()[:, 0]
        logits = model(**inputs, logits_to_keep=columns, use_cache=False).logits
        return logits[self.mask[:, columns]]

    def to(self, device: torch.device) -> NoisyBatch:
        """The same batch on another device, copied without waiting where the memory is pinned."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def pin(self) -> NoisyBatch:
        """The same in pinned memory."""
        return self._each(lambda tensor: tensor.pin_memory())

    def row_without_targets(self) -> NoisyBatch:
        """The first row's input, of which no logits are needed."""
        return replace(
            self._each(lambda tensor: tensor[:1]),
            mask=torch.zeros_like(self.mask[:1]),
            counted=torch.zeros_like(self.counted[:1]),
            targets=self.targets[:0],
            weights=self.weights[:0],
            normaliser=self.normaliser,
            terms=None if self.terms is None else self.terms[:0],
            rows=None if self.rows is None else self.rows[:0],
        )

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> NoisyBatch:
        values = dict(vars(self))
        for name, value in values.items():
            if isinstance(value, MaskDescriptor):
                values[name] = MaskDescriptor(change(value.codes))
            elif isinstance(value, NoisePositions):
                values[name] = value.each(change)
            elif isinstance(value, torch.Tensor):
                values[name] = change(value)
        return NoisyBatch(**values)

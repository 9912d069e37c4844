"""Input and output of an objective: the clean batch with its documents, and the noisy batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from dlm_bridge.attention.masks import MaskDescriptor, document_ids, position_ids_from_padding
from dlm_bridge.lazy_import import LazyModule
from dlm_bridge.objectives.losses import Certainty, NoisePositions

if TYPE_CHECKING:
    import torch
else:
    torch = LazyModule("torch", globals())

GOLDEN_RATIO = 0.6180339887498949  # its fractional part


@dataclass(frozen=True)
class CleanBatch:
    """B rows of L tokens. Documents of a packed row are independent: they do not attend to each other, positions and
    blocks count from the first token of each, and that token is not predicted."""

    input_ids: torch.Tensor  # [B, L]
    targets: torch.Tensor  # [B, L]
    counted: torch.Tensor  # [B, L] bool: positions that may be masked
    real: torch.Tensor | None  # [B, L] bool, False at padding; None: no padding
    document_numbers: torch.Tensor | None  # [B, L] document ids of packed rows; None: one document per row
    commit_steps: torch.Tensor | None = None  # [B, L] int64, -1 outside a trajectory; None: not recorded

    def repeated(self, times: int) -> CleanBatch:
        """Repeat all rows `times` times."""
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
        """[B, L] bool: `real` as a tensor, also without padding."""
        return torch.ones_like(self.counted) if self.real is None else self.real

    @cached_property
    def document_starts(self) -> torch.Tensor:
        """[B, L] bool: first token of each document, and first token after padding."""
        same = preceded(self.real_mask)
        if self.document_numbers is not None:
            same[:, 1:] &= self.document_numbers[:, 1:] == self.document_numbers[:, :-1]
        return self.real_mask & ~same

    @cached_property
    def preceded(self) -> torch.Tensor:
        """[B, L] bool: real tokens with a token of the same document before them."""
        return self.real_mask & ~self.document_starts

    @cached_property
    def documents(self) -> torch.Tensor:
        """[B, L] int64: index of each position's document in its row; padding belongs to the document before it."""
        if self.document_numbers is None:
            return torch.zeros_like(self.input_ids)
        return (self.document_starts.cumsum(dim=1) - 1).clamp(min=0)

    @cached_property
    def mask_documents(self) -> torch.Tensor:
        """[B or 1, L] int32: document ids for a `MaskDescriptor`; each padding position is a separate document."""
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
        """[B, L] int64: index of each position's block of `size` tokens, counted over the row's documents."""
        if self.document_numbers is None:
            return (self.positions // size).expand_as(self.input_ids)
        first = self.real_mask & (self.positions % size == 0)
        return (first.cumsum(dim=1) - 1).clamp(min=0)

    def noise_levels(self, level_B: torch.Tensor) -> torch.Tensor:
        """[B, 1], or [B, L] for packed rows: noise level of each document, see `document_level`."""
        return document_level(level_B[:, None], self.documents) if self.packed else level_B[:, None]

    def sum_per_document(self, values_BL: torch.Tensor) -> torch.Tensor:
        """[B, L]: sum of `values_BL` over each position's document."""
        return torch.zeros_like(values_BL).scatter_add(1, self.documents, values_BL).gather(1, self.documents)

    def count_per_document(self, candidates: torch.Tensor) -> torch.Tensor:
        """[B, L] int64: number of `candidates` in each position's document."""
        return self.sum_per_document(candidates.long())

    def num_documents(self, candidates: torch.Tensor) -> torch.Tensor:
        """Number of documents with at least one position of `candidates`."""
        if self.document_numbers is None:
            return candidates.any(dim=1).sum()
        return (self.document_starts & (self.count_per_document(candidates) > 0)).sum()

    def lowest_per_document(self, values_BL: torch.Tensor, candidates: torch.Tensor) -> torch.Tensor:
        """[B, L] bool: first position with the lowest value among each document's `candidates`."""
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
    """Noise level of a row's document with index `document`, uniform on [0, 1) if the row's `level` is. Documents
    advance by the golden ratio, which spreads them over all levels."""
    return ((level.double() + GOLDEN_RATIO * document) % 1).float().clamp(max=1 - 2**-24)


def preceded(positions_BL: torch.Tensor) -> torch.Tensor:
    """[B, L] bool: True if the previous position of the row is in `positions_BL`; False for the first position."""
    return torch.cat([torch.zeros_like(positions_BL[:, :1]), positions_BL[:, :-1]], dim=1)


def shift_left(values_BL: torch.Tensor) -> torch.Tensor:
    """Shift values to the previous position, whose logits predict the token; the last column becomes zero."""
    return torch.cat([values_BL[:, 1:], torch.zeros_like(values_BL[:, :1])], dim=1)


IGNORE_INDEX = -100  # label of a position that is never masked and not counted: prompt, padding


@dataclass(frozen=True)
class NoisyBatch:
    """Input of a model, and the targets of its logits.

    S is L for objectives over the noisy tokens, and 2L for objectives over [noisy | clean]; an objective may create
    several rows from one. M is the number of positions with a loss, in row-major order. The loss of a global batch is
    the sum over k of sum_k / normaliser_k, each summed over all micro-batches and processes first.
    """

    input_ids: torch.Tensor  # [B, S], with noise
    attention_mask: torch.Tensor | None  # [B, L] bool, False at padding; None: no padding
    mask_descriptor: MaskDescriptor | None  # [B or 1, S]: attention mask with padding; None: the family's
    position_ids: torch.Tensor | None  # [B or 1, S]; None: 0..L-1
    mask: torch.Tensor  # [B, S] bool: positions whose logits are needed
    counted: torch.Tensor  # [B, S] bool: superset of `mask`; its size is the normaliser, if that counts positions
    targets: torch.Tensor  # [M] token that each position's logits predict
    weights: torch.Tensor  # [M] fp32
    normaliser: torch.Tensor  # [K] float64: summands of the global loss's divisors
    terms: torch.Tensor | None = None  # [M] int64, index of each position's sum, below K; None if K is 1
    rows: torch.Tensor | None = None  # [M] int64, row of each position, if the sums are balanced; else None
    pairs: torch.Tensor | None = None  # [B, 1, S, S] bool: attention mask that no `mask_descriptor` can express
    self_conditioned: torch.Tensor | None = None  # [B] bool: canvases conditioned on the decoder's first prediction
    noise: NoisePositions | None = None  # random tokens; None: the loss is cross-entropy
    certainty: Certainty | None = None  # added to the cross-entropy

    def model_mask(self) -> torch.Tensor | None:
        """Attention mask for a Hub model: [B, L] bool, or [B or 1, 1, S, S] bool (True: attends) if the batch has its
        own rule; created on the batch's device."""
        if self.pairs is not None:
            return self.pairs
        return self.attention_mask if self.mask_descriptor is None else self.mask_descriptor.dense()

    def logits(self, model: Any) -> torch.Tensor:
        """[M, V] logits at the positions with a loss, by a Hub model on the batch's device, which may be wrapped for
        data parallelism."""
        inputs = {
            "input_ids": self.input_ids,
            "attention_mask": self.model_mask(),
            "position_ids": self.position_ids,
        }
        logits: torch.Tensor
        if hasattr(getattr(model, "module", model), "family"):
            logits = model(**inputs, logits_to_keep=self.mask).logits
            return logits
        # `logits_to_keep` of transformers' own classes selects columns.
        columns = self.mask.any(dim=0).nonzero()[:, 0]
        logits = model(**inputs, logits_to_keep=columns, use_cache=False).logits
        return logits[self.mask[:, columns]]

    def to(self, device: torch.device) -> NoisyBatch:
        """Copy the batch to another device, asynchronously if its memory is pinned."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def pin(self) -> NoisyBatch:
        """Copy the batch to pinned memory."""
        return self._each(lambda tensor: tensor.pin_memory())

    def row_without_targets(self) -> NoisyBatch:
        """Input of the first row, without positions with a loss."""
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
            elif isinstance(value, NoisyBatch):
                values[name] = value._each(change)
            elif isinstance(value, torch.Tensor):
                values[name] = change(value)
        return type(self)(**values)

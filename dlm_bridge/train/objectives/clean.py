"""A clean batch as an objective reads it: what counts, what is real, and where its documents and blocks begin."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from dlm_bridge.models.masks import positions_of
from dlm_bridge.models.visibility import documents_of

GOLDEN = 0.6180339887498949


@dataclass(frozen=True)
class Clean:
    """B rows of L tokens. A packed row holds documents that know nothing of each other: they do not look at each
    other, positions and blocks are counted from the first token of each, and nothing predicts that token."""

    input_ids: torch.Tensor  # [B, L]
    targets: torch.Tensor  # [B, L]
    counted: torch.Tensor  # [B, L] bool: only these may be masked
    real: torch.Tensor | None  # [B, L] bool: only these may be looked at; None for all
    numbers: torch.Tensor | None  # [B, L] document numbers of packed rows; None for one document a row

    def repeated(self, times: int) -> Clean:
        """The same rows, `times` over."""
        return Clean(
            self.input_ids.repeat(times, 1),
            self.targets.repeat(times, 1),
            self.counted.repeat(times, 1),
            None if self.real is None else self.real.repeat(times, 1),
            None if self.numbers is None else self.numbers.repeat(times, 1),
        )

    @property
    def packed(self) -> bool:
        return self.numbers is not None

    @cached_property
    def everywhere(self) -> torch.Tensor:
        """[B, L] bool: `real`, written out."""
        return torch.ones_like(self.counted) if self.real is None else self.real

    @cached_property
    def starts(self) -> torch.Tensor:
        """[B, L] bool: the first token of each document, and of what follows padding."""
        same = preceded(self.everywhere)
        if self.numbers is not None:
            same[:, 1:] &= self.numbers[:, 1:] == self.numbers[:, :-1]
        return self.everywhere & ~same

    @cached_property
    def preceded(self) -> torch.Tensor:
        """[B, L] bool: a real token that stands behind another of its document."""
        return self.everywhere & ~self.starts

    @cached_property
    def documents(self) -> torch.Tensor:
        """[B, L] int64: each position's document, counted from 0 in its row; padding belongs to the one before."""
        if self.numbers is None:
            return torch.zeros_like(self.input_ids)
        return (self.starts.cumsum(dim=1) - 1).clamp(min=0)

    @cached_property
    def apart(self) -> torch.Tensor:
        """[B or 1, L] int32: document numbers as a `Visibility` takes them, padding positions each alone."""
        if self.real is None and self.numbers is None:
            return torch.zeros(1, self.input_ids.shape[1], dtype=torch.int32, device=self.input_ids.device)
        return documents_of(self.everywhere, self.documents)

    @cached_property
    def positions(self) -> torch.Tensor:
        """[B or 1, L] int64: positions within the document."""
        order = torch.arange(self.input_ids.shape[1], device=self.input_ids.device)[None]
        if self.numbers is not None:
            return order - torch.where(self.starts, order, 0).cummax(dim=1).values
        return order if self.real is None else positions_of(self.real)

    def blocks(self, size: int) -> torch.Tensor:
        """[B, L] int64: the number of each position's block of `size` tokens, counted over the row's documents."""
        if self.numbers is None:
            return (self.positions // size).expand_as(self.input_ids)
        first = self.everywhere & (self.positions % size == 0)
        return (first.cumsum(dim=1) - 1).clamp(min=0)

    def levels(self, level_B: torch.Tensor) -> torch.Tensor:
        """[B, 1] or, of packed rows, [B, L]: the noise level of each document, see `document_level`."""
        return document_level(level_B[:, None], self.documents) if self.packed else level_B[:, None]

    def summed(self, values_BL: torch.Tensor) -> torch.Tensor:
        """[B, L] each document's sum of `values_BL` at all of its positions."""
        return torch.zeros_like(values_BL).scatter_add(1, self.documents, values_BL).gather(1, self.documents)

    def sizes(self, among: torch.Tensor) -> torch.Tensor:
        """[B, L] int64: how many positions of `among` each document has, at all of its positions."""
        return self.summed(among.long())

    def number(self, among: torch.Tensor) -> torch.Tensor:
        """How many documents have a position of `among`."""
        if self.numbers is None:
            return among.any(dim=1).sum()
        return (self.starts & (self.sizes(among) > 0)).sum()

    def lowest(self, values_BL: torch.Tensor, among: torch.Tensor) -> torch.Tensor:
        """[B, L] bool: the first position with the lowest value `among` those of each document."""
        found = self._least(values_BL.masked_fill(~among, torch.inf)) == values_BL
        order = torch.arange(values_BL.shape[1], device=values_BL.device).expand_as(values_BL)
        return found & among & (self._least(order.masked_fill(~(found & among), order.shape[1])) == order)

    def _least(self, values_BL: torch.Tensor) -> torch.Tensor:
        least = torch.empty_like(values_BL).scatter_reduce(
            1, self.documents, values_BL, reduce="amin", include_self=False
        )
        return least.gather(1, self.documents)


def document_level(level: torch.Tensor, document: torch.Tensor | int) -> torch.Tensor:
    """The noise level of a row's document number `document`, uniform on [0, 1) where the row's `level` is: steps of
    the golden ratio, which spread the documents of a row over all levels."""
    return ((level.double() + GOLDEN * document) % 1).float().clamp(max=1 - 2**-24)


def preceded(positions_BL: torch.Tensor) -> torch.Tensor:
    """[B, L] bool: whether the position before in the row is one of `positions_BL`; false for the first of a row."""
    return torch.cat([torch.zeros_like(positions_BL[:, :1]), positions_BL[:, :-1]], dim=1)


def one_earlier(values_BL: torch.Tensor) -> torch.Tensor:
    """`values_BL` moved to the position before, where the logits are that predict it; the last column gets zeros."""
    return torch.cat([values_BL[:, 1:], torch.zeros_like(values_BL[:, :1])], dim=1)

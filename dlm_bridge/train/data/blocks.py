"""Blocks of `seq_length` tokens: what every source of data is, how it is split, and in which order it is read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Protocol

import numpy as np
import torch

from dlm_bridge.train.keyed import Purpose, stream
from dlm_bridge.train.rows import Rows

MOCK = "mock"


class Blocks(Protocol):
    """A source of equally long token sequences."""

    def __len__(self) -> int: ...

    def rows(self, indices: Sequence[int]) -> Rows:
        """The blocks `indices`, B = len(indices) rows of seq_length tokens."""
        ...


class Samples(Protocol):
    """What a run reads: rows by their sample index, which counts from 0 over all steps and processes, without end."""

    def __len__(self) -> int:
        """The number of different blocks."""
        ...

    def rows(self, samples: Sequence[int]) -> Rows:
        """The samples of these numbers: a pure function of them and of the seed. Raises DlmBridgeError for data that
        do not fit the model."""
        ...


@dataclass(frozen=True)
class MockBlocks:
    """Made-up blocks that a model can learn: each repeats a random motif of 8 tokens. Nothing is read or stored."""

    seq_length: int
    tokens: int  # ids below this number are used
    seed: int
    length: int = 100_000

    def __len__(self) -> int:
        return self.length

    def rows(self, indices: Sequence[int]) -> Rows:
        motifs = [stream(self.seed, Purpose.MOCK_DATA, index).integers(0, self.tokens, 8) for index in indices]
        blocks = np.stack([np.resize(motif, self.seq_length) for motif in motifs])
        return Rows(torch.from_numpy(blocks.astype(np.int64)))


@dataclass(frozen=True)
class Section:
    """A contiguous part of some blocks: the training, the validation or the test split."""

    blocks: Blocks
    start: int
    length: int

    def __len__(self) -> int:
        return self.length

    def rows(self, indices: Sequence[int]) -> Rows:
        return self.blocks.rows([self.start + index for index in indices])


@dataclass(frozen=True)
class Concatenated:
    """The blocks of several sources, one source after the other."""

    parts: tuple[Blocks, ...]

    def __len__(self) -> int:
        return sum(len(part) for part in self.parts)

    def rows(self, indices: Sequence[int]) -> Rows:
        """The blocks `indices`, B = len(indices) rows."""
        found, order, first = [], [], 0
        for part in self.parts:
            chosen = [row for row, index in enumerate(indices) if first <= index < first + len(part)]
            if chosen:
                found.append(part.rows([indices[row] - first for row in chosen]))
                order += chosen
            first += len(part)
        return joined(found, order)


@dataclass(frozen=True)
class Epochs:
    """Blocks over and over: sample n is the block at position n mod N of epoch n // N's order.

    The order is shuffled by (seed, epoch, source), the file's own where the seed is None.
    """

    blocks: Blocks
    seed: int | None = None
    source: int = 0  # its number in a blend
    _orders: dict[int, np.ndarray] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __len__(self) -> int:
        return len(self.blocks)

    def rows(self, samples: Sequence[int]) -> Rows:
        """The samples of these numbers, B = len(samples) rows."""
        return self.blocks.rows([self.block(sample) for sample in samples])

    def block(self, sample: int) -> int:
        """The block that a sample index means."""
        epoch, position = divmod(sample, len(self.blocks))
        return position if self.seed is None else int(self._order(epoch)[position])

    def _order(self, epoch: int) -> np.ndarray:
        if epoch not in self._orders:
            for old in [known for known in self._orders if known < epoch - 1]:  # a step can touch two epochs
                del self._orders[old]
            generator = stream(self.seed or 0, Purpose.SHUFFLE, epoch, self.source)
            size = np.int32 if len(self.blocks) < 2**31 else np.int64
            self._orders[epoch] = generator.permutation(np.arange(len(self.blocks), dtype=size))
        return self._orders[epoch]


def joined(parts: Sequence[Rows], places: Sequence[int]) -> Rows:
    """The rows of all parts in one batch: row i of them, counted over the parts, at `places[i]`. A field that only
    some parts have is filled in with what its absence means."""
    order = torch.argsort(torch.tensor(places))
    fields: dict[str, torch.Tensor | None] = {}
    for name in vars(parts[0]):
        values = [getattr(part, name) for part in parts]
        if any(value is not None for value in values):
            values = [
                _ABSENT[name](part) if value is None else value for part, value in zip(parts, values, strict=True)
            ]
            fields[name] = torch.cat(values)[order]
    return Rows(**fields)  # type: ignore[arg-type]


_ABSENT: dict[str, Callable[[Rows], torch.Tensor]] = {
    "labels": lambda rows: rows.input_ids,
    "attention_mask": lambda rows: torch.ones_like(rows.input_ids, dtype=torch.bool),
    "documents": lambda rows: torch.zeros_like(rows.input_ids),
}


def split(blocks: Blocks, shares: tuple[float, float, float]) -> tuple[Section, Section, Section]:
    """Contiguous training, validation and test sections of some blocks, as `section_sizes` cuts them."""
    sizes = section_sizes(len(blocks), shares)
    starts = accumulate(sizes[:-1], initial=0)
    train, valid, test = (Section(blocks, start, size) for start, size in zip(starts, sizes, strict=True))
    return train, valid, test


def section_sizes(total: int, shares: tuple[float, float, float]) -> tuple[int, int, int]:
    """How many of `total` blocks are for training, validation and test. A positive share gets at least one where there
    are enough of them."""
    valid, test = (max(1, int(share * total)) if share > 0 else 0 for share in shares[1:])
    while valid + test >= total and valid + test > 0:
        valid, test = (valid, test - 1) if test else (valid - 1, test)
    return total - valid - test, valid, test

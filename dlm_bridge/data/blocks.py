"""Blocks of `seq_length` tokens: protocols, splits, epochs and weighted blends."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate
from typing import Protocol

import numpy as np
import torch

from dlm_bridge.errors import SettingError, counted
from dlm_bridge.objectives.noise import Purpose, keyed_generator
from dlm_bridge.objectives.trajectory import NOT_RECORDED


@dataclass(frozen=True)
class LabelledTokens:
    """B rows of L tokens. The fields are arguments of `Objective.noise`."""

    input_ids: torch.Tensor  # [B, L] int64
    labels: torch.Tensor | None = None  # [B, L] int64, -100 at tokens never masked or counted; None: all count
    attention_mask: torch.Tensor | None = None  # [B, L] bool, False at padding; None: every token is real
    documents: torch.Tensor | None = None  # [B, L] int, the document of each token; None: one per row
    commit_steps: torch.Tensor | None = None  # [B, L] int, -1 outside a recorded trajectory; None: none is recorded


MOCK = "mock"


class Blocks(Protocol):
    """Source of token sequences of equal length."""

    def __len__(self) -> int: ...

    def rows(self, indices: Sequence[int]) -> LabelledTokens:
        """Return the blocks `indices` as B = len(indices) rows of seq_length tokens."""
        ...


class Samples(Protocol):
    """Infinite sequence of a run's samples. The sample index counts from 0 over all steps and processes."""

    def __len__(self) -> int:
        """Number of distinct blocks."""
        ...

    def rows(self, samples: Sequence[int]) -> LabelledTokens:
        """Return the samples with these indices, which depend only on the indices and the seed. Raises InputFileError
        for data that do not fit the model."""
        ...


@dataclass(frozen=True)
class MockBlocks:
    """Synthetic blocks that a model can learn: each repeats a random motif of 8 tokens."""

    seq_length: int
    tokens: int  # upper bound (exclusive) of the token ids
    seed: int
    length: int = 100_000

    def __len__(self) -> int:
        return self.length

    def rows(self, indices: Sequence[int]) -> LabelledTokens:
        motifs = [
            keyed_generator(self.seed, Purpose.MOCK_DATA, index).integers(0, self.tokens, 8) for index in indices
        ]
        blocks = np.stack([np.resize(motif, self.seq_length) for motif in motifs])
        return LabelledTokens(torch.from_numpy(blocks.astype(np.int64)))


@dataclass(frozen=True)
class BlockRange:
    """Contiguous range of blocks: the training, validation or test split."""

    blocks: Blocks
    start: int
    length: int

    def __len__(self) -> int:
        return self.length

    def rows(self, indices: Sequence[int]) -> LabelledTokens:
        return self.blocks.rows([self.start + index for index in indices])


@dataclass(frozen=True)
class Concatenated:
    """Concatenation of the blocks of several sources."""

    parts: tuple[Blocks, ...]

    def __len__(self) -> int:
        return sum(len(part) for part in self.parts)

    def rows(self, indices: Sequence[int]) -> LabelledTokens:
        """Return the blocks `indices` as B = len(indices) rows."""
        starts = list(accumulate(map(len, self.parts), initial=0))
        parts = [bisect_right(starts, index) - 1 for index in indices]
        return rows_of(self.parts, [(part, index - starts[part]) for part, index in zip(parts, indices, strict=True)])


@dataclass(frozen=True)
class Epochs:
    """Repeated blocks: sample n is the block at position n mod N of epoch n // N's order.

    The order is shuffled by (seed, epoch, source); without a seed it is that of the file.
    """

    blocks: Blocks
    seed: int | None = None
    source: int = 0  # index of the source in a blend
    _orders: dict[int, np.ndarray] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __len__(self) -> int:
        return len(self.blocks)

    def rows(self, samples: Sequence[int]) -> LabelledTokens:
        """Return the samples with these indices as B = len(samples) rows."""
        return self.blocks.rows([self.block(sample) for sample in samples])

    def block(self, sample: int) -> int:
        """Index of the block that belongs to a sample index."""
        epoch, position = divmod(sample, len(self.blocks))
        return position if self.seed is None else int(self._order(epoch)[position])

    def _order(self, epoch: int) -> np.ndarray:
        if epoch not in self._orders:
            for old in [known for known in self._orders if known < epoch - 1]:  # a step can touch two epochs
                del self._orders[old]
            generator = keyed_generator(self.seed or 0, Purpose.SHUFFLE, epoch, self.source)
            size = np.int32 if len(self.blocks) < 2**31 else np.int64
            self._orders[epoch] = generator.permutation(np.arange(len(self.blocks), dtype=size))
        return self._orders[epoch]


def rows_of(sources: Sequence[Blocks | Samples], places: Sequence[tuple[int, int]]) -> LabelledTokens:
    """Gather rows, given as (source index, row index) pairs, with one call per source."""
    parts, order = [], []
    for number, source in enumerate(sources):
        chosen = [row for row, (own, _) in enumerate(places) if own == number]
        if chosen:
            parts.append(source.rows([places[row][1] for row in chosen]))
            order += chosen
    return join_rows(parts, order)


def join_rows(parts: Sequence[LabelledTokens], places: Sequence[int]) -> LabelledTokens:
    """Join parts into one batch, with row i (counted over all parts) at `places[i]`. A field that only some parts have
    gets its default value in the others."""
    order = torch.argsort(torch.tensor(places))
    fields: dict[str, torch.Tensor | None] = {}
    for name in vars(parts[0]):
        values = [getattr(part, name) for part in parts]
        if any(value is not None for value in values):
            values = [
                _ABSENT[name](part) if value is None else value for part, value in zip(parts, values, strict=True)
            ]
            fields[name] = torch.cat(values)[order]
    return LabelledTokens(**fields)  # type: ignore[arg-type]


_ABSENT: dict[str, Callable[[LabelledTokens], torch.Tensor]] = {
    "labels": lambda rows: rows.input_ids,
    "attention_mask": lambda rows: torch.ones_like(rows.input_ids, dtype=torch.bool),
    "documents": lambda rows: torch.zeros_like(rows.input_ids),
    "commit_steps": lambda rows: torch.full_like(rows.input_ids, NOT_RECORDED),
}


def split(blocks: Blocks, shares: tuple[float, float, float]) -> tuple[BlockRange, BlockRange, BlockRange]:
    """Split blocks into contiguous training, validation and test ranges; see `section_sizes`."""
    sizes = section_sizes(len(blocks), shares)
    starts = accumulate(sizes[:-1], initial=0)
    train, valid, test = (BlockRange(blocks, start, size) for start, size in zip(starts, sizes, strict=True))
    return train, valid, test


def section_sizes(total: int, shares: tuple[float, float, float]) -> tuple[int, int, int]:
    """Number of training, validation and test blocks out of `total`. A positive share gets at least one block, if
    there are enough blocks."""
    valid, test = (max(1, int(share * total)) if share > 0 else 0 for share in shares[1:])
    while valid + test >= total and valid + test > 0:
        valid, test = (valid, test - 1) if test else (valid - 1, test)
    return total - valid - test, valid, test


def check_block(tokens: int, seq_length: int, where: str) -> None:
    """Raise SettingError if a source has less than one block of tokens."""
    if tokens < seq_length:
        raise SettingError(
            "seq_length",
            f"{seq_length} is longer than the {counted(tokens, 'token')} of {where}: reduce it or add text",
        )


LONGEST_PERIOD = 1 << 20


@dataclass(frozen=True)
class BlendSchedule:
    """Order of the sources in a blend: sample g of the run is sample `at(g)[1]` of source `at(g)[0]`, which depends
    only on g and the weights.

    Typical weights are ratios of small integers, so the order repeats after a period; other weights are rounded to a
    millionth of their sum. For every n, a source with weight w has floor(w n) or ceil(w n) of the first n samples.
    """

    shares: tuple[int, ...]  # samples of each source per period

    @property
    def period(self) -> int:
        """Number of samples after which the order of the sources repeats."""
        return sum(self.shares)

    def at(self, sample: int) -> tuple[int, int]:
        """(source, sample index within the source) of a sample of the run."""
        periods, place = divmod(sample, self.period)
        sources, before = _period(self.shares)
        source = int(sources[place])
        return source, periods * self.shares[source] + int(before[place])


def blend_schedule(weights: Sequence[float]) -> BlendSchedule:
    """Create the schedule for positive weights. Raises SettingError if one is less than a millionth of the sum."""
    exact = [Fraction(repr(float(weight))) for weight in weights]  # 0.3 is three tenths
    whole = [int(weight * math.lcm(*(weight.denominator for weight in exact))) for weight in exact]
    shares = [share // math.gcd(*whole) for share in whole]
    if sum(shares) > LONGEST_PERIOD:
        shares = _rounded(shares)
    for weight, share in zip(weights, shares, strict=True):
        if share == 0:
            raise SettingError("data", f"weight {weight:g} is less than a millionth of the sum: remove its source")
    return BlendSchedule(tuple(shares))


@dataclass(frozen=True)
class Blend:
    """Infinite sequence of samples from several sources, mixed by weight."""

    sources: tuple[Epochs, ...]
    schedule: BlendSchedule

    def __len__(self) -> int:
        """Number of blocks of all sources."""
        return sum(len(source) for source in self.sources)

    def rows(self, samples: Sequence[int]) -> LabelledTokens:
        """Return the samples with these indices, which count from 0 over the whole run."""
        return rows_of(self.sources, [self.schedule.at(sample) for sample in samples])


def _rounded(shares: list[int]) -> list[int]:
    """Scale `shares` to a sum of LONGEST_PERIOD, by largest remainder."""
    total = sum(shares)
    scaled = [share * LONGEST_PERIOD // total for share in shares]
    rest = sorted(range(len(shares)), key=lambda i: (-(shares[i] * LONGEST_PERIOD % total), i))
    for i in rest[: LONGEST_PERIOD - sum(scaled)]:
        scaled[i] += 1
    return scaled


@lru_cache(maxsize=4)
def _period(shares: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Source of each sample of a period, and the number of earlier samples from that source.

    Sample j of a source with a of D samples has its earliest position at floor(j D / a), and its deadline at
    ceil((j + 1) D / a). Earliest-deadline-first scheduling meets all deadlines
    (https://en.wikipedia.org/wiki/Pfair_scheduling), so every count stays within one of its share.
    """
    period = sum(shares)
    sources = np.empty(period, dtype=np.int32)
    before = np.empty(period, dtype=np.int32)
    waiting = [(0, source, 0) for source in range(len(shares))]  # (earliest position, source, sample)
    ready: list[tuple[int, int, int]] = []  # (deadline, source, sample)
    for place in range(period):
        while waiting and waiting[0][0] <= place:
            _, source, own = heapq.heappop(waiting)
            heapq.heappush(ready, (-(-(own + 1) * period // shares[source]), source, own))
        _, source, own = heapq.heappop(ready)
        sources[place], before[place] = source, own
        heapq.heappush(waiting, ((own + 1) * period // shares[source], source, own + 1))
    return sources, before

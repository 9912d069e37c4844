"""Blocks of `seq_length` tokens: the protocol of every source, splits, epochs, and blends by weight."""

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

from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.objectives.noise import Purpose, keyed_generator
from dlm_bridge.objectives.trajectory import NOT_RECORDED


@dataclass(frozen=True)
class LabelledTokens:
    """B rows of L tokens, named as `Objective.noise` takes them."""

    input_ids: torch.Tensor  # [B, L] int64
    labels: torch.Tensor | None = None  # [B, L] int64, -100 where a token is never masked nor counted; None: all count
    attention_mask: torch.Tensor | None = None  # [B, L] bool, false at padding; None where every token is real
    documents: torch.Tensor | None = None  # [B, L] int, the document of each token; None: one per row
    commit_steps: torch.Tensor | None = None  # [B, L] int, -1 outside a recorded trajectory; None: none is recorded


MOCK = "mock"


class Blocks(Protocol):
    """A source of equally long token sequences."""

    def __len__(self) -> int: ...

    def rows(self, indices: Sequence[int]) -> LabelledTokens:
        """The blocks `indices`, B = len(indices) rows of seq_length tokens."""
        ...


class Samples(Protocol):
    """The endless samples of a run: rows by their sample index, which counts from 0 over all steps and processes."""

    def __len__(self) -> int:
        """The number of different blocks."""
        ...

    def rows(self, samples: Sequence[int]) -> LabelledTokens:
        """The samples of these numbers: a pure function of them and of the seed. Raises DlmBridgeError for data that
        do not fit the model."""
        ...


@dataclass(frozen=True)
class MockBlocks:
    """Synthetic blocks that a model can learn: each repeats a random motif of 8 tokens."""

    seq_length: int
    tokens: int  # ids below this number are used
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
    """A contiguous part of some blocks: the training, the validation or the test split."""

    blocks: Blocks
    start: int
    length: int

    def __len__(self) -> int:
        return self.length

    def rows(self, indices: Sequence[int]) -> LabelledTokens:
        return self.blocks.rows([self.start + index for index in indices])


@dataclass(frozen=True)
class Concatenated:
    """The blocks of several sources, one source after the other."""

    parts: tuple[Blocks, ...]

    def __len__(self) -> int:
        return sum(len(part) for part in self.parts)

    def rows(self, indices: Sequence[int]) -> LabelledTokens:
        """The blocks `indices`, B = len(indices) rows."""
        starts = list(accumulate(map(len, self.parts), initial=0))
        parts = [bisect_right(starts, index) - 1 for index in indices]
        return rows_of(self.parts, [(part, index - starts[part]) for part, index in zip(parts, indices, strict=True)])


@dataclass(frozen=True)
class Epochs:
    """Repeated blocks: sample n is the block at position n mod N of epoch n // N's order.

    The order is shuffled by (seed, epoch, source), the file's own where the seed is None.
    """

    blocks: Blocks
    seed: int | None = None
    source: int = 0  # its number in a blend
    _orders: dict[int, np.ndarray] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __len__(self) -> int:
        return len(self.blocks)

    def rows(self, samples: Sequence[int]) -> LabelledTokens:
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
            generator = keyed_generator(self.seed or 0, Purpose.SHUFFLE, epoch, self.source)
            size = np.int32 if len(self.blocks) < 2**31 else np.int64
            self._orders[epoch] = generator.permutation(np.arange(len(self.blocks), dtype=size))
        return self._orders[epoch]


def rows_of(sources: Sequence[Blocks | Samples], places: Sequence[tuple[int, int]]) -> LabelledTokens:
    """The rows at `places`, each a source's number and the row's index in it; every source is asked once."""
    parts, order = [], []
    for number, source in enumerate(sources):
        chosen = [row for row, (own, _) in enumerate(places) if own == number]
        if chosen:
            parts.append(source.rows([places[row][1] for row in chosen]))
            order += chosen
    return join_rows(parts, order)


def join_rows(parts: Sequence[LabelledTokens], places: Sequence[int]) -> LabelledTokens:
    """The rows of all parts in one batch: row i of them, counted over the parts, at `places[i]`. A field that only
    some parts have gets its default in the others."""
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
    """Contiguous training, validation and test sections of some blocks, as `section_sizes` cuts them."""
    sizes = section_sizes(len(blocks), shares)
    starts = accumulate(sizes[:-1], initial=0)
    train, valid, test = (BlockRange(blocks, start, size) for start, size in zip(starts, sizes, strict=True))
    return train, valid, test


def section_sizes(total: int, shares: tuple[float, float, float]) -> tuple[int, int, int]:
    """How many of `total` blocks are for training, validation and test. A positive share gets at least one where there
    are enough of them."""
    valid, test = (max(1, int(share * total)) if share > 0 else 0 for share in shares[1:])
    while valid + test >= total and valid + test > 0:
        valid, test = (valid, test - 1) if test else (valid - 1, test)
    return total - valid - test, valid, test


LONGEST_PERIOD = 1 << 20


@dataclass(frozen=True)
class BlendSchedule:
    """Sample g of the run is sample `at(g)[1]` of source `at(g)[0]`: a pure function of g and the weights.

    Weights as a person writes them are ratios of small whole numbers, so that the order of the sources repeats after a
    period; others are rounded to a millionth of their sum. A source with weight w has had floor(w n) or ceil(w n) of
    the first n samples, for every n.
    """

    shares: tuple[int, ...]  # samples of each source in a period

    @property
    def period(self) -> int:
        """Samples after which the order of the sources repeats."""
        return sum(self.shares)

    def at(self, sample: int) -> tuple[int, int]:
        """(source, its own sample index) of a sample of the run."""
        periods, place = divmod(sample, self.period)
        sources, before = _period(self.shares)
        source = int(sources[place])
        return source, periods * self.shares[source] + int(before[place])


def blend_schedule(weights: Sequence[float]) -> BlendSchedule:
    """The schedule of some positive weights. Raises DlmBridgeError where one is less than a millionth of the sum."""
    exact = [Fraction(repr(float(weight))) for weight in weights]  # 0.3 is three tenths
    whole = [int(weight * math.lcm(*(weight.denominator for weight in exact))) for weight in exact]
    shares = [share // math.gcd(*whole) for share in whole]
    if sum(shares) > LONGEST_PERIOD:
        shares = _rounded(shares)
    for weight, share in zip(weights, shares, strict=True):
        if share == 0:
            raise DlmBridgeError(
                f"--data: weight {weight:g} is less than a millionth of the sum: leave its source out"
            )
    return BlendSchedule(tuple(shares))


@dataclass(frozen=True)
class Blend:
    """Samples of several sources, mixed by their weights, without end."""

    sources: tuple[Epochs, ...]
    schedule: BlendSchedule

    def __len__(self) -> int:
        """The blocks of all sources together."""
        return sum(len(source) for source in self.sources)

    def rows(self, samples: Sequence[int]) -> LabelledTokens:
        """The samples of these numbers, which count from 0 over the whole run."""
        return rows_of(self.sources, [self.schedule.at(sample) for sample in samples])


def _rounded(shares: list[int]) -> list[int]:
    """`shares` scaled to LONGEST_PERIOD in all, by largest remainder."""
    total = sum(shares)
    scaled = [share * LONGEST_PERIOD // total for share in shares]
    rest = sorted(range(len(shares)), key=lambda i: (-(shares[i] * LONGEST_PERIOD % total), i))
    for i in rest[: LONGEST_PERIOD - sum(scaled)]:
        scaled[i] += 1
    return scaled


@lru_cache(maxsize=4)
def _period(shares: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """The source of each sample of a period, and how many that source has had before.

    Sample j of a source with a of D samples may come from place floor(j D / a) on and must have come before place
    ceil((j + 1) D / a): the earliest deadline first meets all of them (https://en.wikipedia.org/wiki/Pfair_scheduling),
    which keeps every count within one of its share.
    """
    period = sum(shares)
    sources = np.empty(period, dtype=np.int32)
    before = np.empty(period, dtype=np.int32)
    waiting = [(0, source, 0) for source in range(len(shares))]  # (from which place on, source, its sample)
    ready: list[tuple[int, int, int]] = []  # (before which place, source, its sample)
    for place in range(period):
        while waiting and waiting[0][0] <= place:
            _, source, own = heapq.heappop(waiting)
            heapq.heappush(ready, (-(-(own + 1) * period // shares[source]), source, own))
        _, source, own = heapq.heappop(ready)
        sources[place], before[place] = source, own
        heapq.heappush(waiting, ((own + 1) * period // shares[source], source, own + 1))
    return sources, before

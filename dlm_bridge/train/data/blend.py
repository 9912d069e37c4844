"""Blends: which source each sample comes from, so that at every moment each has had its share to within one sample."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import numpy as np

from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.train.data.blocks import Epochs, joined
from dlm_bridge.train.rows import Rows

LONGEST_PERIOD = 1 << 20


@dataclass(frozen=True)
class Schedule:
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


def schedule(weights: Sequence[float]) -> Schedule:
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
    return Schedule(tuple(shares))


@dataclass(frozen=True)
class Blend:
    """Samples of several sources, mixed by their weights, without end."""

    sources: tuple[Epochs, ...]
    schedule: Schedule

    def __len__(self) -> int:
        """The blocks of all sources together."""
        return sum(len(source) for source in self.sources)

    def rows(self, samples: Sequence[int]) -> Rows:
        """The samples of these numbers, which count from 0 over the whole run."""
        places = [self.schedule.at(sample) for sample in samples]
        parts, order = [], []
        for number, source in enumerate(self.sources):
            chosen = [row for row, (own, _) in enumerate(places) if own == number]
            if chosen:
                parts.append(source.rows([places[row][1] for row in chosen]))
                order += chosen
        return joined(parts, order)


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

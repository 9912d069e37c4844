"""Which blocks a step reads: a pure function of (seed, step), cut over processes and micro-batches afterwards.

Sample g of a run (g counts from zero over all steps and processes) is the block at position g mod N of epoch g // N's
shuffled order. Nothing is stored, so a resumed run repeats nothing and skips nothing, on any number of processes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from dlm_bridge.train.keyed import Purpose, stream


@dataclass(frozen=True)
class Sampler:
    """Global sample indices of each step, and the block that each of them means."""

    blocks: int
    seed: int
    global_batch_size: int

    def samples(self, step: int, process: int, processes: int, micro_batch_size: int) -> list[list[int]]:
        """The global sample indices of one process's micro-batches at `step`, which counts from 1."""
        share = self.global_batch_size // processes
        first = (step - 1) * self.global_batch_size + process * share
        return [
            list(range(start, start + micro_batch_size)) for start in range(first, first + share, micro_batch_size)
        ]

    def block(self, sample: int) -> int:
        """The block that a global sample index means."""
        epoch, position = divmod(sample, self.blocks)
        return int(_order(self.seed, epoch, self.blocks)[position])


@lru_cache(maxsize=4)  # a step can touch two epochs
def _order(seed: int, epoch: int, blocks: int) -> np.ndarray:
    return stream(seed, Purpose.SHUFFLE, epoch).permutation(blocks)

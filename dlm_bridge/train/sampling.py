"""Which samples a step reads: a pure function of the step, cut over processes and micro-batches afterwards.

Sample g of a run counts from zero over all steps and processes; what it holds is a pure function of g and the seed too
(`dlm_bridge.train.data`). Nothing is stored, so a resumed run repeats nothing and skips nothing, on any number of
processes.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sampler:
    """The global sample indices of each step."""

    global_batch_size: int

    def samples(self, step: int, process: int, processes: int, micro_batch_size: int) -> list[list[int]]:
        """The global sample indices of one process's micro-batches at `step`, which counts from 1."""
        share = self.global_batch_size // processes
        first = (step - 1) * self.global_batch_size + process * share
        return [
            list(range(start, start + micro_batch_size)) for start in range(first, first + share, micro_batch_size)
        ]

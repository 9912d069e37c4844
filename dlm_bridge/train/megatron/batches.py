"""The micro-batches of a step, made on the CPU ahead of time: rows, noise, and each rank's part of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from dlm_bridge.parallel.batch import MicroBatch
from dlm_bridge.train.adaptation import annealed
from dlm_bridge.train.config import TrainConfig
from dlm_bridge.train.data import Samples
from dlm_bridge.train.keyed import Purpose
from dlm_bridge.train.objectives import IGNORE, NoisyBatch, Objective, Uniforms
from dlm_bridge.train.sampling import Sampler

EVALUATION_STEP = 0  # of the noise's key: every validation draws the same


@dataclass(frozen=True)
class StepBatches:
    """One data parallel replica's share of a global batch, this rank's part of it."""

    batches: list[MicroBatch]
    normaliser: torch.Tensor  # [K] float64, what the replica adds to the divisors of the global loss


@dataclass(frozen=True)
class Batcher:
    """Makes the micro-batches of one data parallel replica. `cut` takes a replica's noisy batches of one step and
    gives a rank's part of each; every rank of a replica draws the same noise and cuts its own part."""

    config: TrainConfig
    train: Samples
    replica: int
    replicas: int
    micro_batch_size: int
    cut: Callable[[Sequence[NoisyBatch]], list[MicroBatch]]

    def training(self, objective: Objective, step: int) -> StepBatches:
        """The micro-batches of a training step, counted from 1."""
        sampler = Sampler(self.config.global_batch_size)
        noisy = []
        for samples in sampler.samples(step, self.replica, self.replicas, self.micro_batch_size):
            rows = self.train.rows(samples)
            uniforms = Uniforms.keyed(self.config.seed, step, samples, self.config.seq_length)
            noisy.append(annealed(objective.noise(uniforms=uniforms, **vars(rows)), self.config, step, samples))
        return self._finished(noisy)

    def evaluation(self, objective: Objective, blocks: Samples, count: int) -> Iterator[StepBatches]:
        """The first `count` blocks, a global batch at a time, in as many micro-batches as a training step has: experts
        and pipelines want all ranks to take as many turns. What is beyond the last block counts nothing."""
        sampler = Sampler(self.config.global_batch_size)
        for turn in range(1, -(-count // self.config.global_batch_size) + 1):
            noisy = []
            for samples in sampler.samples(turn, self.replica, self.replicas, self.micro_batch_size):
                there = torch.tensor([sample < count for sample in samples])
                rows = blocks.rows([sample if sample < count else 0 for sample in samples])
                labels = rows.input_ids if rows.labels is None else rows.labels
                rows = replace(rows, labels=torch.where(there[:, None], labels, IGNORE))
                uniforms = Uniforms.keyed(
                    self.config.seed, EVALUATION_STEP, samples, self.config.seq_length, Purpose.EVAL_NOISE
                )
                noisy.append(objective.noise(uniforms=uniforms, **vars(rows)))
            yield self._finished(noisy)

    def _finished(self, noisy: list[NoisyBatch]) -> StepBatches:
        return StepBatches(self.cut(noisy), torch.stack([batch.normaliser for batch in noisy]).sum(dim=0))

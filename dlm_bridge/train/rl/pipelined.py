"""Predictions of a model in a megatron-core pipeline, and gradients of arbitrary losses of them.

A pipeline schedule computes gradients of weighted sums of predictions only. An update therefore runs it twice: a
forward pass for the predictions, from which the loss and its derivatives are computed, then forward and backward of
the sum of predictions weighted by these derivatives, whose gradient equals the loss's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from dlm_bridge.attention.masks import MaskDescriptor
from dlm_bridge.loading.source import MegatronSource
from dlm_bridge.objectives.batches import NoisyBatch
from dlm_bridge.parallel.batch import MicroBatch, micro_batch, rank_targets
from dlm_bridge.parallel.core import parallel_state
from dlm_bridge.parallel.gpt import model_inputs
from dlm_bridge.parallel.self_attention import scales_queries
from dlm_bridge.parallel.train.schedule import gathered_weights, run_schedule
from dlm_bridge.train.config import RLConfig
from dlm_bridge.train.rl.trainer import UpdatePart
from dlm_bridge.train.trainer import Processes


@dataclass(frozen=True)
class PipelinedModel:
    """Virtual pipeline stages, on this rank, of a model that predicts a number for each target of a batch: its
    log-probability, or with a value head its value. All ranks of a replica call its methods together, with the same
    batches."""

    config: RLConfig
    source: MegatronSource
    processes: Processes
    replica_group: Any  # CPU group of the ranks of this data parallel replica
    chunks: list[Any]
    sign: int = -1  # of predictions in the schedule's sums: cross-entropies are negative log-probabilities

    @torch.no_grad()
    def predictions(self, batches: Sequence[NoisyBatch]) -> list[torch.Tensor]:
        """Predictions [M] fp32 for each batch, on the CPU and without a graph: computed by the last stages, each rank
        for its own positions, and gathered to all ranks of the replica."""
        ones = [
            dataclasses.replace(noisy, weights=torch.ones(len(noisy.targets)), terms=None)
            for noisy in self._same_shape(batches)
        ]
        losses = self._run(ones, summed=False, forward_only=True)
        found = [torch.zeros(len(noisy.targets)) for noisy in batches]
        if parallel_state.get_tensor_model_parallel_rank() == 0:
            for predicted_M, noisy, losses_M in zip(found, ones, losses, strict=False):  # none but on the last stage
                mine_M = rank_targets(noisy, *self._form())
                predicted_M[mine_M] = self.sign * losses_M[: len(mine_M)].float().cpu()
        joined = torch.cat(found)
        dist.all_reduce(joined, group=self.replica_group)
        return [part.clone() for part in joined.split([len(predicted_M) for predicted_M in found])]

    def forward_backward(self, optimizer: Any, parts: Sequence[UpdatePart]) -> tuple[float, dict[str, float]]:
        """Set the gradients of the chunks, which are wrapped for data parallelism, to those of the parts' losses,
        summed over all replicas. Returns the loss and the sums of this replica's parts."""
        with gathered_weights(self.chunks):
            found = self.predictions([part.noisy for part in parts])
        loss, sums, weighted = 0.0, dict[str, float](), []
        for part, predicted_M in zip(parts, found, strict=True):
            value, measured = part.loss(predicted_M.requires_grad_())
            (derivative_M,) = torch.autograd.grad(value, predicted_M)
            weighted.append(dataclasses.replace(part.noisy, weights=self.sign * derivative_M, terms=None))
            loss += float(value.detach())
            for name, each in measured.items():
                sums[name] = sums.get(name, 0.0) + float(each)
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        self._run(self._same_shape(weighted), summed=True, forward_only=False)
        return loss, sums

    def _run(self, batches: Sequence[NoisyBatch], summed: bool, forward_only: bool) -> list[torch.Tensor]:
        absolute = scales_queries(self.chunks[0].config)
        micro_batches = [micro_batch(noisy, *self._form(), absolute=absolute) for noisy in batches]

        def inputs(batch: MicroBatch) -> dict[str, Any]:
            return model_inputs(batch, summed=summed)

        return run_schedule(self.chunks, micro_batches, inputs, self.config.parallel.cp, forward_only)

    def _form(self) -> tuple[str, int | None, int, int]:
        """Attention pattern and block size of the model, context parallel rank and size."""
        rank, size = parallel_state.get_context_parallel_rank(), self.config.parallel.cp
        family, block_size = self.source.bridge.family, getattr(self.source.model.config, "block_size", None)
        return family.attention_pattern, block_size, rank, size

    def _same_shape(self, batches: Sequence[NoisyBatch]) -> list[NoisyBatch]:
        """Pad the batches to one number of rows, as pipelines and experts require, and their number to a multiple of
        the pipeline stages for virtual stages. Padding has no targets."""
        most = self.processes.largest(max(len(noisy.input_ids) for noisy in batches))
        found = [_with_rows(noisy, most) for noisy in batches]
        more = -len(found) % self.config.parallel.pp if self.config.parallel.vp > 1 else 0
        return found + [_with_rows(found[0].row_without_targets(), most)] * more


def _with_rows(noisy: NoisyBatch, rows: int) -> NoisyBatch:
    """Pad the batch to `rows` rows with copies of the first, without targets."""
    more = rows - len(noisy.input_ids)
    if more == 0:
        return noisy

    def repeated(tensor: torch.Tensor) -> torch.Tensor:
        if len(tensor) == 1 < len(noisy.input_ids):  # shared by all rows
            return tensor
        return torch.cat([tensor, tensor[:1].expand(more, *tensor.shape[1:])])

    def empty(tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat([tensor, torch.zeros_like(tensor[:1]).expand(more, -1)])

    descriptor = noisy.mask_descriptor
    return dataclasses.replace(
        noisy,
        input_ids=repeated(noisy.input_ids),
        attention_mask=None if noisy.attention_mask is None else repeated(noisy.attention_mask),
        mask_descriptor=None if descriptor is None else MaskDescriptor(repeated(descriptor.codes)),
        position_ids=None if noisy.position_ids is None else repeated(noisy.position_ids),
        pairs=None if noisy.pairs is None else repeated(noisy.pairs),
        mask=empty(noisy.mask),
        counted=empty(noisy.counted),
    )

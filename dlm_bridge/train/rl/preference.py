"""Updates on pairs of a chosen and a rejected answer (VRPO, DPO)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from dlm_bridge.objectives.batches import NoisyBatch
from dlm_bridge.train.config import RLConfig
from dlm_bridge.train.metrics import StepMetrics
from dlm_bridge.train.rl.rows import PreferencePair, load_pairs
from dlm_bridge.train.rl.trainer import LogpLoss, PreferenceRecord, RLTrainer, UpdatePart
from dlm_bridge.train.rl.updates import BoundDraws, UpdateMetrics, longest, preference_loss


class PreferenceTrainer(RLTrainer[PreferencePair]):
    """Trainer on pairs of a chosen and a rejected answer."""

    @staticmethod
    def load(
        config: RLConfig, items: list[str], tokenizer: Any, mask_token: int | None, field: str = "data"
    ) -> list[PreferencePair]:
        return load_pairs(items, tokenizer, config.data.seq_length, mask_token, field)

    def set_up(self) -> None:
        options = self.config.rl
        # An autoregressive model's likelihood is exact.
        levels, masks = (1, 1) if options.method == "dpo" else (options.elbo_levels, options.elbo_masks)
        self.draws = BoundDraws(levels, masks, self.config.data.seed)
        self.micro_batch_size = self.config.data.micro_batch_size or self.per_replica

    def train_step(self, step: int) -> tuple[UpdateMetrics, dict[str, float]]:
        first = self.first_row(step)
        samples = list(range(first, first + self.per_replica))
        pairs = [self.order[sample] for sample in samples]
        batches = self._queries(pairs, samples, step)
        references = self.engine.reference_logps(batches)
        loss, sums = self.engine.forward_backward(
            [
                UpdatePart(noisy, self._loss(noisy, reference_M))
                for noisy, reference_M in zip(batches, references, strict=True)
            ]
        )
        norm = self.engine.optimizer_step(step)
        tokens = sum(len(pair.chosen.input_ids) + len(pair.rejected.input_ids) for pair in pairs)
        return UpdateMetrics(loss, norm, sums), {"tokens": float(tokens)}

    def _queries(self, pairs: Sequence[PreferencePair], samples: Sequence[int], step: int) -> list[NoisyBatch]:
        """Input of each micro-batch."""
        width, size = self.engine.row_width(longest(pairs)), self.micro_batch_size
        found = []
        for start in range(0, len(pairs), size):
            part, keys = pairs[start : start + size], samples[start : start + size]
            found.append(self.draws.query(self.plain_model, part, keys, step, width or longest(part)))
        return found

    def _loss(self, noisy: NoisyBatch, reference_M: torch.Tensor) -> LogpLoss:
        beta, total = self.config.rl.kl_weight, self.config.data.global_batch_size

        def loss(logps_M: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            margins = self.draws.margins(noisy, logps_M, reference_M)
            sums = {"preferred": (margins > 0).sum(), "margin": beta * margins.detach().sum()}
            return preference_loss(margins, beta).sum() / total, sums

        return loss

    def row(self, common: dict[str, Any], sums: dict[str, float]) -> StepMetrics:
        count = self.config.data.global_batch_size
        return PreferenceRecord(**common, preferred=sums["preferred"] / count, margin=sums["margin"] / count)

    def evaluate(self) -> float:
        """Loss of the held-out pairs, with the same noise every time."""
        return self._held_out()["loss"]

    def evaluated(self, row: StepMetrics) -> StepMetrics:
        found = self._held_out()
        return dataclasses.replace(row, eval_loss=found["loss"], eval_preferred=found["preferred"])  # type: ignore[call-arg]

    @torch.no_grad()
    def _held_out(self) -> dict[str, float]:
        processes, count = self.processes, len(self.valid)
        # All replicas run the same number of forward passes: FSDP and experts need all processes in each.
        samples = list(
            range(processes.replica, -(-count // processes.replicas) * processes.replicas, processes.replicas)
        )
        batches = self._queries([self.valid[sample % count] for sample in samples], samples, 0)
        references = self.engine.reference_logps(batches)
        with self.engine.evaluating():
            found = self.engine.logps(batches)
        margins = torch.cat(
            [
                self.draws.margins(noisy, logps_M, reference_M)
                for noisy, logps_M, reference_M in zip(batches, found, references, strict=True)
            ]
        )
        margins = margins[torch.tensor(samples, device=margins.device) < count]
        own = {
            "loss": float(preference_loss(margins, self.config.rl.kl_weight).sum()),
            "preferred": float((margins > 0).sum()),
        }
        return {name: value / count for name, value in self.summed(own).items()}

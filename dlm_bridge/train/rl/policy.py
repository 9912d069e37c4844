"""Updates on sampled completions and their rewards (diffu-GRPO, block-GRPO)."""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from typing import Any

import torch

from dlm_bridge.train.config import RLConfig
from dlm_bridge.train.metrics import StepMetrics
from dlm_bridge.train.rl.likelihood import LikelihoodQuery, Sequences, blockwise, one_step
from dlm_bridge.train.rl.reward_worker import RewardWorkers
from dlm_bridge.train.rl.rollout import Rollout, Rollouts
from dlm_bridge.train.rl.rows import Problem, load_problems
from dlm_bridge.train.rl.trainer import RLTrainer, RolloutRow
from dlm_bridge.train.rl.update_engine import LogpLoss, UpdatePart
from dlm_bridge.train.rl.updates import UpdateMetrics, policy_loss


class PolicyTrainer(RLTrainer[Problem]):
    """Trainer on sampled completions and their rewards."""

    @staticmethod
    def load(config: RLConfig, items: list[str], tokenizer: Any, mask_token: int) -> list[Problem]:
        return load_problems(items, tokenizer, config.data.seq_length - config.rl.gen_length, mask_token)

    def set_up(self) -> None:
        config = self.config
        self.seconds: dict[str, float] = {}  # of the last step
        self.reward_workers = RewardWorkers(config.rl.reward, config.rl.reward_timeout, config.rl.reward_failure)
        self.rollouts = Rollouts(
            tokenizer=self.tokenizer,
            reward_workers=self.reward_workers,
            seed=config.data.seed,
            group_size=config.rl.group_size,
            gen_length=config.rl.gen_length,
            temperature=config.rl.temperature,
            sampler=config.rl.sampler,
            batch_size=config.data.micro_batch_size,
            scaled=config.rl.advantages == "scaled",
            ranks=self.engine.replica,
        )

    def close(self) -> None:
        self.reward_workers.close()

    def train_step(self, step: int) -> tuple[UpdateMetrics, dict[str, float]]:
        group_size, first = self.config.rl.group_size, self.first_row(step)
        groups = range(first // group_size, (first + self.per_replica) // group_size)
        problems = [self.order[group] for group in groups]
        times = [self._now()]
        with self.engine.sampling_model() as model:
            times.append(self._now())
            rollout = self.rollouts.sample(model, problems, step, first)
        times.append(self._now())
        metrics = self._update(rollout, step)
        times.append(self._now())
        parts = zip(("transfer", "rollout", "update"), itertools.pairwise(times), strict=True)
        self.seconds = {name: end - begin for name, (begin, end) in parts}
        grouped = rollout.rewards.reshape(-1, group_size)
        return metrics, {
            "tokens": float((rollout.sequences.prompt | rollout.sequences.scored).sum()),
            "scored": float(rollout.sequences.scored.sum()),
            "reward": float(rollout.rewards.double().sum()),
            "reward_squares": float((rollout.rewards.double() ** 2).sum()),
            "idle": float((grouped.amax(dim=1) == grouped.amin(dim=1)).sum()),
            "failed": float(rollout.scores.failed),
            **{f"of {name}": sum(values) for name, values in rollout.scores.parts.items()},
        }

    def _update(self, rollout: Rollout, step: int) -> UpdateMetrics:
        """`rl.updates` optimizer steps on this replica's completions. Each draws the likelihoods' noise anew, the same
        for the current, the sampling and the reference model. Raises DlmBridgeError where the gradient norm is NaN."""
        config, engine, updates = self.config, self.engine, self.config.rl.updates
        size = config.data.micro_batch_size or self.per_replica
        own = len(rollout) if config.rl.rl_normalisation == "rows" else int(rollout.sequences.scored.sum())
        total = max(1.0, self.summed({"": float(own)})[""])
        sequences, length = rollout.sequences, rollout.sequences.tokens.shape[1]
        sequences = sequences.padded(engine.row_width(length) or length)
        parts = [slice(start, start + size) for start in range(0, len(rollout), size)]
        rows = [
            [self._query(sequences.rows(part), draw, rollout.samples[part]) for part in parts]
            for draw in range((step - 1) * updates + 1, step * updates + 1)
        ]
        # All of it before the first optimizer step; with one step the current model is the sampling model.
        before = None
        if updates > 1:
            before = [engine.logps([query.noisy for query in queries]) for queries in rows]
        sums = {"clipped": 0.0, "kl": 0.0}
        loss = norm = 0.0
        for number, queries in enumerate(rows):
            noisy = [query.noisy for query in queries]
            reference = engine.reference_logps(noisy) if config.rl.kl_weight else None
            found, measured = engine.forward_backward(
                [
                    UpdatePart(
                        query.noisy,
                        self._loss(
                            query,
                            None if before is None else before[number][place],
                            None if reference is None else reference[place],
                            rollout.advantages[part],
                            sequences.scored[part],
                            total,
                        ),
                    )
                    for place, (part, query) in enumerate(zip(parts, queries, strict=True))
                ]
            )
            loss += found / updates
            sums = {name: value + measured[name] / updates for name, value in sums.items()}
            norm = max(norm, engine.optimizer_step(step))
        return UpdateMetrics(loss, norm, sums)

    def _loss(
        self,
        query: LikelihoodQuery,
        old_M: torch.Tensor | None,
        reference_M: torch.Tensor | None,
        advantages: torch.Tensor,
        scored: torch.Tensor,
        total: float,
    ) -> LogpLoss:
        """The policy loss of a micro-batch over the `total` of the global one; `old_M` None: that of the current model
        itself."""
        options = self.config.rl

        def loss(logps_M: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            new, device = query.token_logps(logps_M), logps_M.device
            value, measured = policy_loss(
                new,
                new.detach() if old_M is None else query.token_logps(old_M),
                None if reference_M is None else query.token_logps(reference_M),
                advantages.to(device),
                scored.to(device),
                options.clip_range,
                options.kl_weight,
                options.rl_normalisation,
            )
            return value / total, measured

        return loss

    def _now(self) -> float:
        """The time in seconds when the device has done what it was given."""
        if self.processes.device.type == "cuda":
            torch.cuda.synchronize(self.processes.device)
        return time.perf_counter()

    def row(self, common: dict[str, Any], sums: dict[str, float]) -> StepMetrics:
        count = self.config.data.global_batch_size
        mean = sums["reward"] / count
        return RolloutRow(
            **common,
            reward=mean,
            reward_std=math.sqrt(max(0.0, sums["reward_squares"] / count - mean**2)),
            rewards={name[3:]: value / count for name, value in sums.items() if name.startswith("of ")},
            failed_rewards=int(sums["failed"]),
            idle_groups=sums["idle"] * self.config.rl.group_size / count,
            kl=sums["kl"] / count if self.config.rl.kl_weight else None,
            clip_fraction=sums["clipped"] / sums["scored"],
            completion_length=sums["scored"] / count,
            seconds=self.seconds,
        )

    def evaluate(self) -> float:
        """The mean reward of greedy answers to the held-out prompts."""
        return self._held_out()[0]

    def evaluated(self, row: StepMetrics) -> StepMetrics:
        reward, rewards = self._held_out()
        return dataclasses.replace(row, eval_reward=reward, eval_rewards=rewards)  # type: ignore[call-arg]

    def _held_out(self) -> tuple[float, dict[str, float]]:
        processes = self.processes
        with self.engine.sampling_model() as model:
            _, scores = self.rollouts.answer(model, self.valid[processes.rank :: processes.world_size])
        own = {"": sum(scores.rewards), **{name: sum(values) for name, values in scores.parts.items()}}
        means = {name: value / len(self.valid) for name, value in self.summed(own, of_replicas=False).items()}
        return means.pop(""), means

    def _query(self, sequences: Sequences, draw: int, samples: list[int]) -> LikelihoodQuery:
        config, model = self.config, self.plain_model
        if config.rl.method == "block-grpo":
            return blockwise(model, sequences, config.rl.trace_steps)
        return one_step(model, sequences, config.data.seed, draw, samples, config.rl.prompt_masking)

"""Updates on sampled completions and their rewards (GRPO, diffu-GRPO, block-GRPO, TraceRL)."""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from dataclasses import dataclass
from typing import Any

import torch

from dlm_bridge.train.config import RLConfig
from dlm_bridge.train.config.reinforcement import AUTOREGRESSIVE
from dlm_bridge.train.metrics import StepMetrics
from dlm_bridge.train.rl.likelihood import (
    LikelihoodQuery,
    Sequences,
    blockwise,
    causal,
    one_step,
    trace_block_size,
    trace_numbers,
    trajectory,
)
from dlm_bridge.train.rl.replica import room_makers
from dlm_bridge.train.rl.reward_worker import RewardWorkers
from dlm_bridge.train.rl.rollout import Rollout, Rollouts
from dlm_bridge.train.rl.rows import Problem, load_problems
from dlm_bridge.train.rl.trainer import LogpLoss, RLTrainer, RolloutRecord, UpdatePart, ValueUpdates
from dlm_bridge.train.rl.updates import (
    UpdateMetrics,
    policy_loss,
    token_weights,
    trajectory_advantages,
    value_loss,
)

IDLE_STEPS = 10  # consecutive steps with mostly idle groups after which a run warns


@dataclass(frozen=True)
class LikelihoodPart:
    """A micro-batch of likelihoods of B completions."""

    rows: slice  # of this replica's completions
    query: LikelihoodQuery
    advantages: torch.Tensor  # [B, L] or [B, 1]
    weights: torch.Tensor  # [B, L], zero at tokens that it does not predict


class PolicyTrainer(RLTrainer[Problem]):
    """Trainer on sampled completions and their rewards."""

    @staticmethod
    def load(
        config: RLConfig, items: list[str], tokenizer: Any, mask_token: int | None, field: str = "data"
    ) -> list[Problem]:
        return load_problems(items, tokenizer, config.data.seq_length - config.rl.gen_length, mask_token, field)

    def set_up(self) -> None:
        config = self.config
        self.seconds: dict[str, float] = {}  # of the last step
        self.idle_steps = 0  # consecutive steps in which most groups were idle
        self.reward_workers = RewardWorkers(config.rl.reward, config.rl.reward_timeout, config.rl.reward_failure)
        self.rollouts = Rollouts(
            tokenizer=self.tokenizer,
            reward_workers=self.reward_workers,
            seed=config.data.seed,
            group_size=config.rl.group_size,
            gen_length=config.rl.gen_length,
            temperature=config.rl.temperature,
            sampler=config.rl.sampler,
            batch_size=config.rl.rollout_batch_size,
            scaled=config.rl.advantages == "scaled",
            autoregressive=config.rl.method in AUTOREGRESSIVE,
            remedy=room_makers(config),
            ranks=self.engine.replica,
            samplers=self.engine.samplers,
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
        """Take `rl.updates` optimizer steps on this replica's completions. Each draws new noise for the likelihoods,
        the same for the current, the sampling and the reference model."""
        engine, options, updates = self.engine, self.config.rl, self.config.rl.updates
        sequences, length = rollout.sequences, rollout.sequences.tokens.shape[1]
        sequences = sequences.padded(engine.row_width(length) or length)
        weights, own = self._token_weights(sequences)
        total = max(1.0, self.summed({"": own})[""])
        draws = [
            self._parts(rollout, sequences, weights, draw)
            for draw in range((step - 1) * updates + 1, step * updates + 1)
        ]
        # Before the first optimizer step; with a single step the current model is the sampling model.
        before: list[list[torch.Tensor]] | None = None
        if updates > 1:
            before = [engine.logps([part.query.noisy for part in parts]) for parts in draws]
        sums = {"clipped": 0.0, "kl": 0.0}
        loss = norm = value = 0.0
        if engine.value_model is not None:
            advantages, value = self._value_updates(engine.value_model, rollout, sequences, draws[0], total, step)
            draws = [
                [dataclasses.replace(part, advantages=advantages[part.rows]) for part in parts] for parts in draws
            ]
        for number, parts in enumerate(draws):
            old = before[number] if before else [None] * len(parts)
            reference = engine.reference_logps([part.query.noisy for part in parts]) if options.has_reference else old
            found, measured = engine.forward_backward(
                [
                    UpdatePart(part.query.noisy, self._loss(part, old_M, reference_M, total))
                    for part, old_M, reference_M in zip(parts, old, reference, strict=True)
                ]
            )
            loss += found / updates
            sums = {name: value + measured[name] / updates for name, value in sums.items()}
            norm = max(norm, engine.optimizer_step(step))
        return UpdateMetrics(loss, norm, {**sums, "kl": sums["kl"] / total, "value_loss": value})

    def _value_updates(
        self,
        model: ValueUpdates,
        rollout: Rollout,
        sequences: Sequences,
        parts: list[LikelihoodPart],
        total: float,
        step: int,
    ) -> tuple[torch.Tensor, float]:
        """Advantages [B, L] from the value model before its update, and the mean loss of its `rl.updates` steps."""
        options, old = self.config.rl, torch.zeros(sequences.shape)
        found = model.values([part.query.noisy for part in parts])
        for part, values_M in zip(parts, found, strict=True):
            old[part.rows] += part.query.per_token(values_M.cpu())
        steps = trace_numbers(sequences, self._trace_steps(), trace_block_size(self.plain_model))
        returns, advantages = trajectory_advantages(
            rollout.advantages, old, steps, options.discount, options.gae_lambda
        )

        def loss_of(part: LikelihoodPart) -> LogpLoss:
            def loss(values_M: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
                device, new = values_M.device, part.query.per_token(values_M)
                before, goals, weights = (
                    each.to(device) for each in (old[part.rows], returns[part.rows], part.weights)
                )
                return value_loss(new, before, goals, weights, options.clip_range) / total, {}

            return loss

        losses = [
            model.update([UpdatePart(part.query.noisy, loss_of(part)) for part in parts], step)
            for _ in range(options.updates)
        ]
        return advantages, sum(losses) / options.updates

    def _parts(self, rollout: Rollout, sequences: Sequences, weights: torch.Tensor, draw: int) -> list[LikelihoodPart]:
        """Likelihoods of this replica's completions in micro-batches, the same number on every replica."""
        size = self.config.data.micro_batch_size or self.per_replica
        parts = []
        for start in range(0, len(rollout), size):
            rows = slice(start, start + size)
            for query in self._queries(sequences.rows(rows), draw, rollout.samples[rows]):
                own = weights[rows] * query.predicted
                parts.append(LikelihoodPart(rows, query, rollout.advantages[rows, None], own))
        missing = self.processes.largest(len(parts)) - len(parts)
        last = parts[-1]
        nothing = dataclasses.replace(last, query=last.query.without_targets(), weights=torch.zeros_like(last.weights))
        return parts + [nothing] * missing

    def _loss(
        self, part: LikelihoodPart, old_M: torch.Tensor | None, reference_M: torch.Tensor | None, total: float
    ) -> LogpLoss:
        """Policy loss of a micro-batch over the `total` of the global batch. `old_M` None: the current model's
        log-probabilities."""
        options, query = self.config.rl, part.query

        def loss(logps_M: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            new, device = query.per_token(logps_M), logps_M.device
            value, measured = policy_loss(
                new,
                new.detach() if old_M is None else query.per_token(old_M),
                query.per_token(reference_M) if reference_M is not None and options.kl_weight else None,
                part.advantages.to(device),
                part.weights.to(device),
                options.clip_range,
                options.kl_weight,
            )
            return value / total, measured

        return loss

    def _token_weights(self, sequences: Sequences) -> tuple[torch.Tensor, float]:
        """Weight of each token in the loss [B, L], and the number of rows, tokens or steps to divide by."""
        normalisation = self.config.rl.normalisation
        if normalisation != "steps":
            count = len(sequences) if normalisation == "rows" else int(sequences.scored.sum())
            return token_weights(sequences.scored, normalisation), float(count)
        steps = trace_numbers(sequences, self._trace_steps(), trace_block_size(self.plain_model))
        return token_weights(sequences.scored, normalisation, steps), float((steps.amax(dim=1) + 1).sum())

    def _now(self) -> float:
        """Time in seconds, after the device has finished its work."""
        if self.processes.device.type == "cuda":
            torch.cuda.synchronize(self.processes.device)
        return time.perf_counter()

    def row(self, common: dict[str, Any], sums: dict[str, float]) -> StepMetrics:
        count = self.config.data.global_batch_size
        mean = sums["reward"] / count
        idle_groups = sums["idle"] * self.config.rl.group_size / count
        self._warn_of_idle_groups(idle_groups)
        return RolloutRecord(
            **common,
            reward=mean,
            reward_std=math.sqrt(max(0.0, sums["reward_squares"] / count - mean**2)),
            rewards={name[3:]: value / count for name, value in sums.items() if name.startswith("of ")},
            failed_rewards=int(sums["failed"]),
            idle_groups=idle_groups,
            kl=sums["kl"] if self.config.rl.kl_weight else None,
            value_loss=sums["value_loss"] if self.config.rl.value_model else None,
            clip_fraction=sums["clipped"] / max(1.0, sums["scored"]),
            completion_length=sums["scored"] / count,
            seconds=self.seconds,
        )

    def _warn_of_idle_groups(self, idle_groups: float) -> None:
        """Warn when most groups have been idle for IDLE_STEPS steps, or for the whole of a shorter run."""
        self.idle_steps = self.idle_steps + 1 if idle_groups > 0.5 else 0
        if self.main and self.idle_steps == min(IDLE_STEPS, self.config.schedule.last_step):
            self.console.print(
                f"warning: nothing is learned from {idle_groups:.0%} of the prompts, whose completions all have the "
                "same reward (idle_groups). Use a reward with more levels, prompts that are neither too easy nor too "
                "hard, a higher `temperature` or a larger `group_size`",
                highlight=False,
                soft_wrap=True,
            )

    def evaluate(self) -> float:
        """Mean reward of greedy answers to the held-out prompts."""
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

    def _queries(self, sequences: Sequences, draw: int, samples: list[int]) -> list[LikelihoodQuery]:
        config, model = self.config, self.plain_model
        if config.rl.method == "grpo":
            return [causal(sequences)]
        if config.rl.method == "tracerl":
            return trajectory(model, sequences, self._trace_steps())
        if config.rl.method == "block-grpo":
            return blockwise(model, sequences, self._trace_steps())
        return [one_step(model, sequences, config.data.seed, draw, samples, config.rl.prompt_masking)]

    def _trace_steps(self) -> int:
        """`trace_steps`; tracerl's defaults are those of TraDo's configurations."""
        if self.config.rl.method == "block-grpo":
            return self.config.rl.trace_steps or 32
        return self.config.rl.trace_steps or (1 if trace_block_size(self.plain_model) else 8)

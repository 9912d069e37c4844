"""Reinforcement learning on one machine: rollouts and updates under Accelerate, alone or data parallel."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from rich.console import Console

from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.objectives.batches import NoisyBatch
from dlm_bridge.objectives.registry import mask_token_id, noise_process
from dlm_bridge.train.accelerate import fsdp
from dlm_bridge.train.accelerate.trainer import run
from dlm_bridge.train.config import RLConfig
from dlm_bridge.train.config.reinforcement import AUTOREGRESSIVE, SAMPLED
from dlm_bridge.train.data.documents import check_tokenizer
from dlm_bridge.train.loading import load_tokenizer, model_family, starting_model
from dlm_bridge.train.lora import add_adapter, with_lora
from dlm_bridge.train.metrics import StepMetrics
from dlm_bridge.train.monitoring import check_trackers
from dlm_bridge.train.rl.likelihood import LikelihoodQuery, Sequences, blockwise, bound_sums, one_step, token_logps
from dlm_bridge.train.rl.reward_worker import RewardWorkers
from dlm_bridge.train.rl.rollout import Rollout, Rollouts
from dlm_bridge.train.rl.rows import PreferencePair, Problem, load_pairs, load_problems
from dlm_bridge.train.rl.trainer import PreferenceRow, RLTrainer, RolloutRow, check_method, check_sampler
from dlm_bridge.train.rl.updates import (
    PreferenceUpdater,
    UpdateMetrics,
    accumulates,
    loss_divisor,
    optimizer_step,
    policy_loss,
    preference_loss,
)
from dlm_bridge.train.setup import RunStart, check_length, training_errors


@training_errors
def train(config: RLConfig, resume: bool = False, console: Console | None = None) -> Path:
    """Train until `--steps`, a SIGTERM or `--exit-duration`, and return the last checkpoint's folder.

    With `resume` the run in `--output` continues from its newest checkpoint. Raises DlmBridgeError for bad input, for
    rewards that fail and where a loss is NaN.
    """
    if config.rl.method in AUTOREGRESSIVE:
        from dlm_bridge.train.rl.trl_engine import train_with_trl

        return train_with_trl(config, resume, console or Console(stderr=True, markup=False))
    return run(fsdp.with_launcher_settings(config), resume, console, assembled)


@contextlib.contextmanager
def assembled(
    config: RLConfig, accelerator: Accelerator, start: RunStart, console: Console
) -> Iterator[RLTrainer[Any]]:
    """Model, reference, optimizer and rows of a run; what it started ends with it."""
    check_trackers(config)
    model = starting_model(config, start.checkpoint, accelerator.is_main_process)
    check_method(config, model_family(model))
    check_length(config, model)
    if (noise := noise_process(model.config)) not in (None, "mask"):
        raise DlmBridgeError(
            f"--model {config.model.path}: trained with {noise} noise (noise_process in its config.json), whose "
            "answers have no likelihood that --method could use: rl needs a model of masks"
        )
    config = with_lora(config, model)
    token = mask_token_id(model)
    tokenizer = load_tokenizer(config)
    check_tokenizer(tokenizer, model.get_input_embeddings().weight.shape[0], token)
    if config.rl.method in SAMPLED:
        check_sampler(config, model)
    kind: type[RLTrainer[Any]] = PolicyTrainer if config.rl.method in SAMPLED else PreferenceTrainer
    with accelerator.main_process_first():
        rows = kind.load(config, config.data.paths, tokenizer, token)
        held_out = kind.load(config, config.rl.eval_data, tokenizer, token) if config.rl.eval_data else []
    with fsdp.process_group(config):
        adapter = add_adapter(config, model, start.checkpoint) if config.model.adapts else None
        trainer = kind(config, accelerator, model, adapter, tokenizer, rows, held_out, start.output, console)
        try:
            yield trainer
        finally:
            trainer.close()


class PolicyTrainer(RLTrainer[Problem]):
    """Trainer on sampled completions and their rewards (diffu-GRPO, block-GRPO)."""

    @staticmethod
    def load(config: RLConfig, items: list[str], tokenizer: Any, mask_token: int) -> list[Problem]:
        return load_problems(items, tokenizer, config.data.seq_length - config.rl.gen_length, mask_token)

    def set_up(self) -> None:
        config = self.config
        self.reward_workers = RewardWorkers(config.rl.reward, config.rl.reward_timeout, config.rl.reward_failure)
        self.rollouts = Rollouts(
            model=self.plain_model if self.replica is None else self.replica.model,
            tokenizer=self.tokenizer,
            reward_workers=self.reward_workers,
            seed=config.data.seed,
            group_size=config.rl.group_size,
            gen_length=config.rl.gen_length,
            temperature=config.rl.temperature,
            sampler=config.rl.sampler,
            batch_size=config.data.micro_batch_size,
            scaled=config.rl.advantages == "scaled",
        )

    def close(self) -> None:
        self.reward_workers.close()

    def train_step(self, step: int) -> tuple[UpdateMetrics, dict[str, float]]:
        config = self.config
        first = (step - 1) * config.data.global_batch_size + self.accelerator.process_index * self.per_process
        groups = range(first // config.rl.group_size, (first + self.per_process) // config.rl.group_size)
        problems = [self.order[group] for group in groups]
        with self._weights_to_sample():
            rollout = self.rollouts.sample(problems, step, first)
        metrics = self._update(rollout, step)
        grouped = rollout.rewards.reshape(-1, config.rl.group_size)
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
        """`rl.updates` optimizer steps on this process's completions. Each draws the likelihoods' noise anew, the same
        for the current, the sampling and the reference model. Raises DlmBridgeError where the gradient norm is NaN."""
        config, accelerator, updates = self.config, self.accelerator, self.config.rl.updates
        size, normalisation = config.data.micro_batch_size or self.per_process, config.rl.rl_normalisation
        total = loss_divisor(accelerator, rollout.sequences.scored, normalisation)
        parts = [slice(start, start + size) for start in range(0, len(rollout), size)]
        queries = [
            [
                self._query(rollout.sequences.rows(part), draw, rollout.samples[part]).to(accelerator.device)
                for part in parts
            ]
            for draw in range((step - 1) * updates + 1, step * updates + 1)
        ]
        # All of it before the first optimizer step; with one step the current model is the sampling model.
        before = None
        if updates > 1:
            with torch.no_grad():
                before = [[token_logps(self.model, query) for query in row] for row in queries]
        sums = {"clipped": 0.0, "kl": 0.0}
        loss = norm = 0.0
        for number, row in enumerate(queries):
            loss_sum = torch.zeros((), device=accelerator.device)
            for place, (part, query) in enumerate(zip(parts, row, strict=True)):
                last = place + 1 == len(parts)
                reference = self._reference_logps(query) if config.rl.kl_weight else None
                with accumulates(accelerator, self.model, last):
                    new = token_logps(self.model, query)
                    value, measured = policy_loss(
                        new,
                        new.detach() if before is None else before[number][place],
                        reference,
                        rollout.advantages[part].to(accelerator.device),
                        rollout.sequences.scored[part].to(accelerator.device),
                        config.rl.clip_range,
                        config.rl.kl_weight,
                        normalisation,
                    )
                    # Data parallelism averages over processes; the mean over all completions needs the sum.
                    accelerator.backward(value * (accelerator.num_processes / total))
                loss_sum += value.detach()
                sums = {name: sum_ + float(measured[name]) for name, sum_ in sums.items()}
            loss += float(accelerator.reduce(loss_sum, reduction="sum")) / total / updates
            norm = max(norm, optimizer_step(accelerator, self.model, self.optimizer, config.optimizer.clip_grad, step))
        return UpdateMetrics(loss, norm, {name: sum_ / updates for name, sum_ in sums.items()})

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
        )

    def evaluate(self) -> float:
        """The mean reward of greedy answers to the held-out prompts."""
        return self._held_out()[0]

    def evaluated(self, row: StepMetrics) -> StepMetrics:
        reward, rewards = self._held_out()
        return dataclasses.replace(row, eval_reward=reward, eval_rewards=rewards)  # type: ignore[call-arg]

    def _held_out(self) -> tuple[float, dict[str, float]]:
        accelerator = self.accelerator
        with self._weights_to_sample():
            _, scores = self.rollouts.answer(self.valid[accelerator.process_index :: accelerator.num_processes])
        own = {"": sum(scores.rewards), **{name: sum(values) for name, values in scores.parts.items()}}
        means = {name: value / len(self.valid) for name, value in self.summed(own).items()}
        return means.pop(""), means

    def _weights_to_sample(self) -> AbstractContextManager[Any]:
        """In which the rollouts' model has the current weights: under FSDP a whole replica, else the model itself."""
        if self.replica is None:
            return contextlib.nullcontext()
        return self.replica.gathered(self.plain_model, self.accelerator.device)

    def _query(self, sequences: Sequences, draw: int, samples: list[int]) -> LikelihoodQuery:
        config, model = self.config, self.plain_model
        if config.rl.method == "block-grpo":
            return blockwise(model, sequences, config.rl.trace_steps)
        return one_step(model, sequences, config.data.seed, draw, samples, config.rl.prompt_masking)

    def _reference_logps(self, query: LikelihoodQuery) -> torch.Tensor:
        with self.reference() as model:
            return token_logps(model, query)


class PreferenceTrainer(RLTrainer[PreferencePair]):
    """Trainer on pairs of a chosen and a rejected answer (VRPO)."""

    @staticmethod
    def load(config: RLConfig, items: list[str], tokenizer: Any, mask_token: int) -> list[PreferencePair]:
        return load_pairs(items, tokenizer, config.data.seq_length, mask_token)

    def set_up(self) -> None:
        config = self.config
        if not config.rl.kl_weight:
            raise DlmBridgeError("--beta 0: vrpo compares with the model as it began, give a positive number")
        self.updater = PreferenceUpdater(
            accelerator=self.accelerator,
            model=self.model,
            plain_model=self.plain_model,
            reference=self._reference_bounds,
            optimizer=self.optimizer,
            seed=config.data.seed,
            micro_batch_size=config.data.micro_batch_size or self.per_process,
            total=config.data.global_batch_size,
            levels=config.rl.elbo_levels,
            masks=config.rl.elbo_masks,
            beta=config.rl.kl_weight,
            clip_grad=config.optimizer.clip_grad,
        )

    def train_step(self, step: int) -> tuple[UpdateMetrics, dict[str, float]]:
        first = (step - 1) * self.config.data.global_batch_size + self.accelerator.process_index * self.per_process
        samples = list(range(first, first + self.per_process))
        pairs = [self.order[sample] for sample in samples]
        metrics = self.updater.update(pairs, samples, step)
        tokens = sum(len(pair.chosen.input_ids) + len(pair.rejected.input_ids) for pair in pairs)
        return metrics, {"tokens": float(tokens)}

    def row(self, common: dict[str, Any], sums: dict[str, float]) -> StepMetrics:
        count = self.config.data.global_batch_size
        return PreferenceRow(**common, preferred=sums["preferred"] / count, margin=sums["margin"] / count)

    def evaluate(self) -> float:
        """The loss of the held-out pairs, with the same noise every time."""
        return self._held_out()["loss"]

    def evaluated(self, row: StepMetrics) -> StepMetrics:
        found = self._held_out()
        return dataclasses.replace(row, eval_loss=found["loss"], eval_preferred=found["preferred"])  # type: ignore[call-arg]

    @torch.no_grad()
    def _held_out(self) -> dict[str, float]:
        accelerator, size = self.accelerator, self.config.data.micro_batch_size or self.per_process
        count, processes = len(self.valid), accelerator.num_processes
        # All processes run as many forward passes: FSDP gathers its weights in each of them.
        samples = range(accelerator.process_index, -(-count // processes) * processes, processes)
        sums = {"loss": 0.0, "preferred": 0.0}
        self.plain_model.eval()
        for start in range(0, len(samples), size):
            chosen = list(samples[start : start + size])
            pairs = [self.valid[sample % count] for sample in chosen]
            margins = self.updater.margins(pairs, chosen, 0, self.plain_model)
            margins = margins[torch.tensor(chosen, device=margins.device) < count]
            sums["loss"] += float(preference_loss(margins, self.config.rl.kl_weight).sum())
            sums["preferred"] += float((margins > 0).sum())
        self.plain_model.train()
        return {name: value / count for name, value in self.summed(sums).items()}

    def _reference_bounds(self, noisy: NoisyBatch) -> torch.Tensor:
        with self.reference() as model:
            return bound_sums(model, noisy)

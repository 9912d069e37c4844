"""Reinforcement learning on one machine: rollouts and updates under Accelerate, alone or data parallel."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from rich.console import Console

from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.train.accelerate_engine import set_attention
from dlm_bridge.train.checkpoints import clean, find_checkpoints, load_state, save_checkpoint
from dlm_bridge.train.data import check_tokenizer
from dlm_bridge.train.keyed import Purpose, torch_seed
from dlm_bridge.train.loading import load_model, load_tokenizer, model_family, starting_model
from dlm_bridge.train.loop import Engine
from dlm_bridge.train.lora import Adapter, add_adapter, with_lora
from dlm_bridge.train.metrics import MetricsFile, Row, plot_loss
from dlm_bridge.train.objectives import NoisyBatch, mask_token_id
from dlm_bridge.train.optimisation import adamw, check_finite, learning_rate
from dlm_bridge.train.rl.checks import check_length, check_method, check_sampler
from dlm_bridge.train.rl.config import AUTOREGRESSIVE, SAMPLED, RLConfig
from dlm_bridge.train.rl.judge import Judge
from dlm_bridge.train.rl.likelihood import Query, Sequences, blockwise, bound_sums, one_step, token_logps
from dlm_bridge.train.rl.metrics import PreferenceRow, RolloutRow
from dlm_bridge.train.rl.policy import PolicyUpdater
from dlm_bridge.train.rl.preference import PreferenceUpdater, preference_loss
from dlm_bridge.train.rl.rollout import Figures, Rollouts
from dlm_bridge.train.rl.rows import Pair, Problem, Shuffled, load_pairs, load_problems
from dlm_bridge.train.setup import begin, leaves_no_empty_folder, on_cpu, write_config
from dlm_bridge.train.trackers import check_trackers

Item = TypeVar("Item")


@leaves_no_empty_folder
def train(config: RLConfig, resume: bool = False, console: Console | None = None) -> Path:
    """Train until `config.steps`, a SIGTERM or `config.exit_duration`, and return the last checkpoint's folder.

    With `resume` the run in `config.output` goes on from its newest checkpoint. Raises DlmBridgeError for bad input,
    for rewards that fail and where a loss stops being a number.
    """
    if config.method in AUTOREGRESSIVE:
        from dlm_bridge.train.rl.trl_engine import train_with_trl

        return train_with_trl(config, resume, console or Console(stderr=True))
    console = console or Console(stderr=True)
    accelerator = _accelerator(config)
    beginning = begin(config, resume, accelerator, console)
    output, step, checkpoint = beginning.output, beginning.step, beginning.checkpoint
    if beginning.finished and checkpoint is not None:
        return checkpoint
    check_trackers(config)
    model = starting_model(config, checkpoint, accelerator.is_main_process)
    check_method(config, model_family(model))
    check_length(config, model)
    config = with_lora(config, model)
    adapter = add_adapter(config, model, checkpoint) if config.adapts else None
    token = mask_token_id(model)
    tokenizer = load_tokenizer(config)
    check_tokenizer(tokenizer, model.get_input_embeddings().weight.shape[0], token)
    if config.method in SAMPLED:
        check_sampler(config, model)
    state = None if checkpoint is None else load_state(checkpoint)
    kind: type[Trainer[Any]] = PolicyTrainer if config.method in SAMPLED else PreferenceTrainer
    with accelerator.main_process_first():
        rows = kind.load(config, config.data, tokenizer, token)
        held_out = kind.load(config, config.eval_data, tokenizer, token) if config.eval_data else []
    trainer = kind(config, accelerator, model, adapter, tokenizer, rows, held_out, output, console)
    if accelerator.is_main_process:
        write_config(config, output)
        console.print(
            f"{'training' if step == 0 else f'resuming at step {step}:'} {len(rows):,} rows, "
            f"{len(held_out):,} held out",
            highlight=False,
        )
    try:
        if state is not None:
            trainer.load_state(state)
        folder = trainer.run(step)
    finally:
        trainer.close()
    accelerator.wait_for_everyone()
    return folder


@dataclass
class Trainer(Engine, Generic[Item]):
    """What both kinds of run share: model, reference, optimizer, checkpoints."""

    config: RLConfig
    accelerator: Accelerator
    model: Any
    adapter: Adapter | None  # of the model, in its place
    tokenizer: Any
    rows: list[Item]
    valid: list[Item]
    output: Path
    console: Console
    tokens: int = field(default=0, init=False)  # trained on so far, over all processes

    def __post_init__(self) -> None:
        config = self.config
        if config.attention_backend is not None:
            set_attention(self.model, config.attention_backend)
        self.model.train()
        if config.gradient_checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self.reference_model = self._reference()
        optimizer = adamw(config, self.model)
        self.order = Shuffled(self.rows, config.seed)
        self.plain_model = self.model
        self.model, self.optimizer = self.accelerator.prepare(self.model, optimizer)
        self.set_up()

    @staticmethod
    @abc.abstractmethod
    def load(config: RLConfig, items: list[str], tokenizer: Any, mask_token: int) -> list[Any]:
        """The rows that some paths name. Raises DlmBridgeError."""

    @abc.abstractmethod
    def set_up(self) -> None:
        """Make what follows the model."""

    @abc.abstractmethod
    def train_step(self, step: int) -> tuple[Figures, dict[str, float]]:
        """Update the model: what it measured, and sums over this process's rows, `tokens` among them."""

    @abc.abstractmethod
    def row(self, common: dict[str, Any], sums: dict[str, float]) -> Row:
        """The figures of a step from those that all training has and sums over all processes."""

    def close(self) -> None:
        """End what the run started."""

    @property
    def main(self) -> bool:
        return self.accelerator.is_main_process

    @property
    def share(self) -> int:
        """Completions, or pairs, of this process in a step."""
        return self.config.global_batch_size // self.accelerator.num_processes

    def load_state(self, state: dict[str, Any]) -> None:
        """Set the optimizer's state, and the gradient scaler's, to what a checkpoint has."""
        if state["rows"] != len(self.rows):
            raise DlmBridgeError(
                f"--data has {len(self.rows)} rows, the run began with {state['rows']}: resume with the data that it "
                "began with"
            )
        self.tokens = state["tokens"]
        self.optimizer.load_state_dict(state["optimizer"])
        if self.accelerator.scaler is not None and state["scaler"] is not None:
            self.accelerator.scaler.load_state_dict(state["scaler"])

    def step(self, step: int, want_stop: bool) -> tuple[Row, bool]:
        config, began = self.config, time.perf_counter()
        torch.manual_seed(torch_seed(config.seed, step, self.accelerator.process_index))
        rate = learning_rate(config, step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        figures, own = self.train_step(step)
        if not math.isfinite(figures.loss):
            raise DlmBridgeError(f"step {step}: the loss is {figures.loss}: lower --lr")
        sums = self.summed({**figures.sums, **own, "stop": float(want_stop)})
        self.tokens += int(sums["tokens"])
        rate_of_tokens = sums["tokens"] / (time.perf_counter() - began)
        common = {
            "step": step,
            "loss": figures.loss,
            "grad_norm": figures.grad_norm,
            "lr": rate,
            "tokens": self.tokens,
            "tokens_per_s": rate_of_tokens,
            "tokens_per_s_per_device": rate_of_tokens / self.accelerator.num_processes,
            "mfu": None,
            "peak_memory": torch.cuda.max_memory_allocated() if self.accelerator.device.type == "cuda" else None,
        }
        return self.row(common, sums), sums["stop"] > 0

    def save(self, step: int, metrics: MetricsFile | None) -> Path:
        """Write the checkpoint of `step` on the main process, while the others wait."""
        check_finite(step, self.plain_model.parameters())
        if metrics is not None:
            metrics.sync()
            scaler = self.accelerator.scaler
            state = {
                "optimizer": self.optimizer.state_dict(),
                "scaler": None if scaler is None else scaler.state_dict(),
                "rows": len(self.rows),
                "tokens": self.tokens,
            }
            save_checkpoint(self.output, step, self.adapter or self.plain_model, self.tokenizer, state)
            clean(self.output, self.config.keep_last)
            plot_loss(metrics.rows, self.output / "loss.png")
        self.accelerator.wait_for_everyone()
        return find_checkpoints(self.output)[-1][1]

    def summed(self, values: dict[str, float]) -> dict[str, float]:
        """Each value summed over the processes."""
        device = self.accelerator.device
        dtype = torch.float32 if device.type == "mps" else torch.float64
        row: Any = self.accelerator.reduce(torch.tensor(list(values.values()), dtype=dtype, device=device), "sum")
        return dict(zip(values, row.tolist(), strict=True))

    def _reference(self) -> Any:
        """The model as it began, on this process's device; None where nothing asks for it, and where it is the model
        without the adapter that this run began."""
        if self.config.kl_weight == 0 or self.config.lora_rank:
            return None
        reference = load_model(self.config)
        if self.config.adapter is not None:
            add_adapter(self.config, reference)
        if self.config.attention_backend is not None:
            set_attention(reference, self.config.attention_backend)
        return reference.requires_grad_(False).eval().to(self.accelerator.device)

    @contextlib.contextmanager
    def as_it_began(self) -> Iterator[Any]:
        """The model as it began, without gradients."""
        without: Any = contextlib.nullcontext()
        if self.reference_model is None:
            assert self.adapter is not None
            without = self.adapter.peft.disable_adapter()
        with torch.no_grad(), self.accelerator.autocast(), without:
            yield self.plain_model if self.reference_model is None else self.reference_model


class PolicyTrainer(Trainer[Problem]):
    """Completions are sampled and judged, and the model moves towards the better ones of each prompt."""

    @staticmethod
    def load(config: RLConfig, items: list[str], tokenizer: Any, mask_token: int) -> list[Problem]:
        return load_problems(items, tokenizer, config.seq_length - config.gen_length, mask_token)

    def set_up(self) -> None:
        config = self.config
        config.groups(self.accelerator.num_processes)
        self.judge = Judge(config.reward, config.reward_timeout, config.reward_failure)
        self.rollouts = Rollouts(
            model=self.plain_model,
            tokenizer=self.tokenizer,
            judge=self.judge,
            seed=config.seed,
            group_size=config.group_size,
            gen_length=config.gen_length,
            temperature=config.temperature,
            sampler=config.sampler,
            batch_size=config.micro_batch_size,
            scaled=config.advantages == "scaled",
        )
        self.updater = PolicyUpdater(
            accelerator=self.accelerator,
            model=self.model,
            optimizer=self.optimizer,
            ask=self._query,
            reference=self._reference_logps if config.kl_weight else None,
            updates=config.updates,
            micro_batch_size=config.micro_batch_size or self.share,
            total=config.global_batch_size,
            clip_range=config.clip_range,
            beta=config.kl_weight,
            clip_grad=config.clip_grad,
        )

    def close(self) -> None:
        self.judge.close()

    def train_step(self, step: int) -> tuple[Figures, dict[str, float]]:
        config = self.config
        first = (step - 1) * config.global_batch_size + self.accelerator.process_index * self.share
        groups = range(first // config.group_size, (first + self.share) // config.group_size)
        problems = [self.order[group] for group in groups]
        rollout = self.rollouts.sample(problems, step, first)
        figures = self.updater.update(rollout, step)
        grouped = rollout.rewards.reshape(-1, config.group_size)
        return figures, {
            "tokens": float((rollout.sequences.prompt | rollout.sequences.scored).sum()),
            "scored": float(rollout.sequences.scored.sum()),
            "reward": float(rollout.rewards.double().sum()),
            "reward_squares": float((rollout.rewards.double() ** 2).sum()),
            "idle": float((grouped.amax(dim=1) == grouped.amin(dim=1)).sum()),
            "failed": float(rollout.judged.failed),
            **{f"of {name}": sum(values) for name, values in rollout.judged.parts.items()},
        }

    def row(self, common: dict[str, Any], sums: dict[str, float]) -> Row:
        count = self.config.global_batch_size
        mean = sums["reward"] / count
        return RolloutRow(
            **common,
            reward=mean,
            reward_std=math.sqrt(max(0.0, sums["reward_squares"] / count - mean**2)),
            rewards={name[3:]: value / count for name, value in sums.items() if name.startswith("of ")},
            failed_rewards=int(sums["failed"]),
            idle_groups=sums["idle"] * self.config.group_size / count,
            kl=sums["kl"] / count if self.config.kl_weight else None,
            clip_fraction=sums["clipped"] / sums["scored"],
            completion_length=sums["scored"] / count,
        )

    def evaluate(self) -> float:
        """The mean reward of greedy answers to the held-out prompts."""
        return self._held_out()[0]

    def evaluated(self, row: Row) -> Row:
        reward, rewards = self._held_out()
        return dataclasses.replace(row, eval_reward=reward, eval_rewards=rewards)  # type: ignore[call-arg]

    def _held_out(self) -> tuple[float, dict[str, float]]:
        accelerator = self.accelerator
        _, judged = self.rollouts.answer(self.valid[accelerator.process_index :: accelerator.num_processes])
        own = {"": sum(judged.rewards), **{name: sum(values) for name, values in judged.parts.items()}}
        means = {name: value / len(self.valid) for name, value in self.summed(own).items()}
        return means.pop(""), means

    def _query(self, sequences: Sequences, draw: int, samples: list[int]) -> Query:
        config, model = self.config, self.plain_model
        if config.method == "block-grpo":
            return blockwise(model, sequences, config.trace_steps)
        return one_step(model, sequences, config.seed, draw, samples, config.prompt_masking)

    def _reference_logps(self, query: Query) -> torch.Tensor:
        with self.as_it_began() as model:
            return token_logps(model, query)


class PreferenceTrainer(Trainer[Pair]):
    """The model moves towards the chosen answers and away from the rejected ones."""

    @staticmethod
    def load(config: RLConfig, items: list[str], tokenizer: Any, mask_token: int) -> list[Pair]:
        return load_pairs(items, tokenizer, config.seq_length, mask_token)

    def set_up(self) -> None:
        config = self.config
        config.accumulation(self.accelerator.num_processes)
        if not config.kl_weight:
            raise DlmBridgeError("--beta 0: vrpo compares with the model as it began, give a positive number")
        self.updater = PreferenceUpdater(
            accelerator=self.accelerator,
            model=self.model,
            plain_model=self.plain_model,
            reference=self._reference_bounds,
            optimizer=self.optimizer,
            seed=config.seed,
            micro_batch_size=config.micro_batch_size or self.share,
            total=config.global_batch_size,
            levels=config.elbo_levels,
            masks=config.elbo_masks,
            beta=config.kl_weight,
            clip_grad=config.clip_grad,
        )

    def train_step(self, step: int) -> tuple[Figures, dict[str, float]]:
        first = (step - 1) * self.config.global_batch_size + self.accelerator.process_index * self.share
        samples = list(range(first, first + self.share))
        pairs = [self.order[sample] for sample in samples]
        figures = self.updater.update(pairs, samples, step)
        tokens = sum(len(pair.chosen.input_ids) + len(pair.rejected.input_ids) for pair in pairs)
        return figures, {"tokens": float(tokens)}

    def row(self, common: dict[str, Any], sums: dict[str, float]) -> Row:
        count = self.config.global_batch_size
        return PreferenceRow(**common, preferred=sums["preferred"] / count, margin=sums["margin"] / count)

    def evaluate(self) -> float:
        """The loss of the held-out pairs, with the same noise every time."""
        return self._held_out()["loss"]

    def evaluated(self, row: Row) -> Row:
        found = self._held_out()
        return dataclasses.replace(row, eval_loss=found["loss"], eval_preferred=found["preferred"])  # type: ignore[call-arg]

    @torch.no_grad()
    def _held_out(self) -> dict[str, float]:
        accelerator, size = self.accelerator, self.config.micro_batch_size or self.share
        samples = range(len(self.valid))[accelerator.process_index :: accelerator.num_processes]
        sums = {"loss": 0.0, "preferred": 0.0}
        self.plain_model.eval()
        for start in range(0, len(samples), size):
            chosen = list(samples[start : start + size])
            pairs = [self.valid[sample] for sample in chosen]
            margins = self.updater.margins(pairs, chosen, 0, self.plain_model, Purpose.EVAL_NOISE)
            sums["loss"] += float(preference_loss(margins, self.config.kl_weight).sum())
            sums["preferred"] += float((margins > 0).sum())
        self.plain_model.train()
        return {name: value / len(self.valid) for name, value in self.summed(sums).items()}

    def _reference_bounds(self, noisy: NoisyBatch) -> torch.Tensor:
        with self.as_it_began() as model:
            return bound_sums(model, noisy)


def _accelerator(config: RLConfig) -> Accelerator:
    cpu = on_cpu(config)
    mixed = {"fp32": "no", "bf16": "bf16", "fp16": "fp16"}[config.precision]
    accelerator = Accelerator(cpu=cpu, mixed_precision=mixed)
    if accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
        raise DlmBridgeError(
            f"accelerate is configured for {accelerator.distributed_type.value}: reinforcement learning is data "
            "parallel only, launch with torchrun or accelerate launch --multi_gpu"
        )
    return accelerator

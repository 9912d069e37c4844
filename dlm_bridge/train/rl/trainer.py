"""The trainer that policy and preference runs share, the rows of their metrics, and checks of the model."""

from __future__ import annotations

import abc
import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from accelerate import Accelerator
from rich.console import Console

from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.generation.samplers import SpecialTokens
from dlm_bridge.generation.settings import resolve_settings
from dlm_bridge.models.family_spec import FamilySpec
from dlm_bridge.objectives.noise import torch_seed
from dlm_bridge.train.accelerate import fsdp
from dlm_bridge.train.accelerate.attention import set_attention
from dlm_bridge.train.accelerate.optimizers import adamw
from dlm_bridge.train.accelerate.replica import Replica
from dlm_bridge.train.accelerate.trainer import processes_of
from dlm_bridge.train.checkpoints import (
    load_state,
    raised_everywhere,
    remove_old_checkpoints,
    save_checkpoint,
    step_folder,
)
from dlm_bridge.train.config import RLConfig
from dlm_bridge.train.config.reinforcement import AUTOREGRESSIVE, METHODS, SAMPLED
from dlm_bridge.train.loading import starting_model
from dlm_bridge.train.lora import Adapter, add_adapter
from dlm_bridge.train.metrics import StepMetrics
from dlm_bridge.train.rl.rows import Shuffled
from dlm_bridge.train.rl.updates import UpdateMetrics
from dlm_bridge.train.schedule import learning_rate
from dlm_bridge.train.trainer import TrainingLoop, check_same_count


@dataclass(frozen=True, kw_only=True)
class RolloutRow(StepMetrics):
    """Metrics of a step on sampled completions."""

    reward: float  # mean
    reward_std: float  # over all of the step's completions
    rewards: dict[str, float]  # the mean of each function
    failed_rewards: int  # completions whose reward raised or hung and counted as 0
    idle_groups: float  # share of prompts whose completions all have the same reward: nothing is learned from them
    kl: float | None  # from the reference, in nats a token; null without one
    clip_fraction: float  # share of tokens that the clip kept from gaining
    completion_length: float  # tokens, the end included
    eval_reward: float | None = None  # of greedy answers to held-out prompts
    eval_rewards: dict[str, float] | None = None

    @property
    def was_evaluated(self) -> bool:
        return self.eval_reward is not None

    def summary(self) -> str:
        """The metrics as one line for the console."""
        held_out = "" if self.eval_reward is None else f"  held-out {self.eval_reward:.3f}"
        return f"reward {self.reward:.3f}  length {self.completion_length:.1f}  {super().summary()}{held_out}"


@dataclass(frozen=True, kw_only=True)
class PreferenceRow(StepMetrics):
    """Metrics of a step on preference pairs."""

    preferred: float  # share of pairs whose chosen answer gained on the rejected one
    margin: float  # mean of beta x (gain of the chosen answer - gain of the rejected one)
    eval_preferred: float | None = None

    def summary(self) -> str:
        """The metrics as one line for the console."""
        return f"preferred {self.preferred:.3f}  margin {self.margin:.3f}  {super().summary()}"


def check_method(config: RLConfig, family: FamilySpec | None) -> None:
    """Raise DlmBridgeError for a model of no known family, and a method of the other kind of model."""
    if family is None:
        raise DlmBridgeError(
            f"--model {config.model.path}: of no known family: see dlm-bridge families for what rl takes"
        )
    autoregressive = family.kind == "autoregressive"
    if autoregressive != (config.rl.method in AUTOREGRESSIVE):
        fits = [name for name in METHODS if (name in AUTOREGRESSIVE) == autoregressive]
        raise DlmBridgeError(
            f"--method {config.rl.method} is not for {family.title}, which is {family.kind}: use {', '.join(fits)}"
        )


def check_sampler(config: RLConfig, model: Any) -> None:
    """Raise DlmBridgeError for settings of `--generation` that the model's sampler cannot run."""
    keywords = {"gen_length": config.rl.gen_length, "temperature": config.rl.temperature, **config.rl.sampler}
    settings = resolve_settings(model, None, keywords, prompt_width=1)
    settings.sampler.spec(SpecialTokens.of(settings))


Item = TypeVar("Item")


@dataclass
class RLTrainer(TrainingLoop, Generic[Item]):
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
        self.processes = processes_of(self.accelerator)
        if config.engine.attention_backend is not None:
            set_attention(self.model, config.engine.attention_backend)
        self.model.train()
        if config.engine.gradient_checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self.reference_model = self._reference_model()
        self.order = Shuffled(self.rows, config.data.seed)
        self.plain_model = self.model
        self.replica: Replica | None = None
        self.fsdp = config.parallel.shards
        if self.fsdp:
            if config.rl.method in SAMPLED:
                self.replica = Replica(
                    self.model, torch.float32 if config.precision.name == "fp32" else torch.bfloat16
                )
            fsdp.shard_model(self.model, config, self.accelerator.device)
        optimizer = adamw(config, self.model)
        if self.fsdp:
            self.optimizer = optimizer
        else:
            self.model, self.optimizer = self.accelerator.prepare(self.model, optimizer)
        self.set_up()

    @staticmethod
    @abc.abstractmethod
    def load(config: RLConfig, items: list[str], tokenizer: Any, mask_token: int) -> list[Any]:
        """The rows of some paths. Raises DlmBridgeError."""

    @abc.abstractmethod
    def set_up(self) -> None:
        """Make the parts that need the model."""

    @abc.abstractmethod
    def train_step(self, step: int) -> tuple[UpdateMetrics, dict[str, float]]:
        """Update the model. Returns metrics, and sums over this process's rows, with `tokens` among them."""

    @abc.abstractmethod
    def row(self, common: dict[str, Any], sums: dict[str, float]) -> StepMetrics:
        """The metrics of a step, from those common to all training and sums over all processes."""

    def close(self) -> None:
        """End what the run started."""

    @property
    def per_process(self) -> int:
        """Completions, or pairs, of this process in a step."""
        return self.config.data.global_batch_size // self.processes.world_size

    def announce(self, step: int) -> None:
        if self.main:
            begun = "training:" if step == 0 else f"resuming at step {step}:"
            self.console.print(
                f"{begun} {len(self.rows):,} rows, {len(self.valid):,} held out", highlight=False, soft_wrap=True
            )

    def load_checkpoint(self, folder: Path) -> None:
        """Set the optimizer's state, and the gradient scaler's; `starting_model` has loaded the weights."""
        state = load_state(folder)
        check_same_count("rows", len(self.rows), state["rows"])
        self.tokens = state["tokens"]
        if not self.fsdp and "optimizer" in state:
            self.optimizer.load_state_dict(state["optimizer"])
        else:
            plain = getattr(self.optimizer, "optimizer", self.optimizer)  # without Accelerate around it
            fsdp.load_optimizer(folder, self.plain_model, plain, state)
        if self.accelerator.scaler is not None and state["scaler"] is not None:
            self.accelerator.scaler.load_state_dict(state["scaler"])

    def start_step(self, step: int, want_stop: bool) -> tuple[Callable[[], StepMetrics], bool]:
        config, began = self.config, time.perf_counter()
        torch.manual_seed(torch_seed(config.data.seed, step, self.accelerator.process_index))
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
            "tokens_per_s_per_device": rate_of_tokens / self.processes.world_size,
            "mfu": None,
            "peak_memory": torch.cuda.max_memory_allocated() if self.accelerator.device.type == "cuda" else None,
        }
        row = self.row(common, sums)
        return (lambda: row), sums["stop"] > 0

    def save_checkpoint(self, step: int) -> Path:
        """Write the checkpoint of `step` on the main process while the others wait, under FSDP with all of them."""
        scaler = self.accelerator.scaler
        state: dict[str, Any] = {
            "scaler": None if scaler is None else scaler.state_dict(),
            "rows": len(self.rows),
            "tokens": self.tokens,
        }
        if self.fsdp:
            fsdp.reshard_model(self.plain_model)
            device = self.accelerator.device
            fsdp.save_sharded(
                self.output, step, self.plain_model, self.optimizer, self.adapter, self.tokenizer, state, device
            )
        with raised_everywhere():
            if self.main and not self.fsdp:
                state["optimizer"] = self.optimizer.state_dict()
                save_checkpoint(self.output, step, self.adapter or self.plain_model, self.tokenizer, state)
            if self.main:
                remove_old_checkpoints(self.output, self.config.checkpoint.keep_last)
        return step_folder(self.output, step)

    def summed(self, values: dict[str, float]) -> dict[str, float]:
        """Each value summed over the processes."""
        device = self.accelerator.device
        dtype = torch.float32 if device.type == "mps" else torch.float64
        row: Any = self.accelerator.reduce(torch.tensor(list(values.values()), dtype=dtype, device=device), "sum")
        return dict(zip(values, row.tolist(), strict=True))

    def _reference_model(self) -> Any:
        """A copy of the starting model; None without a KL term, and where it is the base of a new adapter."""
        if self.config.rl.kl_weight == 0 or self.config.model.lora_rank:
            return None
        config, device = self.config, self.accelerator.device
        reference = starting_model(config, None, self.main)
        if self.config.model.adapter is not None:
            add_adapter(self.config, reference)
        if self.config.engine.attention_backend is not None:
            set_attention(reference, self.config.engine.attention_backend)
        reference.requires_grad_(False).eval()
        if config.parallel.shards:
            fsdp.shard_model(reference, config, device)
            return reference
        return reference.to(device)

    @contextlib.contextmanager
    def reference(self) -> Iterator[Any]:
        """The reference model, without gradients."""
        without: Any = contextlib.nullcontext()
        if self.reference_model is None:
            assert self.adapter is not None
            without = self.adapter.peft.disable_adapter()
        with torch.no_grad(), self.accelerator.autocast(), without:
            yield self.plain_model if self.reference_model is None else self.reference_model

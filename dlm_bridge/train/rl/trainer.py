"""The loop that policy and preference runs share, and the rows of their metrics."""

from __future__ import annotations

import abc
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from rich.console import Console

from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.objectives.noise import torch_seed
from dlm_bridge.train.config import RLConfig
from dlm_bridge.train.metrics import StepMetrics
from dlm_bridge.train.rl.rows import Shuffled
from dlm_bridge.train.rl.update_engine import UpdateEngine
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
    value_loss: float | None = None  # of the value model; null without one
    eval_reward: float | None = None  # of greedy answers to held-out prompts
    eval_rewards: dict[str, float] | None = None
    seconds: dict[str, float] | None = None  # of the first process: transfer of weights, rollout, update

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


Item = TypeVar("Item")


@dataclass
class RLTrainer(TrainingLoop, Generic[Item]):
    """What both kinds of run share: the step around an update, its sums over all replicas, checkpoints."""

    config: RLConfig
    engine: UpdateEngine
    tokenizer: Any
    rows: list[Item]
    valid: list[Item]
    output: Path
    console: Console
    tokens: int = field(default=0, init=False)  # trained on so far, over all replicas

    def __post_init__(self) -> None:
        self.processes, self.plain_model = self.engine.processes, self.engine.plain_model
        self.order = Shuffled(self.rows, self.config.data.seed)
        self.set_up()

    @staticmethod
    @abc.abstractmethod
    def load(config: RLConfig, items: list[str], tokenizer: Any, mask_token: int | None) -> list[Any]:
        """The rows of some paths. Raises DlmBridgeError."""

    @abc.abstractmethod
    def set_up(self) -> None:
        """Make the parts that need the engine."""

    @abc.abstractmethod
    def train_step(self, step: int) -> tuple[UpdateMetrics, dict[str, float]]:
        """Update the model. Returns metrics, and sums over this replica's rows, with `tokens` among them."""

    @abc.abstractmethod
    def row(self, common: dict[str, Any], sums: dict[str, float]) -> StepMetrics:
        """The metrics of a step, from those common to all training and sums over all replicas."""

    def close(self) -> None:
        """End what the run started."""

    @property
    def per_replica(self) -> int:
        """Completions, or pairs, of this data parallel replica in a step."""
        return self.config.data.global_batch_size // self.processes.replicas

    def first_row(self, step: int) -> int:
        """The global index of this replica's first completion, or pair, of a step."""
        return (step - 1) * self.config.data.global_batch_size + self.processes.replica * self.per_replica

    def announce(self, step: int, layout: str = "") -> None:
        if self.main:
            begun = "training:" if step == 0 else f"resuming at step {step}:"
            self.console.print(
                f"{begun} {len(self.rows):,} rows, {len(self.valid):,} held out{layout}",
                highlight=False,
                soft_wrap=True,
            )

    def start_step(self, step: int, want_stop: bool) -> tuple[Callable[[], StepMetrics], bool]:
        config, began = self.config, time.perf_counter()
        self.engine.manual_seed(torch_seed(config.data.seed, step, self.processes.rank))
        rate = learning_rate(config, step)
        self.engine.set_learning_rate(rate)
        figures, own = self.train_step(step)
        sums = self.summed({"loss": figures.loss, **figures.sums, **own})
        stop = self.summed({"stop": float(want_stop)}, of_replicas=False)["stop"] > 0
        if not math.isfinite(loss := sums.pop("loss")):
            raise DlmBridgeError(f"step {step}: the loss is {loss}: lower --lr")
        self.tokens += int(sums["tokens"])
        rate_of_tokens = sums["tokens"] / (time.perf_counter() - began)
        common = {
            "step": step,
            "loss": loss,
            "grad_norm": figures.grad_norm,
            "lr": rate,
            "tokens": self.tokens,
            "tokens_per_s": rate_of_tokens,
            "tokens_per_s_per_device": rate_of_tokens / self.processes.world_size,
            "mfu": None,
            "peak_memory": self.engine.peak_memory(),
        }
        row = self.row(common, sums)
        return (lambda: row), stop

    def summed(self, values: dict[str, float], of_replicas: bool = True) -> dict[str, float]:
        """Each value summed over the replicas, of which all ranks have the same, or over all processes."""
        counts = not of_replicas or self.engine.replica.rank == 0
        own = [value if counts else 0.0 for value in values.values()]
        return dict(zip(values, self.sum_on_cpu(torch.tensor(own, dtype=torch.float64)).tolist(), strict=True))

    def trained_parameters(self) -> Iterable[torch.Tensor]:
        return self.engine.trained_parameters()

    def load_checkpoint(self, folder: Path) -> None:
        state = self.engine.load_checkpoint(folder)
        check_same_count("rows", len(self.rows), state["rows"])
        self.tokens = state["tokens"]

    def save_checkpoint(self, step: int) -> Path:
        return self.engine.save_checkpoint(step, {"rows": len(self.rows), "tokens": self.tokens})

    def finish(self) -> None:
        self.engine.finish()

"""Training loop of reinforcement learning and preference optimisation, its metrics, and the engine interface.

An `UpdateEngine` computes log-probabilities, updates the model and provides a model to sample from. A micro-batch is a
`NoisyBatch` with M targets; the loss of a method is a function of their log-probabilities (`UpdatePart`), so it does
not depend on the engine.
"""

from __future__ import annotations

import abc
import contextlib
import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
import torch.nn.functional as F  # noqa: N812
from rich.console import Console

from dlm_bridge.errors import NonFiniteError, SettingError, counted
from dlm_bridge.objectives.batches import NoisyBatch
from dlm_bridge.objectives.noise import torch_seed
from dlm_bridge.replicas import ALONE, Replicas
from dlm_bridge.train.config import RLConfig
from dlm_bridge.train.metrics import StepMetrics
from dlm_bridge.train.rl.rows import Shuffled
from dlm_bridge.train.rl.updates import UpdateMetrics
from dlm_bridge.train.schedule import learning_rate
from dlm_bridge.train.trainer import Processes, TrainingLoop, check_same_count

# Maps log-probabilities [M] fp32 to a scalar, their part of the loss of the global batch, and detached sums by name.
LogpLoss = Callable[[torch.Tensor], tuple[torch.Tensor, dict[str, torch.Tensor]]]


@dataclass(frozen=True)
class UpdatePart:
    """A micro-batch of an update, with its loss."""

    noisy: NoisyBatch
    loss: LogpLoss


VALUE_FOLDER = "value"  # in a checkpoint


class ValueUpdates(abc.ABC):
    """A value model and its optimizer. All processes call `values` and `update` together, with the same number of
    micro-batches."""

    config: RLConfig

    @abc.abstractmethod
    def values(self, batches: Sequence[NoisyBatch]) -> list[torch.Tensor]:
        """[M] fp32 for each batch: the values of its targets, without a graph."""

    @abc.abstractmethod
    def update(self, parts: Sequence[UpdatePart], step: int) -> float:
        """Take one optimizer step on losses of values, summed over all replicas. Returns this replica's part of the
        loss. Raises NonFiniteError if the gradient norm is NaN or infinite."""

    @abc.abstractmethod
    def set_learning_rate(self, lr: float) -> None:
        """Set the learning rate of every parameter group for a policy learning rate of `lr`."""

    @abc.abstractmethod
    def trained_parameters(self) -> Iterable[torch.Tensor]:
        """The parameters that this process updates."""

    def learning_rate(self, lr: float) -> float:
        """The value model's learning rate for a policy learning rate of `lr`: scaled by `value_lr` / `lr`."""
        peak, own = self.config.optimizer.lr, self.config.rl.value_lr
        return lr if own is None else own * (lr / peak if peak else 1.0)

    def diverged(self, step: int, norm: float) -> NonFiniteError:
        """The error of an update whose gradient norm is not finite."""
        return NonFiniteError(f"the value model's gradient norm is {norm}: lower `value_lr`", [f"step {step}"])


def value_file(checkpoint: Path, name: str) -> Path:
    """The file `name` of a checkpoint's value model. Raises SettingError if the checkpoint has no value model."""
    file = checkpoint / VALUE_FOLDER / name
    if not file.is_file():
        raise SettingError("value_model", f"{checkpoint} has no value model to resume: choose another `output`")
    return file


class UpdateEngine(abc.ABC):
    """The trained model, its reference and its optimizer. All processes call every method together, with the same
    number of micro-batches, unless a method says otherwise."""

    processes: Processes
    replica: Replicas  # ranks that hold one replica of the trained model; they share what they sample
    samplers: Replicas = ALONE  # ranks that share one model to sample from
    plain_model: Any  # family and config, and weights if each process holds them
    value_model: ValueUpdates | None = None

    @abc.abstractmethod
    def row_width(self, width: int) -> int | None:
        """Number of tokens to which this step's rows are padded, given this process's longest row; None if each
        micro-batch may have its own width."""

    @abc.abstractmethod
    def logps(self, batches: Sequence[NoisyBatch]) -> list[torch.Tensor]:
        """[M] fp32 for each batch: log-probabilities of its targets, without a graph."""

    @abc.abstractmethod
    def reference_logps(self, batches: Sequence[NoisyBatch]) -> list[torch.Tensor]:
        """`logps` of the reference model."""

    @abc.abstractmethod
    def forward_backward(self, parts: Sequence[UpdatePart]) -> tuple[float, dict[str, float]]:
        """Accumulate the gradients of the parts' losses, summed over all replicas. Returns the loss and the sums of
        this replica's parts."""

    @abc.abstractmethod
    def optimizer_step(self, step: int) -> float:
        """Clip the gradients, step, and clear them. Returns the norm before clipping; raises NonFiniteError if it is
        NaN or infinite."""

    @abc.abstractmethod
    def evaluating(self) -> AbstractContextManager[None]:
        """Context manager in which `logps` uses evaluation mode."""

    @abc.abstractmethod
    def sampling_model(self) -> AbstractContextManager[Any]:
        """Context manager of a Hub model with the current weights: this process's own, or shared by the ranks of
        `samplers`, which run it together."""

    @abc.abstractmethod
    def set_learning_rate(self, lr: float) -> None:
        """Set the learning rate of every parameter group."""

    @abc.abstractmethod
    def manual_seed(self, seed: int) -> None:
        """Seed this process's dropout generators."""

    @abc.abstractmethod
    def trained_parameters(self) -> Iterable[torch.Tensor]:
        """The parameters that this process updates. A process may call it alone."""

    @abc.abstractmethod
    def peak_memory(self) -> int | None:
        """Peak number of bytes allocated on the device; None on CPU."""

    @abc.abstractmethod
    def save_checkpoint(self, step: int, state: dict[str, Any]) -> Path:
        """Write weights, optimizer state and `state` (numbers)."""

    @abc.abstractmethod
    def load_checkpoint(self, folder: Path) -> dict[str, Any]:
        """Restore the optimizer, and weights that are not set yet. Returns the `state`."""

    def finish(self) -> None:  # noqa: B027 (most have nothing in the background)
        """Wait for background work."""


def accumulate_gradients(
    accelerator: Any,
    model: Any,
    parts: Sequence[UpdatePart],
    predict: Callable[[Any, NoisyBatch], torch.Tensor],
    always_reduce: bool = False,
) -> tuple[float, dict[str, float]]:
    """Run the backward passes of the parts' losses, summed over all processes. `predict` maps the model and a batch to
    predictions [M]. Returns the loss and the sums of this process's parts."""
    loss_sum, sums = torch.zeros((), device=accelerator.device), dict[str, float]()
    for number, part in enumerate(parts, 1):
        # DDP reduces gradients once, with the last micro-batch; FSDP for each, to keep them sharded.
        reduces = number == len(parts) or always_reduce
        with contextlib.nullcontext() if reduces else accelerator.no_sync(model):
            loss, measured = part.loss(predict(model, part.noisy.to(accelerator.device)))
            # Data parallelism averages over processes; the loss of the global batch is the sum.
            accelerator.backward(loss * accelerator.num_processes)
        loss_sum += loss.detach()
        for name, value in measured.items():
            sums[name] = sums.get(name, 0.0) + float(value)
    return float(loss_sum), sums


def target_logps(model: Any, noisy: NoisyBatch) -> torch.Tensor:
    """Log-probabilities [M] fp32 of a batch's targets under a Hub model, which may be wrapped."""
    return -F.cross_entropy(noisy.logits(model).float(), noisy.targets, reduction="none")


@dataclass(frozen=True, kw_only=True)
class RolloutRecord(StepMetrics):
    """Metrics of a step on sampled completions."""

    reward: float  # mean
    reward_std: float  # over all of the step's completions
    rewards: dict[str, float]  # mean of each reward function
    failed_rewards: int  # completions whose reward raised or hung and counted as 0
    idle_groups: float  # fraction of prompts whose completions all have the same reward, hence no gradient
    kl: float | None  # from the reference model, in nats per token; null without one
    clip_fraction: float  # fraction of tokens whose gain is clipped
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
class PreferenceRecord(StepMetrics):
    """Metrics of a step on preference pairs."""

    preferred: float  # fraction of pairs whose chosen answer gained on the rejected one
    margin: float  # mean of beta x (gain of the chosen answer - gain of the rejected one)
    eval_preferred: float | None = None

    def summary(self) -> str:
        """The metrics as one line for the console."""
        return f"preferred {self.preferred:.3f}  margin {self.margin:.3f}  {super().summary()}"


Item = TypeVar("Item")


@dataclass
class RLTrainer(TrainingLoop, Generic[Item]):
    """Base of both trainers: the step around an update, sums over all replicas, checkpoints."""

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
    def load(
        config: RLConfig, items: list[str], tokenizer: Any, mask_token: int | None, field: str = "data"
    ) -> list[Any]:
        """Read the rows of paths given by the setting `field`."""

    @abc.abstractmethod
    def set_up(self) -> None:
        """Create the parts that need the engine."""

    @abc.abstractmethod
    def train_step(self, step: int) -> tuple[UpdateMetrics, dict[str, float]]:
        """Update the model. Returns metrics, and sums over this replica's rows, with `tokens` among them."""

    @abc.abstractmethod
    def row(self, common: dict[str, Any], sums: dict[str, float]) -> StepMetrics:
        """Metrics of a step, from those common to all training and sums over all replicas."""

    def close(self) -> None:
        """Stop helper processes."""

    @property
    def per_replica(self) -> int:
        """Completions, or pairs, per step of this data parallel replica."""
        return self.config.data.global_batch_size // self.processes.replicas

    def first_row(self, step: int) -> int:
        """Global index of this replica's first completion, or pair, in a step."""
        return (step - 1) * self.config.data.global_batch_size + self.processes.replica * self.per_replica

    def announce(self, step: int, layout: str = "") -> None:
        self.print_summary(step, f"{counted(len(self.rows), 'row')}, {len(self.valid):,} held out", layout)

    def start_step(self, step: int, want_stop: bool) -> tuple[Callable[[], StepMetrics], bool]:
        config, began = self.config, time.perf_counter()
        self.engine.manual_seed(torch_seed(config.data.seed, step, self.processes.rank))
        rate = learning_rate(config, step)
        self.engine.set_learning_rate(rate)
        figures, own = self.train_step(step)
        sums = self.summed({"loss": figures.loss, **figures.sums, **own})
        stop = self.summed({"stop": float(want_stop)}, of_replicas=False)["stop"] > 0
        if not math.isfinite(loss := sums.pop("loss")):
            raise NonFiniteError(f"the loss is {loss}: lower `lr`", [f"step {step}"])
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
        """Sum each value over the replicas, whose ranks have equal values, or over all processes."""
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

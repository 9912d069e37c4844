"""The loop that policy and preference runs share, the rows of their metrics, and what it asks of an engine.

An `UpdateEngine` has log-probabilities, updates and a model to sample from. A micro-batch is a `NoisyBatch`, and its
log-probabilities are those of its M targets: losses of the methods are functions of them (`UpdatePart`), whatever
holds the weights.
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

from dlm_bridge.distributed import ALONE, Replicas
from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.objectives.batches import NoisyBatch
from dlm_bridge.objectives.noise import torch_seed
from dlm_bridge.train.config import RLConfig
from dlm_bridge.train.metrics import StepMetrics
from dlm_bridge.train.rl.rows import Shuffled
from dlm_bridge.train.rl.updates import UpdateMetrics
from dlm_bridge.train.schedule import learning_rate
from dlm_bridge.train.trainer import Processes, TrainingLoop, check_same_count

# Of log-probabilities [M] fp32: a scalar, what they add to the loss of the global batch, and detached sums by name.
LogpLoss = Callable[[torch.Tensor], tuple[torch.Tensor, dict[str, torch.Tensor]]]


@dataclass(frozen=True)
class UpdatePart:
    """A micro-batch of an update, with its loss."""

    noisy: NoisyBatch
    loss: LogpLoss


VALUE_FOLDER = "value"  # in a checkpoint


class ValueUpdates(abc.ABC):
    """A value model and its optimizer. All processes call `values` and `update` together, with as many micro-batches
    each."""

    config: RLConfig

    @abc.abstractmethod
    def values(self, batches: Sequence[NoisyBatch]) -> list[torch.Tensor]:
        """[M] fp32 for each batch: the values of its targets, without a graph."""

    @abc.abstractmethod
    def update(self, parts: Sequence[UpdatePart], step: int) -> float:
        """One optimizer step on losses of values, summed over all replicas, of which it returns this replica's part.
        Raises DlmBridgeError where the gradient norm is NaN."""

    @abc.abstractmethod
    def set_learning_rate(self, lr: float) -> None:
        """Give every parameter group its learning rate, where that of the policy is `lr`."""

    @abc.abstractmethod
    def trained_parameters(self) -> Iterable[torch.Tensor]:
        """The parameters that this process updates."""

    def learning_rate(self, lr: float) -> float:
        """That of the value model where the policy's is `lr`: times --value-lr over --lr."""
        peak, own = self.config.optimizer.lr, self.config.rl.value_lr
        return lr if own is None else own * (lr / peak if peak else 1.0)

    def diverged(self, step: int, norm: float) -> DlmBridgeError:
        """What an update raises for a gradient norm that is not finite."""
        return DlmBridgeError(f"step {step}: the value model's gradient norm is {norm}: lower --value-lr")


def value_file(checkpoint: Path, name: str) -> Path:
    """The file `name` of a checkpoint's value model. Raises DlmBridgeError where there is none."""
    file = checkpoint / VALUE_FOLDER / name
    if not file.is_file():
        raise DlmBridgeError(f"--value-model: {checkpoint} has no value model to go on with: choose another --output")
    return file


class UpdateEngine(abc.ABC):
    """The model that is trained, its reference and its optimizer, wherever they are. All processes call every method
    together, with as many micro-batches each, but for what says otherwise."""

    processes: Processes
    replica: Replicas  # that hold one replica of the trained model: what they sample they share
    samplers: Replicas = ALONE  # that have one model to sample from
    plain_model: Any  # family and config; its weights only where each process holds them
    value_model: ValueUpdates | None = None

    @abc.abstractmethod
    def row_width(self, width: int) -> int | None:
        """To how many tokens this step's rows are padded, of which this process's longest has `width`; None where each
        micro-batch may have a width of its own."""

    @abc.abstractmethod
    def logps(self, batches: Sequence[NoisyBatch]) -> list[torch.Tensor]:
        """[M] fp32 for each batch: its targets' log-probabilities, without a graph."""

    @abc.abstractmethod
    def reference_logps(self, batches: Sequence[NoisyBatch]) -> list[torch.Tensor]:
        """The same by the reference model."""

    @abc.abstractmethod
    def forward_backward(self, parts: Sequence[UpdatePart]) -> tuple[float, dict[str, float]]:
        """Accumulate the gradients of the parts' losses, summed over all replicas. Returns the loss and the sums of
        this replica's parts."""

    @abc.abstractmethod
    def optimizer_step(self, step: int) -> float:
        """Clip the gradients, step, clear them; the norm before clipping. Raises DlmBridgeError where it is NaN."""

    @abc.abstractmethod
    def evaluating(self) -> AbstractContextManager[None]:
        """In which `logps` are of the model in evaluation mode."""

    @abc.abstractmethod
    def sampling_model(self) -> AbstractContextManager[Any]:
        """In which the yielded Hub model has the current weights and is this process's own, or that of the ranks of
        `samplers`, which run it together."""

    @abc.abstractmethod
    def set_learning_rate(self, lr: float) -> None:
        """Give every parameter group its learning rate."""

    @abc.abstractmethod
    def manual_seed(self, seed: int) -> None:
        """Seed the generators of dropout, this process's own."""

    @abc.abstractmethod
    def trained_parameters(self) -> Iterable[torch.Tensor]:
        """The parameters that this process updates. It may call it alone."""

    @abc.abstractmethod
    def peak_memory(self) -> int | None:
        """Bytes that the device has allocated at once so far; None on CPU."""

    @abc.abstractmethod
    def save_checkpoint(self, step: int, state: dict[str, Any]) -> Path:
        """Write weights, optimizer and `state` (numbers)."""

    @abc.abstractmethod
    def load_checkpoint(self, folder: Path) -> dict[str, Any]:
        """Set the optimizer, and weights that are not set yet, and return the `state`. Raises DlmBridgeError."""

    def finish(self) -> None:  # noqa: B027 (most have nothing in the background)
        """Wait for what still runs in the background."""


def accumulate_gradients(
    accelerator: Any,
    model: Any,
    parts: Sequence[UpdatePart],
    predict: Callable[[Any, NoisyBatch], torch.Tensor],
    always_reduce: bool = False,
) -> tuple[float, dict[str, float]]:
    """Backward passes of the parts' losses, summed over all processes, of what `predict` makes of the model and each
    batch, [M]. Returns the loss and the sums of this process's parts."""
    loss_sum, sums = torch.zeros((), device=accelerator.device), dict[str, float]()
    for number, part in enumerate(parts, 1):
        # DDP sums gradients over the processes once, with the last micro-batch; FSDP each time, since a process has no
        # room for unsharded ones.
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
    """[M] fp32, the log-probabilities of a batch's targets under a Hub model, which may be wrapped."""
    return -F.cross_entropy(noisy.logits(model).float(), noisy.targets, reduction="none")


@dataclass(frozen=True, kw_only=True)
class RolloutRecord(StepMetrics):
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
class PreferenceRecord(StepMetrics):
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
    def load(
        config: RLConfig, items: list[str], tokenizer: Any, mask_token: int | None, flag: str = "--data"
    ) -> list[Any]:
        """The rows of some paths, which `flag` has given. Raises DlmBridgeError."""

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

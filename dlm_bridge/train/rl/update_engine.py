"""What the loop of reinforcement learning asks of an engine: log-probabilities, updates, a model to sample from.

A micro-batch is a `NoisyBatch`, and its log-probabilities are those of its M targets: losses of the methods are
functions of them (`UpdatePart`), whatever holds the weights.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812

from dlm_bridge.objectives.batches import NoisyBatch
from dlm_bridge.train.trainer import Processes

# Of log-probabilities [M] fp32: a scalar, what they add to the loss of the global batch, and detached sums by name.
LogpLoss = Callable[[torch.Tensor], tuple[torch.Tensor, dict[str, torch.Tensor]]]


@dataclass(frozen=True)
class UpdatePart:
    """A micro-batch of an update, with its loss."""

    noisy: NoisyBatch
    loss: LogpLoss


@dataclass(frozen=True)
class RankGroup:
    """Ranks that work together."""

    rank: int = 0  # of this process, among them
    size: int = 1
    gather: Callable[[Any], list[Any]] = lambda own: [own]  # each rank's object, by rank, on all of them

    @classmethod
    def of(cls, group: Any) -> RankGroup:
        """The ranks of a process group between CPUs."""

        def gather(own: Any) -> list[Any]:
            found: list[Any] = [None] * group.size()
            dist.all_gather_object(found, own, group=group)
            return found

        return cls(group.rank(), group.size(), gather)


class ValueUpdates(abc.ABC):
    """A value model and its optimizer. All processes call both methods together, with as many micro-batches each."""

    @abc.abstractmethod
    def values(self, batches: Sequence[NoisyBatch]) -> list[torch.Tensor]:
        """[M] fp32 for each batch: the values of its targets, without a graph."""

    @abc.abstractmethod
    def update(self, parts: Sequence[UpdatePart], step: int) -> float:
        """One optimizer step on losses of values, summed over all processes, of which it returns this process's part.
        Raises DlmBridgeError where the gradient norm is NaN."""


class UpdateEngine(abc.ABC):
    """The model that is trained, its reference and its optimizer, wherever they are. All processes call every method
    together, with as many micro-batches each, but for what says otherwise."""

    processes: Processes
    replica: RankGroup  # that hold one replica of the trained model: what they sample they share
    samplers: RankGroup = RankGroup()  # that have one model to sample from
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

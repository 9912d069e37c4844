"""The training loop and the base class of both engines' trainers: a step, evaluation, checkpoints and metrics.

`TrainingLoop.run` decides when to step, evaluate, sample, save and stop. `Trainer.start_step` is one optimizer step
from top to bottom; an engine overrides the parts of it that depend on its model: `prepare`, `forward_backward`,
`optimizer_step`, `evaluation_sums`, `save_checkpoint` and `load_checkpoint`.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterable, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

from dlm_bridge.data.blocks import Samples
from dlm_bridge.data.loader import BatchSampler, Prefetcher
from dlm_bridge.distributed import raised_everywhere
from dlm_bridge.errors import DlmBridgeError, printable
from dlm_bridge.objectives.base import Objective, divisors
from dlm_bridge.objectives.batches import IGNORE_INDEX, NoisyBatch
from dlm_bridge.objectives.noise import Purpose, Uniforms, torch_seed
from dlm_bridge.processes import catch_sigterm
from dlm_bridge.train.checkpoints import check_finite
from dlm_bridge.train.config import TrainConfig
from dlm_bridge.train.metrics import (
    CudaTimer,
    DeferredMetrics,
    MetricsFile,
    StepMetrics,
    flops_per_token,
    peak_flops,
    plot_loss,
)
from dlm_bridge.train.monitoring import RunMonitor, TextSamples
from dlm_bridge.train.norms import LayerNorms
from dlm_bridge.train.schedule import anneal_mask, at_step, batch_sampler, learning_rate, with_block_size

EVALUATION_STEP = 0  # step in the key of an evaluation's noise: every evaluation draws the same


@dataclass(frozen=True)
class Processes:
    """This process among those of the run."""

    rank: int
    world_size: int
    replica: int  # data parallel rank
    replicas: int
    device: torch.device
    device_name: str | None  # None on CPU
    cpu_group: Any = None  # group of all processes between CPUs; None: the default group

    def largest(self, value: int) -> int:
        """The largest value of all processes, which call this together."""
        if self.world_size == 1:
            return value
        found = torch.tensor(value)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self.cpu_group)
        return int(found)


class TrainingLoop(abc.ABC):
    """One process's part of a run. The main process writes the metrics; all processes take every step together."""

    config: TrainConfig
    processes: Processes
    output: Path
    console: Console
    tokenizer: Any
    plain_model: Any  # the Hub model that is trained, without its wrappers
    valid: Sized  # validation blocks

    @property
    def main(self) -> bool:
        """Whether this process writes metrics and checkpoints and shows the progress."""
        return self.processes.rank == 0

    @abc.abstractmethod
    def announce(self, step: int) -> None:
        """Print what starts, or resumes after `step`, on the main process."""

    @abc.abstractmethod
    def start_step(self, step: int, want_stop: bool) -> tuple[Callable[[], StepMetrics], bool]:
        """One optimizer step, counted from 1: its metrics, and whether any process wants to stop after it.

        Returns as soon as the device has been given the step's work; the returned function waits for the metrics.
        """

    @abc.abstractmethod
    def evaluate(self) -> float:
        """The validation loss, over the same blocks with the same noise every time."""

    @abc.abstractmethod
    def save_checkpoint(self, step: int) -> Path:
        """Write weights, optimizer state and what else a resume needs; every process calls it."""

    @abc.abstractmethod
    def load_checkpoint(self, folder: Path) -> None:
        """Set weights and optimizer state to a checkpoint's. Raises DlmBridgeError where it is damaged or of other
        data."""

    def trained_parameters(self) -> Iterable[torch.Tensor]:
        """The parameters that this process updates."""
        return (weight for weight in self.plain_model.parameters() if weight.requires_grad)

    def saves_locally(self, step: int) -> bool:
        """Whether a local checkpoint is due after `step`. Asked only where no other checkpoint is due."""
        return False

    def save_locally(self, step: int, metrics: MetricsFile | None) -> None:  # noqa: B027 (one engine has them)
        """Write the local checkpoint of `step`. Every process calls it; `metrics` is None but on the main process."""

    def finish(self) -> None:  # noqa: B027 (most have nothing in the background)
        """Wait for what still runs in the background after the last step. Raises DlmBridgeError where it fails."""

    def evaluated(self, metrics: StepMetrics) -> StepMetrics:
        """A step's metrics with those of an evaluation after it."""
        return dataclasses.replace(metrics, eval_loss=self.evaluate())

    def sample(self, samples: TextSamples, step: int) -> None:
        """Sample texts from the model as it is after `step`. All processes call it."""
        samples.write(step, self.plain_model)

    def step(self, step: int, want_stop: bool) -> tuple[StepMetrics, bool]:
        """As `start_step`, but wait for the metrics and return them."""
        metrics, stop = self.start_step(step, want_stop)
        return metrics(), stop

    def run(self, step: int) -> Path:
        """Train from after `step` and return the last checkpoint's folder."""
        config = self.config
        monitor = RunMonitor(config, self.output, self.processes.device, self.console, step, self.main)
        samples = None
        if config.logging.sample_interval:
            samples = TextSamples(config, self.tokenizer, self.output, step, self.main)
            if step == 0:  # for comparison; a prompt that cannot be sampled ends the run here
                self.sample(samples, 0)
        limit = config.schedule.exit_duration
        deadline = math.inf if limit is None else time.monotonic() + 60 * limit
        steps = config.schedule.steps
        with catch_sigterm() as terminated, monitor:
            pending: Callable[[], StepMetrics] | None = None  # of a step that the device may still work on
            while True:
                step += 1
                monitor.begin(step)
                try:
                    metrics, stop = self.start_step(step, terminated.is_set() or time.monotonic() >= deadline)
                finally:
                    if pending is not None:
                        monitor.write(pending())
                        pending = None
                monitor.end(step)
                last = stop or step == steps
                evaluates, saves, samples_now = self._due(step, last)
                saves_locally = not saves and self.saves_locally(step)
                if not (evaluates or saves or samples_now or saves_locally):
                    pending = metrics
                    continue
                monitor.write(self.evaluated(metrics()) if evaluates else metrics())
                if samples is not None and samples_now:
                    self.sample(samples, step)
                if saves:
                    folder = self.save(step, monitor.metrics_file)
                if saves_locally:
                    self.save_locally(step, monitor.metrics_file)
                if last:
                    break
        self.finish()
        monitor.close()
        if self.main:
            done = "done" if step == steps else f"stopped early (continue with --resume), step {step}"
            self.console.print(printable(f"{done}: the model is at {folder}"), highlight=False, soft_wrap=True)
        return folder

    def save(self, step: int, metrics: MetricsFile | None) -> Path:
        """Write the checkpoint of `step`. Every process calls it; `metrics` is None but on the main process."""
        self.before_save(step, metrics)
        folder = self.save_checkpoint(step)
        with raised_everywhere():
            if metrics is not None:
                plot_loss(metrics.rows, self.output / "loss.png")
        return folder

    def before_save(self, step: int, metrics: MetricsFile | None) -> None:
        """Check the weights and flush the metrics, before any checkpoint of `step`. Raises DlmBridgeError where a
        weight is not finite."""
        self._check_finite(step)
        with raised_everywhere():
            if metrics is not None:
                metrics.sync()

    def sum_on_cpu(self, values: torch.Tensor) -> torch.Tensor:
        """`values`, on the CPU, summed over all processes in place: it never waits for the device."""
        if self.processes.world_size > 1:
            dist.all_reduce(values, group=self.processes.cpu_group)
        return values

    def _check_finite(self, step: int) -> None:
        """Raise DlmBridgeError on every process where one of them has weights that are not finite."""
        error: DlmBridgeError | None = None
        try:
            check_finite(step, self.trained_parameters())
        except DlmBridgeError as found:
            error = found
        if self.sum_on_cpu(torch.tensor(float(error is not None))):
            raise error or DlmBridgeError(f"step {step}: another process has weights that are not finite")

    def _due(self, step: int, last: bool) -> tuple[bool, bool, bool]:
        """Whether the run evaluates, saves and samples after `step`, in the `last` one in any case."""
        logging, checkpoint = self.config.logging, self.config.checkpoint

        def due(interval: int) -> bool:
            return bool(interval) and (last or step % interval == 0)

        evaluates = bool(len(self.valid)) and due(logging.eval_interval)
        saves = last or step in checkpoint.saves or due(checkpoint.save_interval)
        return evaluates, saves, due(logging.sample_interval)


# One data parallel rank's micro-batches of a step, as the engine's model takes them, and its part of the divisors of
# the K loss terms, [K] float64; with z-loss [K + 1], the last one the number of its loss positions.
StepInputs = tuple[list[Any], torch.Tensor]


class Trainer(TrainingLoop):
    """What both engines' trainers share; see the module's docstring for what an engine overrides."""

    plain_model: Any  # its family, config and parameters; in the Megatron engine without weights
    optimizer: Any
    valid: Samples

    def __init__(
        self,
        config: TrainConfig,
        model: Any,
        objective: Objective,
        data: tuple[Samples, Samples, Any],
        console: Console,
        processes: Processes,
    ) -> None:
        """`data`: training blocks, validation blocks, tokenizer."""
        self.config = config
        self.plain_model = model
        self.objective = objective
        self.train, self.valid, self.tokenizer = data
        self.output = Path(config.checkpoint.output)
        self.console = console
        self.processes = processes
        self.device = processes.device
        self.micro_batch_size, _ = config.data.accumulation(processes.replicas)
        self.sampler = batch_sampler(config)
        self.flops_per_token = flops_per_token(model, config.data.seq_length) * objective.tokens_read
        self.peak_flops = peak_flops(processes.device_name, config.precision.name)
        self.z_loss_coeff = config.objective.z_loss_coeff
        self.prefetcher: Prefetcher[StepInputs] | None = None

    def announce(self, step: int, layout: str = "") -> None:
        if self.main:
            begun = "training" if step == 0 else f"resuming at step {step}:"
            self.console.print(
                f"{begun} {len(self.train):,} blocks of {self.config.data.seq_length} tokens, {len(self.valid):,} for "
                f"validation{layout}",
                highlight=False,
                soft_wrap=True,
            )

    def run(self, step: int) -> Path:
        self.prefetcher = Prefetcher(self.produce, step + 1)
        try:
            return super().run(step)
        finally:
            self.close()

    def close(self) -> None:
        """Stop what runs in the background."""
        if self.prefetcher is not None:
            self.prefetcher.close()

    # -- one step, in the order in which it runs

    def start_step(self, step: int, want_stop: bool) -> tuple[Callable[[], StepMetrics], bool]:
        """One optimizer step, counted from 1. Nothing in it waits for the device, but for an optimizer that does."""
        timer = CudaTimer(self.device)
        self.between_steps()
        assert self.prefetcher is not None
        batches, normaliser_K = self.prefetcher.get()
        self.objective = with_block_size(self.objective, self.plain_model, self.config, step)
        # Dropout too depends on nothing that a restart forgets.
        self.manual_seed(torch_seed(self.config.data.seed, step, self.processes.rank))
        divisors_K, stop = self._global_divisors(normaliser_K, want_stop)
        lr = learning_rate(self.config, step)
        self.set_learning_rate(lr)
        sums_K = self.forward_backward(batches, divisors_K)
        norms = self.layer_norms if self._measures_norms(step) else None
        squares = None if norms is None else norms.gradient_squares()
        finite, norm = self.optimizer_step()
        values = [sums_K, norm.detach().to(sums_K)[None]]
        if norms is not None and squares is not None:
            values.append(norms.norms(squares))
        metrics = DeferredMetrics(torch.cat(values), timer)
        return functools.partial(self._step_metrics, step, lr, metrics, finite, self.peak_memory(), norms), stop

    def produce(self, step: int) -> StepInputs:
        """The batches of a training step, made in the background and ahead of it.

        The noise is drawn on the CPU, where it costs little and is the same for every engine and layout.
        """
        config, objective = self.config, at_step(self.objective, self.config, step)
        noisy = []
        for samples in self.rank_samples(step):
            uniforms = Uniforms.keyed(config.data.seed, step, samples, config.data.seq_length)
            batch = objective.noise(uniforms=uniforms, **vars(self.train.rows(samples)))
            noisy.append(anneal_mask(batch, config, step, samples))
        return self.step_inputs(noisy)

    def rank_samples(self, step: int, sampler: BatchSampler | None = None) -> list[list[int]]:
        """The global sample indices of this data parallel rank's micro-batches, of the training batches by default."""
        return (sampler or self.sampler).samples(
            step, self.processes.replica, self.processes.replicas, self.micro_batch_size
        )

    def step_inputs(self, noisy: Sequence[NoisyBatch]) -> StepInputs:
        """Noisy batches of one step with their normaliser, as the engine's model takes them."""
        normaliser = torch.stack([batch.normaliser for batch in noisy]).sum(dim=0)
        if self.z_loss_coeff:
            count = sum(batch.weights.count_nonzero() for batch in noisy)
            normaliser = torch.cat([normaliser, torch.as_tensor(count).to(normaliser)[None]])
        return self.prepare(noisy), normaliser

    @abc.abstractmethod
    def prepare(self, noisy: Sequence[NoisyBatch]) -> list[Any]:
        """The micro-batches of a step as the engine's model takes them, in pinned memory where there is a GPU."""

    def between_steps(self) -> None:
        """Hook for an engine's work on the host while the device still runs the step before."""

    def manual_seed(self, seed: int) -> None:
        """Seed torch's generators."""
        torch.manual_seed(seed)

    def _global_divisors(self, normaliser_K: torch.Tensor, want_stop: bool) -> tuple[torch.Tensor, bool]:
        """The divisors of the global batch's loss, and whether any process wants to stop."""
        stop_votes = torch.tensor([float(want_stop)], dtype=torch.float64)
        summed = self.sum_on_cpu(torch.cat([self.counted_once(normaliser_K), stop_votes]))
        return divisors(summed[:-1]), bool(summed[-1] > 0)

    def counted_once(self, normaliser_K: torch.Tensor) -> torch.Tensor:
        """The summand of this process in a sum over all processes, for a value that all ranks of a replica have: zero
        but on one rank of each replica."""
        return normaliser_K

    def set_learning_rate(self, lr: float) -> None:
        """Give every parameter group its learning rate."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    @abc.abstractmethod
    def forward_backward(self, batches: list[Any], divisors_K: torch.Tensor) -> torch.Tensor:
        """Accumulate the gradients of the global batch's loss.

        Returns:
            The K loss terms, float64 on the device, summed over all processes and divided by `divisors_K`; with z-loss
            followed by the z-loss, and with multi-token prediction by its loss before `mtp_loss_scaling_factor`.
        """

    @abc.abstractmethod
    def optimizer_step(self) -> tuple[bool, torch.Tensor]:
        """Clip the gradients, update the weights and clear the gradients.

        Returns:
            Whether the norm has to be finite: under fp16's loss scale gradients may overflow, and the step is skipped.
            The gradient norm before clipping, a scalar on the device.
        """

    @functools.cached_property
    @abc.abstractmethod
    def layer_norms(self) -> LayerNorms:
        """Measures the parameter and gradient norms of `--norm-interval`."""

    def _measures_norms(self, step: int) -> bool:
        interval = self.config.logging.norm_interval
        return interval > 0 and step % interval == 0

    @abc.abstractmethod
    def peak_memory(self) -> int | None:
        """Bytes that the device with the largest peak has allocated at once so far; None on CPU."""

    def _step_metrics(
        self,
        step: int,
        lr: float,
        metrics: DeferredMetrics,
        finite: bool,
        peak_memory: int | None,
        norms: LayerNorms | None,
    ) -> StepMetrics:
        """The metrics of a step, once the device has finished it. Raises DlmBridgeError where the loss or the gradient
        norm is not finite: the next step may have started by then, but no checkpoint has been written."""
        values, seconds = metrics.read()
        measured = None if norms is None else norms.named(values[-len(norms.layers) - 1 :])
        *losses, norm = values if norms is None else values[: -len(norms.layers) - 1]
        loss, more = sum(losses[: self.objective.terms]), losses[self.objective.terms :]
        z_loss = more.pop(0) if self.z_loss_coeff else None
        if not math.isfinite(loss):
            raise DlmBridgeError(f"step {step}: the loss is {loss}: lower --lr, or resume from before with another")
        if finite and not math.isfinite(norm):
            raise DlmBridgeError(f"step {step}: the gradient norm is {norm}: lower --lr")
        seq_length = self.config.data.seq_length
        tokens_per_s = self.sampler.batch_size(step) * seq_length / seconds
        devices = self.processes.world_size
        peak = None if self.peak_flops is None else self.peak_flops * devices
        return StepMetrics(
            step=step,
            loss=loss,
            grad_norm=norm if math.isfinite(norm) else None,
            lr=lr,
            tokens=self.sampler.samples_before(step + 1) * seq_length,
            tokens_per_s=tokens_per_s,
            tokens_per_s_per_device=tokens_per_s / devices,
            mfu=None if peak is None else tokens_per_s * self.flops_per_token / peak,
            peak_memory=peak_memory,
            z_loss=z_loss,
            mtp_loss=more[0] if more else None,
            param_norm=None if measured is None else measured.param_norm,
            layer_grad_norms=None if measured is None else measured.layer_grad_norms,
        )

    # -- evaluation

    @torch.no_grad()
    def evaluate(self) -> float:
        """The validation loss, over the same blocks with the same noise every time. The model is evaluated as a
        checkpoint of this step would be used: with its block size, and with its family's own attention even while the
        training mask is annealed."""
        count = min(len(self.valid), self.config.logging.eval_batches * self.config.data.global_batch_size)
        objective = dataclasses.replace(self.objective, length_variation=0.0)
        sums_K, normaliser_K = self.evaluation_sums(objective, count)
        return float((sums_K / divisors(normaliser_K)).sum())

    @abc.abstractmethod
    def evaluation_sums(self, objective: Objective, count: int) -> torch.Tensor:
        """[2, K] float64 on the CPU: loss sums and normalisers of the first `count` validation blocks."""

    def evaluation_batch(self, objective: Objective, samples: Sequence[int], count: int) -> NoisyBatch:
        """Validation blocks with their noise; those from `count` on do not exist and count nothing."""
        exists = torch.tensor([sample < count for sample in samples])
        rows = self.valid.rows([sample if sample < count else 0 for sample in samples])
        if not exists.all():
            labels = rows.input_ids if rows.labels is None else rows.labels
            rows = dataclasses.replace(rows, labels=torch.where(exists[:, None], labels, IGNORE_INDEX))
        data = self.config.data
        uniforms = Uniforms.keyed(data.seed, EVALUATION_STEP, samples, data.seq_length, Purpose.EVAL_NOISE)
        return objective.noise(uniforms=uniforms, **vars(rows))

    def check_same_data(self, train_blocks: int) -> None:
        """Raise DlmBridgeError where a checkpoint's run had another number of training blocks."""
        check_same_count("training blocks", len(self.train), train_blocks)


def check_same_count(what: str, found: int, recorded: int) -> None:
    """Raise DlmBridgeError where `--data` does not give as many `what` as the run began with."""
    if found != recorded:
        raise DlmBridgeError(
            f"--data gives {found} {what}, the run began with {recorded}: resume with the data that it began with"
        )

"""Training loop and base class of both engines' trainers: steps, evaluation, checkpoints and metrics.

`TrainingLoop.run` decides when to step, evaluate, sample, save and stop. `Trainer.start_step` runs one optimizer step
from top to bottom. An engine overrides the parts that depend on its model: `prepare`, `forward_backward`,
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

from dlm_bridge.data.blocks import LabelledTokens, Samples
from dlm_bridge.data.loader import BatchSampler, Prefetcher
from dlm_bridge.distributed import from_all, raised_everywhere
from dlm_bridge.errors import InputFileError, NonFiniteError, SettingError, counted, printable
from dlm_bridge.objectives.base import Objective, divisors
from dlm_bridge.objectives.batches import IGNORE_INDEX, NoisyBatch
from dlm_bridge.objectives.noise import Purpose, Uniforms, torch_seed
from dlm_bridge.processes import catch_sigterm
from dlm_bridge.train.checkpoints import check_finite, step_folder
from dlm_bridge.train.config import TrainConfig
from dlm_bridge.train.early_stopping import EarlyStopping, KeptCheckpoints
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
from dlm_bridge.train.output import RunEnd, write_status
from dlm_bridge.train.schedule import anneal_mask, at_step, batch_sampler, learning_rate, with_block_size
from dlm_bridge.train.summary import print_summary

EVALUATION_STEP = 0  # step in the noise key of evaluations, so that every evaluation has the same noise


@dataclass(frozen=True)
class Processes:
    """Rank, device and process groups of this process."""

    rank: int
    world_size: int
    replica: int  # data parallel rank
    replicas: int
    device: torch.device
    device_name: str | None  # None on CPU
    cpu_group: Any = None  # group of all processes for CPU tensors; None: the default group

    def largest(self, value: int) -> int:
        """Maximum of `value` over all processes. Every process must call it."""
        if self.world_size == 1:
            return value
        found = torch.tensor(value)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self.cpu_group)
        return int(found)


class TrainingLoop(abc.ABC):
    """Training loop of one process. All processes run every step together; the main process writes the metrics."""

    config: TrainConfig
    processes: Processes
    output: Path
    console: Console
    tokenizer: Any
    plain_model: Any  # the trained Hub model without wrappers
    valid: Sized  # validation blocks
    early_stopping: EarlyStopping | None = None  # set by `run`

    @property
    def main(self) -> bool:
        """True if this process writes metrics and checkpoints and shows progress."""
        return self.processes.rank == 0

    @abc.abstractmethod
    def announce(self, step: int) -> None:
        """Print on the main process that the run starts, or resumes after `step`."""

    def print_summary(self, step: int, data: str, layout: str) -> None:
        """Print the run's summary on the main process; see `train.summary`."""
        if not self.main:
            return
        processes = self.processes
        name, count = processes.device_name or "the CPU", processes.world_size
        devices = f"{count} processes on {name}" if count > 1 else name
        print_summary(
            self.console, self.config, self.plain_model, data, step, devices + layout, processes.device, count
        )  # fmt: skip

    @abc.abstractmethod
    def start_step(self, step: int, want_stop: bool) -> tuple[Callable[[], StepMetrics], bool]:
        """Start one optimizer step without waiting for the device.

        Args:
            step: number of the step, from 1.
            want_stop: True if this process wants to stop after the step.

        Returns:
            A function that waits for the step and returns its metrics; True if any process wants to stop.
        """

    @abc.abstractmethod
    def evaluate(self) -> float:
        """Compute the validation loss, on the same blocks with the same noise each time."""

    @abc.abstractmethod
    def save_checkpoint(self, step: int) -> Path:
        """Write weights, optimizer state and everything else that a resume needs. Every process calls it."""

    @abc.abstractmethod
    def load_checkpoint(self, folder: Path) -> None:
        """Load weights and optimizer state from a checkpoint. Raises CheckpointError if it is damaged, and
        InputFileError if the run had other data."""

    def checkpoint_folder(self, step: int) -> Path:
        """Folder of the checkpoint of `step`."""
        return step_folder(self.output, step)

    def trained_parameters(self) -> Iterable[torch.Tensor]:
        """Parameters that this process updates."""
        return (weight for weight in self.plain_model.parameters() if weight.requires_grad)

    def saves_locally(self, step: int) -> bool:
        """True if a local checkpoint is due after `step`. Called only if no other checkpoint is due."""
        return False

    def save_locally(self, step: int, metrics: MetricsFile | None) -> None:  # noqa: B027 (one engine has them)
        """Write the local checkpoint of `step`. Every process calls it; `metrics` is None on all but the main one."""

    def finish(self) -> None:  # noqa: B027 (most have nothing in the background)
        """Wait for background work after the last step. Raises ResourceError if it fails."""

    def evaluated(self, metrics: StepMetrics) -> StepMetrics:
        """Evaluate, and return the step's metrics with the validation loss."""
        return dataclasses.replace(metrics, eval_loss=self.evaluate())

    def sample(self, samples: TextSamples, step: int) -> None:
        """Sample texts from the model after `step`. Every process calls it."""
        samples.write(step, self.plain_model)

    def step(self, step: int, want_stop: bool) -> tuple[StepMetrics, bool]:
        """Run one step: `start_step`, then wait for the metrics."""
        metrics, stop = self.start_step(step, want_stop)
        return metrics(), stop

    def run(self, step: int) -> RunEnd:
        """Train from after `step`."""
        config = self.config
        monitor = RunMonitor(config, self.output, self.processes.device, self.console, step, self.main)
        samples = None
        if config.logging.sample_interval:
            samples = TextSamples(config, self.tokenizer, self.output, step, self.main)
            if step == 0:  # for comparison; a prompt that cannot be sampled ends the run here
                self.sample(samples, 0)
        limit = config.schedule.exit_duration
        deadline = math.inf if limit is None else time.monotonic() + 60 * limit
        steps = config.schedule.last_step
        early = self.early_stopping = self._begin_early_stopping(monitor.metrics_file)
        if early is not None and early.ends:
            monitor.close()
            return self._end(step, self.checkpoint_folder(step))
        self._write_status("running", step)
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
                saves_locally = self.saves_locally(step)
                if not (evaluates or saves or samples_now or saves_locally):
                    pending = metrics
                    continue
                found = self.evaluated(metrics()) if evaluates else metrics()
                monitor.write(found)
                if early is not None and found.eval_loss is not None:
                    saves |= early.add(step, found.eval_loss)
                    last |= early.ends
                    saves |= last
                if samples is not None and samples_now:
                    self.sample(samples, step)
                if saves:
                    folder = self.save(step, monitor.metrics_file)
                elif saves_locally:
                    self.save_locally(step, monitor.metrics_file)
                if last:
                    break
        self.finish()
        monitor.close()
        return self._end(step, folder)

    def _end(self, step: int, folder: Path) -> RunEnd:
        """End the run after `step`, whose checkpoint is `folder`."""
        early = self.early_stopping
        finished = step == self.config.schedule.last_step or (early is not None and early.ends)
        self._write_status("finished" if finished else "stopped", step)
        best = None if early is None or not early.step else self.checkpoint_folder(early.step)
        done = "done" if finished else f"stopped early (continue with `resume`), step {step}"
        if early is not None and early.ends:
            done = f"done at step {step}, after {early.waited} validations without a lower loss"
        where = f"the model is at {folder}"
        if early is not None and best is not None:
            where = f"the best model (step {early.step}, validation loss {early.loss:.4f}) is at {best}"
        if self.main:
            self.console.print(printable(f"{done}: {where}"), highlight=False, soft_wrap=True)
        return RunEnd(folder, step, finished, best)

    def _begin_early_stopping(self, metrics: MetricsFile | None) -> EarlyStopping | None:
        """Early stopping with the validations of the run so far, equal on all processes; None without it. A run that
        began without it, and therefore has no checkpoint of the lowest loss, counts from here."""
        patience = self.config.schedule.early_stopping_patience
        if patience is None:
            return None
        if not len(self.valid):
            raise SettingError("early_stopping_patience", "needs validation data, but `split` leaves no rows for it")
        early = EarlyStopping(patience)
        if metrics is not None:
            early.add_rows(metrics.rows)
            if early.step and not self.checkpoint_folder(early.step).is_dir():
                early = EarlyStopping(patience)
        return from_all(early)[0]

    def _write_status(self, state: str, step: int) -> None:
        """Write status.json on the main process."""
        early = self.early_stopping
        best = None if early is None or not early.step else {"step": early.step, "eval_loss": early.loss}
        if self.main:
            write_status(self.output, state, step, self.config.schedule.last_step, best)

    def kept_checkpoints(self) -> KeptCheckpoints:
        """Checkpoints that stay once the next one is complete."""
        keep_last, early = self.config.checkpoint.keep_last, self.early_stopping
        if early is None:
            return KeptCheckpoints(keep_last)
        return KeptCheckpoints(keep_last, early.step, 0 if self._saves(early.previous) else early.previous)

    def save(self, step: int, metrics: MetricsFile | None) -> Path:
        """Write the checkpoint of `step`. Every process calls it; `metrics` is None on all but the main one."""
        self.before_save(step, metrics)
        folder = self.save_checkpoint(step)
        with raised_everywhere():
            if metrics is not None:
                plot_loss(metrics.rows, self.output / "loss.png")
                self._write_status("running", step)
        return folder

    def before_save(self, step: int, metrics: MetricsFile | None) -> None:
        """Check the weights and flush the metrics, before any checkpoint of `step`. Raises NonFiniteError if a weight
        is not finite."""
        self._check_finite(step)
        with raised_everywhere():
            if metrics is not None:
                metrics.sync()

    def sum_on_cpu(self, values: torch.Tensor) -> torch.Tensor:
        """All-reduce `values`, on the CPU, in place. Does not wait for the device."""
        if self.processes.world_size > 1:
            dist.all_reduce(values, group=self.processes.cpu_group)
        return values

    def _check_finite(self, step: int) -> None:
        """Raise NonFiniteError on every process if any process has non-finite weights."""
        error: NonFiniteError | None = None
        try:
            check_finite(step, self.trained_parameters())
        except NonFiniteError as found:
            error = found
        if self.sum_on_cpu(torch.tensor(float(error is not None))):
            raise error or NonFiniteError("another process has NaN or infinite weights", [f"step {step}"])

    def _due(self, step: int, last: bool) -> tuple[bool, bool, bool]:
        """(evaluates, saves, samples) after `step`; after the `last` step, whatever is enabled."""
        logging = self.config.logging

        def due(interval: int) -> bool:
            return bool(interval) and (last or step % interval == 0)

        evaluates = bool(len(self.valid)) and due(logging.eval_interval)
        return evaluates, last or self._saves(step), due(logging.sample_interval)

    def _saves(self, step: int) -> bool:
        """True if `save_steps` or `save_interval` ask for a checkpoint of `step`."""
        checkpoint = self.config.checkpoint
        return step in checkpoint.saves or bool(checkpoint.save_interval and step % checkpoint.save_interval == 0)


# Micro-batches of one data parallel rank's step, in the form that the engine's model takes, and the rank's summand of
# the divisors of the K loss terms, [K] float64; with z-loss [K + 1], where the last is the number of loss positions.
StepInputs = tuple[list[Any], torch.Tensor]


class Trainer(TrainingLoop):
    """Base class of both engines' trainers. The module's docstring lists the methods that an engine overrides."""

    plain_model: Any  # for family, config and parameters; without weights in the Megatron engine
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
        """Args: `data` contains training blocks, validation blocks and the tokenizer."""
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
        self.peak_flops = peak_flops(processes.device_name, config.precision.precision)
        self.z_loss_coeff = config.objective.z_loss_coeff
        self.prefetcher: Prefetcher[StepInputs] | None = None

    def announce(self, step: int, layout: str = "") -> None:
        rows, valid = counted(len(self.train), "row"), len(self.valid)
        epochs = f"{self.sampler.samples_before(self.config.schedule.last_step + 1) / len(self.train):.3g}"
        times = "once" if epochs == "1" else f"{epochs} times"
        length = counted(self.config.data.seq_length, "token")
        self.print_summary(step, f"{rows} of {length}, read {times}; {valid:,} for validation", layout)

    def run(self, step: int) -> RunEnd:
        self.prefetcher = self.prefetch(step + 1)
        try:
            return super().run(step)
        finally:
            self.close()

    def prefetch(self, first: int) -> Prefetcher[StepInputs]:
        """Start to produce the inputs of the steps from `first` on."""
        return Prefetcher(self.produce, first)

    def close(self) -> None:
        """Stop background work."""
        if self.prefetcher is not None:
            self.prefetcher.close()

    # -- one step, in execution order

    def start_step(self, step: int, want_stop: bool) -> tuple[Callable[[], StepMetrics], bool]:
        """Start one optimizer step; see `TrainingLoop.start_step`. Only some optimizers wait for the device in it."""
        timer = CudaTimer(self.device)
        self.between_steps()
        assert self.prefetcher is not None
        batches, normaliser_K = self.prefetcher.get()
        self.objective = with_block_size(self.objective, self.plain_model, self.config, step)
        # Dropout is reproducible after a restart.
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
        """Prepare the batches of a training step. Called ahead of the step, in the background.

        Noise is drawn on the CPU, where it is cheap and equal for every engine and layout.
        """
        config, objective = self.config, at_step(self.objective, self.config, step)
        noisy = []
        for samples in self.rank_samples(step):
            uniforms = Uniforms.keyed(config.data.seed, step, samples, config.data.seq_length)
            batch = self.noisy_batch(objective, uniforms, self.train.rows(samples))
            noisy.append(anneal_mask(batch, config, step, samples))
        return self.step_inputs(noisy)

    def rank_samples(self, step: int, sampler: BatchSampler | None = None) -> list[list[int]]:
        """Global sample indices of this data parallel rank's micro-batches (default `sampler`: training batches)."""
        return (sampler or self.sampler).samples(
            step, self.processes.replica, self.processes.replicas, self.micro_batch_size
        )

    def step_inputs(self, noisy: Sequence[NoisyBatch]) -> StepInputs:
        """Inputs of one step from its noisy batches."""
        normaliser = torch.stack([batch.normaliser for batch in noisy]).sum(dim=0)
        if self.z_loss_coeff:
            count = sum(batch.weights.count_nonzero() for batch in noisy)
            normaliser = torch.cat([normaliser, torch.as_tensor(count).to(normaliser)[None]])
        return self.prepare(noisy), normaliser

    @abc.abstractmethod
    def prepare(self, noisy: Sequence[NoisyBatch]) -> list[Any]:
        """Convert the micro-batches of a step to the form that the engine's model takes, in pinned memory on a GPU."""

    def between_steps(self) -> None:
        """Hook for an engine's work on the host while the device still runs the previous step."""

    def manual_seed(self, seed: int) -> None:
        """Seed torch's generators."""
        torch.manual_seed(seed)

    def _global_divisors(self, normaliser_K: torch.Tensor, want_stop: bool) -> tuple[torch.Tensor, bool]:
        """Divisors of the global batch's loss, and True if any process wants to stop."""
        stop_votes = torch.tensor([float(want_stop)], dtype=torch.float64)
        summed = self.sum_on_cpu(torch.cat([self.counted_once(normaliser_K), stop_votes]))
        return divisors(summed[:-1]), bool(summed[-1] > 0)

    def counted_once(self, normaliser_K: torch.Tensor) -> torch.Tensor:
        """The value on one rank per replica, zeros elsewhere, so that an all-reduce counts each replica once."""
        return normaliser_K

    def set_learning_rate(self, lr: float) -> None:
        """Set the learning rate of every parameter group."""
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
            True if the norm must be finite. With fp16 loss scaling it is False: gradients may overflow, and the step
            is then skipped.
            The gradient norm before clipping, a scalar on the device.
        """

    @functools.cached_property
    @abc.abstractmethod
    def layer_norms(self) -> LayerNorms:
        """Computes the parameter and gradient norms for `norm_interval`."""

    def _measures_norms(self, step: int) -> bool:
        interval = self.config.logging.norm_interval
        return interval > 0 and step % interval == 0

    @abc.abstractmethod
    def peak_memory(self) -> int | None:
        """Peak allocated memory in bytes so far, of the device where it is largest; None on CPU."""

    def _step_metrics(
        self,
        step: int,
        lr: float,
        metrics: DeferredMetrics,
        finite: bool,
        peak_memory: int | None,
        norms: LayerNorms | None,
    ) -> StepMetrics:
        """Wait for the device and return the metrics of a step. Raises NonFiniteError if the loss or the gradient norm
        is not finite; the next step may have started by then, but no checkpoint has been written."""
        values, seconds = metrics.read()
        measured = None if norms is None else norms.named(values[-len(norms.layers) - 1 :])
        *losses, norm = values if norms is None else values[: -len(norms.layers) - 1]
        loss, more = sum(losses[: self.objective.terms]), losses[self.objective.terms :]
        z_loss = more.pop(0) if self.z_loss_coeff else None
        if not math.isfinite(loss):
            raise NonFiniteError(
                f"the loss is {loss}: lower `lr`, or resume from an earlier checkpoint with a lower one",
                [f"step {step}"],
            )
        if finite and not math.isfinite(norm):
            raise NonFiniteError(f"the gradient norm is {norm}: lower `lr`", [f"step {step}"])
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
        """Compute the validation loss, on the same blocks with the same noise each time.

        The model is evaluated as a checkpoint of this step would be used: with its current block size, and with its
        family's own attention even while the training mask is annealed.
        """
        count = min(len(self.valid), self.config.logging.eval_batches * self.config.data.global_batch_size)
        objective = dataclasses.replace(self.objective, length_variation=0.0)
        sums_K, normaliser_K = self.evaluation_sums(objective, count)
        return float((sums_K / divisors(normaliser_K)).sum())

    @abc.abstractmethod
    def evaluation_sums(self, objective: Objective, count: int) -> torch.Tensor:
        """[2, K] float64 on the CPU: loss sums and normalisers of the first `count` validation blocks."""

    def evaluation_batch(self, objective: Objective, samples: Sequence[int], count: int) -> NoisyBatch:
        """Noisy batch of validation blocks. Blocks from `count` on do not exist and have no loss."""
        exists = torch.tensor([sample < count for sample in samples])
        rows = self.valid.rows([sample if sample < count else 0 for sample in samples])
        if not exists.all():
            labels = rows.input_ids if rows.labels is None else rows.labels
            rows = dataclasses.replace(rows, labels=torch.where(exists[:, None], labels, IGNORE_INDEX))
        data = self.config.data
        uniforms = Uniforms.keyed(data.seed, EVALUATION_STEP, samples, data.seq_length, Purpose.EVAL_NOISE)
        return self.noisy_batch(objective, uniforms, rows)

    def noisy_batch(self, objective: Objective, uniforms: Uniforms, rows: LabelledTokens) -> NoisyBatch:
        """Corrupt rows of training or validation data."""
        return objective.noise(uniforms=uniforms, **vars(rows))

    def check_same_data(self, train_blocks: int) -> None:
        """Raise InputFileError if the checkpoint's run had a different number of training blocks."""
        check_same_count("training blocks", len(self.train), train_blocks)


def check_same_count(what: str, found: int, recorded: int) -> None:
    """Raise InputFileError unless the data have the recorded number of `what`."""
    if found != recorded:
        raise InputFileError("data", f"has {found} {what}, the run started with {recorded}: resume with the same data")

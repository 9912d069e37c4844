"""Trainer of the Megatron engine, on any layout of megatron-core, on GPUs or (for tests) on CPU with gloo."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

from dlm_bridge.errors import DlmBridgeError, one_line
from dlm_bridge.objectives.base import Objective
from dlm_bridge.objectives.batches import IGNORE_INDEX, NoisyBatch
from dlm_bridge.objectives.loss import divisors
from dlm_bridge.objectives.noise import Purpose, Uniforms, torch_seed
from dlm_bridge.objectives.two_streams import TwoStreamObjective
from dlm_bridge.parallel import platform
from dlm_bridge.parallel.batch import MicroBatch, micro_batch
from dlm_bridge.parallel.core import get_forward_backward_func, parallel_state
from dlm_bridge.parallel.gpt import model_inputs
from dlm_bridge.parallel.handover import refresh_hf_model, stream_live_weights
from dlm_bridge.parallel.self_attention import scales_queries
from dlm_bridge.train.adaptation import anneal_mask, scheduled_block_size, with_block_size
from dlm_bridge.train.config import TrainConfig
from dlm_bridge.train.data.blocks import Samples
from dlm_bridge.train.data.loader import BatchSampler, Prefetcher
from dlm_bridge.train.loading import MegatronSource
from dlm_bridge.train.megatron import training_state
from dlm_bridge.train.megatron.checkpoints import (
    CheckpointManager,
    write_hub_config,
)
from dlm_bridge.train.megatron.mcore_config import (
    DTYPES,
)
from dlm_bridge.train.megatron.optimizer import ClippedOptimizerStep
from dlm_bridge.train.megatron.stragglers import GCSchedule, StragglerDetector, TimedWork
from dlm_bridge.train.metrics import (
    CudaTimer,
    DeferredMetrics,
    MetricsFile,
    StepMetrics,
    flops_per_token,
    peak_flops,
    plot_loss,
)
from dlm_bridge.train.monitoring import TextSamples
from dlm_bridge.train.optimizer import check_finite, learning_rate
from dlm_bridge.train.trainer import EVAL_BATCHES, TrainingLoop


@dataclass
class MegatronTrainer(TrainingLoop):
    """One process's parts of a run, put together."""

    config: TrainConfig
    source: MegatronSource
    chunks: list[Any]  # this rank's virtual stages, wrapped for data parallelism
    optimizer: Any
    tokenizer: Any
    objective: Objective
    train: Samples
    valid: Samples
    output: Path
    console: Console

    def __post_init__(self) -> None:
        config = self.config
        self.platform = platform.current()
        self.device = self.platform.device()
        self.replica = parallel_state.get_data_parallel_rank()
        self.replicas = parallel_state.get_data_parallel_world_size()
        self.micro_batch_size, _ = config.data.accumulation(self.replicas)
        carried = training_state.read_mtp_shard(self.source.bridge.checkpoint)
        self.saver = CheckpointManager(
            self.output,
            self.chunks,
            self.optimizer,
            config.checkpoint.async_save,
            config.checkpoint.keep_last,
            carried,
        )
        # Counts travel between CPUs: agreeing on them never waits for the device.
        self.cpu_group = dist.group.WORLD if self.platform.backend == "gloo" else dist.new_group(backend="gloo")
        self.collection = GCSchedule()
        self.update = ClippedOptimizerStep(
            self.optimizer, config.optimizer.clip_grad, config.parallel.fsdp is not None
        )
        self.schedule = get_forward_backward_func()
        self.batcher = Batcher(config, self.train, self.replica, self.replicas, self.micro_batch_size, self._cut)
        self.attention_pattern = self.source.bridge.family.attention_pattern
        # Transformer Engine takes documents of variable length where they alone say who looks at whom.
        self.takes_packed = (
            self.platform.uses_transformer_engine()
            and config.parallel.cp == 1
            and self.attention_pattern != "block_causal"
            and not isinstance(self.objective, TwoStreamObjective)
            and config.objective.mask_annealing_steps == 0
            # The balance over a sequence would be one over all rows of a micro-batch.
            and not (
                config.objective.moe_aux_loss_coeff
                and config.objective.moe_aux_loss == "seq_aux_loss"
                and self.micro_batch_size > 1
            )
        )
        self.stragglers = self._stragglers() if config.logging.straggler_interval else None
        self.prefetcher: Prefetcher[StepBatches] | None = None
        self.producing = threading.Lock()
        self.flops_per_token = flops_per_token(self.source.model, config.data.seq_length) * self.objective.tokens_read
        self.peak_flops = peak_flops(self.platform.device_name(), config.precision.name)

    @property
    def main(self) -> bool:
        return dist.get_rank() == 0

    def run(self, step: int) -> Path:
        if self.config.logging.sample_interval and self.main:
            self.hub_model  # noqa: B018 (read now: on a resume, --keep-last may remove what it is read from)
        self.prefetcher = Prefetcher(self._produce, step + 1)
        folder = super().run(step)
        self.saver.finish()
        return folder

    def close(self) -> None:
        """Stop what runs in the background."""
        self.collection.close()
        if self.prefetcher is not None:
            self.prefetcher.close()

    def _produce(self, step: int) -> StepBatches:
        """The batches of one step, in the background and ahead of it: what belongs to this step stays as it is."""
        with self.producing:
            size = scheduled_block_size(self.config, step)
            # A TwoStreams where there is a schedule, as checked.
            objective: Any = self.objective
            return self.batcher.training(
                objective if size is None else dataclasses.replace(objective, block_size=size), step
            )

    def _cut(self, noisy: Sequence[NoisyBatch]) -> list[MicroBatch]:
        """This rank's part of each, all of one form: pipeline stages expect one shape throughout a step."""
        packed = self.takes_packed and any(_has_documents(batch) for batch in noisy)
        rank, size = parallel_state.get_context_parallel_rank(), self.config.parallel.cp
        block = getattr(self.source.model.config, "block_size", None)
        absolute = scales_queries(self.chunks[0].config)
        parts = [micro_batch(batch, self.attention_pattern, block, rank, size, packed, absolute) for batch in noisy]
        return [part.pin() for part in parts] if self.device.type == "cuda" else parts

    def step(self, step: int, want_stop: bool) -> tuple[StepMetrics, bool]:
        figures, stop = self.start(step, want_stop)
        return figures(), stop

    def start(self, step: int, want_stop: bool) -> tuple[Callable[[], StepMetrics], bool]:
        """One optimizer step. What comes back waits for the device and is called by every rank; the step itself waits
        only where its optimizer does."""
        config = self.config
        began = CudaTimer(self.device)
        self.collection.step()
        self.saver.poll()
        assert self.prefetcher is not None
        batches = self.prefetcher.get()
        self.objective = with_block_size(self.objective, self.source.model, config, step)
        self.platform.manual_seed(torch_seed(config.data.seed, step, dist.get_rank()))
        summed = self._sum_on_cpu(torch.cat([self._once(batches.normaliser), torch.tensor([float(want_stop)])]))
        normaliser, stop = divisors(summed[:-1]), bool(summed[-1] > 0)
        rate = learning_rate(config, step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
            group["weight_decay"] = config.optimizer.weight_decay * group["wd_mult"]

        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        with named_gradient_errors(step):
            sums = self._forward_backward(batches.batches, normaliser, forward_only=False)
        updated, norm = self.update()
        figures = DeferredMetrics(torch.cat([sums, norm.to(sums)[None]]), began)
        timed = None if self.stragglers is None else self.stragglers.take_timed()
        peak = self._fullest()
        return (lambda: self._row(step, rate, updated, figures, peak, timed)), stop

    def _row(
        self,
        step: int,
        rate: float,
        updated: bool,
        figures: DeferredMetrics,
        peak: int | None,
        timed: list[TimedWork] | None,
    ) -> StepMetrics:
        """The line of a step, once the device has taken it. Raises DlmBridgeError where the loss or the gradient is no
        number: the next step may have begun by then, no checkpoint has been written."""
        config = self.config
        (*losses, norm), seconds = figures.read()
        loss = sum(losses)
        if not math.isfinite(loss):
            raise DlmBridgeError(f"step {step}: the loss is {loss}: lower --lr, or resume from before with another")
        if updated and not math.isfinite(norm):
            raise DlmBridgeError(f"step {step}: the gradient norm is {norm}: lower --lr")

        if self.stragglers is not None and (line := self.stragglers.end_step(step, timed or [])) and self.main:
            self.console.print(line, highlight=False, soft_wrap=True)
        tokens = config.data.global_batch_size * config.data.seq_length
        world = dist.get_world_size()
        per_s = tokens / seconds
        return StepMetrics(
            step=step,
            loss=loss,
            grad_norm=norm if updated else None,
            lr=rate,
            tokens=step * tokens,
            tokens_per_s=per_s,
            tokens_per_s_per_device=per_s / world,
            peak_memory=peak,
            mfu=None if self.peak_flops is None else per_s * self.flops_per_token / (self.peak_flops * world),
        )

    @torch.no_grad()
    def evaluate(self) -> float:
        config = self.config
        count = min(len(self.valid), EVAL_BATCHES * config.data.global_batch_size)
        objective = dataclasses.replace(self.objective, length_variation=0.0)
        totals = torch.zeros(2, objective.terms, dtype=torch.float64)
        with self._without_gather(), self._without_dropout():
            for batches in self.batcher.evaluation(objective, self.valid, count):
                summed = self._sum_on_cpu(self._once(batches.normaliser))
                sums = self._forward_backward(batches.batches, torch.ones(objective.terms), forward_only=True)
                totals += torch.stack([sums.cpu(), summed])
        return float((totals[0] / divisors(totals[1])).sum())

    def sample(self, samples: TextSamples, step: int) -> None:
        """On the main process, which holds the whole model for it; the others hand over what they have of it."""
        bridge = self.source.bridge
        with self._without_gather():
            if self.main:
                refresh_hf_model(bridge, self.hub_model, self.chunks)
            else:
                for _ in stream_live_weights(bridge, self.chunks):
                    pass
        if self.main:
            for name in ("mask_token_id", "block_size"):  # which the run may have changed
                if (value := getattr(self.source.model.config, name, None)) is not None:
                    setattr(self.hub_model.config, name, value)
            samples.write(step, self.hub_model.to(self.device))
            self.hub_model.to("cpu")  # the device's memory is training's

    @functools.cached_property
    def hub_model(self) -> Any:
        """The Hub-side model that samples, on the CPU in between."""
        return self.source.bridge.build_hf_model(dtype=DTYPES[self.config.precision.name])

    def save(self, step: int, metrics: MetricsFile | None) -> Path:
        self._check_finite(step)
        if metrics is not None:
            metrics.sync()
            if self.config.objective.block_sizes:
                write_hub_config(self.output, self.source)
        # A save in the background forks this process, which no thread should be in the middle of something for.
        with self.producing, self._without_gather():
            folder = self.saver.save(step, {"train_blocks": len(self.train)})
        if metrics is not None:
            plot_loss(metrics.rows, self.output / "loss.png")
        return folder

    def load(self, folder: Path) -> None:
        """Set weights and optimizer state to a checkpoint's. Raises DlmBridgeError where the data are others."""
        blocks = self.saver.load(folder)["train_blocks"]
        if blocks != len(self.train):
            raise DlmBridgeError(
                f"--data gives {len(self.train)} training blocks, the run began with {blocks}: "
                "resume with the data that it began with"
            )

    def _forward_backward(
        self, batches: Sequence[MicroBatch], normaliser: torch.Tensor, forward_only: bool
    ) -> torch.Tensor:
        """[K] float64 on the device and on every rank, the weighted loss sums of the global batch over `normaliser`;
        unless `forward_only` their gradients, summed over all ranks, are in the chunks' buffers."""
        share = _without_waiting(1 / normaliser, self.device)
        none = torch.zeros((), dtype=torch.int, device=self.device)

        def forward(data: Iterator[MicroBatch], model: Any) -> tuple[torch.Tensor, Any]:
            batch = next(data).to(self.device)
            of_weights = share if batch.terms is None else share[batch.terms]
            batch = dataclasses.replace(batch, weights=batch.weights * of_weights)
            with contextlib.nullcontext() if self.stragglers is None or forward_only else self.stragglers.timed():
                return model(**model_inputs(batch, len(share))), loss

        def loss(output: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            return output[0], none, output[1]

        rows, length = batches[0].input_ids.shape
        several = len(self.chunks) > 1
        results = self.schedule(
            forward_step_func=forward,
            data_iterator=[iter(batches) for _ in self.chunks] if several else iter(batches),
            model=self.chunks if several else self.chunks[0],
            num_microbatches=len(batches),
            seq_length=length * self.config.parallel.cp,
            micro_batch_size=rows,
            forward_only=forward_only,
        )
        sums = torch.zeros(len(normaliser), dtype=torch.float64, device=self.device)
        if results and parallel_state.get_tensor_model_parallel_rank() == 0:
            sums += torch.stack(results).double().sum(dim=0)
        dist.all_reduce(sums)
        return sums

    def _stragglers(self) -> StragglerDetector:
        return StragglerDetector(
            self.config.logging.straggler_interval,
            parallel_state.get_pipeline_model_parallel_rank(),
            self.device,
            self.cpu_group,
        )

    def _once(self, normaliser: torch.Tensor) -> torch.Tensor:
        """What a replica adds to a sum over all ranks, said by one of its ranks."""
        ranks = (
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_pipeline_model_parallel_rank(),
            parallel_state.get_context_parallel_rank(),
        )
        return normaliser if ranks == (0, 0, 0) else torch.zeros_like(normaliser)

    def _check_finite(self, step: int) -> None:
        """Every rank stops where one of them would write what is no number."""
        error: DlmBridgeError | None = None
        try:
            check_finite(step, (weight for group in self.optimizer.param_groups for weight in group["params"]))
        except DlmBridgeError as found:
            error = found
        if self._sum_on_cpu(torch.tensor(float(error is not None))):
            raise error or DlmBridgeError(f"step {step}: another rank has weights that are not finite")

    def _fullest(self) -> int | None:
        """The most memory that any device has held at once; None on CPU."""
        if self.platform.name == "cpu":
            return None
        peak = torch.tensor(self.platform.peak_memory())
        dist.all_reduce(peak, dist.ReduceOp.MAX, group=self.cpu_group)
        return int(peak)

    def _sum_on_cpu(self, values: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(values, group=self.cpu_group)
        return values

    @contextlib.contextmanager
    def _without_dropout(self) -> Iterator[None]:
        """The layers as they are outside of training."""
        for chunk in self.chunks:
            chunk.eval()
        yield
        for chunk in self.chunks:
            chunk.train()

    @contextlib.contextmanager
    def _without_gather(self) -> Iterator[None]:
        """Whole weights, outside of a training step: no forward pass gathers them."""
        overlapped = [chunk for chunk in self.chunks if _gathers_late(chunk)]
        for chunk in overlapped:
            chunk.disable_forward_pre_hook()
        yield
        for chunk in overlapped:
            chunk.enable_forward_pre_hook()


def _has_documents(noisy: NoisyBatch) -> bool:
    padded = noisy.attention_mask is not None and not bool(noisy.attention_mask.all())
    return padded or noisy.mask_descriptor is not None


def _without_waiting(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The same on a device that may still be at work on something else."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values


def _gathers_late(chunk: Any) -> bool:
    return chunk.ddp_config.overlap_param_gather and not chunk.ddp_config.use_megatron_fsdp


@contextlib.contextmanager
def named_gradient_errors(step: int) -> Iterator[None]:
    """What megatron-core finds wrong of a step's gradients, with `--megatron ddp.check_for_nan_in_grad=true` and
    `ddp.check_for_large_grads=true`, as one line."""
    try:
        yield
    except RuntimeError as error:
        if "Unexpected result" not in str(error):
            raise
        raise DlmBridgeError(
            f"step {step}: {one_line(error)}: lower --lr, or resume from before with another"
        ) from error


EVALUATION_STEP = 0  # of the noise's key: every validation draws the same


@dataclass(frozen=True)
class StepBatches:
    """One data parallel replica's share of a global batch, this rank's part of it."""

    batches: list[MicroBatch]
    normaliser: torch.Tensor  # [K] float64, what the replica adds to the divisors of the global loss


@dataclass(frozen=True)
class Batcher:
    """Makes the micro-batches of one data parallel replica. `cut` takes a replica's noisy batches of one step and
    gives a rank's part of each; every rank of a replica draws the same noise and cuts its own part."""

    config: TrainConfig
    train: Samples
    replica: int
    replicas: int
    micro_batch_size: int
    cut: Callable[[Sequence[NoisyBatch]], list[MicroBatch]]

    def training(self, objective: Objective, step: int) -> StepBatches:
        """The micro-batches of a training step, counted from 1."""
        sampler = BatchSampler(self.config.data.global_batch_size)
        noisy = []
        for samples in sampler.samples(step, self.replica, self.replicas, self.micro_batch_size):
            rows = self.train.rows(samples)
            uniforms = Uniforms.keyed(self.config.data.seed, step, samples, self.config.data.seq_length)
            noisy.append(anneal_mask(objective.noise(uniforms=uniforms, **vars(rows)), self.config, step, samples))
        return self._finished(noisy)

    def evaluation(self, objective: Objective, blocks: Samples, count: int) -> Iterator[StepBatches]:
        """The first `count` blocks, a global batch at a time, in as many micro-batches as a training step has: experts
        and pipelines want all ranks to take as many turns. What is beyond the last block counts nothing."""
        sampler = BatchSampler(self.config.data.global_batch_size)
        for turn in range(1, -(-count // self.config.data.global_batch_size) + 1):
            noisy = []
            for samples in sampler.samples(turn, self.replica, self.replicas, self.micro_batch_size):
                there = torch.tensor([sample < count for sample in samples])
                rows = blocks.rows([sample if sample < count else 0 for sample in samples])
                labels = rows.input_ids if rows.labels is None else rows.labels
                rows = replace(rows, labels=torch.where(there[:, None], labels, IGNORE_INDEX))
                uniforms = Uniforms.keyed(
                    self.config.data.seed, EVALUATION_STEP, samples, self.config.data.seq_length, Purpose.EVAL_NOISE
                )
                noisy.append(objective.noise(uniforms=uniforms, **vars(rows)))
            yield self._finished(noisy)

    def _finished(self, noisy: list[NoisyBatch]) -> StepBatches:
        return StepBatches(self.cut(noisy), torch.stack([batch.normaliser for batch in noisy]).sum(dim=0))

"""Trainer of the Megatron engine, on any layout of megatron-core, on GPUs or, for tests, on CPU with gloo."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from rich.console import Console

from dlm_bridge.data.blocks import Samples
from dlm_bridge.data.loader import BatchSampler
from dlm_bridge.distributed import raised_everywhere
from dlm_bridge.errors import NonFiniteError, SettingError, one_line, printable
from dlm_bridge.loading.source import MegatronSource
from dlm_bridge.models.special_tokens import SPECIAL_TOKENS
from dlm_bridge.objectives.base import Objective
from dlm_bridge.objectives.batches import NoisyBatch
from dlm_bridge.parallel import groups, mcore_compat, platform
from dlm_bridge.parallel.batch import MicroBatch, micro_batch
from dlm_bridge.parallel.core import parallel_state
from dlm_bridge.parallel.core_attention import has_sinks
from dlm_bridge.parallel.gpt import model_inputs
from dlm_bridge.parallel.handover import refresh_hf_model, stream_live_weights
from dlm_bridge.parallel.lora import LiveFactor
from dlm_bridge.parallel.mcore_patches.fused_step import FusedOptimizerStep
from dlm_bridge.parallel.mcore_patches.modules import release_cuda_graphs
from dlm_bridge.parallel.mcore_patches.optimizers import parts_of
from dlm_bridge.parallel.self_attention import scales_queries
from dlm_bridge.parallel.train.checkpoints import (
    CheckpointManager,
    checkpoint_root,
    describe_mtp,
    write_hub_config,
    write_hub_files,
)
from dlm_bridge.parallel.train.ema import MegatronAverages
from dlm_bridge.parallel.train.lora import LoraRun
from dlm_bridge.parallel.train.mcore_config import DTYPES, MASKED
from dlm_bridge.parallel.train.norms import MegatronLayerNorms
from dlm_bridge.parallel.train.schedule import (
    eval_mode,
    gathered_weights,
    optimizer_weights,
    run_schedule,
    set_learning_rate,
)
from dlm_bridge.train.config import TrainConfig
from dlm_bridge.train.metrics import MetricsFile, StepMetrics
from dlm_bridge.train.monitoring import TextSamples
from dlm_bridge.train.output import RunEnd
from dlm_bridge.train.ranks import StragglerDetector
from dlm_bridge.train.trainer import Processes, StepInputs, Trainer

if TYPE_CHECKING:
    from dlm_bridge.parallel.train.local_checkpoints import LocalCheckpoints


class MegatronTrainer(Trainer):
    """Trains this rank's virtual pipeline stages of a model."""

    def __init__(
        self,
        config: TrainConfig,
        source: MegatronSource,
        chunks: list[Any],  # this rank's virtual stages, wrapped for data parallelism
        optimizer: Any,
        objective: Objective,
        data: tuple[Samples, Samples, Any],
        console: Console,
        local: LocalCheckpoints | None = None,
        adapter: LoraRun | None = None,
        factors: list[list[LiveFactor]] | None = None,  # of the adapter, by chunk
    ) -> None:
        super().__init__(config, source.model, objective, data, console, megatron_processes())
        self.local = local
        self.source = source
        self.chunks = chunks
        self.optimizer = optimizer
        self.platform = platform.current()
        self.adapter = adapter
        decay = config.optimizer.ema_decay
        self.averages = MegatronAverages(optimizer, decay) if decay else None
        self.checkpoints = CheckpointManager(
            config, chunks, optimizer, source.bridge.checkpoint, factors, self.averages
        )
        self.gc_schedule = GCSchedule()
        self.clipped_step = ClippedOptimizerStep(
            optimizer, config.optimizer.clip_grad, config.parallel.fsdp is not None
        )
        self.attention_pattern = source.bridge.family.attention_pattern
        self.scales_queries = scales_queries(chunks[0].config)
        self.depths: int = chunks[0].config.mtp_num_layers or 0  # number of multi-token prediction layers
        self.packs_documents = self._packs_documents()
        self.stragglers = self._straggler_detector() if config.logging.straggler_interval else None
        self.producing = threading.Lock()
        self.records_graphs = config.engine.cuda_graphs  # True until the end of the first step

    def announce(self, step: int, layout: str = "") -> None:
        super().announce(step, layout)
        if self.main and self.adapter is not None:
            self.console.print(printable(self.adapter.described()), highlight=False, soft_wrap=True)
        elif self.main and (layers := self.source.bridge.dims.mtp):
            line = describe_mtp(layers, self.config.objective.mtp_loss_scaling_factor)
            self.console.print(line, highlight=False, soft_wrap=True)

    def run(self, step: int) -> RunEnd:
        if self.config.logging.sample_interval and self.main:
            self.sampling_model  # noqa: B018 (built now: on a resume, `keep_last` may remove the checkpoint it is from)
        return super().run(step)

    def finish(self) -> None:
        self.checkpoints.finish()

    def close(self) -> None:
        self.gc_schedule.close()
        super().close()
        if self.config.parallel.tp_overlap:
            groups.destroy_userbuffers()
        if self.config.engine.cuda_graphs:
            release_cuda_graphs()

    # -- one step

    def start_step(self, step: int, want_stop: bool) -> tuple[Callable[[], StepMetrics], bool]:
        with named_gradient_errors(step):
            metrics, stop = super().start_step(step, want_stop)
        if self.stragglers is None:
            return metrics, stop
        return functools.partial(self._with_straggler_report, step, metrics, self.stragglers.take_timed()), stop

    def produce(self, step: int) -> StepInputs:
        with self.producing:
            return super().produce(step)

    def prepare(self, noisy: Sequence[NoisyBatch]) -> list[MicroBatch]:
        """This rank's part of each micro-batch, all of the same shape within a step, as pipeline stages expect."""
        packed = self.packs_documents and any(_has_documents(batch) for batch in noisy)
        rank, size = parallel_state.get_context_parallel_rank(), self.config.parallel.cp
        block_size = getattr(self.plain_model.config, "block_size", None)
        form = (self.attention_pattern, block_size, rank, size, packed, self.scales_queries, self.depths)
        parts = [micro_batch(batch, *form) for batch in noisy]
        if self.config.engine.cuda_graphs and any(part.attention_mask is not None or part.packed for part in parts):
            raise SettingError("cuda_graphs", f"{MASKED}: unset it")
        return [part.pin() for part in parts] if self.device.type == "cuda" else parts

    def between_steps(self) -> None:
        self.gc_schedule.step()
        self.checkpoints.poll()

    def manual_seed(self, seed: int) -> None:
        self.platform.manual_seed(seed)

    def counted_once(self, normaliser_K: torch.Tensor) -> torch.Tensor:
        ranks = (
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_pipeline_model_parallel_rank(),
            parallel_state.get_context_parallel_rank(),
        )
        return normaliser_K if ranks == (0, 0, 0) else torch.zeros_like(normaliser_K)

    def set_learning_rate(self, lr: float) -> None:
        set_learning_rate(self.optimizer, lr, self.config.optimizer.weight_decay)

    def forward_backward(self, batches: list[MicroBatch], divisors_K: torch.Tensor) -> torch.Tensor:
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        # No other thread may pin memory while CUDA records.
        with self.producing if self.records_graphs else contextlib.nullcontext():
            sums_K = self._run_schedule(batches, divisors_K, forward_only=False)
        self.records_graphs = False
        return sums_K

    def optimizer_step(self) -> tuple[bool, torch.Tensor]:
        updated, norm = self.clipped_step()
        if self.averages is not None:
            self.averages.update()
        return updated, norm

    @functools.cached_property
    def layer_norms(self) -> MegatronLayerNorms:
        return MegatronLayerNorms(self.chunks, self.optimizer, self.device, self.processes.cpu_group)

    def peak_memory(self) -> int | None:
        return largest_peak_memory(self.processes)

    def _run_schedule(
        self, batches: Sequence[MicroBatch], divisors_K: torch.Tensor, forward_only: bool
    ) -> torch.Tensor:
        """Run megatron-core's pipeline schedule over the micro-batches of a step.

        Returns the loss sums of the global batch divided by `divisors_K`, in float64 on the device, on every rank:
        [K], with one more element for z-loss in training and one for multi-token prediction. Unless `forward_only`,
        the gradients, summed over all ranks, are in the chunks' buffers.
        """
        weight_K = _copy_async(1 / divisors_K, self.device)
        terms = self.objective.terms

        def inputs(batch: MicroBatch) -> dict[str, Any]:
            weights = batch.weights * (weight_K[0] if batch.terms is None else weight_K[batch.terms])
            predictions = tuple(
                dataclasses.replace(each, weights=each.weights * weight_K[0]) for each in batch.predictions
            )
            z_weights = (weights != 0) * (self.z_loss_coeff * weight_K[terms]) if len(weight_K) > terms else None
            batch = dataclasses.replace(batch, weights=weights, predictions=predictions, z_weights=z_weights)
            return model_inputs(batch, terms)

        timed = contextlib.nullcontext if self.stragglers is None or forward_only else self.stragglers.timed
        results = run_schedule(self.chunks, batches, inputs, self.config.parallel.cp, forward_only, timed)
        extra = int(self.depths > 0 and not forward_only)
        sums_K = torch.zeros(len(divisors_K) + extra, dtype=torch.float64, device=self.device)
        if results and parallel_state.get_tensor_model_parallel_rank() == 0:
            sums_K += torch.stack(results).double().sum(dim=0)
        dist.all_reduce(sums_K)
        return sums_K

    # -- evaluation and samples

    def evaluation_sums(self, objective: Objective, count: int) -> torch.Tensor:
        """Evaluate one global batch at a time, in the micro-batches of a training step: experts and pipelines need the
        same number of forward passes on all ranks."""
        totals = torch.zeros(2, objective.terms, dtype=torch.float64)
        sampler = BatchSampler((self.config.data.global_batch_size,))
        with gathered_weights(self.chunks), eval_mode(self.chunks):
            for number in range(1, -(-count // self.config.data.global_batch_size) + 1):
                samples = self.rank_samples(number, sampler)
                batches, normaliser_K = self.step_inputs(
                    [self.evaluation_batch(objective, each, count) for each in samples]
                )
                normaliser_K = self.sum_on_cpu(self.counted_once(normaliser_K[: objective.terms]))
                sums_K = self._run_schedule(batches, torch.ones(objective.terms), forward_only=True)
                totals += torch.stack([sums_K.cpu(), normaliser_K])
        return totals

    def sample(self, samples: TextSamples, step: int) -> None:
        """Sample on the main process with an unsharded copy of the model, to which the others send their weights."""
        bridge = self.source.bridge
        with gathered_weights(self.chunks):
            if self.main:
                refresh_hf_model(bridge.checkpoint, self.sampling_model, self.chunks)
            else:
                for _ in stream_live_weights(bridge.checkpoint, self.chunks):
                    pass
        if self.main:
            changed = (
                "mask_token_id",
                "block_size",
                *SPECIAL_TOKENS,
                *self.objective.model_config,
            )  # fields set by the run
            for name in changed:
                if (value := getattr(self.plain_model.config, name, None)) is not None:
                    setattr(self.sampling_model.config, name, value)
            samples.write(step, self.sampling_model.to(self.device))
            self.sampling_model.to("cpu")  # frees device memory for training

    @functools.cached_property
    def sampling_model(self) -> Any:
        """Hub model for sampling, on the CPU between uses."""
        model = self.source.bridge.build_hf_model(dtype=DTYPES[self.config.precision.precision])
        model.generation_config = self.plain_model.generation_config
        return model

    # -- checkpoints

    def write_shared_files(self) -> None:
        """Write the files that the run's checkpoints share. One process calls it at the start of a run."""
        if self.adapter is None:
            write_hub_files(self.output, self.source, self.tokenizer, self.depths > 0)
        else:
            self.adapter.write_manifest(checkpoint_root(self.output), DTYPES[self.config.precision.precision])

    def save_checkpoint(self, step: int) -> Path:
        if self.config.objective.block_sizes and self.adapter is None:
            with raised_everywhere():
                if self.main:
                    write_hub_config(self.output, self.source, self.depths > 0)
        # A background save forks this process: no thread may hold a lock.
        with self.producing, gathered_weights(self.chunks):
            return self.checkpoints.save(step, {"train_blocks": len(self.train)}, kept=self.kept_checkpoints())

    def checkpoint_folder(self, step: int) -> Path:
        return self.checkpoints.folder(step)

    def load_checkpoint(self, folder: Path) -> None:
        self.check_same_data(self.checkpoints.load(folder)["train_blocks"])

    def saves_locally(self, step: int) -> bool:
        return self.local is not None and step % self.config.checkpoint.local_interval == 0

    def save_locally(self, step: int, metrics: MetricsFile | None) -> None:
        assert self.local is not None
        self.before_save(step, metrics)
        with self.producing, gathered_weights(self.chunks):
            self.local.save(step, {"train_blocks": len(self.train)}, self.chunks, self.optimizer)

    def load_local_checkpoint(self) -> None:
        assert self.local is not None
        self.check_same_data(self.local.load(self.chunks, self.optimizer)["train_blocks"])

    def trained_parameters(self) -> Iterable[torch.Tensor]:
        return optimizer_weights(self.optimizer)

    # -- parts of the above

    def _packs_documents(self) -> bool:
        """True if rows become variable-length documents for Transformer Engine, because documents alone determine the
        attention mask."""
        config, moe_loss = self.config, self.config.objective
        # seq_aux_loss would balance experts over all rows of a micro-batch instead of each row.
        whole_sequences = moe_loss.moe_aux_loss_coeff and moe_loss.moe_aux_loss == "seq_aux_loss"
        return (
            self.platform.uses_transformer_engine()
            and not has_sinks(self.chunks[0].config)  # their attention uses masks
            and config.parallel.cp == 1
            and self.attention_pattern != "block_causal"
            and self.objective.streams == 1
            and config.objective.mask_annealing_steps == 0
            and not (whole_sequences and self.micro_batch_size > 1)
        )

    def _straggler_detector(self) -> StragglerDetector:
        return StragglerDetector(
            self.config.logging.straggler_interval,
            parallel_state.get_pipeline_model_parallel_rank(),
            self.device,
            self.processes.cpu_group,
        )

    def _with_straggler_report(self, step: int, metrics: Callable[[], StepMetrics], timed: Any) -> StepMetrics:
        found = metrics()
        assert self.stragglers is not None
        if (line := self.stragglers.end_step(step, timed)) and self.main:
            self.console.print(line, highlight=False, soft_wrap=True)
        return found


@contextlib.contextmanager
def named_gradient_errors(step: int) -> Iterator[None]:
    """Context manager that raises megatron-core's findings in a step's gradients (`ddp.check_for_nan_in_grad`,
    `ddp.check_for_large_grads`) as NonFiniteError."""
    try:
        yield
    except RuntimeError as error:
        if "Unexpected result" not in str(error):
            raise
        raise NonFiniteError(
            f"step {step}: {one_line(error)}: resume from an earlier checkpoint with a lower `lr`"
        ) from error


def megatron_processes() -> Processes:
    """Ranks of this process in megatron-core's groups."""
    current = platform.current()
    return Processes(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        replica=parallel_state.get_data_parallel_rank(),
        replicas=parallel_state.get_data_parallel_world_size(),
        device=current.device(),
        device_name=current.device_name(),
        cpu_group=dist.group.WORLD if current.backend == "gloo" else dist.new_group(backend="gloo"),
    )


def largest_peak_memory(processes: Processes) -> int | None:
    """Largest peak of allocated memory over all devices, in bytes; None on CPU. Collective."""
    current = platform.current()
    return None if current.name == "cpu" else processes.largest(current.peak_memory())


def _has_documents(noisy: NoisyBatch) -> bool:
    padded = noisy.attention_mask is not None and not bool(noisy.attention_mask.all())
    return padded or noisy.mask_descriptor is not None


def _copy_async(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy to a device without waiting for the kernels running there."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values


FROZEN_BY_PYTHON = 1000  # objects: Python 3.12 starts with a few hundred; more means that the program froze its own
FULL_GC_EVERY = 100  # steps; other steps collect only young objects


class GCSchedule:
    """Runs Python's garbage collector only between steps, from the first step to `close`, at the same step on every
    rank. Otherwise ranks would pause at different times, and the others would wait in their next collective."""

    def __init__(self) -> None:
        self._steps: int | None = None  # since Python's own collection was disabled
        self._freezes = True

    def step(self) -> None:
        """Collect between two steps, while the device is busy: cycles may hold device memory."""
        if self._steps is None:
            if gc.isenabled():
                gc.collect()
                # The model is permanent. If the program has frozen objects itself, they could not be told apart later.
                self._freezes = gc.get_freeze_count() < FROZEN_BY_PYTHON
                if self._freezes:
                    gc.freeze()
                gc.disable()
                self._steps = 0
            return
        self._steps += 1
        gc.collect(2 if self._steps % FULL_GC_EVERY == 0 else 1)

    def close(self) -> None:
        """Enable Python's own collection again."""
        if self._steps is not None:
            if self._freezes:
                gc.unfreeze()
            gc.enable()
            self._steps = None


# Settings that need megatron-core's own step: gradients are not in `grad`, or the state is on the CPU.
MCORE_STEP = ("use_precision_aware_optimizer", "optimizer_cpu_offload")
# Size in bytes above which scaling all gradients, needed or not, costs more than waiting for the norm.
MAX_ALWAYS_SCALED_BYTES = 12 << 30


class ClippedOptimizerStep:
    """Clips the gradients to a global norm and updates the weights.

    Args:
        optimizer: of megatron-core.
        max_norm: 0 for no clipping.
        mcore_step: use megatron-core's own step, as FSDP requires.
    """

    def __init__(self, optimizer: Any, max_norm: float, mcore_step: bool = False) -> None:
        self.optimizer, self.max_norm = optimizer, max_norm
        self.mcore_step = mcore_step or any(getattr(optimizer.config, name) for name in MCORE_STEP)
        self.parts = parts_of(optimizer)
        self.fused_steps = [None if self.mcore_step else FusedOptimizerStep.of(part) for part in self.parts]

    @torch.no_grad()
    def __call__(self) -> tuple[bool, torch.Tensor]:
        """Take a step. Returns True if the weights were updated (fp16 gradients can overflow), and the norm before
        clipping, in fp32 on the device, infinite if they were not."""
        if self.mcore_step:
            updated, norm, _ = self.optimizer.step()
            return updated, torch.tensor(float("inf") if norm is None else float(norm))
        pairs = list(zip(self.fused_steps, self.parts, strict=True))
        # Not short-circuited: every part has gradients to prepare.
        overflowed = [(fused or part).prepare_grads() for fused, part in pairs]
        if any(overflowed):
            return False, torch.tensor(float("inf"))
        norm = gradient_norm(self.parts, self.fused_steps)
        clip_coef = (self.max_norm / (norm + 1e-6)).clamp(max=1.0) if self.max_norm else torch.ones_like(norm)
        with ExitStack() as clipping:
            gradients = []  # to clip before the step; a fused step clips as it reads them
            for fused, part in pairs:
                if fused is None:
                    gradients += [p.grad for p in part.get_parameters() if p.grad is not None]
                else:
                    clipping.enter_context(fused.clipping(clip_coef))
            if gradients and self.max_norm:
                small = sum(gradient.nbytes for gradient in gradients) <= MAX_ALWAYS_SCALED_BYTES
                if small or norm > self.max_norm:
                    torch._foreach_mul_(gradients, clip_coef)
            return self.optimizer.step_with_ready_grads(), norm


def gradient_norm(parts: list[Any], fused_steps: list[FusedOptimizerStep | None]) -> torch.Tensor:
    """Global norm of the gradients of megatron-core optimizers, each summed over its own ranks; a scalar."""
    total: torch.Tensor | None = None
    for part, fused in zip(parts, fused_steps, strict=True):
        group = part.get_grad_stats_parallel_group()
        gradients = mcore_compat.grads_for_norm(part) if fused is None else fused.grads_for_norm()
        if gradients:
            squares = torch.stack(torch._foreach_norm(gradients, dtype=torch.float32)).square().sum()
        else:  # a rank without a shard takes part in the sum
            squares = torch.zeros((), device=platform.current().device())
        dist.all_reduce(squares, group=group)
        total = squares if total is None else total + squares
    assert total is not None
    return total.sqrt()

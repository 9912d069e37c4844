"""Trainer of the Accelerate engine: the Hub model on one device, data parallel, or under FSDP2."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType
from rich.console import Console

from dlm_bridge.data.blocks import Samples
from dlm_bridge.distributed import world_size
from dlm_bridge.errors import SettingError, printable
from dlm_bridge.job import start_process_group
from dlm_bridge.loading.lazy import shard_source
from dlm_bridge.loading.source import StartingModel
from dlm_bridge.objectives.base import Objective
from dlm_bridge.objectives.batches import NoisyBatch
from dlm_bridge.objectives.linear_cross_entropy import LossPositions
from dlm_bridge.objectives.single_stream import NextTokenPrediction
from dlm_bridge.train.accelerate import fsdp, transforms
from dlm_bridge.train.accelerate.attention import (
    FLASH,
    attention_kernels,
    layer_masks,
    set_attention,
    uses_flash_attention,
)
from dlm_bridge.train.accelerate.canvas import loss_head, prepare_canvas_model
from dlm_bridge.train.accelerate.checkpoints import restore_run, save_run
from dlm_bridge.train.accelerate.optimizers import build_optimizer
from dlm_bridge.train.config import TrainConfig
from dlm_bridge.train.ema import AveragedModel, averaged_folder
from dlm_bridge.train.lora import Adapter, add_adapter, with_lora
from dlm_bridge.train.norms import HubLayerNorms
from dlm_bridge.train.output import RunEnd
from dlm_bridge.train.schedule import with_steps
from dlm_bridge.train.setup import (
    Config,
    RunStart,
    check_data,
    load_data,
    resolve_objective,
    resume_point,
    start_run,
    starting_model,
    training_errors,
    trains_on_cpu,
    with_seq_length,
    write_config,
)
from dlm_bridge.train.trainer import Processes, Trainer, TrainingLoop

HALF = ("bf16", "fp8")  # precisions with fp32 main params and a model that computes in bf16

MicroBatch = tuple[NoisyBatch, LossPositions]
Assembled = Callable[[Config, Accelerator, RunStart, Console], AbstractContextManager[TrainingLoop]]


@training_errors
def train(config: TrainConfig, resume: bool = False, console: Console | None = None) -> RunEnd:
    """Train until `config.schedule.steps`, SIGTERM or `exit_duration`.

    Args:
        resume: continue from the newest checkpoint, or start if there is none. Otherwise an output folder with a run
            is refused.

    Raises:
        DlmBridgeError: the input is invalid, or the loss is not finite (NonFiniteError).
    """
    return run(fsdp.with_launcher_settings(config), resume, console, assembled)


def run(config: Config, resume: bool, console: Console | None, assembled: Assembled[Config]) -> RunEnd:
    """Run from the output folder to the last checkpoint. `assembled` constructs the trainer of a configuration, before
    the state of a checkpoint is loaded."""
    console = console or Console(stderr=True, markup=False)
    accelerator = build_accelerator(config)
    config.check_batch(accelerator.num_processes)
    config, start = start_run(config, resume, accelerator.is_main_process, console, resume_point)
    if start.finished is not None:
        return start.finished
    with assembled(config, accelerator, start, console) as trainer:
        if start.checkpoint is not None:
            trainer.load_checkpoint(start.checkpoint)
        if trainer.main:
            write_config(trainer.config, start.output)
        trainer.announce(start.step)
        end = trainer.run(start.step)
        accelerator.wait_for_everyone()
        return end


@contextlib.contextmanager
def assembled(
    config: TrainConfig, accelerator: Accelerator, start: RunStart, console: Console
) -> Iterator[AccelerateTrainer]:
    """Context manager with the trainer of a run: model, optimizer, objective and data."""
    check_data(config)
    starting = starting_model(config, start.checkpoint, accelerator.is_main_process)
    model = starting.model
    config, objective = resolve_objective(config, model, start.step)
    prepare_canvas_model(model, config)
    config = with_lora(config, model)
    with accelerator.main_process_first():
        config = with_seq_length(config, model, objective.mask_token)
        data = load_data(config, model, objective.mask_token)
    config = with_steps(config, len(data[0]))
    with fsdp.process_group(config):
        adapter = add_adapter(config, model, start.checkpoint, starting.weights) if config.model.adapts else None
        yield AccelerateTrainer(config, accelerator, starting, adapter, objective, data, console)


class AccelerateTrainer(Trainer):
    """Trainer of a Hub model, replicated or sharded by FSDP2."""

    def __init__(
        self,
        config: TrainConfig,
        accelerator: Accelerator,
        starting: StartingModel,
        adapter: Adapter | None,
        objective: Objective,
        data: tuple[Samples, Samples, Any],
        console: Console,
    ) -> None:
        model = starting.model
        super().__init__(config, model, objective, data, console, processes_of(accelerator))
        self.accelerator = accelerator
        self.adapter = adapter
        self.diffuses = not isinstance(objective, NextTokenPrediction)
        backend = config.engine.attention_backend
        if backend not in (None, FLASH):
            set_attention(model, backend)
        self.uses_flash = uses_flash_attention(model, backend, self.device, config.precision.precision)
        model.train()  # transformers loads models in eval mode
        if config.engine.gradient_checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": False})
        self.fsdp = config.parallel.shards
        # FSDP moves shards to the device; a quantized model is there already.
        stays = self.fsdp or config.model.lora_quantize is not None
        self.plain_model = model if stays else model.to(self.device)
        # In half precision a single process computes with copies of the weights, several use autocast or FSDP.
        half = config.precision.precision in HALF and accelerator.mixed_precision == "no" and not self.fsdp
        self.half = transforms.HalfPrecisionParams(self.plain_model) if half else None
        self.computing = self.plain_model if self.half is None else self.half.model
        if config.precision.precision == "fp8":
            transforms.convert_to_float8(self.computing)
        self.compiled = self.device.type == "cuda" if config.engine.compile is None else config.engine.compile
        if self.compiled:
            transforms.compile_layers(self.computing)
        self.head = loss_head(self.computing)
        if self.fsdp:
            fsdp.shard_model(self.plain_model, starting.weights, config, self.device)
        decay = config.optimizer.ema_decay
        self.averages = AveragedModel(self.plain_model, decay) if decay else None
        unwrapped = half or self.fsdp
        self.model = self.computing if unwrapped else accelerator.prepare(self.plain_model)
        optimizer = build_optimizer(config, self.plain_model, fused=self.device.type == "cuda")
        self.optimizer = optimizer if self.fsdp else accelerator.prepare(optimizer)

    def announce(self, step: int, layout: str = "") -> None:
        super().announce(step, layout)
        if self.main and self.adapter is not None:
            self.console.print(printable(self.adapter.described()), highlight=False, soft_wrap=True)

    def prepare(self, noisy: Sequence[NoisyBatch]) -> list[MicroBatch]:
        batches = [(batch, transforms.loss_positions(batch)) for batch in noisy]
        if self.device.type != "cuda":
            return batches
        return [(batch.pin(), transforms.pin_positions(positions)) for batch, positions in batches]

    def forward_backward(self, batches: list[MicroBatch], divisors_K: torch.Tensor) -> torch.Tensor:
        sums_K = torch.zeros(len(divisors_K), dtype=torch.float64, device=self.device)
        for number, (batch, positions) in enumerate(batches, 1):
            # DDP reduces gradients with the last micro-batch. FSDP reduces them with each one, because unsharded
            # gradients would not fit in memory.
            reduces = number == len(batches) or self.fsdp
            sync = contextlib.nullcontext() if reduces else self.accelerator.no_sync(self.model)
            with sync, self._attention(batch):
                loss, terms_K = self._loss(self.model, batch, positions, divisors_K)
                # Data parallelism averages over processes; the global normaliser needs the sum.
                self.accelerator.backward(loss * self.processes.world_size)
            sums_K += terms_K
        return self._sum(sums_K)

    def optimizer_step(self) -> tuple[bool, torch.Tensor]:
        max_norm = self.config.optimizer.clip_grad or math.inf  # infinity only measures
        if self.fsdp:
            norm = fsdp.clip_grad_norm(list(self.plain_model.parameters()), max_norm, self.device)
        else:
            norm = self.accelerator.clip_grad_norm_(self.plain_model.parameters(), max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.half is not None:
            self.half.refresh()
        if self.averages is not None:
            self.averages.update()
        return self.accelerator.scaler is None, norm

    @functools.cached_property
    def layer_norms(self) -> HubLayerNorms:
        processes = self.processes
        return HubLayerNorms(
            self.plain_model, self.device, processes.rank, processes.cpu_group, self.accelerator.scaler
        )

    def peak_memory(self) -> int | None:
        return largest_peak_memory(self.processes)

    def evaluation_sums(self, objective: Objective, count: int) -> torch.Tensor:
        rank, world_size = self.processes.rank, self.processes.world_size
        totals = torch.zeros(2, objective.terms, dtype=torch.float64)
        self.model.eval()
        # All processes run the same number of forward passes, because FSDP gathers weights in each of them.
        own = range(rank, -(-count // world_size) * world_size, world_size)
        for start in range(0, len(own), self.micro_batch_size):
            batch = self.evaluation_batch(objective, own[start : start + self.micro_batch_size], count)
            with self._attention(batch):
                _, sums_K = self._loss(
                    self.computing, batch, transforms.loss_positions(batch), torch.ones(objective.terms)
                )
            totals += torch.stack([sums_K.double().cpu(), batch.normaliser])
        self.model.train()
        return self._sum(totals).cpu()

    def save_checkpoint(self, step: int) -> Path:
        return save_run(
            self.config, self.accelerator, step, self.plain_model, self.optimizer, self.adapter, self.tokenizer,
            {"train_blocks": len(self.train)}, self.averages, kept=self.kept_checkpoints(),
        )  # fmt: skip

    def load_checkpoint(self, folder: Path) -> None:
        """Load the states of optimizer, averages and gradient scaler. The weights are loaded by `starting_model`."""
        state = restore_run(self.config, self.accelerator, folder, self.plain_model, self.optimizer)
        self.check_same_data(state["train_blocks"])
        if self.averages is not None:
            self._load_averages(self.averages, folder)

    def _load_averages(self, averages: AveragedModel, checkpoint: Path) -> None:
        starting = starting_model(self.config, averaged_folder(checkpoint), self.main)
        if self.fsdp:
            source = shard_source(starting.model, starting.weights, self.device)
            averages.load(source.shards(self.plain_model))
        else:
            averages.load(starting.model.parameters())

    def _loss(
        self, model: Any, batch: NoisyBatch, positions: LossPositions, divisors_K: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Loss of a micro-batch, a scalar, and its terms [K], divided by `divisors_K` of the global batch."""
        coeff = self.z_loss_coeff if len(divisors_K) > self.objective.terms else 0.0
        positions = transforms.normalised_positions(positions, divisors_K, self.device, coeff)
        batch = batch.to(self.device)
        mask: Any = batch.model_mask()
        if not self.diffuses and mask is not None and mask.dim() == 4:  # model classes of transformers
            mask = layer_masks(mask, self.computing.config, self.computing.dtype)
        more = {} if batch.self_conditioned is None else {"self_conditioned": batch.self_conditioned}
        return self.head.loss(
            model,
            positions,
            input_ids=batch.input_ids,
            attention_mask=mask,
            position_ids=batch.position_ids,
            use_cache=False,
            **more,
        )

    def _attention(self, batch: NoisyBatch) -> AbstractContextManager[None]:
        """Context manager with the attention kernels of a micro-batch, for forward and backward pass."""
        own = batch.attention_mask is not None or batch.mask_descriptor is not None or batch.pairs is not None
        masked = own or "block_causal" in self.objective.attention_patterns
        return attention_kernels(self.device, masked, self.compiled, self.uses_flash)

    def _sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum of each value over the processes, float64 on the device."""
        reduced: Any = self.accelerator.reduce(values.double().to(self.device), reduction="sum")
        return reduced


def largest_peak_memory(processes: Processes) -> int | None:
    """Peak of allocated bytes so far, of the GPU where it is largest; None on CPU. Collective."""
    return processes.largest(torch.cuda.max_memory_allocated()) if processes.device.type == "cuda" else None


def processes_of(accelerator: Accelerator) -> Processes:
    """Rank, device and groups of this process in an Accelerate run."""
    device, world_size = accelerator.device, accelerator.num_processes
    on_gpu = device.type == "cuda"
    return Processes(
        rank=accelerator.process_index,
        world_size=world_size,
        replica=accelerator.process_index,
        replicas=world_size,
        device=device,
        device_name=torch.cuda.get_device_name(device) if on_gpu else None,
        cpu_group=dist.new_group(backend="gloo") if on_gpu and world_size > 1 else None,
    )


def build_accelerator(config: TrainConfig) -> Accelerator:
    """Construct the Accelerator in the run's precision. Raises SettingError or MissingExtraError if the machine or the
    launcher does not support it."""
    cpu = trains_on_cpu(config)
    precision, is_rl = config.precision.precision, config.task == "rl"
    if precision == "fp8":
        transforms.check_float8()
    if world_size() > 1:  # Accelerate's own group would find stale keys after a restart by torchrun
        accelerator = torch.accelerator.current_accelerator()
        start_process_group("gloo" if cpu else dist.get_default_backend_for_device(str(accelerator)))
    mixed = {"fp32": "no", "bf16": "bf16", "fp16": "fp16", "fp8": "bf16"}[precision]
    # FSDP, and a single process that computes with copies of the weights, do not use autocast.
    copies = precision in HALF and not is_rl and PartialState(cpu=cpu).num_processes == 1
    accelerator = Accelerator(cpu=cpu, mixed_precision="no" if config.parallel.shards or copies else mixed)
    found = accelerator.distributed_type
    if found in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
        raise SettingError(
            "sharding",
            f"accelerate is configured for {found.value}: launch with torchrun, which runs data parallelism and FSDP2",
        )
    return accelerator

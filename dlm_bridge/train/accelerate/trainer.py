"""Trainer of the Accelerate engine: the Hub model on one device, data parallel, or under FSDP2."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType
from rich.console import Console

from dlm_bridge.attention_mask import mask_for_implementation
from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.objectives.base import Objective
from dlm_bridge.objectives.batches import IGNORE_INDEX, NoisyBatch
from dlm_bridge.objectives.loss import divisors
from dlm_bridge.objectives.noise import Purpose, Uniforms, torch_seed
from dlm_bridge.parallel.output_layer import LossPositions
from dlm_bridge.train.accelerate.attention import FLASH, attention_kernels, set_attention, uses_flash_attention
from dlm_bridge.train.accelerate.fsdp import (
    clip_grad_norm,
    fsdp_config,
    load_optimizer,
    process_group,
    reshard_model,
    save_sharded,
    shard_model,
    with_launcher_settings,
)
from dlm_bridge.train.accelerate.transforms import (
    HalfPrecisionParams,
    LossHead,
    check_float8,
    compile_layers,
    convert_to_float8,
    loss_positions,
    normalised_positions,
    pin_positions,
)
from dlm_bridge.train.adaptation import anneal_mask, at_step, scheduled_block_size, with_block_size
from dlm_bridge.train.checkpoints import find_checkpoints, load_state, remove_old_checkpoints, save_checkpoint
from dlm_bridge.train.config import TrainConfig
from dlm_bridge.train.data.blocks import Rows, Samples
from dlm_bridge.train.data.loader import BatchSampler, Prefetcher
from dlm_bridge.train.loading import starting_model
from dlm_bridge.train.lora import Adapter, add_adapter, with_lora
from dlm_bridge.train.metrics import (
    CudaTimer,
    DeferredMetrics,
    MetricsFile,
    StepMetrics,
    flops_per_token,
    peak_flops,
    plot_loss,
)
from dlm_bridge.train.optimizer import adamw, check_finite, learning_rate
from dlm_bridge.train.setup import (
    check_data,
    load_data,
    make_objective,
    remove_empty_output_on_error,
    start_run,
    trains_on_cpu,
    with_objective,
    write_config,
)
from dlm_bridge.train.trainer import EVAL_BATCHES, TrainingLoop

HALF = ("bf16", "fp8")  # precisions whose weights are fp32 and whose model is not


@remove_empty_output_on_error
def train(config: TrainConfig, resume: bool = False, console: Console | None = None) -> Path:
    """Train until `config.steps`, a SIGTERM or `config.exit_duration`, and return the last checkpoint's folder.

    With `resume` the run in `config.output` goes on from its newest checkpoint (from the start where it has none);
    without it, an output folder that holds a run is refused. Raises DlmBridgeError for bad input and where the loss
    stops being a number.
    """
    console = console or Console(stderr=True)
    config = with_launcher_settings(config)
    accelerator = _accelerator(config)
    micro_batch_size, _ = config.data.accumulation(accelerator.num_processes)
    beginning = start_run(config, resume, accelerator, console)
    output, step, checkpoint = beginning.output, beginning.step, beginning.checkpoint
    if beginning.finished and checkpoint is not None:
        return checkpoint

    check_data(config)
    model = starting_model(config, checkpoint, accelerator.is_main_process)
    config = with_lora(with_objective(config, model), model)
    if (size := scheduled_block_size(config, step + 1)) is not None:
        model.config.block_size = size  # which a model that begins with a schedule need not have
    objective = make_objective(config, model)
    with accelerator.main_process_first():
        train, valid, tokenizer = load_data(config, model, objective.mask_token_id if objective.masks else None)
    state = None if checkpoint is None else load_state(checkpoint)
    if state is not None and state["train_blocks"] != len(train):
        raise DlmBridgeError(
            f"--data gives {len(train)} training blocks, the run began with {state['train_blocks']}: "
            "resume with the data that it began with"
        )
    with process_group(config):
        trainer = AccelerateTrainer(
            config=config,
            accelerator=accelerator,
            model=model,
            adapter=add_adapter(config, model, checkpoint) if config.model.adapts else None,
            tokenizer=tokenizer,
            objective=objective,
            train=train,
            valid=valid,
            micro_batch_size=micro_batch_size,
            output=output,
            console=console,
        )
        if accelerator.is_main_process:
            write_config(config, output)
            begun = "training" if step == 0 else f"resuming at step {step}:"
            console.print(
                f"{begun} {len(train):,} blocks of {config.data.seq_length} tokens, {len(valid):,} for validation",
                highlight=False,
            )
            if trainer.adapter is not None:
                console.print(trainer.adapter.described(), highlight=False)
        if checkpoint is not None and state is not None:
            trainer.load_state(checkpoint, state)
        folder = trainer.run(step)
        accelerator.wait_for_everyone()
        return folder


@dataclass
class AccelerateTrainer(TrainingLoop):
    """One run's parts, put together."""

    config: TrainConfig
    accelerator: Accelerator
    model: Any
    adapter: Adapter | None  # of the model, in its place
    tokenizer: Any
    objective: Objective
    train: Samples
    valid: Samples
    micro_batch_size: int
    output: Path
    console: Console

    def __post_init__(self) -> None:
        config = self.config
        if config.engine.attention_backend not in (None, FLASH):
            set_attention(self.model, config.engine.attention_backend)
        self.uses_flash = uses_flash_attention(
            self.model, config.engine.attention_backend, self.accelerator.device, config.precision.name
        )
        self.model.train()  # transformers loads models for inference: no dropout, no gradient checkpointing
        if config.engine.gradient_checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        device = self.accelerator.device
        self.flops_per_token = flops_per_token(self.model, config.data.seq_length) * self.objective.tokens_read
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else None
        self.peak_flops = peak_flops(name, config.precision.name)
        self.sampler = BatchSampler(config.data.global_batch_size)
        self.sharding = fsdp_config(config, device)
        # What will be cut gets to the device in parts; what is quantized is there.
        stays = self.sharding is not None or config.model.lora_quantize is not None
        self.plain_model = self.model if stays else self.model.to(device)
        # In half precision one process computes with copies of the weights, several under autocast, or FSDP's.
        half = config.precision.name in HALF and self.accelerator.mixed_precision == "no" and self.sharding is None
        self.half = HalfPrecisionParams(self.plain_model) if half else None
        self.computing = self.plain_model if self.half is None else self.half.model
        if config.precision.name == "fp8":
            convert_to_float8(self.computing)
        self.compiled = device.type == "cuda" if config.engine.compile is None else config.engine.compile
        if self.compiled:
            compile_layers(self.computing)
        self.head = LossHead(self.computing)
        if self.sharding is not None:
            shard_model(self.plain_model, self.sharding)
        whole = half or self.sharding is not None
        self.model = self.computing if whole else self.accelerator.prepare(self.plain_model)
        optimizer = adamw(config, self.plain_model, fused=device.type == "cuda")
        self.optimizer: Any = optimizer if self.sharding is not None else self.accelerator.prepare(optimizer)
        # Counts travel between CPUs: agreeing on them never waits for the device.
        several = self.accelerator.num_processes > 1 and device.type == "cuda"
        self.cpu_group = dist.new_group(backend="gloo") if several else None

    @property
    def main(self) -> bool:
        return self.accelerator.is_main_process

    def load_state(self, checkpoint: Path, state: dict[str, Any]) -> None:
        """Set the optimizer's state, and the gradient scaler's, to what a checkpoint has."""
        if self.sharding is None and "optimizer" in state:
            self.optimizer.load_state_dict(state["optimizer"])
        else:
            plain = getattr(self.optimizer, "optimizer", self.optimizer)  # without Accelerate around it
            load_optimizer(checkpoint, self.plain_model, plain, state)
        if self.accelerator.scaler is not None and state["scaler"] is not None:
            self.accelerator.scaler.load_state_dict(state["scaler"])

    def run(self, step: int) -> Path:
        with Prefetcher(self._produce, step + 1) as self.batches:
            return super().run(step)

    def step(self, step: int, want_stop: bool) -> tuple[StepMetrics, bool]:
        figures, stop = self.start(step, want_stop)
        return figures(), stop

    def start(self, step: int, want_stop: bool) -> tuple[Callable[[], StepMetrics], bool]:
        """One optimizer step. Nothing in it waits for the device; what comes back does, when it is called."""
        config, accelerator = self.config, self.accelerator
        began = CudaTimer(accelerator.device)
        # Dropout's numbers, too, depend on nothing that a restart forgets.
        torch.manual_seed(torch_seed(config.data.seed, step, accelerator.process_index))
        self.objective = with_block_size(self.objective, self.plain_model, config, step)
        batches = self.batches.get()
        counted = torch.stack([batch.normaliser for batch, _ in batches]).sum(dim=0)
        summed = self._sum_on_cpu(torch.cat([counted, torch.tensor([float(want_stop)], dtype=torch.float64)]))
        shares, stop = divisors(summed[:-1]), bool(summed[-1] > 0)
        rate = learning_rate(config, step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate

        sums = torch.zeros(len(shares), dtype=torch.float64, device=accelerator.device)
        for number, (batch, chosen) in enumerate(batches, 1):
            # Gradients are summed over the processes once, with the last micro-batch; where they are cut each time,
            # since a process has no room for whole ones.
            whole = number == len(batches) or self.sharding is not None
            sync = contextlib.nullcontext() if whole else accelerator.no_sync(self.model)
            with sync, self._attention(batch):
                loss, terms = self._loss(self.model, batch, chosen, shares)
                # Data parallelism averages over processes; the global normaliser wants the sum.
                accelerator.backward(loss * accelerator.num_processes)
            sums += terms
        sums = self._sum(sums)
        bound = config.optimizer.clip_grad or math.inf  # which only measures
        if self.sharding is not None:
            norm = clip_grad_norm(list(self.plain_model.parameters()), bound, accelerator.device)
        else:
            norm = accelerator.clip_grad_norm_(self.plain_model.parameters(), bound)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.half is not None:
            self.half.refresh()
        figures = DeferredMetrics(torch.cat([sums, norm.detach().to(sums)[None]]), began)
        return (lambda: self._row(step, rate, figures)), stop

    def _row(self, step: int, rate: float, figures: DeferredMetrics) -> StepMetrics:
        """The line of a step, once the device has taken it. Raises DlmBridgeError where the loss or the gradient is no
        number: the next step may have been taken by then, no checkpoint has been written."""
        config, accelerator = self.config, self.accelerator
        (*losses, norm), seconds = figures.read()
        loss = sum(losses)
        if not math.isfinite(loss):
            raise DlmBridgeError(f"step {step}: the loss is {loss}: lower --lr, or resume from before with another")
        if not math.isfinite(norm) and accelerator.scaler is None:
            raise DlmBridgeError(f"step {step}: the gradient norm is {norm}: lower --lr")
        tokens = config.data.global_batch_size * config.data.seq_length
        rate_of_tokens = tokens / seconds
        return StepMetrics(
            step=step,
            loss=loss,
            grad_norm=norm,
            lr=rate,
            tokens=step * tokens,
            tokens_per_s=rate_of_tokens,
            tokens_per_s_per_device=rate_of_tokens / accelerator.num_processes,
            peak_memory=torch.cuda.max_memory_allocated() if accelerator.device.type == "cuda" else None,
            mfu=None
            if self.peak_flops is None
            else rate_of_tokens * self.flops_per_token / (self.peak_flops * accelerator.num_processes),
        )

    @torch.no_grad()
    def evaluate(self) -> float:
        """The validation loss, over the same blocks with the same noise every time; of the model as a checkpoint of
        this step is used: with its block size, and with its family's own attention, annealed or not."""
        accelerator = self.accelerator
        count = min(len(self.valid), EVAL_BATCHES * self.config.data.global_batch_size)
        objective = dataclasses.replace(self.objective, length_variation=0.0)
        totals = torch.zeros(2, objective.terms, dtype=torch.float64)  # loss sums and normalisers
        self.model.eval()
        # All processes take as many turns: those of cut weights gather them together.
        samples = range(accelerator.process_index, -(-count // accelerator.num_processes) * accelerator.num_processes)
        samples = samples[:: accelerator.num_processes]
        for start in range(0, len(samples), self.micro_batch_size):
            chosen = list(samples[start : start + self.micro_batch_size])
            uniforms = Uniforms.keyed(
                self.config.data.seed, 0, chosen, self.config.data.seq_length, Purpose.EVAL_NOISE
            )
            batch = objective.noise(uniforms=uniforms, **vars(_evaluation_rows(self.valid, chosen, count)))
            with self._attention(batch):
                _, sums = self._loss(self.computing, batch, loss_positions(batch), torch.ones(objective.terms))
            totals += torch.stack([sums.double().cpu(), batch.normaliser])
        self.model.train()
        loss_sums, normaliser = self._sum(totals).cpu()
        return float((loss_sums / divisors(normaliser)).sum())

    def save(self, step: int, metrics: MetricsFile | None) -> Path:
        """Write the checkpoint of `step` on the main process, while the others wait, or give it their parts."""
        if self.sharding is not None:
            reshard_model(self.plain_model)
        self._check_finite(step)
        scaler = self.accelerator.scaler
        state: dict[str, Any] = {
            "scaler": None if scaler is None else scaler.state_dict(),
            "train_blocks": len(self.train),
        }
        if metrics is not None:
            metrics.sync()
        if self.sharding is not None:
            save_sharded(
                self.output,
                step,
                self.plain_model,
                self.optimizer,
                self.adapter,
                self.tokenizer,
                state,
                self.accelerator.device,
            )
        elif metrics is not None:
            state["optimizer"] = self.optimizer.state_dict()
            save_checkpoint(self.output, step, self.adapter or self.plain_model, self.tokenizer, state)
        if metrics is not None:
            remove_old_checkpoints(self.output, self.config.checkpoint.keep_last)
            plot_loss(metrics.rows, self.output / "loss.png")
        self.accelerator.wait_for_everyone()
        return find_checkpoints(self.output)[-1][1]

    def _check_finite(self, step: int) -> None:
        """Every process stops where one of them would write what is no number."""
        error: DlmBridgeError | None = None
        try:
            check_finite(step, (weight for weight in self.plain_model.parameters() if weight.requires_grad))
        except DlmBridgeError as found:
            error = found
        if self._sum_on_cpu(torch.tensor(float(error is not None))):
            raise error or DlmBridgeError(f"step {step}: another process has weights that are not finite")

    def _produce(self, step: int) -> list[tuple[NoisyBatch, LossPositions]]:
        """This process's micro-batches of a step and the positions with a loss, in the background and ahead of it. The
        noise is drawn on the CPU, where it costs little and equals every other engine's."""
        config, accelerator = self.config, self.accelerator
        objective = at_step(self.objective, config, step)
        batches = []
        for samples in self.sampler.samples(
            step, accelerator.process_index, accelerator.num_processes, self.micro_batch_size
        ):
            uniforms = Uniforms.keyed(config.data.seed, step, samples, config.data.seq_length)
            noisy = objective.noise(uniforms=uniforms, **vars(self.train.rows(samples)))
            noisy = anneal_mask(noisy, config, step, samples)
            batch = (noisy, loss_positions(noisy))
            batches.append((noisy.pin(), pin_positions(batch[1])) if accelerator.device.type == "cuda" else batch)
        return batches

    def _loss(
        self, model: Any, batch: NoisyBatch, chosen: LossPositions, shares: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss of a micro-batch and its terms [K], divided by `shares` [K], the whole global batch's."""
        device = self.accelerator.device
        batch, chosen = batch.to(device), normalised_positions(chosen, shares, device)
        mask = batch.model_mask()
        if not self.objective.masks and mask is not None and mask.dim() == 4:  # of transformers' own classes
            mask = mask_for_implementation(mask, self.computing.config._attn_implementation, self.computing.dtype)
        return self.head.loss(
            model,
            chosen,
            input_ids=batch.input_ids,
            attention_mask=mask,
            position_ids=batch.position_ids,
            use_cache=False,
        )

    def _attention(self, batch: NoisyBatch) -> contextlib.AbstractContextManager[None]:
        """The kernels of a micro-batch's attention, for its forward and its backward pass."""
        own = batch.attention_mask is not None or batch.mask_descriptor is not None or batch.pairs is not None
        masked = own or "block_causal" in self.objective.attention_patterns
        return attention_kernels(self.accelerator.device, masked, self.compiled, self.uses_flash)

    def _sum(self, values: torch.Tensor) -> torch.Tensor:
        """Each value summed over the processes, in float64, on the device."""
        reduced: Any = self.accelerator.reduce(values.double().to(self.accelerator.device), reduction="sum")
        return reduced

    def _sum_on_cpu(self, values: torch.Tensor) -> torch.Tensor:
        if self.accelerator.num_processes > 1:
            dist.all_reduce(values, group=self.cpu_group)
        return values


def _evaluation_rows(blocks: Samples, samples: list[int], count: int) -> Rows:
    """The rows of some samples, of which those from `count` on are not there, and count nothing."""
    rows = blocks.rows([sample if sample < count else 0 for sample in samples])
    there = torch.tensor([sample < count for sample in samples])
    if there.all():
        return rows
    labels = rows.input_ids if rows.labels is None else rows.labels
    return dataclasses.replace(rows, labels=torch.where(there[:, None], labels, IGNORE_INDEX))


def _accelerator(config: TrainConfig) -> Accelerator:
    cpu = trains_on_cpu(config)
    if config.precision.name == "fp8":
        check_float8()
    mixed = {"fp32": "no", "bf16": "bf16", "fp16": "fp16", "fp8": "bf16"}[config.precision.name]
    if config.parallel.shards or (config.precision.name in HALF and PartialState(cpu=cpu).num_processes == 1):
        mixed = "no"
    accelerator = Accelerator(cpu=cpu, mixed_precision=mixed)
    if accelerator.distributed_type in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
        raise DlmBridgeError(
            f"accelerate is configured for {accelerator.distributed_type.value}: data parallelism and FSDP2 are "
            "supported, launch with torchrun or accelerate launch --multi_gpu"
        )
    return accelerator

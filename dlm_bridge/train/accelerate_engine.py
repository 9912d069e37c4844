"""Training on one machine: the Hub-side model under Accelerate, alone or data parallel over processes."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from rich.console import Console

from dlm_bridge.errors import DlmBridgeError, one_line
from dlm_bridge.models.masks import for_kernel
from dlm_bridge.train.adaptation import annealed, at_step, block_size, with_block_size
from dlm_bridge.train.checkpoints import clean, find_checkpoints, load_state, save_checkpoint
from dlm_bridge.train.config import TrainConfig
from dlm_bridge.train.data import Prefetcher, Samples
from dlm_bridge.train.keyed import Purpose, torch_seed
from dlm_bridge.train.loading import load_hub_model, load_model
from dlm_bridge.train.loop import EVAL_BATCHES, Engine
from dlm_bridge.train.metrics import MetricsFile, Row, flops_per_token, peak_flops, plot_loss
from dlm_bridge.train.objectives import NoisyBatch, Objective, Uniforms, divisors
from dlm_bridge.train.optimisation import check_finite, learning_rate, parameter_groups
from dlm_bridge.train.sampling import Sampler
from dlm_bridge.train.setup import (
    check_data,
    load_data,
    make_objective,
    open_output,
    with_objective,
    write_config,
)


def train(config: TrainConfig, resume: bool = False, console: Console | None = None) -> Path:
    """Train until `config.steps`, a SIGTERM or `config.exit_duration`, and return the last checkpoint's folder.

    With `resume` the run in `config.output` goes on from its newest checkpoint (from the start where it has none);
    without it, an output folder that holds a run is refused. Raises DlmBridgeError for bad input and where the loss
    stops being a number.
    """
    console = console or Console(stderr=True)
    accelerator = _accelerator(config)
    micro_batch_size, _ = config.accumulation(accelerator.num_processes)
    output = Path(config.output)
    if accelerator.is_main_process:
        open_output(output, resume)
    accelerator.wait_for_everyone()
    step, checkpoint = find_checkpoints(output)[-1] if resume and find_checkpoints(output) else (0, None)
    if checkpoint is not None and step >= config.steps:
        if accelerator.is_main_process:
            console.print(f"the run is finished: step {step} of {config.steps}, {checkpoint}", soft_wrap=True)
        return checkpoint

    check_data(config)
    model = load_model(config) if checkpoint is None else load_hub_model(str(checkpoint), config.family)
    config = with_objective(config, model)
    if (size := block_size(config, step + 1)) is not None:
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
    trainer = Trainer(
        config=config,
        accelerator=accelerator,
        model=model,
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
        console.print(
            f"{'training' if step == 0 else f'resuming at step {step}:'} {len(train):,} blocks of {config.seq_length} "
            f"tokens, {len(valid):,} for validation",
            highlight=False,
        )
    if state is not None:
        trainer.load_state(state)
    folder = trainer.run(step)
    accelerator.wait_for_everyone()
    return folder


@dataclass
class Trainer(Engine):
    """One run's parts, put together."""

    config: TrainConfig
    accelerator: Accelerator
    model: Any
    tokenizer: Any
    objective: Objective
    train: Samples
    valid: Samples
    micro_batch_size: int
    output: Path
    console: Console

    def __post_init__(self) -> None:
        config = self.config
        if config.attention_backend is not None:
            set_attention(self.model, config.attention_backend)
        self.model.train()  # transformers loads models for inference: no dropout, no gradient checkpointing
        if config.gradient_checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        device = self.accelerator.device
        self.flops_per_token = flops_per_token(self.model, config.seq_length) * self.objective.tokens_read
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else None
        self.peak_flops = peak_flops(name, config.precision)
        optimizer = torch.optim.AdamW(
            parameter_groups(self.model, config.weight_decay),
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.adam_eps,
        )
        self.sampler = Sampler(config.global_batch_size)
        self.plain_model = self.model
        self.model, self.optimizer = self.accelerator.prepare(self.model, optimizer)

    @property
    def main(self) -> bool:
        return self.accelerator.is_main_process

    def load_state(self, state: dict[str, Any]) -> None:
        """Set the optimizer's state, and the gradient scaler's, to what a checkpoint has."""
        self.optimizer.load_state_dict(state["optimizer"])
        if self.accelerator.scaler is not None and state["scaler"] is not None:
            self.accelerator.scaler.load_state_dict(state["scaler"])

    def run(self, step: int) -> Path:
        with Prefetcher(self._produce, step + 1) as self.batches:
            return super().run(step)

    def step(self, step: int, want_stop: bool) -> tuple[Row, bool]:
        config, accelerator = self.config, self.accelerator
        began = time.perf_counter()
        # Dropout's numbers, too, depend on nothing that a restart forgets.
        torch.manual_seed(torch_seed(config.seed, step, accelerator.process_index))
        self.objective = with_block_size(self.objective, self.plain_model, config, step)
        batches = self.batches.get()
        summed = self._sum(torch.stack([batch.normaliser for batch in batches]).sum(dim=0), int(want_stop))
        normaliser, stop = divisors(summed[:-1]).to(accelerator.device), bool(summed[-1] > 0)
        rate = learning_rate(config, step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate

        loss_sums = torch.zeros(len(normaliser), dtype=torch.float64, device=accelerator.device)
        for number, batch in enumerate(batches, 1):
            # Gradients are summed over the processes once, with the last micro-batch.
            with contextlib.nullcontext() if number == len(batches) else accelerator.no_sync(self.model):
                sums = self._loss_sums(self.model, batch)
                # Data parallelism averages over processes; the global normaliser wants the sum.
                accelerator.backward((sums * (accelerator.num_processes / normaliser)).sum())
            loss_sums += sums.detach()
        loss_value = float((self._sum(loss_sums) / normaliser).sum())
        if not math.isfinite(loss_value):
            raise DlmBridgeError(
                f"step {step}: the loss is {loss_value}: lower --lr, or resume from before with another"
            )
        # An infinite bound only measures.
        norm = float(accelerator.clip_grad_norm_(self.model.parameters(), config.clip_grad or math.inf))
        if not math.isfinite(norm) and accelerator.scaler is None:
            raise DlmBridgeError(f"step {step}: the gradient norm is {norm}: lower --lr")
        self.optimizer.step()
        self.optimizer.zero_grad()

        tokens = config.global_batch_size * config.seq_length
        rate_of_tokens = tokens / (time.perf_counter() - began)
        row = Row(
            step=step,
            loss=loss_value,
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
        return row, stop

    @torch.no_grad()
    def evaluate(self) -> float:
        """The validation loss, over the same blocks with the same noise every time; of the model as a checkpoint of
        this step is used: with its block size, and with its family's own attention, annealed or not."""
        accelerator = self.accelerator
        count = min(len(self.valid), EVAL_BATCHES * self.config.global_batch_size)
        samples = range(count)[accelerator.process_index :: accelerator.num_processes]
        objective = dataclasses.replace(self.objective, length_variation=0.0)
        totals = torch.zeros(2, objective.terms, dtype=torch.float64)  # loss sums and normalisers
        self.model.eval()
        for start in range(0, len(samples), self.micro_batch_size):
            chosen = list(samples[start : start + self.micro_batch_size])
            uniforms = Uniforms.keyed(self.config.seed, 0, chosen, self.config.seq_length, Purpose.EVAL_NOISE)
            batch = objective.noise(uniforms=uniforms, **vars(self.valid.rows(chosen)))
            sums = self._loss_sums(self.plain_model, batch).double().cpu()
            totals += torch.stack([sums, batch.normaliser])
        self.model.train()
        loss_sums, normaliser = self._sum(totals).cpu().reshape(2, -1)
        return float((loss_sums / divisors(normaliser)).sum())

    def save(self, step: int, metrics: MetricsFile | None) -> Path:
        """Write the checkpoint of `step` on the main process, while the others wait."""
        check_finite(step, self.plain_model.parameters())
        if metrics is not None:
            metrics.sync()
            scaler = self.accelerator.scaler
            state = {
                "optimizer": self.optimizer.state_dict(),
                "scaler": None if scaler is None else scaler.state_dict(),
                "train_blocks": len(self.train),
            }
            save_checkpoint(self.output, step, self.plain_model, self.tokenizer, state)
            clean(self.output, self.config.keep_last)
            plot_loss(metrics.rows, self.output / "loss.png")
        self.accelerator.wait_for_everyone()
        return find_checkpoints(self.output)[-1][1]

    def _produce(self, step: int) -> list[NoisyBatch]:
        """This process's micro-batches of a step, in the background and ahead of it. The noise is drawn on the CPU,
        where it costs little and equals every other engine's."""
        config, accelerator = self.config, self.accelerator
        objective = at_step(self.objective, config, step)
        batches = []
        for samples in self.sampler.samples(
            step, accelerator.process_index, accelerator.num_processes, self.micro_batch_size
        ):
            uniforms = Uniforms.keyed(config.seed, step, samples, config.seq_length)
            noisy = objective.noise(uniforms=uniforms, **vars(self.train.rows(samples)))
            batches.append(annealed(noisy, config, step, samples))
        return batches

    def _loss_sums(self, model: Any, batch: NoisyBatch) -> torch.Tensor:
        batch = batch.to(self.accelerator.device)
        if not self.objective.masks:  # transformers' own classes, whose logits_to_keep is not a mask
            mask = batch.model_mask()
            if mask is not None and mask.dim() == 4:
                plain = self.plain_model
                mask = for_kernel(mask, plain.config._attn_implementation, plain.dtype)
            outputs = model(
                input_ids=batch.input_ids, attention_mask=mask, position_ids=batch.position_ids, use_cache=False
            )
            return self.objective.loss_sum(outputs.logits[batch.mask], batch)
        logits_MV = model(
            input_ids=batch.input_ids,
            attention_mask=batch.model_mask(),
            position_ids=batch.position_ids,
            logits_to_keep=batch.mask,
        ).logits
        return self.objective.loss_sum(logits_MV, batch)

    def _sum(self, *values: torch.Tensor | float) -> torch.Tensor:
        """All values in one row, each summed over the processes, in float64."""
        device = self.accelerator.device
        row = torch.cat([torch.as_tensor(value, dtype=torch.float64, device=device).reshape(-1) for value in values])
        reduced: Any = self.accelerator.reduce(row, reduction="sum")
        return reduced


def set_attention(model: Any, backend: str) -> None:
    """Use one of transformers' attention implementations. Raises DlmBridgeError for one that is not there."""
    try:
        model.set_attn_implementation(backend)
    except (ValueError, ImportError) as error:
        raise DlmBridgeError(f"--attention-backend {backend}: {one_line(error)}") from error


def _accelerator(config: TrainConfig) -> Accelerator:
    cpu = not torch.accelerator.is_available()
    if cpu and config.precision == "fp16":
        raise DlmBridgeError("--precision fp16 needs a GPU: use bf16 or fp32 on a CPU")
    mixed = {"fp32": "no", "bf16": "bf16", "fp16": "fp16"}[config.precision]
    accelerator = Accelerator(cpu=cpu, mixed_precision=mixed)
    if accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
        raise DlmBridgeError(
            f"accelerate is configured for {accelerator.distributed_type.value}: only data parallelism is supported, "
            "launch with torchrun or accelerate launch --multi_gpu"
        )
    return accelerator

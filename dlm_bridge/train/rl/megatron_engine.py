"""Reinforcement learning with the Megatron engine: updates in any layout of megatron-core, rollouts from a copy of the
model on each rank, and TraceRL's value model."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

from dlm_bridge.convert.formats.dcp import DCP_METADATA
from dlm_bridge.distributed import first_on_main, raised_everywhere
from dlm_bridge.errors import NonFiniteError, SettingError
from dlm_bridge.files.atomic import disk_errors
from dlm_bridge.loading.pretrained import model_without_weights
from dlm_bridge.loading.source import MegatronSource
from dlm_bridge.objectives.batches import NoisyBatch
from dlm_bridge.objectives.registry import family_objective
from dlm_bridge.objectives.single_stream import NextTokenPrediction
from dlm_bridge.parallel import platform
from dlm_bridge.parallel.batch import rank_positions
from dlm_bridge.parallel.core import named_refusals
from dlm_bridge.parallel.handover import InPlaceWriter, write_hf_weights
from dlm_bridge.parallel.lora import LiveFactor, adapters_disabled
from dlm_bridge.parallel.parallelize import build_megatron_model
from dlm_bridge.parallel.train import mcore_config
from dlm_bridge.parallel.train.assembly import begin_run, build_trained_model, describe_layout
from dlm_bridge.parallel.train.checkpoints import CheckpointManager, checkpoint_root, remove_leftovers, write_hub_files
from dlm_bridge.parallel.train.lora import LoraRun
from dlm_bridge.parallel.train.schedule import eval_mode, gathered_weights, optimizer_weights, set_learning_rate
from dlm_bridge.parallel.train.trainer import ClippedOptimizerStep, largest_peak_memory, megatron_processes
from dlm_bridge.replicas import Replicas
from dlm_bridge.train.config import RLConfig
from dlm_bridge.train.config.reinforcement import AUTOREGRESSIVE, SAMPLED
from dlm_bridge.train.lora import with_lora
from dlm_bridge.train.metrics import MAKE_ROOM
from dlm_bridge.train.output import RunEnd
from dlm_bridge.train.rl.methods import check_model, load_rows
from dlm_bridge.train.rl.pipelined import PipelinedModel
from dlm_bridge.train.rl.replica import RolloutModel, room_makers, sampler_ranks
from dlm_bridge.train.rl.trainer import (
    VALUE_FOLDER,
    RLTrainer,
    UpdateEngine,
    UpdatePart,
    ValueUpdates,
    value_file,
)
from dlm_bridge.train.setup import open_megatron_source, write_config
from dlm_bridge.train.trainer import Processes


def train_with_megatron(config: RLConfig, resume: bool, console: Console) -> RunEnd:
    """`accelerate_engine.train` with the Megatron engine. Every process of the launcher calls it."""
    config, start = begin_run(config, resume, console)
    if start.finished is not None:
        return start.finished
    source = open_megatron_source(config, start.checkpoint)
    kind, tokenizer = check_model(config, source.model)
    config = with_lora(config, source.model)
    rows, held_out = first_on_main(lambda: load_rows(config, kind, source.model, tokenizer))
    engine = assemble_engine(config, source, start.checkpoint)
    trainer: RLTrainer[Any] = kind(config, engine, tokenizer, rows, held_out, start.output, console)
    with contextlib.closing(trainer):
        with raised_everywhere():
            if dist.get_rank() == 0:
                if start.checkpoint is None:
                    engine.write_shared_files(start.output, tokenizer)
                remove_leftovers(start.output)
                write_config(config, start.output)
        if start.checkpoint is not None:
            trainer.load_checkpoint(start.checkpoint)
        trainer.announce(start.step, f", {describe_layout(config)}")
        return trainer.run(start.step)


def assemble_engine(config: RLConfig, source: MegatronSource, checkpoint: Path | None) -> MegatronUpdates:
    """Build model, optimizer, reference and value model of a run that resumes from `checkpoint` (None: starts from
    `model`). Every process calls it."""
    rank_positions(config.data.seq_length, config.parallel.cp)
    objective = NextTokenPrediction() if config.rl.method in AUTOREGRESSIVE else family_objective(source.model)
    overrides = mcore_config.transformer_overrides(config, source.bridge, objective)
    adapter = LoraRun.of(config, source, checkpoint)
    chunks, optimizer, factors = build_trained_model(config, source, overrides, checkpoint, adapter)
    reference = None
    if config.rl.has_reference and not config.model.lora_rank:  # an adapter's reference is its base
        start = source if checkpoint is None else open_megatron_source(config, None)
        dtype, parallel = mcore_config.DTYPES[config.precision.precision], config.parallel
        with named_refusals(AssertionError):
            reference = build_megatron_model(
                start.bridge.checkpoint, parallel.layout, dtype, parallel.context, **overrides
            )
        if adapter is not None:
            adapter.add(reference)
        for chunk in reference:
            chunk.eval().requires_grad_(False)
    engine = MegatronUpdates(config, source, chunks, optimizer, reference, adapter, factors)
    if config.rl.value_model:
        engine.value_model = MegatronValueModel(config, engine.model, overrides, checkpoint)
    return engine


class MegatronUpdates(UpdateEngine):
    """Virtual pipeline stages of the model on this rank, and a second set of the reference or of the value model."""

    value_model: MegatronValueModel | None = None

    def __init__(
        self,
        config: RLConfig,
        source: MegatronSource,
        chunks: list[Any],  # wrapped for data parallelism
        optimizer: Any,
        reference: list[Any] | None,
        adapter: LoraRun | None = None,
        factors: list[list[LiveFactor]] | None = None,  # the adapter's, per chunk
    ) -> None:
        self.config, self.source = config, source
        self.adapter, self.factors = adapter, factors
        self.chunks, self.optimizer = chunks, optimizer
        self.plain_model = source.model
        self.processes = megatron_processes()
        self.replica, group = _replica_ranks(self.processes)
        self.model = PipelinedModel(config, source, self.processes, group, chunks)
        self.reference = None if reference is None else dataclasses.replace(self.model, chunks=reference)
        self.checkpoints = CheckpointManager(config, chunks, optimizer, source.bridge.checkpoint, factors)
        self.clipped_step = ClippedOptimizerStep(optimizer, config.optimizer.clip_grad)
        self.rollout_model: RolloutModel | None = None
        if config.rl.method in SAMPLED:
            dtype = mcore_config.DTYPES[config.precision.precision]
            self.samplers, group = sampler_ranks(config)
            empty = _empty_model(source, dtype, self.processes.device)
            self.rollout_model = RolloutModel(empty, dtype, room_makers(config), group)

    # -- log-probabilities and updates

    def row_width(self, width: int) -> int:
        """One width for all rows of a step, a multiple of what context and sequence parallelism need."""
        parallel = self.config.parallel
        chunks = 2 if parallel.cp > 1 else 1
        multiple = parallel.cp * math.lcm(chunks, parallel.tp if parallel.sharded_sequence else 1)
        return -(-self.processes.largest(width) // multiple) * multiple

    def logps(self, batches: Sequence[NoisyBatch]) -> list[torch.Tensor]:
        with gathered_weights(self.chunks):
            return self.model.predictions(batches)

    def reference_logps(self, batches: Sequence[NoisyBatch]) -> list[torch.Tensor]:
        if self.reference is not None:
            return self.reference.predictions(batches)
        with gathered_weights(self.chunks), adapters_disabled(self.chunks):
            return self.model.predictions(batches)

    def forward_backward(self, parts: Sequence[UpdatePart]) -> tuple[float, dict[str, float]]:
        return self.model.forward_backward(self.optimizer, parts)

    def optimizer_step(self, step: int) -> float:
        _, norm = self.clipped_step()
        if not math.isfinite(found := float(norm)) and self.config.precision.precision != "fp16":
            raise NonFiniteError(f"the gradient norm is {found}: lower `lr`", [f"step {step}"])
        return found

    def set_learning_rate(self, lr: float) -> None:
        set_learning_rate(self.optimizer, lr, self.config.optimizer.weight_decay)
        if self.value_model is not None:
            self.value_model.set_learning_rate(lr)

    def manual_seed(self, seed: int) -> None:
        platform.current().manual_seed(seed)

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        with eval_mode(self.chunks):
            yield

    @contextlib.contextmanager
    def sampling_model(self) -> Iterator[Any]:
        """Context manager of the whole model, or this rank's shard of it, whose weights all ranks gather one at a
        time."""
        assert self.rollout_model is not None
        with self.rollout_model.allocated(self.processes.device) as model:
            writer = self.rollout_model.hub_writer() if self.samplers.processes > 1 else InPlaceWriter(model)
            with gathered_weights(self.chunks):
                trained = None
                if self.adapter is not None:
                    assert self.factors is not None
                    trained = self.adapter.live(self.factors)
                write_hf_weights(self.source.bridge.checkpoint, writer, self.chunks, trained)
            yield model

    # -- checkpoints

    def write_shared_files(self, output: Path, tokenizer: Any) -> None:
        """Write the files that the run's checkpoints share. One process calls it when a run starts."""
        if self.adapter is None:
            write_hub_files(output, self.source, tokenizer)
        else:
            self.adapter.write_manifest(checkpoint_root(output), mcore_config.DTYPES[self.config.precision.precision])

    def trained_parameters(self) -> Iterable[torch.Tensor]:
        own = optimizer_weights(self.optimizer)
        return own if self.value_model is None else [*own, *self.value_model.trained_parameters()]

    def peak_memory(self) -> int | None:
        return largest_peak_memory(self.processes)

    def save_checkpoint(self, step: int, state: dict[str, Any]) -> Path:
        with gathered_weights(self.chunks):
            more = None if self.value_model is None else partial(self.value_model.save, step=step)
            return self.checkpoints.save(step, state, more)

    def load_checkpoint(self, folder: Path) -> dict[str, Any]:
        state = self.checkpoints.load(folder)
        if self.value_model is not None:
            self.value_model.load(folder)
        return state


def _replica_ranks(processes: Processes) -> tuple[Replicas, Any]:
    """The ranks of this process's data parallel replica, and their CPU group."""
    replica_of: list[Any] = [None] * processes.world_size
    dist.all_gather_object(replica_of, processes.replica, group=processes.cpu_group)
    groups = {
        replica: dist.new_group([rank for rank, of in enumerate(replica_of) if of == replica], backend="gloo")
        for replica in range(processes.replicas)
    }
    group = groups[processes.replica]
    return Replicas.of_group(group), group


def _empty_model(source: MegatronSource, dtype: torch.dtype, device: torch.device) -> Any:
    """The Hub model of a run without weights, its buffers on `device`. Raises SettingError for a model with weights
    that the Megatron engine does not hold."""
    checkpoint = source.bridge.checkpoint
    model = model_without_weights(type(source.model), source.model.config, dtype)
    held = InPlaceWriter(model).shapes
    for name, entry in checkpoint.mapping.passthrough_names(checkpoint.dims).items():
        if not entry.copy_of and name in held:
            raise SettingError(
                "engine", f"megatron does not hold {name}, which rollouts need: use `engine=accelerate`"
            )
    for module in model.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to(device)
    model.generation_config = source.model.generation_config
    return model


class MegatronValueModel(ValueUpdates):
    """A model of the policy's family and layout that predicts one number per token, with its optimizer."""

    def __init__(
        self, config: RLConfig, policy: PipelinedModel, overrides: dict[str, Any], checkpoint: Path | None
    ) -> None:
        """Build the policy's starting model with a value head of zeros; `load` restores it from a `checkpoint`.
        `overrides` as in `build_trained_model`. Every process calls it."""
        if checkpoint is not None:
            value_file(checkpoint, DCP_METADATA)
        self.config = config
        chunks, self.optimizer, _ = build_trained_model(config, policy.source, overrides, checkpoint, value_head=True)
        self.model = dataclasses.replace(policy, chunks=chunks, sign=1)
        self.checkpoints = CheckpointManager(config, chunks, self.optimizer, None)
        self.clipped_step = ClippedOptimizerStep(self.optimizer, config.optimizer.clip_grad)

    def values(self, batches: Sequence[NoisyBatch]) -> list[torch.Tensor]:
        with gathered_weights(self.model.chunks):
            return self.model.predictions(batches)

    def update(self, parts: Sequence[UpdatePart], step: int) -> float:
        loss, _ = self.model.forward_backward(self.optimizer, parts)
        norm = float(self.clipped_step()[1])
        if not math.isfinite(norm) and self.config.precision.precision != "fp16":
            raise self.diverged(step, norm)
        return loss

    def set_learning_rate(self, lr: float) -> None:
        set_learning_rate(self.optimizer, self.learning_rate(lr), self.config.optimizer.weight_decay)

    def trained_parameters(self) -> Iterable[torch.Tensor]:
        return optimizer_weights(self.optimizer)

    # -- checkpoints

    def save(self, folder: Path, step: int) -> None:
        """Write weights and optimizer to a subfolder of an iteration. Every process calls it."""
        own = folder / VALUE_FOLDER
        with raised_everywhere(), disk_errors(own, MAKE_ROOM):
            if dist.get_rank() == 0:
                own.mkdir()
        with gathered_weights(self.model.chunks):
            self.checkpoints.write(own, step, {})

    def load(self, folder: Path) -> None:
        """Restore weights and optimizer from an iteration."""
        self.checkpoints.load(folder / VALUE_FOLDER)

"""Reinforcement learning with Accelerate, with TraceRL's value model (arXiv 2509.06949).

Each process holds the whole model, or under FSDP2 a shard of it.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from rich.console import Console
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.tensor import DTensor

from dlm_bridge.convert.formats.hub_weights import SINGLE_FILE
from dlm_bridge.convert.lora.experts import stacked_product
from dlm_bridge.convert.lora.peft import merged_weight
from dlm_bridge.errors import NonFiniteError, SettingError
from dlm_bridge.files.reading import reading
from dlm_bridge.loading.pretrained import check_whole, model_without_weights
from dlm_bridge.loading.source import StartingModel
from dlm_bridge.objectives.batches import NoisyBatch
from dlm_bridge.replicas import ALONE
from dlm_bridge.train.accelerate import fsdp
from dlm_bridge.train.accelerate.attention import set_attention
from dlm_bridge.train.accelerate.checkpoints import (
    OPTIMIZER,
    load_optimizer,
    load_parameters,
    restore_run,
    save_optimizer,
    save_parameters,
    save_run,
)
from dlm_bridge.train.accelerate.optimizers import adamw, clip_gradients
from dlm_bridge.train.accelerate.trainer import largest_peak_memory, processes_of, run
from dlm_bridge.train.config import RLConfig
from dlm_bridge.train.config.reinforcement import SAMPLED
from dlm_bridge.train.lora import Adapter, add_adapter, with_lora
from dlm_bridge.train.output import RunEnd
from dlm_bridge.train.rl.methods import check_model, load_rows
from dlm_bridge.train.rl.replica import RolloutModel, room_makers, sampler_ranks
from dlm_bridge.train.rl.trainer import (
    VALUE_FOLDER,
    RLTrainer,
    UpdateEngine,
    UpdatePart,
    ValueUpdates,
    accumulate_gradients,
    target_logps,
    value_file,
)
from dlm_bridge.train.setup import RunStart, starting_model, training_errors

VALUE_STATE = "value_optimizer"  # key of the value model's optimizer in the trainer's state
# Name of a weight inside PEFT's wrappers: one around a linear layer, nested ones around stacks of experts.
_ADAPTED = re.compile(r"(.+?)((?:\.base_layer)+)\.(.+)")


@training_errors
def train(config: RLConfig, resume: bool = False, console: Console | None = None) -> RunEnd:
    """Train until `steps`, a SIGTERM or `exit_duration`.

    With `resume` the run in `output` continues from its newest checkpoint.

    Raises:
        RowError: a reward failed.
        NonFiniteError: the loss or a gradient norm is NaN or infinite.
        DlmBridgeError: bad settings, data or checkpoints, as its subclasses say.
    """
    console = console or Console(stderr=True, markup=False)
    if config.engine.engine == "megatron":
        from dlm_bridge.train.rl.megatron_engine import train_with_megatron

        return train_with_megatron(config, resume, console)
    return run(fsdp.with_launcher_settings(config), resume, console, assembled)


@contextlib.contextmanager
def assembled(
    config: RLConfig, accelerator: Accelerator, start: RunStart, console: Console
) -> Iterator[RLTrainer[Any]]:
    """Context manager of a run's trainer: model, reference, optimizer and rows."""
    starting = starting_model(config, start.checkpoint, accelerator.is_main_process)
    model = starting.model
    kind, tokenizer = check_model(config, model)
    config = with_lora(config, model)
    with accelerator.main_process_first():
        rows, held_out = load_rows(config, kind, model, tokenizer)
    with fsdp.process_group(config):
        adapter = add_adapter(config, model, start.checkpoint, starting.weights) if config.model.adapts else None
        engine = AccelerateUpdates(config, accelerator, starting, adapter, tokenizer, start.checkpoint)
        with contextlib.closing(kind(config, engine, tokenizer, rows, held_out, start.output, console)) as trainer:
            yield trainer


class AccelerateUpdates(UpdateEngine):
    """Model, reference and optimizer on each process, data parallel or sharded by FSDP2."""

    replica = ALONE
    value_model: ValueModel | None = None

    def __init__(
        self,
        config: RLConfig,
        accelerator: Accelerator,
        starting: StartingModel,
        adapter: Adapter | None,  # already added to the model
        tokenizer: Any,
        checkpoint: Path | None = None,  # to resume from
    ) -> None:
        self.config, self.accelerator, self.adapter = config, accelerator, adapter
        self.tokenizer = tokenizer
        self.processes = processes_of(accelerator)
        self.device, model = accelerator.device, starting.model
        if config.engine.attention_backend is not None:
            set_attention(model, config.engine.attention_backend)
        model.train()
        if config.engine.gradient_checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": False})
        self.reference_model = self._reference_model()
        self.plain_model = self.model = model
        self.rollout_model: RolloutModel | None = None
        self.fsdp = config.parallel.shards
        if self.fsdp:
            if config.rl.method in SAMPLED:
                self.rollout_model = self._rollout_model(model)
            fsdp.shard_model(model, starting.weights, config, self.device)
        self.optimizer: Any = adamw(config, model)
        if not self.fsdp:
            self.model, self.optimizer = accelerator.prepare(model, self.optimizer)
        if config.rl.value_model:
            self.value_model = ValueModel(config, accelerator, checkpoint)

    def row_width(self, width: int) -> None:
        return None

    # -- log-probabilities and updates

    @torch.no_grad()
    def logps(self, batches: Sequence[NoisyBatch]) -> list[torch.Tensor]:
        return [target_logps(self.model, noisy.to(self.device)) for noisy in batches]

    def reference_logps(self, batches: Sequence[NoisyBatch]) -> list[torch.Tensor]:
        without: Any = contextlib.nullcontext()
        if self.reference_model is None:
            assert self.adapter is not None
            without = self.adapter.peft.disable_adapter()
        with torch.no_grad(), self.accelerator.autocast(), without:
            model = self.plain_model if self.reference_model is None else self.reference_model
            return [target_logps(model, noisy.to(self.device)) for noisy in batches]

    def forward_backward(self, parts: Sequence[UpdatePart]) -> tuple[float, dict[str, float]]:
        return accumulate_gradients(self.accelerator, self.model, parts, target_logps, always_reduce=self.fsdp)

    def optimizer_step(self, step: int) -> float:
        norm = clip_gradients(self.config, self.accelerator, self.model)
        if not math.isfinite(norm) and self.accelerator.scaler is None:
            raise NonFiniteError(f"the gradient norm is {norm}: lower `lr`", [f"step {step}"])
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    def set_learning_rate(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        if self.value_model is not None:
            self.value_model.set_learning_rate(lr)

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        self.plain_model.eval()
        yield
        self.plain_model.train()

    def sampling_model(self) -> AbstractContextManager[Any]:
        if self.rollout_model is None:
            return contextlib.nullcontext(self.plain_model)
        return self._gathered(self.rollout_model)

    def _rollout_model(self, model: Any) -> RolloutModel:
        """Create the rollout model before `model` is sharded. If processes share it, its weights have the adapter
        merged."""
        config = self.config
        dtype = torch.float32 if config.precision.precision == "fp32" else torch.bfloat16
        self.samplers, group = sampler_ranks(config)
        if group is not None:
            if self.adapter is not None and self.adapter.mask_only is not None:
                raise SettingError("rollout_tp", "an adapter that acts only at mask tokens cannot be merged: omit it")
            plain = model_without_weights(type(model), model.config, dtype)
            plain.generation_config = model.generation_config
            model = plain
        return RolloutModel(model, dtype, room_makers(config), group)

    @contextlib.contextmanager
    def _gathered(self, rollout_model: RolloutModel) -> Iterator[Any]:
        """Context manager of the rollout model with weights gathered one at a time."""
        fsdp.reshard_model(self.plain_model)
        with rollout_model.allocated(self.device) as model:
            gather_weights(self.plain_model, rollout_model, self.device)
            yield model

    # -- checkpoints

    def trained_parameters(self) -> Iterable[torch.Tensor]:
        own = (weight for weight in self.plain_model.parameters() if weight.requires_grad)
        return own if self.value_model is None else itertools.chain(own, self.value_model.trained_parameters())

    def peak_memory(self) -> int | None:
        return largest_peak_memory(self.processes)

    def save_checkpoint(self, step: int, state: dict[str, Any]) -> Path:
        value_model = self.value_model
        return save_run(
            self.config,
            self.accelerator,
            step,
            self.plain_model,
            self.optimizer,
            self.adapter,
            self.tokenizer,
            state if value_model is None else {**state, **value_model.state()},
            save_more=None if value_model is None else value_model.save,
        )

    def load_checkpoint(self, folder: Path) -> dict[str, Any]:
        state = restore_run(self.config, self.accelerator, folder, self.plain_model, self.optimizer)
        if self.value_model is not None:
            self.value_model.load(state, folder)
        return state

    def _reference_model(self) -> Any:
        """A copy of the starting model; None without a KL term, or if it is the base of a new adapter."""
        config = self.config
        if not config.rl.has_reference or config.model.lora_rank:
            return None
        starting = starting_model(config, None, self.accelerator.is_main_process)
        reference = starting.model
        if config.model.adapter is not None:
            add_adapter(config, reference, weights=starting.weights)
        if config.engine.attention_backend is not None:
            set_attention(reference, config.engine.attention_backend)
        reference.requires_grad_(False).eval()
        if config.parallel.shards:
            fsdp.shard_model(reference, starting.weights, config, self.device)
            return reference
        return reference.to(self.device)


@torch.no_grad()
def gather_weights(sharded: torch.nn.Module, rollout_model: RolloutModel, device: torch.device) -> None:
    """Copy the weights, one at a time, and the buffers of a `sharded` model to its rollout model. All processes call
    it together."""
    copied = rollout_model.model
    missing = {name for name, _ in copied.named_parameters()}
    for name, whole in _weights(sharded, device) if rollout_model.group is None else _merged(sharded, device):
        rollout_model.write(name, whole)
        missing.remove(name)
    assert not missing, "the copy is of another model"
    for name, buffer in sharded.named_buffers(remove_duplicate=False):
        owner, _, own_name = name.rpartition(".")
        copied.get_submodule(owner)._buffers[own_name] = buffer


def _weights(sharded: torch.nn.Module, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    for name, weight in sharded.named_parameters():
        yield name, fsdp.full_tensor(weight, device)


def _merged(sharded: torch.nn.Module, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights of a model with its PEFT adapter merged into them."""
    layers = {name: module for name, module in sharded.named_modules() if hasattr(module, "base_layer")}
    for name, weight in sharded.named_parameters():
        if ".lora_" in name:
            continue
        whole = fsdp.full_tensor(weight, device)
        if (found := _ADAPTED.fullmatch(name)) is not None:
            place, wrappers, kind = found.groups()
            for number in range(wrappers.count(".")):
                layer = layers[place + number * ".base_layer"]
                if kind == getattr(layer, "parameter_name", "weight"):
                    whole = _with_adapter(layer, whole, device)
            name = f"{place}.{kind}"
        yield name, whole


def _with_adapter(layer: Any, weight: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The weight of one of PEFT's layers, linear or a stack of experts, with the layer's adapter merged."""
    (name,) = layer.lora_A.keys()
    a, b = (fsdp.full_tensor(part[name].weight, device).float() for part in (layer.lora_A, layer.lora_B))
    if weight.dim() == 3:
        product = stacked_product(a, b, len(weight))
        product = product.mT if getattr(layer.get_base_layer(), "is_transposed", False) else product
        return merged_weight(weight, layer.scaling[name] * product, None)
    magnitude = None
    if name in layer.lora_magnitude_vector:
        magnitude = fsdp.full_tensor(layer.lora_magnitude_vector[name].weight, device)
    return merged_weight(weight, layer.scaling[name] * (b @ a), magnitude)


class ValueModel(ValueUpdates):
    """A model of the policy's family that predicts one number per token, with its optimizer, whole on each process or
    sharded by FSDP2."""

    def __init__(self, config: RLConfig, accelerator: Accelerator, checkpoint: Path | None) -> None:
        """Load the run's starting model with a value head of zeros, or the value model of a `checkpoint`."""
        self.config, self.accelerator = config, accelerator
        starting = starting_model(config, None, accelerator.is_main_process)
        model = starting.model
        head = model.get_output_embeddings()
        own = nn.Linear(head.in_features, 1, bias=False)
        nn.init.zeros_(own.weight)
        model.set_output_embeddings(own)
        self.fsdp = config.parallel.shards
        if checkpoint is not None and not self.fsdp:
            _load_value_weights(model, checkpoint)
        if config.engine.attention_backend is not None:
            set_attention(model, config.engine.attention_backend)
        model.train().requires_grad_(True)
        if config.engine.gradient_checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": False})
        self.plain_model = self.model = model
        if self.fsdp:
            if starting.weights is not None:
                (name,) = (name for name, weight in model.named_parameters() if weight is own.weight)
                starting.weights.leave_out(name)
            fsdp.shard_model(model, starting.weights, config, accelerator.device)
            if checkpoint is not None:
                _load_value_weights(model, checkpoint)
        self.optimizer: Any = adamw(config, model)
        if not self.fsdp:
            self.model, self.optimizer = accelerator.prepare(model, self.optimizer)

    @torch.no_grad()
    def values(self, batches: Sequence[NoisyBatch]) -> list[torch.Tensor]:
        return [predicted_values(self.model, noisy.to(self.accelerator.device)) for noisy in batches]

    def update(self, parts: Sequence[UpdatePart], step: int) -> float:
        loss, _ = accumulate_gradients(self.accelerator, self.model, parts, predicted_values, always_reduce=self.fsdp)
        norm = clip_gradients(self.config, self.accelerator, self.model)
        if not math.isfinite(norm) and self.accelerator.scaler is None:
            raise self.diverged(step, norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def set_learning_rate(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate(lr)

    def trained_parameters(self) -> Iterable[torch.Tensor]:
        return self.plain_model.parameters()

    # -- checkpoints

    def state(self) -> dict[str, Any]:
        """The optimizer's state for the trainer's state; empty under FSDP."""
        return {} if self.fsdp else {VALUE_STATE: self.optimizer.state_dict()}

    def save(self, folder: Path) -> None:
        """Write weights, and sharded optimizer state, to a subfolder of a checkpoint, whose model is the policy."""
        if self.fsdp:
            fsdp.reshard_model(self.plain_model)
            save_parameters(folder / VALUE_FOLDER, self.plain_model, self.accelerator.device)
            save_optimizer(folder / VALUE_FOLDER / OPTIMIZER, self.plain_model, self.optimizer)
            return
        (folder / VALUE_FOLDER).mkdir()
        weights = {name: weight.contiguous().cpu() for name, weight in self.plain_model.named_parameters()}
        save_file(weights, folder / VALUE_FOLDER / SINGLE_FILE, {"format": "pt"})

    def load(self, state: dict[str, Any], folder: Path) -> None:
        """Restore the optimizer from a checkpoint with the trainer's `state`."""
        own = {OPTIMIZER: state.get(VALUE_STATE)}
        load_optimizer(self.config, folder / VALUE_FOLDER, self.plain_model, self.optimizer, own)


def predicted_values(model: Any, noisy: NoisyBatch) -> torch.Tensor:
    """Values [M] fp32 of a batch's targets by a model with a value head, which may be wrapped."""
    return noisy.logits(model).float()[:, 0]


def _load_value_weights(model: nn.Module, checkpoint: Path) -> None:
    file = value_file(checkpoint, SINGLE_FILE)
    check_whole(file)
    with reading(file, "is not the value model of `model`"):
        if any(isinstance(weight, DTensor) for weight in model.parameters()):
            load_parameters(file, model)
            return
        found = model.load_state_dict(load_file(file), strict=False)
        stored = {name for name, _ in model.named_parameters()}
        if wrong := [*found.unexpected_keys, *stored.intersection(found.missing_keys)]:
            raise ValueError(f"{wrong[0]} is not in both")

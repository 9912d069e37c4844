"""TraceRL's value model (arXiv 2509.06949) under Accelerate: values of tokens on the canvas that their step saw."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.tensor import DTensor

from dlm_bridge.convert.formats.hub_weights import SINGLE_FILE
from dlm_bridge.errors import reading
from dlm_bridge.loading import check_whole
from dlm_bridge.objectives.batches import NoisyBatch
from dlm_bridge.train.accelerate import fsdp
from dlm_bridge.train.accelerate.attention import set_attention
from dlm_bridge.train.accelerate.checkpoints import load_optimizer
from dlm_bridge.train.accelerate.optimizers import adamw, clip_gradients
from dlm_bridge.train.config import RLConfig
from dlm_bridge.train.loading import starting_model
from dlm_bridge.train.rl.trainer import VALUE_FOLDER, UpdatePart, ValueUpdates, accumulate_gradients, value_file

STATE = "value_optimizer"  # in its trainer's state


class ValueModel(ValueUpdates):
    """A model of the policy's family that predicts one number a token, with its optimizer, whole on each process or
    sharded by FSDP2."""

    def __init__(self, config: RLConfig, accelerator: Accelerator, checkpoint: Path | None) -> None:
        """The run's starting model with a value head of zeros, or that of a `checkpoint`. Raises DlmBridgeError."""
        self.config, self.accelerator = config, accelerator
        starting = starting_model(config, None, accelerator.is_main_process)
        model = starting.model
        head = model.get_output_embeddings()
        own = nn.Linear(head.in_features, 1, bias=False)
        nn.init.zeros_(own.weight)
        model.set_output_embeddings(own)
        self.fsdp = config.parallel.shards
        if checkpoint is not None and not self.fsdp:
            _load_weights(model, checkpoint)
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
                _load_weights(model, checkpoint)
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
        """What the trainer's state holds of it."""
        return {} if self.fsdp else {STATE: self.optimizer.state_dict()}

    def save(self, folder: Path) -> None:
        """Write its weights, and sharded optimizer state, to a folder of their own in a checkpoint's; the model there
        is the policy alone."""
        if self.fsdp:
            fsdp.reshard_model(self.plain_model)
            fsdp.save_parameters(folder / VALUE_FOLDER, self.plain_model, self.accelerator.device)
            fsdp.save_optimizer(folder / VALUE_FOLDER / fsdp.OPTIMIZER, self.plain_model, self.optimizer)
            return
        (folder / VALUE_FOLDER).mkdir()
        weights = {name: weight.contiguous().cpu() for name, weight in self.plain_model.named_parameters()}
        save_file(weights, folder / VALUE_FOLDER / SINGLE_FILE, {"format": "pt"})

    def load(self, state: dict[str, Any], folder: Path) -> None:
        """Set the optimizer to that of a checkpoint, whose trainer's state is `state`."""
        own = {fsdp.OPTIMIZER: state.get(STATE)}
        load_optimizer(self.config, folder / VALUE_FOLDER, self.plain_model, self.optimizer, own)


def predicted_values(model: Any, noisy: NoisyBatch) -> torch.Tensor:
    """[M] fp32, the values of a batch's targets by a model with a value head, which may be wrapped."""
    return noisy.logits(model).float()[:, 0]


def _load_weights(model: nn.Module, checkpoint: Path) -> None:
    file = value_file(checkpoint, SINGLE_FILE)
    check_whole(file)
    with reading(f"{file}: is not the value model of --model"):
        if any(isinstance(weight, DTensor) for weight in model.parameters()):
            fsdp.load_parameters(file, model)
            return
        found = model.load_state_dict(load_file(file), strict=False)
        stored = {name for name, _ in model.named_parameters()}
        if wrong := [*found.unexpected_keys, *stored.intersection(found.missing_keys)]:
            raise ValueError(f"{wrong[0]} is not in both")

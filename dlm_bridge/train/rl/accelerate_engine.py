"""Updates under Accelerate: each process holds the whole model, or under FSDP2 a shard of it."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.objectives.batches import NoisyBatch
from dlm_bridge.train.accelerate import fsdp
from dlm_bridge.train.accelerate.attention import set_attention
from dlm_bridge.train.accelerate.checkpoints import restore_run, save_run
from dlm_bridge.train.accelerate.optimizers import adamw
from dlm_bridge.train.accelerate.trainer import largest_peak_memory, processes_of
from dlm_bridge.train.config import RLConfig
from dlm_bridge.train.config.reinforcement import SAMPLED
from dlm_bridge.train.loading import StartingModel, starting_model
from dlm_bridge.train.lora import Adapter, add_adapter
from dlm_bridge.train.rl.replica import WholeModel
from dlm_bridge.train.rl.update_engine import (
    ReplicaRanks,
    UpdateEngine,
    UpdatePart,
    accumulate_gradients,
    target_logps,
)
from dlm_bridge.train.rl.value_model import ValueModel


class AccelerateUpdates(UpdateEngine):
    """Model, reference and optimizer on each process, data parallel or sharded by FSDP2."""

    replica = ReplicaRanks()
    value_model: ValueModel | None = None

    def __init__(
        self,
        config: RLConfig,
        accelerator: Accelerator,
        starting: StartingModel,
        adapter: Adapter | None,  # of its model, in its place
        tokenizer: Any,
        checkpoint: Path | None = None,  # that the run goes on from
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
        self.whole_model: WholeModel | None = None
        self.fsdp = config.parallel.shards
        if self.fsdp:
            if config.rl.method in SAMPLED:
                self.whole_model = WholeModel(
                    model, torch.float32 if config.precision.name == "fp32" else torch.bfloat16
                )
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
        max_norm = self.config.optimizer.clip_grad or math.inf
        if self.fsdp:
            norm = float(fsdp.clip_grad_norm(list(self.model.parameters()), max_norm, self.device))
        else:
            norm = float(self.accelerator.clip_grad_norm_(self.model.parameters(), max_norm))
        if not math.isfinite(norm) and self.accelerator.scaler is None:
            raise DlmBridgeError(f"step {step}: the gradient norm is {norm}: lower --lr")
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
        if self.whole_model is None:
            return contextlib.nullcontext(self.plain_model)
        return self._gathered(self.whole_model)

    @contextlib.contextmanager
    def _gathered(self, whole: WholeModel) -> Iterator[Any]:
        """The whole model, with its weights gathered one at a time."""
        fsdp.reshard_model(self.plain_model)
        with whole.allocated(self.device) as model:
            gather_weights(self.plain_model, model, self.device)
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
            self.value_model.load(state)
        return state

    def _reference_model(self) -> Any:
        """A copy of the starting model; None without a KL term, and where it is the base of a new adapter."""
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
def gather_weights(sharded: torch.nn.Module, whole: torch.nn.Module, device: torch.device) -> None:
    """Give `whole`, a copy of a `sharded` model, its weights, one at a time, and its buffers. Every process calls this
    together."""
    weights, filled = dict(sharded.named_parameters()), dict(whole.named_parameters())
    assert weights.keys() == filled.keys(), "the copy is of another model"
    for name, weight in filled.items():
        weight.copy_(fsdp.full_tensor(weights[name], device))
    for name, buffer in sharded.named_buffers(remove_duplicate=False):
        owner, _, own_name = name.rpartition(".")
        whole.get_submodule(owner)._buffers[own_name] = buffer

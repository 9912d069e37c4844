"""TraceRL's value model in the Megatron engine: a second model and its optimizer on the ranks of the policy."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dlm_bridge.convert.atomic import disk_errors
from dlm_bridge.convert.formats.dcp_metadata import DCP_METADATA
from dlm_bridge.objectives.batches import NoisyBatch
from dlm_bridge.train.checkpoints import raised_everywhere
from dlm_bridge.train.config import RLConfig
from dlm_bridge.train.megatron.checkpoints import CheckpointManager
from dlm_bridge.train.megatron.engine import build_trained_model
from dlm_bridge.train.megatron.schedule import gathered_weights, optimizer_weights, set_learning_rate
from dlm_bridge.train.megatron.trainer import ClippedOptimizerStep
from dlm_bridge.train.metrics import MAKE_ROOM
from dlm_bridge.train.rl.pipelined import PipelinedModel
from dlm_bridge.train.rl.trainer import VALUE_FOLDER, UpdatePart, ValueUpdates, value_file


class MegatronValueModel(ValueUpdates):
    """A model of the policy's family and layout that predicts one number a token, with its optimizer."""

    def __init__(
        self, config: RLConfig, policy: PipelinedModel, overrides: dict[str, Any], checkpoint: Path | None
    ) -> None:
        """The policy's starting model with a value head of zeros, or what `load` sets from a `checkpoint`; `overrides`
        as of `build_trained_model`. Every process calls it. Raises DlmBridgeError."""
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
        if not math.isfinite(norm) and self.config.precision.name != "fp16":
            raise self.diverged(step, norm)
        return loss

    def set_learning_rate(self, lr: float) -> None:
        set_learning_rate(self.optimizer, self.learning_rate(lr), self.config.optimizer.weight_decay)

    def trained_parameters(self) -> Iterable[torch.Tensor]:
        return optimizer_weights(self.optimizer)

    # -- checkpoints

    def save(self, folder: Path, step: int) -> None:
        """Write its weights and optimizer to a folder of their own in an iteration's. Every process calls it. Raises
        DlmBridgeError where the disk refuses."""
        own = folder / VALUE_FOLDER
        with raised_everywhere(), disk_errors(own, MAKE_ROOM):
            if dist.get_rank() == 0:
                own.mkdir()
        with gathered_weights(self.model.chunks):
            self.checkpoints.write(own, step, {})

    def load(self, folder: Path) -> None:
        """Set weights and optimizer to those of an iteration. Raises DlmBridgeError."""
        self.checkpoints.load(folder / VALUE_FOLDER)

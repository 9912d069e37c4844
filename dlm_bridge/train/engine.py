"""Training engines, the values of `--engine`: the interface, and the Accelerate engine behind it.

Further ones are registered by extensions, such as `dlm_bridge.parallel`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlm_bridge.registration import deferred, load

if TYPE_CHECKING:
    from rich.console import Console

    from dlm_bridge.mapping.rules import Dims
    from dlm_bridge.models.families import FamilySpec
    from dlm_bridge.objectives.base import Objective
    from dlm_bridge.train.checkpoints import ResumePoint
    from dlm_bridge.train.config import TrainConfig


def find_engine(name: str) -> TrainingEngine:
    """The engine of `--engine NAME`. Raises DlmBridgeError where its extension is not installed."""
    return load("engines", name)()


class TrainingEngine(ABC):
    """What a command and a dry run ask of an engine. Every method raises DlmBridgeError for bad input."""

    @abstractmethod
    def train(self, config: TrainConfig, resume: bool = False, console: Console | None = None) -> Path:
        """Train until `config.schedule.steps`, a SIGTERM or `exit_duration`, and return the last checkpoint's folder.
        Every process of the launcher calls it."""

    # -- before a run, on any machine

    @abstractmethod
    def find_checkpoint(self, config: TrainConfig) -> ResumePoint:
        """The checkpoint in the output folder that a run would go on from; nothing is changed there."""

    def check_settings(self, config: TrainConfig) -> list[str]:
        """Check settings that only this engine has; returns lines about those that are passed on untested."""
        return []

    def check_model(  # noqa: B027
        self,
        config: TrainConfig,
        family: FamilySpec,
        hub_config: dict[str, Any],
        dims: Dims,
        objective: Objective | None,
    ) -> None:
        """Check that the engine can hold the model, in the layout of `config`, and with `objective` train it."""

    def environment(self) -> dict[str, Any]:
        """What `dlm-bridge env` says of the engine, as plain values: platform, devices, patches."""
        return {}


class AccelerateEngine(TrainingEngine):
    """Training on the Hub's own model classes, by Accelerate."""

    train = deferred("dlm_bridge.train.accelerate.trainer:train")
    find_checkpoint = deferred("dlm_bridge.train.setup:find_checkpoint")

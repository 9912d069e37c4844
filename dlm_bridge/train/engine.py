"""Interface of training engines, and the Accelerate engine.

Extensions register further engines, such as `dlm_bridge.parallel`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from dlm_bridge.registration import deferred, load

if TYPE_CHECKING:
    from rich.console import Console

    from dlm_bridge.mapping.rules import Dims
    from dlm_bridge.models.families import FamilySpec
    from dlm_bridge.objectives.base import Objective
    from dlm_bridge.train.checkpoints import ResumePoint
    from dlm_bridge.train.config import TrainConfig
    from dlm_bridge.train.output import RunEnd


def find_engine(name: str) -> TrainingEngine:
    """Load the engine `name`. Raises MissingExtraError if its extension is not installed."""
    return load("engines", name)()


class TrainingEngine(ABC):
    """Interface between commands and a training engine. Every method raises DlmBridgeError for bad input."""

    @abstractmethod
    def train(self, config: TrainConfig, resume: bool = False, console: Console | None = None) -> RunEnd:
        """Train until `config.schedule.steps`, SIGTERM or `exit_duration`. Every process of the launcher calls it."""

    # -- before a run, on any machine

    @abstractmethod
    def find_checkpoint(self, config: TrainConfig) -> ResumePoint:
        """Find the checkpoint in the output folder from which a run would resume. Changes nothing there."""

    def check_settings(self, config: TrainConfig) -> list[str]:
        """Check settings of this engine. Returns notes about settings that are passed on untested."""
        return []

    def check_model(  # noqa: B027
        self,
        config: TrainConfig,
        family: FamilySpec,
        hub_config: dict[str, Any],
        dims: Dims,
        objective: Objective | None,
    ) -> None:
        """Check that the engine supports the model in the layout of `config`, and training it with `objective`."""

    def environment(self) -> dict[str, Any]:
        """Platform, devices and patches for `dlm-bridge env`, as plain values."""
        return {}


class AccelerateEngine(TrainingEngine):
    """Engine that trains transformers model classes with Accelerate."""

    train = deferred("dlm_bridge.train.accelerate.trainer:train")
    find_checkpoint = deferred("dlm_bridge.train.setup:find_checkpoint")

"""A run's figures in TensorBoard or Weights & Biases, through Accelerate's trackers."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path
from typing import Any

from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.train.config import TrainConfig
from dlm_bridge.train.megatron_options import names
from dlm_bridge.train.metrics import Row


def check_trackers(config: TrainConfig) -> None:
    """Raise DlmBridgeError where a tracker's package is missing."""
    for name in names(config.trackers):
        if importlib.util.find_spec(name) is None:
            raise DlmBridgeError(f"--trackers {name}: the package is not installed: pip install {name}")


class Trackers:
    """The trackers of one run, on its main process: DIR/tensorboard, and a wandb run with the folder's name."""

    def __init__(self, config: TrainConfig, output: Path) -> None:
        from accelerate import PartialState
        from accelerate.tracking import TensorBoardTracker, WandBTracker

        PartialState()  # which Accelerate's trackers and their logger look at; a Megatron run has no Accelerator
        self.trackers: list[Any] = []
        for name in names(config.trackers):
            if name == "tensorboard":
                tracker: Any = TensorBoardTracker("tensorboard", str(output))
            else:
                tracker = WandBTracker(output.name, dir=str(output))
            tracker.start()
            if name == "wandb":  # TensorBoard's form of this is a folder a call; config.yaml lies beside it already
                tracker.store_init_configuration(dataclasses.asdict(config))
            self.trackers.append(tracker)

    def log(self, row: Row) -> None:
        """One step's figures, without what is not a number."""
        values = {key: value for key, value in dataclasses.asdict(row).items() if value is not None and key != "step"}
        for tracker in self.trackers:
            tracker.log(values, step=row.step)

    def close(self) -> None:
        for tracker in self.trackers:
            tracker.finish()

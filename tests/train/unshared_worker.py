"""`dlm-bridge WORDS...` in the folder HERE with a relative `output`, whose second process leaves for the working
directory ELSEWHERE before LEAVES, "start" or the step of a checkpoint. From then on the output is not shared."""

from __future__ import annotations

import os
from typing import Any

from dlm_bridge.cli.app import main
from dlm_bridge.train import checkpoints
from dlm_bridge.train.trainer import TrainingLoop


def leave() -> None:
    os.chdir(os.environ["ELSEWHERE"])


def leave_before_saving(step: int) -> None:
    save = TrainingLoop.save

    def alone(self: Any, number: int, metrics: Any) -> Any:
        if number == step:
            leave()
        return save(self, number, metrics)

    TrainingLoop.save = alone  # type: ignore[method-assign]


if __name__ == "__main__":
    os.chdir(os.environ["HERE"])
    checkpoints.LOOK_AGAIN_S = 1.0
    if os.environ["RANK"] == "1" and (leaves := os.environ.get("LEAVES")) is not None:
        if leaves == "start":
            leave()
        else:
            leave_before_saving(int(leaves))
    main()

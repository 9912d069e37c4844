"""`dlm-bridge pretrain` on the Accelerate engine, killed before a step.

python -m tests.train.killed_worker STEP ARGUMENTS
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from dlm_bridge.cli.app import main
from dlm_bridge.train.accelerate.trainer import AccelerateTrainer


def kill_before(step: int) -> None:
    start_step = AccelerateTrainer.start_step

    def killed(self: Any, number: int, want_stop: bool) -> Any:
        if number == step:
            os.kill(os.getpid(), signal.SIGKILL)
        return start_step(self, number, want_stop)

    AccelerateTrainer.start_step = killed  # type: ignore[method-assign]


if __name__ == "__main__":
    kill_before(int(sys.argv.pop(1)))
    sys.argv[1:1] = ["pretrain"]
    main()

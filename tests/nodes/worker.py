"""`dlm-bridge` whose steps take as long as told: `python -m tests.nodes.worker SECONDS ARGUMENTS`."""

from __future__ import annotations

import runpy
import sys
import time


def slow(seconds: float) -> None:
    """Every optimizer step of this process takes so much longer."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    register_optimizer_step_pre_hook(lambda *_: time.sleep(seconds))


if __name__ == "__main__":
    slow(float(sys.argv.pop(1)))
    runpy.run_module("dlm_bridge.cli", run_name="__main__")

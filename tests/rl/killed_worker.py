"""`dlm-bridge rl` on a rank that is killed in the middle of a step's rollout.

python -m tests.rl.killed_worker STEP RANK ARGUMENTS
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from dlm_bridge.cli.app import main
from dlm_bridge.generation.engine import SamplingEngine
from dlm_bridge.train.rl import rollout


def kill_in_rollout(number: int, rank: int) -> None:
    complete, run = rollout.Rollouts.complete, SamplingEngine.step

    def killed(engine: SamplingEngine) -> Any:
        run(engine)  # together with the ranks that have the model
        os.kill(os.getpid(), signal.SIGKILL)

    def at_step(self: Any, model: Any, problems: Any, samples: Any, step: int, temperature: float) -> Any:
        dies = step == number and os.environ["RANK"] == str(rank)
        SamplingEngine.step = killed if dies else run  # type: ignore[method-assign]
        return complete(self, model, problems, samples, step, temperature)

    rollout.Rollouts.complete = at_step  # type: ignore[method-assign]


if __name__ == "__main__":
    kill_in_rollout(int(sys.argv.pop(1)), int(sys.argv.pop(1)))
    sys.argv[1:1] = ["rl"]
    main()

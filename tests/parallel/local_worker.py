"""`dlm-bridge WORDS...` on the Megatron engine, killed before step KILLED_AT, or KILLED_RANK while it writes the local
checkpoint of step KILLED_WRITING; or whose FULL_RANK has a full disk from step FULL_AT on."""

from __future__ import annotations

import errno
import os
import signal
from typing import Any

import psutil

from dlm_bridge.cli.app import main
from dlm_bridge.parallel.train import local_checkpoints
from dlm_bridge.parallel.train.trainer import MegatronTrainer


def kill() -> None:
    for process in psutil.Process().children(recursive=True):
        process.kill()
    os.kill(os.getpid(), signal.SIGKILL)


def kill_before(step: int) -> None:
    start_step = MegatronTrainer.start_step

    def killed(self: Any, number: int, want_stop: bool) -> Any:
        if number == step:
            kill()
        return start_step(self, number, want_stop)

    MegatronTrainer.start_step = killed  # type: ignore[method-assign]


def kill_while_writing(step: int) -> None:
    """When the state is in the file, and its digest is not."""
    digests_of = local_checkpoints.digests_of

    def killed(folder: Any, names: Any) -> Any:
        if folder.name.startswith(f".step-{step:07d}"):
            kill()
        return digests_of(folder, names)

    local_checkpoints.digests_of = killed


def fill_disk(step: int) -> None:
    digests_of = local_checkpoints.digests_of

    def full(folder: Any, names: Any) -> Any:
        if int(folder.name.split(".")[1].removeprefix("step-")) >= step:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))
        return digests_of(folder, names)

    local_checkpoints.digests_of = full


if __name__ == "__main__":
    if "KILLED_AT" in os.environ:
        kill_before(int(os.environ["KILLED_AT"]))
    if os.environ["RANK"] == os.environ.get("KILLED_RANK"):
        kill_while_writing(int(os.environ["KILLED_WRITING"]))
    if os.environ["RANK"] == os.environ.get("FULL_RANK"):
        fill_disk(int(os.environ["FULL_AT"]))
    main()

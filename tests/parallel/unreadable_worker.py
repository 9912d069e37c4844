"""One of two processes, of which the second cannot read a checkpoint: FOLDER has the report and an `iteration`."""

from __future__ import annotations

import errno
import sys
from functools import partial
from pathlib import Path

import torch.distributed as dist

from dlm_bridge.errors import CheckpointError
from tests.processes import work
from tests.refusals import refused


def check(folder: Path) -> None:
    from dlm_bridge.parallel.train.checkpoints import restricted_reading

    with refused(CheckpointError, folder, "Errno"), restricted_reading(folder):
        if dist.get_rank() == 1:
            raise OSError(errno.EIO, "unreadable")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    root = Path(sys.argv[1])
    work(root, [("read", partial(check, root / "iteration"))])
    dist.destroy_process_group()

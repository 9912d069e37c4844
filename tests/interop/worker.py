"""One of two processes, which runs all checks in order and writes their results.

python -m tests.interop.worker FOLDER      with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from tests.interop.cases import Checks, Files, plan
from tests.processes import work


def main(folder: Path, checks_of: Checks) -> None:
    from tests.interop import attention_checks, checks  # import megatron-core

    torch.set_num_threads(1)
    files = Files(folder)
    of_module = {**vars(attention_checks), **vars(checks)}
    work(folder, ((name, partial(of_module[check], files, **case)) for name, (check, case) in checks_of.items()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), plan())

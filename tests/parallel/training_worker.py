"""One of the two processes that train: runs every check in order and writes what each said.

python -m tests.parallel.training_worker FOLDER      with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import torch

from tests.parallel.training_cases import Files, plan
from tests.processes import work


def main(folder: Path) -> None:
    from tests.parallel import training_checks as checks  # imports megatron-core

    torch.set_num_threads(1)
    files = Files(folder)
    work(folder, ((name, partial(getattr(checks, check), files, **case)) for name, (check, case) in plan().items()))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

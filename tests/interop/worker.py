"""One of the two processes: runs every check in order and writes what each said.

python -m tests.interop.worker FOLDER      with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

from tests.interop.cases import OK, Files, plan


def main(folder: Path) -> None:
    from tests.interop import attention_checks, checks  # import megatron-core

    torch.set_num_threads(1)
    files = Files(folder)
    report: dict[str, str] = {}
    path = files.report(int(os.environ["RANK"]))
    for name, (function, arguments) in plan().items():
        try:
            module = checks if hasattr(checks, function) else attention_checks
            getattr(module, function)(files, **arguments)
            report[name] = OK
        except BaseException:
            # The other rank may be waiting for this one: nothing after this can be trusted.
            report[name] = traceback.format_exc()
            path.write_text(json.dumps(report))
            os._exit(1)
    path.write_text(json.dumps(report))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

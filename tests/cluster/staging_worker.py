"""Processes that copy data side by side.

python -m tests.cluster.staging_worker host FOLDER SOURCE ...   of one host: into FOLDER/cache, and print the copies
python -m tests.cluster.staging_worker hosts FOLDER SOURCE      each into its own cache; the second waits for FOLDER/go
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from dlm_bridge import distributed, job
from dlm_bridge.cluster.staging import stage


def main() -> None:
    which, folder, *sources = sys.argv[1:]
    if which == "host":
        print("copies", *stage(sources, f"{folder}/cache"))
        return
    job.join()
    rank = distributed.rank()
    while rank == 1 and not Path(folder, "go").exists():
        time.sleep(0.05)
    stage(sources, f"{folder}/cache-{rank}")
    Path(folder, f"done-{rank}").touch()


if __name__ == "__main__":
    main()

"""The cells and runs that `megatron_worker` leaves out.

python -m tests.parallel.megatron_layouts_worker FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.parallel.megatron_worker import Plan, layouts, main, more_runs


def plan(processes: int, root: Path = Path()) -> Plan:
    return layouts(processes, quick=False) | more_runs(processes)


if __name__ == "__main__":
    main(Path(sys.argv[1]), plan, "layouts")

"""The checks that `worker` leaves out.

python -m tests.interop.families_worker FOLDER      with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.interop.cases import other_plan
from tests.interop.worker import main

if __name__ == "__main__":
    main(Path(sys.argv[1]), other_plan())

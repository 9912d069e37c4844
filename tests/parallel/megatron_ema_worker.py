"""--ema-decay in the Megatron engine on one, two and four processes: runs that stop in a layout and go on in another.

python -m tests.parallel.megatron_ema_worker FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.parallel.megatron_worker import LayoutChanges, main

PLAIN = {"distributed_optimizer": False}
CHANGES = LayoutChanges(
    "ema",
    {
        2: [
            ("masked", "dp2", "tp2-sp"),
            ("masked", "tp2", "dp2"),
            ("masked-tied", "pp2", "dp2"),
            ("shifted", "pp2-vp2", "cp2"),
            ("block-moe", "ep2", "tp2-sp"),
            ("block-moe", "etp2", "pp2"),
            ("predicting", "dp2", "pp2"),
            ("latent", "tp2-sp", "dp2"),
        ],
        4: [("masked", "tp2-sp-pp2", "tp2-sp-cp2"), ("block-moe", "ep2-tp2-sp", "ep2-pp2")],
    },
    lambda root, subject: {"ema_decay": 0.75, "clip_grad": 0.0},
    {("masked", "tp2"): PLAIN, ("block-moe", "etp2"): PLAIN, ("latent", "tp2-sp"): {"async_save": True}},
)

if __name__ == "__main__":
    main(Path(sys.argv[1]), CHANGES.plan, CHANGES.name)

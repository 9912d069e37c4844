"""Muon in the Megatron engine on one, two and four processes: runs that stop in one layout and go on in another.

python -m tests.parallel.megatron_muon_worker FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from dlm_bridge.train import muon
from tests.parallel.megatron_worker import LayoutChanges, main

LR = 1e-3
CHANGES = LayoutChanges(
    "muon",
    {
        2: [
            ("masked", "tp2", "pp2"),
            ("masked", "dp2", "tp2-sp"),
            ("masked", "cp2", "dp2"),
            ("shifted", "pp2-vp2", "tp2-sp"),
            ("block-moe", "ep2", "tp2-sp"),
            ("block-moe", "etp2", "pp2"),
            ("latent", "tp2-sp", "pp2"),
        ],
        4: [("masked", "tp2-sp-pp2", "tp2-sp-cp2"), ("block-moe", "ep2-tp2-sp", "ep2-pp2")],
    },
    lambda root, subject: {"optimizer": "muon", "distributed_optimizer": False, "lr": LR},
)

if __name__ == "__main__":
    muon.PRECISION = torch.float32  # in bf16 a gradient's last bit may change an update's third digit
    main(Path(sys.argv[1]), CHANGES.plan, CHANGES.name)

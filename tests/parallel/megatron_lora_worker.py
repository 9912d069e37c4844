"""Adapters in the Megatron engine on one, two and four processes: runs that stop in one layout and go on in another.

python -m tests.parallel.megatron_lora_worker FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.parallel.megatron_worker import LayoutChanges, main


def adapter(root: Path, subject: str, name: str = "lora") -> Path:
    """The PEFT folder that all runs of a subject start from."""
    return root / "adapters" / name / subject


CHANGES = LayoutChanges(
    "lora",
    {
        2: [
            ("masked", "tp2", "pp2"),
            ("masked", "tp2-sp", "dp2"),
            ("shifted", "pp2-vp2", "tp2-sp"),
            ("block-moe", "ep2", "tp2-sp"),
            ("block-moe", "etp2", "ep2"),
            ("masked-moe", "ep2", "tp2-sp"),
            ("masked-moe", "tp2-etp1-sp", "pp2"),
            ("shifted-moe", "dp2", "cp2"),
            ("causal", "cp2", "tp2"),
            ("latent", "tp2-sp", "pp2"),
            ("latent", "ep2", "tp2-sp"),
        ],
        4: [
            ("masked", "tp2-sp-pp2", "tp2-sp-cp2"),
            ("block-moe", "ep2-tp2-sp", "ep2-pp2"),
            ("masked-moe", "ep2-tp2-etp1-sp", "ep2-cp2"),
        ],
    },
    lambda root, subject: {"adapter": str(adapter(root, subject)), "clip_grad": 0.0},
)
DORA = LayoutChanges(
    "dora",
    {
        2: [
            ("masked", "tp2", "pp2"),
            ("shifted", "tp2-sp", "dp2"),
            ("block-moe", "ep2", "tp2-sp"),
            ("causal", "dp2", "cp2"),
            ("latent", "tp2-sp", "dp2"),
        ]
    },
    lambda root, subject: {"adapter": str(adapter(root, subject, "dora")), "clip_grad": 0.0},
)

if __name__ == "__main__":
    for changes in (CHANGES, DORA):
        main(Path(sys.argv[1]), changes.plan, changes.name)

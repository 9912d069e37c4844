"""Muon in the Megatron engine on one, two and four processes: runs that stop in one layout and go on in another.

python -m tests.train.megatron_muon_worker FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from dlm_bridge.train import muon
from tests.train.megatron_worker import Plan, main

LR = 1e-3
# By the number of processes: the subject, the layout that a run stops in, and the one in which it goes on.
STOPPED = {
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
}
SUBJECTS = sorted({subject for runs in STOPPED.values() for subject, _, _ in runs})


def plan(processes: int, root: Path = Path()) -> Plan:
    if processes == 1:
        return {f"{subject}, whole": ("trains", (f"muon-{subject}",), _run(subject)) for subject in SUBJECTS}
    found: Plan = {}
    for subject, before, after in STOPPED[processes]:
        name, run = f"muon-{subject}-{before}", _run(subject)
        found[f"{subject}, {before}"] = ("trains", (name,), {**run, "layout": before, "steps": 2})
        resumed = ("resumes_as_if_nothing_had_been", (name, f"muon-{subject}"), {**run, "layout": after})
        found[f"{subject}, {before} then {after}"] = resumed
    return found


def _run(subject: str) -> dict[str, Any]:
    # Adam's steps of gradients that are next to nothing are noise, but for an epsilon that is larger than they are.
    small = {"steps": 4, "save_interval": 2, "eval_interval": 2, "adam_eps": 1.0, "warmup_steps": 0, "lr": LR}
    muon = {"optimizer": "muon", "distributed_optimizer": False, "from_scratch": False}
    return {"subject": subject, **muon, **small}


if __name__ == "__main__":
    muon.PRECISION = torch.float32  # in bf16 a gradient's last bit may change an update's third digit
    main(Path(sys.argv[1]), plan, "muon")

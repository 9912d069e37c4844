"""Adapters in the Megatron engine on one, two and four processes: runs that stop in one layout and go on in another.

python -m tests.train.megatron_lora_worker FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from tests.train.megatron_worker import Plan, main

# By the number of processes: the subject, the layout that a run stops in, and the one in which it goes on.
STOPPED = {
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
    ],
    4: [
        ("masked", "tp2-sp-pp2", "tp2-sp-cp2"),
        ("block-moe", "ep2-tp2-sp", "ep2-pp2"),
        ("masked-moe", "ep2-tp2-etp1-sp", "ep2-cp2"),
    ],
}
SUBJECTS = sorted({subject for runs in STOPPED.values() for subject, _, _ in runs})


def adapter(root: Path, subject: str) -> Path:
    """The PEFT folder that all runs of a subject start from."""
    return root / "adapters" / subject


def plan(processes: int, root: Path = Path()) -> Plan:
    if processes == 1:
        return {f"{subject}, whole": ("trains", (f"lora-{subject}",), _run(root, subject)) for subject in SUBJECTS}
    found: Plan = {}
    for subject, before, after in STOPPED[processes]:
        name, run = f"lora-{subject}-{before}", _run(root, subject)
        found[f"{subject}, {before}"] = ("trains", (name,), {**run, "layout": before, "steps": 2})
        resumed = ("resumes_as_if_nothing_had_been", (name, f"lora-{subject}"), {**run, "layout": after})
        found[f"{subject}, {before} then {after}"] = resumed
    return found


def _run(root: Path, subject: str) -> dict[str, Any]:
    # Adam's steps of gradients that are next to nothing are noise, but for an epsilon that is larger than they are.
    small = {"steps": 4, "save_interval": 2, "eval_interval": 2, "adam_eps": 1.0, "clip_grad": 0.0, "warmup_steps": 0}
    return {"subject": subject, "from_scratch": False, "adapter": str(adapter(root, subject)), **small}


if __name__ == "__main__":
    main(Path(sys.argv[1]), plan, "lora")

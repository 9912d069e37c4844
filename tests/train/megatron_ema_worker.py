"""--ema-decay in the Megatron engine on one, two and four processes: runs that stop in a layout and go on in another.

python -m tests.train.megatron_ema_worker FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from tests.train.megatron_worker import Plan, main

PLAIN = {"distributed_optimizer": False}
# By the number of processes: the subject, the layout that a run stops in, the one in which it goes on, and options.
STOPPED: dict[int, list[tuple[str, str, str, dict[str, Any]]]] = {
    2: [
        ("masked", "dp2", "tp2-sp", {}),
        ("masked", "tp2", "dp2", PLAIN),
        ("masked-tied", "pp2", "dp2", {}),
        ("shifted", "pp2-vp2", "cp2", {}),
        ("block-moe", "ep2", "tp2-sp", {}),
        ("block-moe", "etp2", "pp2", PLAIN),
        ("predicting", "dp2", "pp2", {}),
        ("latent", "tp2-sp", "dp2", {"async_save": True}),
    ],
    4: [("masked", "tp2-sp-pp2", "tp2-sp-cp2", {}), ("block-moe", "ep2-tp2-sp", "ep2-pp2", {})],
}
SUBJECTS = sorted({subject for runs in STOPPED.values() for subject, *_ in runs})


def plan(processes: int, root: Path = Path()) -> Plan:
    if processes == 1:
        return {f"{subject}, whole": ("trains", (f"ema-{subject}",), _run(subject)) for subject in SUBJECTS}
    found: Plan = {}
    for subject, before, after, options in STOPPED[processes]:
        name, run = f"ema-{subject}-{before}", {**_run(subject), **options}
        found[f"{subject}, {before}"] = ("trains", (name,), {**run, "layout": before, "steps": 2})
        resumed = ("resumes_as_if_nothing_had_been", (name, f"ema-{subject}"), {**run, "layout": after})
        found[f"{subject}, {before} then {after}"] = resumed
    return found


def _run(subject: str) -> dict[str, Any]:
    # Adam's steps of gradients that are next to nothing are noise, but for an epsilon that is larger than they are.
    small = {"steps": 4, "save_interval": 2, "eval_interval": 2, "adam_eps": 1.0, "clip_grad": 0.0, "warmup_steps": 0}
    return {"subject": subject, "from_scratch": False, "ema_decay": 0.75, **small}


if __name__ == "__main__":
    main(Path(sys.argv[1]), plan, "ema")

"""Several instances of the distributed optimizer on four processes: runs that stop in one layout and go on in another.

python -m tests.parallel.megatron_instances_worker FOLDER NAME
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from tests.parallel.megatron_worker import LayoutChanges, main

ONE, TWO, FOUR = ({"optimizer_instances": number} for number in (1, 2, 4))
PLAIN = {"overlap_communication": False}


def changes(
    name: str,
    stopped: list[tuple[str, str, str]],
    more: dict[tuple[str, str], Any],
    resumed: dict[tuple[str, str], Any],
) -> LayoutChanges:
    """Runs of two instances before and, but where `resumed` has another number, after; four processes in a layout of
    two have two replicas of it."""
    options = {(subject, before): TWO | more.get((subject, before), {}) for subject, before, _ in stopped}
    return LayoutChanges(
        name,
        {4: stopped},
        lambda root, subject: {"clip_grad": 0.5, "norm_interval": 1, "save_interval": 2},
        options,
        resumed,
    )


QUICK = changes(
    "quick",
    [("block-moe", "ep2", "dp2")],
    {},
    {("block-moe", "ep2"): FOUR},
)
SLOW = changes(
    "slow",
    [
        ("masked", "cp2", "tp2-sp"),
        ("masked", "dp2", "pp2"),
        ("masked", "tp2-sp", "pp2"),
        ("masked", "pp2", "cp2"),
        ("masked-tied", "dp2", "dp2"),
        ("masked-tied", "cp2", "dp2"),
        ("masked-tied", "pp2", "dp2"),
        ("masked-moe", "tp2-etp1-sp", "ep2"),
        ("block-moe", "dp2", "ep2"),
    ],
    {
        ("masked", "dp2"): PLAIN,
        ("block-moe", "dp2"): PLAIN,
        ("masked-tied", "dp2"): {"async_save": True},
        ("masked-tied", "cp2"): ONE,
    },
    {("masked", "cp2"): ONE, ("masked-tied", "cp2"): TWO},
)
AVERAGED = LayoutChanges(
    "averaged",
    {4: [("masked", "dp2", "tp2-sp")]},
    lambda root, subject: {"clip_grad": 0.5, "ema_decay": 0.75},
    {("masked", "dp2"): TWO},
)
ALL = {chosen.name: chosen for chosen in (QUICK, SLOW, AVERAGED)}

if __name__ == "__main__":
    main(Path(sys.argv[1]), ALL[sys.argv[2]].plan, sys.argv[2])

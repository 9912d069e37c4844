"""Command lines of tiny runs on two nodes, and what their figures must be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dlm_bridge.train.metrics import read_rows
from tests.parallel.megatron_cases import SUBJECTS, Files

# Sums of a few numbers in fp32, in another order: the last bits of losses and norms (2 ** -23 is 1.2e-7), and what
# they change in the steps after.
TOLERANCE = 1e-6
STEPS = 6
LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "fsdp2": {"sharding": "fsdp"},
    "dp": {"engine": "megatron"},
    "tp": {"engine": "megatron", "tp": 2},
    "pp": {"engine": "megatron", "pp": 2},
    "cp": {"engine": "megatron", "cp": 2},
}


def pretrain(files: Files, output: Path | str, **changes: Any) -> list[str]:
    """A run of six steps with two checkpoints."""
    return words(
        "pretrain",
        "--from-scratch",
        model=files.hub("masked"),
        data=files.corpus,
        output=output,
        **{
            "objective": SUBJECTS["masked"].objective,
            "steps": STEPS,
            "save_interval": 3,
            "eval_interval": 0,
            "global_batch_size": 4,
            "micro_batch_size": 1,
            "seq_length": 16,
            "split": "90,10,0",
            "lr": 1e-3,
            "warmup_steps": 2,
            **changes,
        },
    )


def words(*first: str, **options: Any) -> list[str]:
    """Arguments: options by their names, a flag for True, none for None."""
    found = list(first)
    for name, value in options.items():
        if value is not None:
            flag = f"--{name.replace('_', '-')}"
            found += [flag] if value is True else [flag, str(value)]
    return found


def checkpoints(run: Path) -> list[str]:
    """The names of everything in a run's folder of checkpoints, hidden and damaged ones included."""
    folder = run / "checkpoints"
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def assert_alike(run: Path, alone: Path, steps: int | None = None, tolerance: float = TOLERANCE) -> None:
    """Both have the same figures in every step, up to the last of `run`, which must be `steps`."""
    found, wanted = (read_rows(folder / "metrics.jsonl") for folder in (run, alone))
    assert [row["step"] for row in found] == list(range(1, (steps or len(wanted)) + 1))
    for row, other in zip(found, wanted, strict=False):
        for name in ("loss", "grad_norm", "lr"):
            assert row[name] == pytest.approx(other[name], rel=tolerance), f"step {row['step']}: {name}"

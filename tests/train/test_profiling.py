"""--profile-steps: which steps are traced, by a run and by one that resumes, and a disk that refuses."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dlm_bridge.errors import ResourceError
from tests.refusals import refused
from tests.train.conftest import Run, without_speed

OPTIONS: dict[str, Any] = {"eval_interval": 0, "save_interval": 2, "warmup_steps": 0, "lr_schedule": "constant"}


def optimizer_steps(file: Path) -> int:
    """How many optimizer steps a trace holds."""
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    return sum(event.get("name", "").startswith("Optimizer.step#") for event in events)


def test_steps_are_traced(tmp_path: Path, run: Run) -> None:
    plain = run(tmp_path / "plain", steps=5, **OPTIONS)
    traced = run(tmp_path / "traced", steps=5, profile_steps="2:4", **OPTIONS)
    assert without_speed(traced) == without_speed(plain)
    (file,) = (tmp_path / "traced/profile").iterdir()
    assert file.name == "steps-2-4.json.gz"
    assert optimizer_steps(file) == 3
    assert not (tmp_path / "plain/profile").exists()


def test_a_run_that_ends_or_resumes_within_the_range(tmp_path: Path, run: Run) -> None:
    for steps, resume in ((4, False), (6, True)):
        run(tmp_path / "run", resume=resume, steps=steps, profile_steps="3:9", **OPTIONS)
    files = sorted((tmp_path / "run/profile").iterdir())
    assert [(file.name, optimizer_steps(file)) for file in files] == [
        ("steps-3-4.json.gz", 2),
        ("steps-5-6.json.gz", 2),
    ]


def test_a_disk_that_refuses_is_one_line(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", full)
    with refused(ResourceError):
        run(tmp_path / "run", steps=2, profile_steps="1:1", **OPTIONS)
    assert list((tmp_path / "run/profile").iterdir()) == []

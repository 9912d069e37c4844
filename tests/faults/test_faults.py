"""A few seeded rounds of each engine; `make faults` runs many."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path

import pytest

from tests import launcher

ROUNDS = {"accelerate": (25, 3), "megatron async": (23, 3)}  # the first seed, how many


@pytest.mark.slow
@pytest.mark.parametrize("engine", ROUNDS)
def test_runs_under_faults_lose_nothing_and_leave_nothing(engine: str, tmp_path: Path) -> None:
    """SIGKILL while saving, a stopped rank by its name, a full disk: see `chain` for what each round checks."""
    if importlib.util.find_spec("megatron") is None:
        pytest.skip("megatron-core is not installed")
    seed, rounds = ROUNDS[engine]
    state, log = tmp_path / "state.json", tmp_path / "log.txt"
    words = ["--rounds", rounds, "--seed", seed, "--processes", 4, "--engines", engine, "--state", state]
    launcher.run("tests.faults", [str(word) for word in words], [dict(os.environ)], [log], timeout_s=900)
    assert state.exists(), log.read_text()
    found = json.loads(state.read_text())
    assert not found["failures"], found["failures"][0]["said"]
    assert found["rounds"] == rounds

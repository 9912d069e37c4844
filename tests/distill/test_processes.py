"""The command line on two processes, replicated and sharded, gives the run of one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import launcher
from tests.distill.conftest import Settings
from tests.processes import environments
from tests.rl.conftest import read_metrics

CASES: list[Any] = [
    pytest.param({"on_policy": True, "gen_length": 8}, [], id="on-policy"),
    pytest.param(
        {"lora_rank": 0, "parent": True}, ["--sharding", "fsdp"], id="sharded parent", marks=pytest.mark.slow
    ),
    pytest.param({}, ["--sharding", "fsdp"], id="sharded base", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("changes", "flags"), CASES)
def test_two_processes_are_one(
    changes: dict[str, Any],
    flags: list[str],
    settings: Settings,
    run: Callable[..., list[dict[str, Any]]],
    parent: Path,
    tmp_path: Path,
) -> None:
    if "parent" in changes:
        changes = {**changes, "parent": str(parent)}
    config = settings(**changes, steps=3)
    alone = run(config)
    (tmp_path / "distill.yaml").write_text(config.to_yaml())
    words = ["distill", "--config", str(tmp_path / "distill.yaml"), "--output", str(tmp_path / "two"), *flags]
    logs = [tmp_path / f"log_{rank}.txt" for rank in range(2)]
    ended = launcher.run("dlm_bridge.cli", words, environments(2), logs, timeout_s=300)
    assert ended, "\n".join(log.read_text()[-3000:] for log in logs)
    together = read_metrics(tmp_path / "two")
    for one, two in zip(alone, together, strict=True):
        assert two["loss"] == pytest.approx(one["loss"], abs=1e-5)
        assert two["grad_norm"] == pytest.approx(one["grad_norm"], abs=1e-4)

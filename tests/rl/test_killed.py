"""A rank that dies in a rollout ends the job, which names it; a resume goes on from the last checkpoint."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.processes import free_port
from tests.rl.conftest import read_metrics, write_llada

OPTIONS = {
    "method": "diffu-grpo", "steps": 4, "save_interval": 2, "global_batch_size": 16, "group_size": 4, "seq_length": 16,
    "gen_length": 4, "lr": 1e-2, "beta": 0.1, "rollout_tp": 2, "rank_timeout": 1,
}  # fmt: skip
ENGINES: dict[str, dict[str, Any]] = {
    "accelerate": {"sharding": "fsdp"},
    "megatron": {"engine": "megatron", "tp": 2},
}
TIMED = ("tokens_per_s", "tokens_per_s_per_device", "seconds")


def torchrun(*words: str) -> subprocess.CompletedProcess[str]:
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port()), "-m", *words]
    environment = {**os.environ, "DLM_BRIDGE_PLATFORM": "cpu", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launch]
    return subprocess.run(command, check=False, env=environment, capture_output=True, text=True, timeout=500)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_the_job_names_the_rank_and_goes_on(engine: str, tmp_path: Path, problems: Path, reward: str) -> None:
    if engine == "megatron" and importlib.util.find_spec("megatron") is None:
        pytest.skip("megatron-core is not installed")
    model = write_llada(tmp_path / "policy")
    given = {**OPTIONS, **ENGINES[engine], "model": model, "data": problems, "reward": reward}
    words = [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    whole, killed = (["--output", str(tmp_path / name)] for name in ("whole", "killed"))
    through = torchrun("dlm_bridge.cli", "rl", *words, *whole)
    assert through.returncode == 0, through.stderr[-3000:]
    died = torchrun("tests.rl.killed_worker", "3", "1", *words, *killed)
    assert died.returncode != 0
    assert re.search(r"rank +: 1 ", died.stderr), died.stderr[-3000:]
    assert "Signal 9" in died.stderr
    assert len(read_metrics(tmp_path / "killed")) == 2
    again = torchrun("dlm_bridge.cli", "rl", *words, *killed, "--resume")
    assert again.returncode == 0, again.stderr[-3000:]
    rows, expected = (read_metrics(tmp_path / name) for name in ("killed", "whole"))
    for row, like in zip(rows, expected, strict=True):
        assert {k: v for k, v in row.items() if k not in TIMED} == {k: v for k, v in like.items() if k not in TIMED}

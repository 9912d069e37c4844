"""Runs on GPUs against the same runs on the CPU, as tests/compatibility recorded them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.compatibility.test_old_files import DATA, EXPECTED, STEPS


def pretrain(output: Path, flags: str, processes: int) -> list[dict[str, float]]:
    """The rows of metrics.jsonl of a run on `processes` GPUs."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    words = f"-m dlm_bridge.cli pretrain --model {DATA / 'llada'} --output {output} {STEPS} {flags}".split()
    environment = {**os.environ, "NVIDIA_TF32_OVERRIDE": "0", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    run = subprocess.run(
        [sys.executable, *launcher, *words], env=environment, check=False, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def assert_as_on_the_cpu(rows: list[dict[str, float]], run: str, tolerance: float) -> None:
    for row, expected in zip(rows[2:], EXPECTED["train"][run], strict=True):
        assert {key: row[key] for key in expected} == pytest.approx(expected, rel=tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ["accelerate", "megatron"])
def test_one_gpu_trains_as_the_cpu_does(engine: str, tmp_path: Path) -> None:
    if engine == "megatron":
        pytest.importorskip("megatron.core")
    rows = pretrain(tmp_path / "run", f"--engine {engine} --precision fp32", 1)
    assert_as_on_the_cpu(rows, engine, 1e-3)


@pytest.mark.gpu2
@pytest.mark.parametrize(
    ("run", "flags"),
    [
        ("accelerate", "--engine accelerate --precision fp32"),
        ("megatron", "--engine megatron --precision fp32 --tp 2"),
        ("megatron", "--engine megatron --precision fp32 --pp 2"),
        ("megatron_bf16_tp2", "--engine megatron --precision bf16 --tp 2"),
    ],
)
def test_two_gpus_train_as_the_cpu_does(run: str, flags: str, tmp_path: Path) -> None:
    if run != "accelerate":
        pytest.importorskip("megatron.core")
    assert_as_on_the_cpu(pretrain(tmp_path / "run", flags, 2), run, 1e-3 if "fp32" in flags else 3e-2)

"""Runs on GPUs against the same runs on the CPU, as tests/compatibility recorded them; resumed and killed runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.compatibility.test_old_files import DATA, EXPECTED, STEPS

ROOT = Path(__file__).parents[2]


def pretrain(output: Path, flags: str, processes: int, cpu: bool = False) -> list[dict[str, float]]:
    """The rows of metrics.jsonl of a run on `processes` GPUs, or as many processes on the CPU."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    words = f"-m dlm_bridge.cli pretrain --model {DATA / 'llada'} --output {output} {STEPS} {flags}".split()
    environment = {**os.environ, "NVIDIA_TF32_OVERRIDE": "0", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    if cpu:
        environment |= {"CUDA_VISIBLE_DEVICES": "", "DLM_BRIDGE_PLATFORM": "cpu", "OMP_NUM_THREADS": "1"}
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


@pytest.mark.gpu2
@pytest.mark.parametrize(
    "flags",
    [
        "--engine accelerate --sharding fsdp",
        "--engine megatron --tp 2 --optimizer muon --no-distributed-optimizer",
        "--engine megatron --tp 2 --z-loss-coeff 1e-2",
        "--engine megatron --tp 2 --lora-rank 4",
        "--engine megatron --tp 2 --lora-rank 4 --lora-dora",
        "--engine megatron --lora-rank 4",
    ],
)
def test_settings_on_two_gpus_train_as_on_the_cpu(flags: str, tmp_path: Path) -> None:
    """Four steps in fp32 on two GPUs against two processes on the CPU."""
    if "megatron" in flags:
        pytest.importorskip("megatron.core")
    rows, expected = (
        pretrain(tmp_path / name, f"{flags} --precision fp32", 2, cpu=name == "cpu") for name in ("gpu", "cpu")
    )
    assert len(rows) == 4
    for row, wanted in zip(rows, expected, strict=True):
        for key in ("loss", "grad_norm"):
            assert row[key] == pytest.approx(wanted[key], rel=1e-3)


def whole_runs(folder: Path, only: str) -> dict[str, str]:
    """What benchmarks/layouts/runs.py says of the runs whose names match: two processes, on one GPU or two."""
    options = ["--output", folder / "runs", "--only", only]
    options += ["--transport", "host" if torch.cuda.device_count() == 1 else "direct"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", "3", ROOT / "benchmarks/layouts/runs.py", *options]
    environment = {**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    if not torch.cuda.is_available():
        environment["DLM_BRIDGE_PLATFORM"] = "cpu"
    log = folder / "log"
    with log.open("w") as said:  # no pipe, which processes that a kill has left behind would hold open
        subprocess.run(command, env=environment, check=False, stdin=subprocess.DEVNULL, stdout=said, stderr=said)
    table = folder / "runs.json"
    rows = json.loads(table.read_text())["rows"] if table.exists() else []
    assert [row["name"] for row in rows if row["result"] != "holds"] == [], log.read_text()[-6000:]
    return {row["name"]: row["said"] for row in rows}


@pytest.mark.slow
@pytest.mark.gpu(optional=True)
@pytest.mark.parametrize(
    ("only", "count"),
    [
        ("^sgd", 2),
        ("^routers in fp32", 1),
        ("^a save in the background: SIGKILL", 1),
        ("^a save in the background$", 1),
    ],
)
def test_runs_resume_as_if_not_stopped(only: str, count: int, tmp_path: Path) -> None:
    """Losses, main params and moments of a resumed run are to the bit those of the run as a whole, and its checkpoints
    are exported; also where a save in the background was killed."""
    pytest.importorskip("megatron.core")
    assert len(whole_runs(tmp_path, only)) == count


@pytest.mark.parametrize(
    ("only", "count"),
    [
        pytest.param("^cuda graphs, tp1", 2, marks=pytest.mark.gpu),
        pytest.param("^cuda graphs, tp2", 2, marks=pytest.mark.gpu2),
        pytest.param("^userbuffers, tp2", 1, marks=pytest.mark.gpu2),
        pytest.param("at a time: as", 1, marks=pytest.mark.gpu2),
    ],
)
def test_overlap_and_graphs_change_no_run(only: str, count: int, tmp_path: Path) -> None:
    """Losses and validations of eight steps are those of the same run without, but for the order of sums."""
    pytest.importorskip("megatron.core")
    assert len(whole_runs(tmp_path, only)) == count


@pytest.mark.gpu
@pytest.mark.parametrize("strategy", ["optim", "optim_grads", "optim_grads_params"])
def test_checkpoints_of_megatron_fsdp(strategy: str, tmp_path: Path) -> None:
    """They are resumed from, and exported to the bit."""
    pytest.importorskip("megatron.core")
    assert len(whole_runs(tmp_path, f"^fsdp {strategy}: resumed")) == 1

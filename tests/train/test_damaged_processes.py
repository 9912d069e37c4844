"""Two processes: a full disk ends both with one line each, both read what a resume compares, and agree on the
checkpoint that it goes on from."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlm_bridge.convert.manifest import check_files, file_names
from tests import launcher
from tests.processes import environments
from tests.train.conftest import read_metrics, without_speed
from tests.train.test_damaged_checkpoints import flip

pytestmark = pytest.mark.slow

# A run's flags, the size that no file may exceed in the save that fails, and a file that the second process wrote.
CASES = {
    "data parallel": ("--engine accelerate", 8_000, "model.safetensors"),
    "fsdp": ("--engine accelerate --sharding fsdp", 8_000, "optimizer/__1_0.distcp"),
    "fsdp, weights": ("--engine accelerate --sharding fsdp", 45_000, "optimizer/__1_0.distcp"),
}
STEPS = (
    "--from-scratch --global-batch-size 4 --seq-length 16 --lr 0.01 --eval-interval 0 --save-interval 2 --steps 4 "
    "--precision fp32"
)


@pytest.mark.parametrize("case", CASES)
def test_two_processes(case: str, tmp_path: Path, seed_folder: Path, corpus: Path) -> None:
    check_two_processes(*CASES[case], tmp_path, seed_folder, corpus)


def check_two_processes(flags: str, size: int, file: str, tmp_path: Path, seed_folder: Path, corpus: Path) -> None:
    output = tmp_path / "run"
    words = f"pretrain --model {seed_folder} --data {corpus} --output {output} {STEPS} {flags}".split()

    def launch(*more: str, **extra: str) -> tuple[bool, list[str]]:
        logs = [tmp_path / f"log_{rank}.txt" for rank in range(2)]
        each = [environment | extra for environment in environments(2)]
        ended = launcher.run("tests.train.full_disk_worker", [*words, *more], each, logs, 300)
        return ended, [log.read_text() for log in logs]

    ended, said = launch(FILE_SIZE=str(size))
    assert not ended
    assert not any("Traceback" in text for text in said), said
    (line,) = {line for text in said for line in text.splitlines() if line.startswith("dlm-bridge: ")}
    assert "stays the newest checkpoint" in line
    rows = without_speed(read_metrics(output))  # the step's row is written before its checkpoint
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert not [path for path in (output / "checkpoints").iterdir() if "4" in path.name]

    ended, said = launch("--resume")
    assert ended, said
    assert without_speed(read_metrics(output)) == rows
    (last,) = (path for path in (output / "checkpoints").iterdir() if path.name.endswith("4"))
    assert not check_files(last)
    assert file in file_names(last)

    flip(last / file)
    ended, said = launch("--resume")
    assert ended, said
    assert f"{file} was changed" in said[0]
    assert without_speed(read_metrics(output)) == rows
    assert last.with_name(f"{last.name}.damaged").is_dir()
    assert not check_files(last)

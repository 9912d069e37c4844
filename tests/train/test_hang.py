"""Dumps of a hang: stacks of all threads and torch's flight recorder, without blocking the caller."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dlm_bridge.train import hang

HANGING = """
import os, sys, threading, time
from pathlib import Path
from dlm_bridge.train import hang

folder = Path(sys.argv[1])
hang.enable_flight_recorder(folder)
import torch
import torch.distributed as dist

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(3))

def watch():
    time.sleep(0.5)
    hang.dump(folder, 0)
    os._exit(2)

def waits_for_ever():
    threading.Event().wait()

threading.Thread(target=watch, daemon=True).start()
waits_for_ever()
"""


def test_a_hang_leaves_stacks_and_the_last_collective_operations(tmp_path: Path) -> None:
    """They are those of `torchfrtrace`, torch's program that compares the ranks' files."""
    folder = tmp_path / "run" / "hang"
    command = [sys.executable, "-c", HANGING, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 2, done.stderr
    stacks = (folder / "stacks_0.txt").read_text()
    assert "waits_for_ever" in stacks
    assert "watch" in stacks
    from torch.distributed.flight_recorder.components.loader import read_dump

    operations = read_dump(hang.FLIGHT_RECORDER, str(folder / f"{hang.FLIGHT_RECORDER}0"))["entries"]
    assert [operation["profiling_name"] for operation in operations] == ["gloo:all_reduce"]
    assert sorted(file.name for file in folder.iterdir()) == [f"{hang.FLIGHT_RECORDER}0", "stacks_0.txt"]


@pytest.mark.slow
def test_no_recorded_operations_no_file_of_them(tmp_path: Path) -> None:
    script = "import sys; from pathlib import Path; from dlm_bridge.train import hang; hang.dump(Path(sys.argv[1]), 3)"
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "hang")], check=True, timeout=120)
    assert [file.name for file in (tmp_path / "hang").iterdir()] == ["stacks_3.txt"]


def test_a_file_system_that_blocks_does_not_block_the_caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "stacks_0.txt")  # blocks until somebody reads it
    monkeypatch.setattr(hang, "DUMP_TIMEOUT_S", 0.2)
    began = time.monotonic()
    hang.dump(tmp_path, 0)
    assert time.monotonic() - began < 10
    with (tmp_path / "stacks_0.txt").open() as file:  # ends its thread
        assert "test_a_file_system_that_blocks" in file.read()


def test_a_folder_that_cannot_be_written_is_no_second_failure(tmp_path: Path) -> None:
    (tmp_path / "hang").write_text("a file")
    hang.dump(tmp_path / "hang", 0)
    assert (tmp_path / "hang").read_text() == "a file"


def test_variables_that_are_set_stay(tmp_path: Path) -> None:
    script = (
        "import json, os, sys; from pathlib import Path; from dlm_bridge.train import hang;"
        "hang.enable_flight_recorder(Path(sys.argv[1]));"
        "print(json.dumps({name: value for name, value in os.environ.items() if name.startswith('TORCH_')}))"
    )
    mine = {"TORCH_NCCL_TRACE_BUFFER_SIZE": "7", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        env={name: value for name, value in os.environ.items() if not name.startswith("TORCH_")} | mine,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    found = json.loads(done.stdout)
    assert (found["TORCH_FR_BUFFER_SIZE"], found["TORCH_NCCL_DUMP_ON_TIMEOUT"]) == ("7", "0")
    assert found["TORCH_FR_DUMP_TEMP_FILE"] == str(tmp_path / hang.FLIGHT_RECORDER)

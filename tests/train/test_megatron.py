"""The Megatron engine: every layout against one process, runs that stop and go on, and bad input."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import assert_ok, forked
from tests.train.megatron_cases import Files
from tests.train.megatron_worker import WORLDS, plan

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None,
    reason="megatron-core is not installed: pip install 'dlm-bridge[megatron]'",
)
Said = dict[int, dict[str, list[str]]]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    files = Files(tmp_path_factory.mktemp("megatron"))
    files.write()
    return files


@pytest.fixture(scope="module")
def said(files: Files) -> Said:
    """What each check said, by the number of processes."""
    command = [sys.executable, "-m", "tests.train.megatron_worker", str(files.root)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (files.root / "log.txt").open("w") as log:
        subprocess.run(
            command, cwd=Path(__file__).parents[2], env=environment, stdout=log, stderr=log, timeout=500, check=True
        )
    return {processes: forked(files.root / f"world{processes}", processes) for processes in WORLDS}


@pytest.mark.parametrize(("processes", "name"), [(number, name) for number in WORLDS for name in plan(number)])
def test_processes(processes: int, name: str, said: Said) -> None:
    assert_ok(name, said[processes], processes)

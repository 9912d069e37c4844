"""One checkpoint and one loaded model per case, made once."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import dlm_bridge  # noqa: F401
from tests.families.case import FamilyCase, all_cases


@pytest.fixture(scope="session", params=all_cases(), ids=lambda case: case.id)
def case(request: pytest.FixtureRequest) -> FamilyCase:
    return request.param


@pytest.fixture(scope="session")
def folder(case: FamilyCase, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The case's checkpoint, fp32. Do not write to it."""
    return case.write(tmp_path_factory.mktemp("families") / case.id)


@pytest.fixture(scope="session")
def model(case: FamilyCase, folder: Path) -> Any:
    """The loaded checkpoint. Do not change it."""
    return case.load(folder)


@pytest.fixture(scope="session")
def ids(case: FamilyCase) -> torch.Tensor:
    """[3, S] token ids."""
    return torch.randint(0, 100, (3, case.length), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="session")
def tensor_parallel(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What each of two processes said of each case: "ok" or a traceback. They run once, for all cases."""
    root = tmp_path_factory.mktemp("tensor_parallel")
    for case in all_cases():
        input_ids = torch.randint(0, 100, (2, case.length), generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            logits = case.load(case.write(root / case.id))(input_ids).logits
        torch.save({"input_ids": input_ids, "logits": logits}, root / f"{case.id}.pt")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, "-m", "tests.families.tp_worker", str(root)]
    processes = []
    for rank in ("0", "1"):
        with (root / f"log_{rank}.txt").open("w") as log:
            variables = {**environment, "RANK": rank, "LOCAL_RANK": rank, "OMP_NUM_THREADS": "1"}
            processes.append(
                subprocess.Popen(
                    command, cwd=Path(__file__).parents[2], env=variables, stdout=log, stderr=subprocess.STDOUT
                )
            )
    try:
        for process in processes:
            process.wait(timeout=300)
    except subprocess.TimeoutExpired:
        pass  # the report of a process that hangs is missing, and its log says where it was
    finally:
        for process in processes:
            process.kill()
            process.wait()
    said: dict[str, list[str]] = {case.id: [] for case in all_cases()}
    for rank in range(2):
        report = root / f"report_{rank}.json"
        log = (root / f"log_{rank}.txt").read_text()[-3000:]
        found = json.loads(report.read_text()) if report.exists() else dict.fromkeys(said, log)
        for name, result in found.items():
            said[name].append(result)
    return said

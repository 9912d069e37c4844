"""`dlm-bridge env --cluster`: processes started by hand as on two hosts, and what its report calls a problem."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from dlm_bridge import __version__, job
from dlm_bridge.cluster import check
from tests import launcher
from tests.processes import environments, free_port

VERSIONS = {"python": "3.11.1", "dlm_bridge": "0.1.0", "torch": "2.13.0", "nccl": "2.27", "driver": "580.1"}


def start(
    folders: list[Path], output: str, *words: str, variables: dict[str, str] | None = None
) -> list[tuple[int, str, str]]:
    """Exit code, stdout and stderr of each process, one in each folder; the last one has `variables`."""
    common = {"WORLD_SIZE": str(len(folders)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, "-m", "dlm_bridge.cli", "env", "--cluster", "--output", output, *words]
    started = [
        subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, **common, "RANK": str(rank), **(variables or {} if folder is folders[-1] else {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, folder in enumerate(folders)
    ]
    said = [process.communicate(timeout=300) for process in started]
    return [(process.returncode, out, err) for process, (out, err) in zip(started, said, strict=True)]


def test_two_processes_that_could_run(tmp_path: Path) -> None:
    """The output folder, which did not exist, is removed again."""
    logs = [tmp_path / "0.txt", tmp_path / "1.txt"]
    words = ["env", "--cluster", "--output", str(tmp_path / "new/run"), "--json"]
    ended = launcher.run("dlm_bridge.cli", words, environments(2), logs, timeout_s=300)
    said = [log.read_text() for log in logs]
    assert ended, said
    assert said[1] == ""
    report = json.loads(said[0])
    (host,) = report["hosts"].values()
    assert (host["ranks"], host["clock_offset_s"], report["backend"], report["problems"]) == ([0, 1], 0.0, "gloo", [])
    assert [row["bytes"] for row in report["all_reduce"]] == list(check.SIZES["gloo"])
    assert all(row["bus_bytes_per_s"] == pytest.approx(row["bytes"] / row["seconds"]) for row in report["all_reduce"])
    assert set(host["free_bytes"]) == {"output", "tmp", "shm"}
    assert host["versions"]["dlm_bridge"] == __version__
    assert sorted(tmp_path.iterdir()) == logs


@pytest.mark.slow
def test_a_folder_that_is_not_shared_and_another_version(tmp_path: Path) -> None:
    """A relative path in two folders, and a package of another version for one process."""
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        (folder / "run").mkdir(parents=True)
    other = tmp_path / "packages" / "accelerate-0.0.1.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: accelerate\nVersion: 0.0.1\n")
    path = f"{other.parent}:{os.environ.get('PYTHONPATH', '')}"
    first, second = start(folders, "run", variables={"PYTHONPATH": path})
    assert (first[0], second[0]) == (1, 1), (first, second)
    problems = [line for line in first[1].splitlines() if line.startswith("problem: ")]
    assert len(problems) == 2
    assert any("output" in problem for problem in problems)
    assert any("versions" in problem for problem in problems)
    assert [list(folder.iterdir()) for folder in folders] == [[folder / "run"] for folder in folders]
    assert list((folders[0] / "run").iterdir()) == []


@pytest.mark.parametrize("kind", ["NVIDIA UNIX x86_64 Kernel Module", "NVIDIA UNIX Open Kernel Module for x86_64"])
def test_the_version_of_a_driver(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = tmp_path / "version"
    driver.write_text(f"NVRM version: {kind}  580.159.04  Release Build  (user@host)  Mon Oct 13 2025\n")
    monkeypatch.setattr(check, "DRIVER", driver)
    assert check._versions()["driver"] == "580.159.04"


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    ((code, out, err),) = start([tmp_path], "file")
    assert code == 1, err
    assert "problem: " in out


def facts(host: str, **changes: Any) -> check.Facts:
    return {
        "host": host,
        "versions": VERSIONS,
        "devices": ["H100", "H100"],
        "local_rank": 0,
        "free_bytes": {"tmp": 1},
        "output": "",
        **changes,
    }


def network(clock: float = 0.0, problem: str = "") -> dict[str, Any]:
    return {"backend": "nccl", "clocks": {"a": 0.0, "b": clock}, "all_reduce": [], "problem": problem}


# Facts of host b, its network, and what the problem names; None: no problem.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], str | None]] = {
    "all is well": ({}, {}, None),
    "another version of this package": ({"versions": {**VERSIONS, "dlm_bridge": "0.2.0"}}, {}, "dlm_bridge"),
    "another driver": ({"versions": {**VERSIONS, "driver": "570"}}, {}, None),
    "another Python": ({"versions": {**VERSIONS, "python": "3.12"}}, {}, None),
    "another torch": ({"versions": {**VERSIONS, "torch": "2.12"}}, {}, "torch"),
    "another NCCL": ({"versions": {**VERSIONS, "nccl": "2.20"}}, {}, "nccl"),
    "a clock that is off a little": ({}, {"clock": 1.5}, None),
    "a clock that is off": ({}, {"clock": -job.LARGEST_CLOCK_OFFSET_S - 1}, "clock"),
    "a folder that is not shared": ({"output": "is not the same folder"}, {}, "output"),
    "fewer devices than processes": ({"local_rank": 2}, {}, "no device"),
    "no devices on one host": ({"devices": []}, {}, "no devices"),
    "a network that hangs": ({}, {"problem": "have not ended"}, "have not ended"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_a_problem(case: str) -> None:
    changes, connection, named = CASES[case]
    report = check._report([facts("a"), facts("b", **changes)], [network(**connection), network(**connection)])
    assert bool(report["problems"]) == (named is not None)
    assert all(named is not None and named in problem for problem in report["problems"])
    assert any("b" in problem for problem in report["problems"]) == (named is not None)


def test_a_network_that_hangs_ends_within_its_time() -> None:
    released = threading.Event()

    def hangs() -> dict[str, Any]:
        released.wait(60)
        return {}

    finished, found = check._within(0.1, hangs)
    released.set()
    assert not finished
    assert found["problem"]

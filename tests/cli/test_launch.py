"""`--nproc-per-node`: how processes are started and end, and what is refused before they are."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dlm_bridge.cli import launch
from dlm_bridge.cli.app import main
from tests.cli.conftest import llada  # noqa: F401  fixture

WAIT_S = 300
SLEEPS = "import time; time.sleep(300)"


@pytest.fixture(autouse=True)
def own_signals() -> Iterator[None]:
    """The launcher replaces this process's handlers."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs a program in two processes."""
    monkeypatch.setattr(launch, "GRACE_S", 0.2)

    def start(code: str) -> int:
        begin = "import os, signal, sys, time\nrank = int(os.environ['RANK'])\n"
        monkeypatch.setattr(launch, "_interpreter", lambda: [sys.executable, "-c", begin + code])
        return launch.run_processes(2, ["one", "two"])

    return start


def test_processes_get_torchruns_variables(run: Any, tmp_path: Path) -> None:
    code = f"""
import json, pathlib
where = pathlib.Path({str(tmp_path)!r}) / str(rank)
where.write_text(json.dumps([dict(os.environ), sys.argv[1:], sys.stdin.read()]))
"""
    assert run(code) == 0
    found = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(2)]
    for rank, (variables, arguments, stdin) in enumerate(found):
        assert (arguments, stdin) == (["one", "two"], "")
        assert variables["RANK"] == variables["LOCAL_RANK"] == str(rank)
        assert variables["WORLD_SIZE"] == variables["LOCAL_WORLD_SIZE"] == "2"
        assert variables["MASTER_ADDR"] == "127.0.0.1"
        assert variables["TORCHELASTIC_USE_AGENT_STORE"] == "True"
    assert len({variables["MASTER_PORT"] for variables, _, _ in found}) == 1


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("sys.exit(2 * rank)", 2),
        ("sys.exit(75 if rank else 0)", 75),
        (f"{SLEEPS} if rank else sys.exit(2)".replace("import time; ", ""), 2),
        ("signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\nif rank: sys.exit(1)\ntime.sleep(300)", 1),
        ("sys.exit(75) if rank else time.sleep(1)", 75),  # not a failure: the other one ends by itself
    ],
)
def test_the_exit_code_is_that_of_the_failure(run: Any, code: str, expected: int) -> None:
    began = time.monotonic()
    assert run(code) == expected
    assert time.monotonic() - began < 60


def test_a_process_that_is_killed_is_named(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("if rank: os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(300)") == 128 + signal.SIGKILL
    (line,) = capsys.readouterr().err.splitlines()
    assert "rank 1" in line
    assert "SIGKILL" in line


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_every_process_once(run: Any, tmp_path: Path, number: int, capsys: Any) -> None:
    code = f"""
where, got = {str(tmp_path)!r} + "/" + str(rank), []
signal.signal({int(number)}, lambda *_: got.append(1))
open(where, "w").close()
while not got: time.sleep(0.01)
time.sleep(0.5)
open(where, "w").write(str(len(got)))
sys.exit(130)
"""

    def interrupt() -> None:
        while len(list(tmp_path.iterdir())) < 2:
            time.sleep(0.05)
        os.kill(os.getpid(), number)

    sender = threading.Thread(target=interrupt)
    sender.start()
    assert run(code) == 130
    sender.join()
    assert [path.read_text() for path in tmp_path.iterdir()] == ["1", "1"]
    assert capsys.readouterr().err == ""


def test_an_unhandled_signal_is_no_accident(run: Any, tmp_path: Path, capsys: Any) -> None:
    def interrupt() -> None:
        while len(list(tmp_path.iterdir())) < 2:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    sender = threading.Thread(target=interrupt)
    sender.start()
    assert run(f"open({str(tmp_path)!r} + '/' + str(rank), 'w').close()\ntime.sleep(300)") == 128 + signal.SIGTERM
    sender.join()
    assert capsys.readouterr().err == ""


RUN = ("pretrain", "--model", "{llada}", "--data", "mock", "--output", "{out}", "--seq-length", "16")
BATCH = ("--steps", "2", "--global-batch-size")


def words(llada: Path, tmp_path: Path, *more: str) -> list[str]:  # noqa: F811
    return [word.format(llada=llada, out=tmp_path / "run") for word in (*RUN, *more)]


@pytest.mark.parametrize(
    ("given", "environment", "named"),
    [
        (["--nproc-per-node", "2"], {"RANK": "0", "WORLD_SIZE": "2"}, "launcher"),
        (["--nproc-per-node", "100000"], {}, "at most"),
        (["--nproc-per-node", "0"], {}, "--nproc-per-node"),
        (["--nproc-per-node", "gpu"], {}, "--nproc-per-node"),
        (["--nproc-per-node", "4", "--dry-run", "--gpus", "2"], {}, "--gpus"),
    ],
)
def test_refused_before_anything_is_started(
    llada: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    given: list[str],
    environment: dict[str, str],
    named: str,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(launch, "run_processes", None)
    monkeypatch.setattr(sys, "argv", ["dlm-bridge", *words(llada, tmp_path, *BATCH, "4", *given)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert named in line


@pytest.mark.extension("plan")
def test_a_dry_run_starts_nothing_and_plans_for_them(
    llada: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(launch, "run_processes", None)
    given = (*BATCH, "128", "--nproc-per-node", "64", "--dry-run", "--json")
    monkeypatch.setattr(sys, "argv", ["dlm-bridge", *words(llada, tmp_path, *given)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    assert json.loads(capsys.readouterr().out)["gpus"] == 64


def command(*given: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DLM_BRIDGE_PLATFORM": "cpu"}
    line = [sys.executable, "-m", "dlm_bridge.cli", *given]
    return subprocess.run(line, capture_output=True, text=True, env=environment, check=False, timeout=WAIT_S)


@pytest.mark.slow
def test_bad_input_that_all_processes_find_is_one_line(llada: Path, tmp_path: Path) -> None:  # noqa: F811
    refused = command(*words(llada, tmp_path, "--nproc-per-node=2", *BATCH, "3"))
    assert refused.returncode == 2
    assert [line for line in refused.stderr.splitlines() if line.startswith("dlm-bridge: ")] == [
        refused.stderr.splitlines()[-1]
    ]
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_run_on_two_processes(llada: Path, tmp_path: Path) -> None:  # noqa: F811
    done = command(*words(llada, tmp_path, *BATCH, "4", "--nproc-per-node", "2"))
    assert done.returncode == 0, done.stderr
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2
    assert "per device" in done.stderr

"""Checks that several processes run together, once for all: their launch, their loop and what each said."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import os
import random
import resource
import signal
import socket
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import pytest

from tests import launcher

OK = "ok"  # what a check says in the report when nothing was raised
ENDED = "ended"  # how the first of the processes that failed has ended


def launch(
    module: str, root: Path, processes: int = 2, timeout_s: float = 800, arguments: Sequence[str] = ()
) -> dict[str, list[str]]:
    """Run `python -m MODULE ROOT ARGUMENTS` in each of several processes on CPU, forked from the launcher; what each
    check said, by rank: OK or a traceback. A process that failed before its first check has its log under "start"."""
    logs = [root / f"log_{rank}.txt" for rank in range(processes)]
    launcher.run(module, [str(root), *arguments], environments(processes), logs, timeout_s)
    return _said(root, [log.read_text()[-4000:] for log in logs])


def environments(processes: int) -> list[dict[str, str]]:
    """Those of several processes on CPU, by rank, as torchrun gives them."""
    shared = {
        **os.environ,
        "WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
        "DLM_BRIDGE_PLATFORM": "cpu",
    }
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]


@contextlib.contextmanager
def limited_memory(room: int) -> Iterator[None]:
    """Context in which this process can allocate `room` bytes more: an absurd allocation fails at once."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + room, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def free_port() -> int:
    """A port for a process group's first meeting. It lies below those that the system hands out, which another run's
    connections could take between now and the meeting."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def fork(
    root: Path,
    processes: int,
    checks: Callable[[], Iterable[tuple[str, Callable[[], None]]]],
    timeout_s: float = 800,
) -> None:
    """`work` on the checks in several processes, each forked from this one with what it has imported, and wait for
    them; `forked` says what each check said. The caller must have no threads and no process groups. A process that
    hangs prints where it does and ends."""
    root.mkdir(exist_ok=True)
    port = free_port()
    gc.collect()
    gc.freeze()  # so that no child's collection touches, and so copies, every page of what is imported here
    children = {}
    for rank in range(processes):
        child = os.fork()
        if child == 0:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes)}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            faulthandler.dump_traceback_later(timeout_s, exit=True)
            try:
                work(root, checks())
            finally:
                launcher.end(0)
        children[child] = rank
    while children:
        child, status = os.wait()
        rank = children.pop(child)
        if status:  # the others may wait for it for ever
            if not (root / ENDED).exists():  # the first one
                (root / ENDED).write_text(f"rank {rank}: {os.waitstatus_to_exitcode(status)}")
            for other in children:
                os.kill(other, signal.SIGKILL)


def forked(root: Path, processes: int) -> dict[str, list[str]]:
    """What each check said in `fork`ed processes, by rank. If one failed: its exit code, or a signal as a negative
    number, with the end of the log that they share, under ENDED."""
    said = _said(root, ["no report"] * processes)
    if (root / ENDED).exists():
        log = root.parent / "log_0.txt"
        said[ENDED] = [(root / ENDED).read_text(), log.read_text(errors="replace")[-4000:] if log.exists() else ""]
    return said


def work(root: Path, checks: Iterable[tuple[str, Callable[[], None]]]) -> None:
    """In one of the processes: run every check in order and write what each said."""
    report: dict[str, str] = {}
    path = _report(root, int(os.environ["RANK"]))
    for name, check in checks:
        try:
            check()
            report[name] = OK
        except BaseException:
            # Another rank may be waiting for this one: nothing after this can be trusted.
            report[name] = traceback.format_exc()
            _write(path, report)
            launcher.end(1)
        _write(path, report)


def assert_ok(name: str, report: dict[str, list[str]], processes: int = 2) -> None:
    """Fail with what a check said, or with why it was not reached."""
    said = report.get(name)
    if said is None:
        failed = [key for key, results in report.items() if set(results) != {OK}]
        ended = "\n".join(report.get(ENDED, ()))
        pytest.fail(f"not reached, because of: {', '.join(failed) or 'a time-out'}\n{ended}")
    assert said == [OK] * processes, "\n".join(said)


def _said(root: Path, logs: list[str]) -> dict[str, list[str]]:
    """What each check said, by rank; of a rank without a report its log, under "start"."""
    said: dict[str, list[str]] = {}
    for rank, log in enumerate(logs):
        path = _report(root, rank)
        found = json.loads(path.read_text()) if path.exists() else {"start": log}
        for name, result in found.items():
            said.setdefault(name, []).append(result)
    return said


def _write(path: Path, report: dict[str, str]) -> None:
    """At once: where another rank fails, this one is killed."""
    temporary = path.with_suffix(".new")
    temporary.write_text(json.dumps(report))
    temporary.replace(path)


def _report(root: Path, rank: int) -> Path:
    return root / f"report_{rank}.json"

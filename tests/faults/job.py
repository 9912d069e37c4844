"""A job of several ranks, forked from this process, which has imported what they need, and ended as torchrun would."""

from __future__ import annotations

import os
import random
import runpy
import signal
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import psutil

from tests.processes import free_port

SHUTDOWN_S = 30.0  # that torchrun gives ranks after SIGTERM, and a job's other processes to end
POLL_S = 0.05


class Job:
    """`dlm-bridge ARGUMENTS` in several ranks, each in a session of its own with a log, and a store for them."""

    def __init__(self, arguments: list[str], processes: int, logs: Path) -> None:
        logs.mkdir(parents=True, exist_ok=True)
        self.logs = logs
        self.codes: dict[int, int] = {}  # by rank, of those that have ended; negative: the signal
        self.started = time.monotonic()
        shared = {
            **os.environ,
            "WORLD_SIZE": str(processes),
            "LOCAL_WORLD_SIZE": str(processes),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "OMP_NUM_THREADS": "1",
            "DLM_BRIDGE_PLATFORM": "cpu",
            "TORCHELASTIC_RUN_ID": "faults",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        self.store = os.fork()
        if self.store == 0:
            _serve_store(int(shared["MASTER_PORT"]))
        self.ranks: list[int] = []
        for rank in range(processes):
            child = os.fork()
            if child == 0:
                become({**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}, arguments, logs / f"{rank}.txt")
            self.ranks.append(child)

    def poll(self) -> None:
        """Notice ranks that have ended."""
        for rank, process in enumerate(self.ranks):
            if rank not in self.codes:
                found, status = os.waitpid(process, os.WNOHANG)
                if found:
                    self.codes[rank] = os.waitstatus_to_exitcode(status)

    @property
    def running(self) -> list[int]:
        """The ranks that have not ended."""
        return [rank for rank in range(len(self.ranks)) if rank not in self.codes]

    @property
    def failed(self) -> bool:
        return any(self.codes.values())

    def signal(self, rank: int, number: int) -> None:
        """Signal one rank's process alone."""
        with suppress(ProcessLookupError):
            os.kill(self.ranks[rank], number)

    def kill_writer(self, draw: random.Random) -> bool:
        """SIGKILL to a process that one of the ranks has forked, if there is any: whether there was."""
        own = psutil.Process().cmdline()  # what multiprocessing starts anew has another
        for rank in draw.sample(self.running, len(self.running)):
            with suppress(psutil.Error):
                forked = [each for each in psutil.Process(self.ranks[rank]).children(True) if each.cmdline() == own]
                if forked:
                    draw.choice(forked).kill()
                    return True
        return False

    def shut_down(self) -> list[str]:
        """After the first rank has failed: SIGTERM to the others, and SIGKILL to ranks that are left. The other
        processes that are left of the job after so long, which there must not be, killed too."""
        self._signal_sessions(self.running, signal.SIGTERM)
        deadline = time.monotonic() + SHUTDOWN_S
        while self.running and time.monotonic() < deadline and not all(map(self._is_stopped, self.running)):
            time.sleep(POLL_S)
            self.poll()
        self._signal_sessions(self.running, signal.SIGKILL)
        while self.running:
            time.sleep(POLL_S)
            self.poll()
        return self.leftovers()

    def leftovers(self) -> list[str]:
        """Processes that a job which has ended leaves, after the time to end."""
        deadline = time.monotonic() + SHUTDOWN_S
        while (left := list(_members(self.ranks))) and time.monotonic() < deadline:
            time.sleep(10 * POLL_S)
        named = [_described(process) for process in left]
        for process in left:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        return named

    def close(self) -> None:
        """End what is there, however the round ended."""
        self._signal_sessions(range(len(self.ranks)), signal.SIGKILL)
        for process in (*(self.ranks[rank] for rank in self.running), self.store):
            with suppress(ProcessLookupError, ChildProcessError):
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)

    def said(self) -> str:
        """What all ranks have printed."""
        return "".join(
            f"--- rank {rank}\n{path.read_text(errors='replace')}"
            for rank in range(len(self.ranks))
            if (path := self.logs / f"{rank}.txt").exists()
        )

    def _is_stopped(self, rank: int) -> bool:
        with suppress(psutil.Error):
            return psutil.Process(self.ranks[rank]).status() == psutil.STATUS_STOPPED
        return False

    def _signal_sessions(self, ranks: Iterable[int], number: int) -> None:
        for rank in ranks:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.ranks[rank], number)


def _serve_store(port: int) -> NoReturn:
    from torch.distributed import TCPStore

    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=timedelta(hours=1))
    while os.getppid() != 1:
        time.sleep(1)
    del store
    os._exit(0)


def become(environment: dict[str, str], arguments: list[str], log: Path) -> NoReturn:
    """The forked process of `dlm-bridge ARGUMENTS`: as if it had been started on its own."""
    status = 1
    try:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with open(os.devnull) as nothing, log.open("w") as said:
            os.dup2(nothing.fileno(), 0)
            os.dup2(said.fileno(), 1)
            os.dup2(said.fileno(), 2)
        os.environ.clear()
        os.environ.update(environment)
        random.seed()
        sys.argv = ["dlm-bridge", *arguments]
        runpy.run_module("dlm_bridge.cli", run_name="__main__")
        status = 0
    except SystemExit as exit_:
        status = exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
        threading._shutdown()  # type: ignore[attr-defined]  # as at the end of a process
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _members(sessions: Iterable[int]) -> Iterable[int]:
    """The processes of sessions, without those that have ended and are not reaped."""
    sessions = set(sessions)
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError, psutil.Error):
                if os.getsid(int(name)) in sessions and psutil.Process(int(name)).status() != psutil.STATUS_ZOMBIE:
                    yield int(name)


def _described(process: int) -> str:
    with suppress(psutil.Error):
        return f"{process}: {' '.join(psutil.Process(process).cmdline())[:200]}"
    return str(process)

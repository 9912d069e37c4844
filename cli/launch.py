"""Several processes of a command on this machine (`--nproc-per-node`), in the environment that torchrun gives them.

torchrun itself ends with 1 whatever its processes end with, prints a report of its own for every failure, and gives
them 30 seconds after SIGTERM, in which a run may not be able to save.
"""

from __future__ import annotations

import functools
import inspect
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from dlm_bridge.cli.help import split_option, with_parameters
from dlm_bridge.distributed import launched
from dlm_bridge.errors import SettingError, counted
from dlm_bridge.processes import GRACE_S, how_it_ended, report
from dlm_bridge.settings import check_minimum

NAMES = ("--nproc-per-node", "--nproc_per_node")
FAILURES = (1, 2, 130)  # exit codes with which a process ends while the others may wait for it
PER_CORE = 4  # processes per CPU core, to try out a layout
SHUTDOWN_S = 30.0  # from SIGTERM to SIGKILL after a failure, as in torchrun
POLL_S = 0.05


def with_processes(command: Callable[..., None]) -> Callable[..., None]:
    """Add --nproc-per-node to a command that can use several processes. A dry run and a preview are shown by one."""

    @functools.wraps(command)
    def on_processes(nproc_per_node: int | None = None, **given: Any) -> None:
        check_minimum("nproc_per_node", nproc_per_node)
        if nproc_per_node is not None and launched():
            reason = "the processes are started already, by torchrun or another launcher: omit one of them"
            raise SettingError("nproc_per_node", reason)
        count = nproc_per_node or 1
        if count == 1 or given.get("dry_run") or given.get("preview") is not None:
            return command(**given)
        _check(count, given.get("device"))
        arguments, _ = split_option(sys.argv[1:], NAMES)
        raise SystemExit(run_processes(count, arguments))  # typer.Exit(130) would report an interrupt again

    option = typer.Option(NAMES[0], metavar="N", help="Run in N processes on this machine, one per GPU.")
    parameters = inspect.signature(command, eval_str=True).parameters.values()
    return with_parameters(
        on_processes,
        {each.name: (each.annotation, each.default) for each in parameters}
        | {"nproc_per_node": (Annotated[int | None, option], None)},
    )


def _check(count: int, device: str | None) -> None:
    """Raise SettingError for more processes than the machine has devices."""
    most, devices = most_processes(device)
    if count > most:
        raise SettingError("nproc_per_node", f"{count}, but this machine has {devices}: set at most {most}")


def most_processes(device: str | None) -> tuple[int, str]:
    """Maximum number of processes on this machine, and its devices: "8 GPUs" or "2 CPU cores"."""
    import torch

    if "cpu" in (device, os.environ.get("DLM_BRIDGE_PLATFORM")) or not torch.accelerator.is_available():
        cores = os.cpu_count() or 1
        return PER_CORE * cores, counted(cores, "CPU core")
    return torch.accelerator.device_count(), counted(torch.accelerator.device_count(), "GPU")


def run_processes(count: int, arguments: Sequence[str]) -> int:
    """Run the command line in `count` processes. Returns the exit code of the process that failed first, otherwise
    the first one that is not 0.

    Signals of this process are sent on to the others, which are in a process group of their own: Ctrl-C reaches each
    of them once. If one fails, the others, which may wait for it, get SIGTERM after `GRACE_S`.
    """
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # until this function returns
    shared = {
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_RUN_ID": secrets.token_hex(8),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(max((os.cpu_count() or 1) // count, 1)),
    }
    received: list[int] = []
    signal.set_wakeup_fd(-1)  # the processes end within seconds after Ctrl-C, and this one after them
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: received.append(number))
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(count):
            environment = {**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            words = [*_interpreter(), *arguments]
            processes.append(subprocess.Popen(words, env=environment, stdin=subprocess.DEVNULL, process_group=0))
        ended = _ended(processes, received)
    finally:
        for process in processes:
            process.kill()
    rank, code = next(((rank, code) for rank, code in ended.items() if _failed(code)), (0, 0))
    if code < 0 and -code not in received:
        report(f"rank {rank} {how_it_ended(code)}")
    code = code or next(filter(None, ended.values()), 0)
    return code if code >= 0 else 128 - code


def _ended(processes: Sequence[subprocess.Popen[bytes]], received: Sequence[int]) -> dict[int, int]:
    """Wait for the processes. Returns their exit codes by rank, in the order in which they ended."""
    ended: dict[int, int] = {}
    sent, deadline, action = 0, float("inf"), signal.SIGTERM
    while len(ended) < len(processes):
        running = {rank: process for rank, process in enumerate(processes) if rank not in ended}
        ended |= {rank: code for rank, process in running.items() if (code := process.poll()) is not None}
        for number in received[sent:]:
            for process in running.values():
                process.send_signal(number)
            sent += 1
        if deadline == float("inf") and any(map(_failed, ended.values())):
            deadline = time.monotonic() + GRACE_S
        if time.monotonic() >= deadline:
            for process in running.values():
                process.send_signal(action)
            deadline, action = time.monotonic() + SHUTDOWN_S, signal.SIGKILL
        time.sleep(POLL_S)
    return ended


def _failed(code: int) -> bool:
    return code < 0 or code in FAILURES


def _interpreter() -> list[str]:
    """How this process was started, without its arguments."""
    arguments = sys.argv[1:]
    if arguments and sys.orig_argv[-len(arguments) :] == arguments:
        return [sys.executable, *sys.orig_argv[1 : -len(arguments)]]
    return [sys.executable, "-m", "dlm_bridge.cli"]

"""Processes of a benchmark under torchrun that end: at a time limit each prints where it is and exits."""

from __future__ import annotations

import faulthandler
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from dlm_bridge.processes import end_with_parent

GRACE_S = 30.0  # for what a process imports before it calls `end_after`
APART_S = 2.0  # between the tracebacks of two ranks, which share a log


def launch(
    script: str,
    processes: int,
    words: Sequence[str],
    limit_s: float,
    log: Path,
    environment: Mapping[str, str] | None = None,
    watch: Callable[[], None] = lambda: None,
    shows_output: bool = False,
) -> str | None:
    """Run `SCRIPT WORDS` in so many processes; None where all ended with 0, otherwise why not, in one line.

    What they print goes to `log`, with `shows_output` only what they print to stderr. `watch` is called several times
    a second. The script's processes are to call `end_after`.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    threads = str(max(1, (os.cpu_count() or 1) // processes))  # an optimizer on the CPU uses them; torchrun sets 1
    began = time.monotonic()
    with log.open("w") as file:
        job = subprocess.Popen(
            [*command, script, *words],
            env={"OMP_NUM_THREADS": threads, **os.environ, **(environment or {})},
            stdout=None if shows_output else file,
            stderr=file,
        )
        try:
            while job.poll() is None and time.monotonic() - began < limit_s + GRACE_S:
                time.sleep(0.2)
                watch()
        finally:
            job.kill()
            job.wait()
    watch()
    said = log.read_text(errors="replace")
    if job.returncode == 0:
        return None
    place = _place(said)
    if place or time.monotonic() - began >= limit_s:
        return f"stopped after {time.monotonic() - began:.0f} s{place}"
    lines = [line for line in said.splitlines() if line.startswith("dlm-bridge: ")]
    lines = lines or [line for line in said.splitlines() if "rror" in line] or said.splitlines()[-1:]
    return " | ".join(lines[:3])[:600] or f"ended with exit code {job.returncode}"


def end_after(limit_s: float) -> None:
    """Let this process print the stacks of its threads and exit in `limit_s` seconds, whatever it waits for; a later
    call begins anew. One of torchrun's ends with it, too."""
    rank = os.environ.get("RANK")
    if rank is not None:
        end_with_parent(os.getppid())
    faulthandler.dump_traceback_later(limit_s + APART_S * int(rank or 0), exit=True)


def _place(said: str) -> str:
    """The innermost calls of the first process that printed its stacks; the main thread's are the last ones."""
    found = re.findall(r"^Timeout \(.*\)!\n((?:(?:Thread |  File |  \.\.\.|\n).*\n?)*)", said, re.MULTILINE)
    if not found:
        return ""
    frames = re.findall(
        r'  File "([^"]*)", line (\d+) in (\S+)', re.split(r"^Thread ", found[0], flags=re.MULTILINE)[-1]
    )
    return " in " + " < ".join(f"{name} ({Path(file).name}:{line})" for file, line, name in frames[:6])

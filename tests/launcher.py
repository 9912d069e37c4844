"""A process that has imported what checks need: those that `processes.launch` starts are forked from it.

To import torch, transformers and megatron-core takes seconds, which each process of a dozen launches would spend
again. This one lives as long as pytest's, which asks by lines on its stdin; it has no threads and no process group.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import json
import multiprocessing
import os
import random
import runpy
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

# Nothing heavy up there: what a check spawns imports this module again, since it is the main one.
IMPORTED = (
    "dlm_bridge.cli.app",
    "dlm_bridge.train.accelerate.trainer",
    "matplotlib.backends.backend_agg",
    "tests.families.case",
    "torch.distributed.checkpoint",
    "torch.distributed.tensor",
    "tests.parallel.megatron_checks",  # from here on with megatron-core
    "tests.interop.attention_checks",
    "tests.interop.checks",
    "tests.parallel.context_checks",
    "tests.parallel.live_worker",
    "tests.parallel.training_loop",
)


# A process that os.fork makes has its parent's list of children, which it must not take for its own and end.
os.register_at_fork(after_in_child=multiprocessing.process._children.clear)  # type: ignore[attr-defined]


def run(
    module: str, arguments: list[str], environments: list[dict[str, str]], logs: list[Path], timeout_s: float
) -> bool:
    """`python -m MODULE ARGUMENTS` once under each of the environments, side by side, until all have ended, one has
    failed or the time is over; then none is left. What each prints goes to its log. Whether all ended with 0."""
    request = {
        "module": module,
        "arguments": arguments,
        "environments": environments,
        "logs": [str(log) for log in logs],
        "timeout_s": timeout_s,
    }
    launcher = _launcher()
    assert launcher.stdin is not None
    assert launcher.stdout is not None
    answer = ""
    try:
        launcher.stdin.write(json.dumps(request) + "\n")
        launcher.stdin.flush()
        answer = launcher.stdout.readline()
    finally:
        if not answer:  # a test's time is over; or the launcher has ended
            launcher.send_signal(signal.SIGINT)
            _launcher.cache_clear()
    if not answer:
        raise RuntimeError(f"{__name__} has ended")
    return bool(json.loads(answer))


@functools.cache
def _launcher() -> subprocess.Popen[str]:
    """The process, which ends with this one."""
    return subprocess.Popen(
        [sys.executable, "-m", __name__],
        cwd=Path(__file__).parents[1],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever is printed is no answer
    skip_fsync()
    import_all()
    share_gloo_device()
    with contextlib.suppress(KeyboardInterrupt):
        for line in sys.stdin:
            answers.write(json.dumps(_run(json.loads(line))) + "\n")
            answers.flush()


def skip_fsync() -> None:
    """In this process and in those that are forked from it: what tests write need not survive a power cut."""
    os.fsync = lambda fd: None  # type: ignore[assignment]


def share_commands() -> None:
    """Typer makes all commands anew whenever one is called; in this process, and in those forked from it, once."""
    import typer.main

    from dlm_bridge.cli.app import app

    typer.main.get_command = functools.cache(typer.main.get_command)
    typer.main.get_command(app)


def share_gloo_device() -> None:
    """In this process, and in each that is forked from it, all of gloo's groups have one device. A device is a thread
    that wakes 100 times a second, and it stays with its group: a process that trains again and again, whose models
    keep their groups, has hundreds of them."""
    from torch.distributed import ProcessGroupGloo as Gloo

    made = functools.cache(lambda process: Gloo.create_default_device())
    make = Gloo.__init__

    def __init__(  # noqa: N807
        group: Any, store: Any, rank: int, size: int, timeout: timedelta = timedelta(minutes=30), **more: Any
    ) -> None:
        options = Gloo._Options()
        options._timeout, options._devices = timeout, [made(os.getpid())]
        for name, value in more.items():  # torch 2.15: enable_reconfigure
            setattr(options, name, value)
        make(group, store, rank, size, options)

    Gloo.__init__ = __init__


def import_all() -> None:
    import torch

    from dlm_bridge.models.families import families

    torch.set_num_threads(1)
    for module in IMPORTED:
        with contextlib.suppress(Exception):  # megatron-core is optional; else the process that needs it says what
            importlib.import_module(module)
    for family in families():
        if not family.derived_from:  # the bodies of autoregressive families, which are loaded all the same
            family.load("model_class")
    share_commands()
    gc.collect()
    gc.freeze()  # a collection in a forked process would touch, and so copy, every page of what is imported here
    frozen = gc.get_freeze_count()  # which walks through 650,000 objects; each training run asks
    gc.get_freeze_count = lambda: frozen


def _run(request: dict[str, Any]) -> bool:
    children = []
    for environment, log in zip(request["environments"], request["logs"], strict=True):
        child = os.fork()
        if child == 0:
            _become(request, environment, log)
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.setpgid(child, child)
        children.append(child)
    running, deadline = set(children), time.monotonic() + request["timeout_s"]
    try:
        # When one process fails the others may wait for it for ever; the checks that were not reached say so.
        while running and time.monotonic() < deadline:
            child, status = os.waitpid(-1, os.WNOHANG)
            running.discard(child)
            if status:
                return False
            if child == 0:
                time.sleep(0.02)
    finally:
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)  # and what it has started
        for child in running:
            os.waitpid(child, 0)
    return not running


def _become(request: dict[str, Any], environment: dict[str, str], log: str) -> NoReturn:
    """The module's process: as if it had been started on its own."""
    status = 1
    try:
        with open(os.devnull) as nothing, open(log, "w") as said:
            os.dup2(nothing.fileno(), 0)
            os.dup2(said.fileno(), 1)
            os.dup2(said.fileno(), 2)
        os.environ.clear()
        os.environ.update(environment)
        random.seed()
        sys.argv = [request["module"], *request["arguments"]]
        runpy.run_module(request["module"], run_name="__main__")
        status = 0
    except SystemExit as exit_:
        status = exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        end(status)


def end(status: int) -> NoReturn:
    """This process, at once, and the one that megatron-core keeps for its checkpoints' queue, which would wait for
    ever."""
    for child in multiprocessing.active_children():
        child.kill()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()

"""Processes that belong together: children that end with their parent, Ctrl-C and SIGTERM, and one report of a job.

Ctrl-C is Python's KeyboardInterrupt, but in two phases, in which users would wait or see a traceback: an import, which
ends at once, and a wait in a collective operation, for a device or in a library, which a thread ends after seconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import gc
import os
import signal
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

from dlm_bridge import distributed
from dlm_bridge.errors import DlmBridgeError

GRACE_S = 5.0  # after Ctrl-C, for what an interrupted command has to close
_PR_SET_PDEATHSIG = 1  # of linux/prctl.h
_KILLED = "was killed by signal"
_CLAIM_TIMEOUT = datetime.timedelta(seconds=10)


def end_with_parent(parent: int) -> None:
    """Let this process end when `parent`, the id of the process that started it, does, even by SIGKILL.

    On Linux the kernel sends SIGKILL when the thread that started this process ends, whatever runs here by then;
    elsewhere a thread looks for the parent once a second. Neither is inherited by what this process starts.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it had ended before
            os._exit(1)
    else:
        threading.Thread(target=_watch_parent, args=(parent,), name="parent", daemon=True).start()


def leave_inherited() -> None:
    """In a forked process, first of all: keep the garbage collector from what it has inherited.

    Among it may be objects that end threads, groups of processes or memory of a device, which are not here: their end
    would crash this process.
    """
    gc.freeze()
    gc.enable()


def _watch_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


@contextlib.contextmanager
def signals_blocked() -> Iterator[None]:
    """Context in which to start a process that this one ends itself: it and its own children never get SIGINT and
    SIGTERM, which a terminal, Slurm or torchrun sends to all processes of a job."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})  # which a new process inherits
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_when_interrupted(is_over: Callable[[], bool]) -> None:
    """Let SIGINT end this process with one line and exit code 130: by KeyboardInterrupt, and where it is still there
    `GRACE_S` later, without. `is_over`: whether nothing is left to interrupt.

    Python raises KeyboardInterrupt in the main thread between two of its own instructions: not while that waits for
    another process in a collective operation, for a device or in a library. While a module is being imported, which
    takes most of a command's start, the process ends at once, as if it were killed: torch's own import suppresses one
    KeyboardInterrupt in ten, or aborts, and numpy makes an ImportError of it.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    owner = os.getpid()

    def interrupt(_: int, frame: types.FrameType | None) -> None:
        if os.getpid() != owner or not _is_importing(frame):
            raise KeyboardInterrupt
        if distributed.is_main():  # the launcher's store would need an import
            _print("interrupted")
        os._exit(130)

    def watch() -> None:
        while os.read(reader, 1)[0] != signal.SIGINT:
            pass
        time.sleep(GRACE_S)
        _end_after(GRACE_S, 130)  # where the report waits as well, for a module that is being imported
        if not is_over():
            report("interrupted")
        os._exit(130)

    def unraisable(suppressed: Any) -> None:
        """What C code suppresses is printed with its traceback, but not an interrupt: `watch` ends the process."""
        if not issubclass(suppressed.exc_type, KeyboardInterrupt):
            sys.__unraisablehook__(suppressed)

    sys.unraisablehook = unraisable
    threading.Thread(target=watch, name="interrupt", daemon=True).start()
    # A forked process has the same pipe, but a SIGINT of its own is not this one's.
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGINT, interrupt)


def _is_importing(frame: types.FrameType | None) -> bool:
    """Whether a module is being imported in a stack."""
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


def _end_after(seconds: float, code: int) -> threading.Timer:
    """A started timer that ends this process, unless it is cancelled before."""
    timer = threading.Timer(seconds, os._exit, (code,))
    timer.daemon = True
    timer.start()
    return timer


@contextlib.contextmanager
def catch_sigterm() -> Iterator[threading.Event]:
    """An event that SIGTERM sets; outside the main thread, where handlers cannot be set, nobody sets it."""
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event
        return
    previous = signal.signal(signal.SIGTERM, lambda *_: event.set())
    try:
        yield event
    finally:
        signal.signal(signal.SIGTERM, previous)


def how_it_ended(exitcode: int | None) -> str:
    """ "was killed by signal 9 (SIGKILL)" or "ended with exit code 1", by the exit code of a process."""
    if exitcode is not None and exitcode < 0:
        return f"{_KILLED} {-exitcode} ({signal.Signals(-exitcode).name})"
    return f"ended with exit code {exitcode}"


def was_killed(message: str) -> bool:
    """Whether a message says so by `how_it_ended`."""
    return _KILLED in message


def kill_children() -> None:
    """Kill the processes of `multiprocessing` that this one has started: a process that fails would wait for them."""
    multiprocessing = sys.modules.get("multiprocessing")
    for child in multiprocessing.active_children() if multiprocessing is not None else ():
        child.kill()


def end_process_group(timeout_s: float = 10.0) -> None:
    """End torch's process groups after a command that succeeded in all processes, as NCCL asks for; a process that
    this takes longer than `timeout_s` ends without."""
    timer = _end_after(timeout_s, 0)
    distributed.end_process_group()
    timer.cancel()


def report(message: str) -> None:
    """Print why this process ends, on one line of stderr; of a job that torchrun has started, one process does.

    All processes of a job find bad input, and Ctrl-C reaches all. torchrun ends the others as soon as one has ended.
    """
    if _is_first_to_report():
        _print(message)


def _print(message: str) -> None:
    print(f"dlm-bridge: {' '.join(message.split())}", file=sys.stderr, flush=True)


def _is_first_to_report() -> bool:
    """Whether no other process of the job has asked; without torchrun's store each is the first."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return True
    try:
        if distributed.world_size() == 1:
            return True
        return int(distributed.launcher_store(_CLAIM_TIMEOUT).add("reported", 1)) == 1
    except (RuntimeError, DlmBridgeError):  # the launcher has gone, or its variables are damaged
        return True

"""Process lifetime: children that end with their parent, Ctrl-C and SIGTERM, one error report per job.

Ctrl-C raises KeyboardInterrupt, with two exceptions: an import is ended immediately, because it could suppress the
interrupt, and a wait in a collective operation, for a device or in a library is ended by a thread after seconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from dlm_bridge import distributed, job
from dlm_bridge.errors import DlmBridgeError

T = TypeVar("T")
GRACE_S = 5.0  # time for cleanup after Ctrl-C
_PR_SET_PDEATHSIG = 1  # constant of linux/prctl.h
_KILLED = "was killed by signal"
_STORE_TIMEOUT_S = 10.0


def end_with_parent(parent: int) -> None:
    """End this process when its parent ends, even by SIGKILL. Child processes do not inherit this.

    On Linux the kernel sends SIGKILL when the thread that started this process ends; on other systems a thread checks
    for the parent once per second.

    Args:
        parent: id of the parent process.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it has already ended
            os._exit(1)
    else:
        threading.Thread(target=_watch_parent, args=(parent,), name="parent", daemon=True).start()


def leave_inherited() -> None:
    """Exclude inherited objects from garbage collection; the first call in a forked process.

    Inherited objects may own threads, process groups or device memory that do not exist in this process. Collecting
    them would crash it.
    """
    gc.freeze()
    gc.enable()


def _watch_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


@contextlib.contextmanager
def signals_blocked() -> Iterator[None]:
    """Context manager for starting child processes that ignore SIGINT and SIGTERM, which a terminal, Slurm or torchrun
    sends to all processes of a job. The parent ends them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})  # children inherit the mask
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_when_interrupted(is_over: Callable[[], bool]) -> None:
    """End this process on SIGINT with one line and exit code 130: by KeyboardInterrupt, and if it still runs after
    `GRACE_S` by `os._exit`.

    Python raises KeyboardInterrupt in the main thread between two bytecode instructions, not while it waits in a
    collective operation, for a device or in a library. During an import the process ends immediately: torch's import
    suppresses one KeyboardInterrupt in ten, or aborts, and numpy turns it into an ImportError.

    Args:
        is_over: returns True if nothing is left to interrupt.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    owner = os.getpid()

    def interrupt(_: int, frame: types.FrameType | None) -> None:
        if os.getpid() != owner or not _is_importing(frame):
            raise KeyboardInterrupt
        if distributed.is_main():  # not `report`, which would import
            _print("interrupted")
        os._exit(130)

    def watch() -> None:
        while os.read(reader, 1)[0] != signal.SIGINT:
            pass
        time.sleep(GRACE_S)
        _end_after(GRACE_S, 130)  # `report` could wait for an import
        if not is_over():
            report("interrupted")
        os._exit(130)

    def unraisable(suppressed: Any) -> None:
        """Print suppressed exceptions of C code, except for an interrupt: `watch` ends the process."""
        if not issubclass(suppressed.exc_type, KeyboardInterrupt):
            sys.__unraisablehook__(suppressed)

    sys.unraisablehook = unraisable
    threading.Thread(target=watch, name="interrupt", daemon=True).start()
    # A forked process inherits the pipe, but its SIGINT must not end this one.
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGINT, interrupt)


def _is_importing(frame: types.FrameType | None) -> bool:
    """True if the stack contains an import."""
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


def _end_after(seconds: float, code: int) -> threading.Timer:
    """Start a timer that ends this process unless it is cancelled."""
    timer = threading.Timer(seconds, os._exit, (code,))
    timer.daemon = True
    timer.start()
    return timer


@contextlib.contextmanager
def catch_sigterm() -> Iterator[threading.Event]:
    """Context manager that yields an event which SIGTERM sets. Only the main thread can set handlers; in other threads
    the event stays clear."""
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
    """Describe an exit code: "was killed by signal 9 (SIGKILL)" or "ended with exit code 1"."""
    if exitcode is not None and exitcode < 0:
        return f"{_KILLED} {-exitcode} ({signal.Signals(-exitcode).name})"
    return f"ended with exit code {exitcode}"


def was_killed(message: str) -> bool:
    """True if `message` contains a kill described by `how_it_ended`."""
    return _KILLED in message


def kill_children() -> None:
    """Kill the `multiprocessing` children of this process, for which a failing process would wait."""
    multiprocessing = sys.modules.get("multiprocessing")
    for child in multiprocessing.active_children() if multiprocessing is not None else ():
        child.kill()


def end_process_group(timeout_s: float = 10.0, code: int = 0) -> None:
    """End torch's process groups after success in all processes, as NCCL requires. After `timeout_s` the process ends
    without, with exit code `code`."""
    timer = _end_after(timeout_s, code)
    job.end_process_group()
    timer.cancel()


def report(message: str) -> None:
    """Print the reason for the end of this process on one line of stderr.

    Of a job's processes, which all find bad input and all receive Ctrl-C, only the first one prints; before they have
    met, the first one of each node. Launchers end the others as soon as one has ended.
    """
    claim = _in_time(job.claim_report)
    if claim is None or claim.first:
        _print(message)
    if claim is not None and claim.first:
        _in_time(claim.end)


def _print(message: str) -> None:
    print(f"{job.prefix()}dlm-bridge: {' '.join(message.split())}", file=sys.stderr, flush=True)


def _in_time(ask: Callable[[float], T]) -> T | None:
    """Result of a function that asks the job's store. None if the store does not answer in time: one whose machine has
    lost its network can block for minutes."""
    result: list[T] = []

    def run() -> None:
        with contextlib.suppress(RuntimeError, DlmBridgeError, OSError):  # it has ended, or malformed variables
            result.append(ask(_STORE_TIMEOUT_S))

    asking = threading.Thread(target=run, daemon=True)
    asking.start()
    asking.join(_STORE_TIMEOUT_S)
    return result[0] if result else None

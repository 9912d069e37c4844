"""Processes that belong together: those that one starts end with it; Ctrl-C, SIGTERM, and a launcher's one report."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import gc
import os
import signal
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path

GRACE_S = 5.0  # after Ctrl-C, for what an interrupted command has to close
_PR_SET_PDEATHSIG = 1  # of linux/prctl.h
_KILLED = "was killed by signal"
_to_undo: list[object] = []  # a mark for each `undone_when_interrupted` that has begun
_CLAIM = "dlm_bridge/reported"  # key in the launcher's store
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


def end_when_interrupted(is_over: Callable[[], bool], grace_s: float = GRACE_S) -> None:
    """Let SIGINT end this process with one line and exit code 130: by KeyboardInterrupt, and where that cannot be, or
    the process is still there `grace_s` later, without. `is_over`: whether nothing is left to interrupt.

    Python raises KeyboardInterrupt in the main thread between two of its own instructions: not while that waits for
    another process in a collective operation, for a device or in a library. While a module is being imported, which
    takes most of a command's start, it would leave half of it, and libraries turn it into something else: the process
    then ends at once, or inside `undone_when_interrupted` gets its exception after the import.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    owner, main = os.getpid(), threading.main_thread().ident
    assert main is not None
    wanted = raised = False

    def raise_interrupt(number: int, frame: types.FrameType | None) -> None:
        nonlocal wanted, raised
        wanted = wanted or number == signal.SIGINT
        if wanted and not (os.getpid() == owner and _is_importing(frame)):
            wanted, raised = False, True
            raise KeyboardInterrupt

    def watch() -> None:
        while os.read(reader, 1)[0] != signal.SIGINT:
            pass
        deadline = time.monotonic() + grace_s
        while time.monotonic() < deadline:
            if not (raised or _to_undo) and _is_importing(sys._current_frames().get(main)):
                # To ask the launcher's store could import what is imported.
                if os.environ.get("RANK", "0") == "0" and not is_over():
                    _print("interrupted")
                os._exit(130)
            # The kernel may have given SIGINT to another thread, which does not wake the main one.
            signal.pthread_kill(main, signal.SIGURG)
            time.sleep(0.05)
        if not is_over():
            report("interrupted")
        os._exit(130)

    threading.Thread(target=watch, name="interrupt", daemon=True).start()
    # A forked process has the same pipe, but a SIGINT of its own is not this one's.
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
    signal.signal(signal.SIGURG, raise_interrupt)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGINT, raise_interrupt)


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


@contextlib.contextmanager
def undone_when_interrupted() -> Iterator[None]:
    """Context of what has to be undone at Ctrl-C, such as a temporary folder: `end_when_interrupted`."""
    mark = object()
    _to_undo.append(mark)
    try:
        yield
    finally:
        _to_undo.remove(mark)


@contextlib.contextmanager
def temporary_folder(prefix: str = "dlm-bridge-", place: Path | None = None) -> Iterator[Path]:
    """A temporary folder, in `place` or where the system has them, that Ctrl-C leaves none of."""
    with undone_when_interrupted(), tempfile.TemporaryDirectory(prefix=prefix, dir=place) as name:
        yield Path(name)


def _is_importing(frame: types.FrameType | None) -> bool:
    """Whether a module is being imported in a stack."""
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


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


def destroy_process_groups(timeout_s: float = 10.0) -> None:
    """Destroy torch's process groups at the end of a command that succeeded in all processes, as NCCL asks for; a
    process that this takes longer than `timeout_s` ends without."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return
    timer = threading.Timer(timeout_s, os._exit, (0,))
    timer.daemon = True
    timer.start()
    distributed.destroy_process_group()
    timer.cancel()


def launched_by_torchrun() -> bool:
    """Whether torchrun, or accelerate launch, which uses it, has started this process as one of a job's."""
    return "TORCHELASTIC_RUN_ID" in os.environ


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
    if os.environ.get("WORLD_SIZE", "1") == "1" or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return True
    from torch.distributed import TCPStore

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        store = TCPStore(address, port, is_master=False, timeout=_CLAIM_TIMEOUT)
        return int(store.add(f"{_CLAIM}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", 1)) == 1
    except RuntimeError:  # the launcher has gone
        return True

"""Output folder of a run: one run writes there, every rank sees it, and it says how the run ended.

`.lock` contains host, process and start of the run that writes, and a token that every rank must read before anything
starts: on a folder that is not shared, each node would keep its own part of every checkpoint. status.json contains the
state of the run: running, finished, stopped (early, with a checkpoint) or failed. hang/ contains stacks of a run that
hung.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import fcntl
import json
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from dlm_bridge import distributed, job
from dlm_bridge.errors import DlmBridgeError, SettingError
from dlm_bridge.files.atomic import disk_errors, replaced_file
from dlm_bridge.hub import BEST, STATUS

logger = logging.getLogger(__name__)
LOCK, HANG = ".lock", "hang"
SHARED_WITHIN_S = 30.0  # for a new file to become visible on a network file system
RUN_FILES = ("config.yaml", "metrics.jsonl", "checkpoints")
LEASE_S = 120.0  # after which NFS releases the lock of a lost host: 90 s by default
_HELD = (errno.EACCES, errno.EAGAIN)


@dataclass(frozen=True)
class RunEnd:
    """End of a run.

    Args:
        folder: last checkpoint.
        step: step of that checkpoint.
        finished: False if the run was stopped, by SIGTERM or `exit_duration`.
        best: with early stopping, the checkpoint with the lowest validation loss.
    """

    folder: Path
    step: int
    finished: bool = True
    best: Path | None = None


@contextlib.contextmanager
def opened_output(output: Path, resume: bool) -> Iterator[None]:
    """Context manager that creates and locks the output folder of a run. Collective. The folder, and the parents
    created for it, are removed if nothing was written there.

    Raises:
        SettingError: the folder contains a run and `resume` is False, another run writes there, or a rank does not see
            it.
    """
    joined = job.current()
    made = (
        [folder for folder in (output, *output.parents) if not os.path.exists(folder)] if distributed.is_main() else []
    )
    with contextlib.ExitStack() as stack:
        stack.callback(_remove_empty, [output / HANG, *made])
        refusal, token = None, ""
        if distributed.is_main():
            try:
                token = stack.enter_context(_locked(output, resume))
            except DlmBridgeError as error:
                refusal = error
        if joined is not None:
            # All ranks wait for the first one, then for each other.
            token = joined.agree("lock", token, lambda tokens: _or_raise(refusal, tokens[0]), work_s=LEASE_S)
            seen = appears(output, lambda: _reads(output / LOCK, token), SHARED_WITHIN_S)
            unseen = "" if seen else socket.gethostname()
            joined.agree("output", unseen, lambda hosts: _check_shared(output, hosts), work_s=SHARED_WITHIN_S)
        _or_raise(refusal, None)
        try:
            yield
        except BaseException:
            if distributed.is_main():
                _record_failure(output)
            raise


def check_output(output: Path, resume: bool) -> None:
    """Raise SettingError for a folder that contains a run, unless it is resumed."""
    traces = [name for name in RUN_FILES if (output / name).exists()]
    if traces and not resume:
        raise SettingError("output", f"{output} already contains a run ({traces[0]}): add `resume`, or use another")


def write_status(output: Path, state: str, step: int, steps: int, best: dict[str, Any] | None = None) -> None:
    """Update status.json on the first process, with the step of the newest checkpoint and, with early stopping, the
    `best_status`. Raises ResourceError if the disk is full."""
    status = {"state": state, "step": step, "steps": steps} | ({} if best is None else {BEST: best})
    if read_status(output) != status:
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        with replaced_file(output / STATUS) as file:
            file.write_text(json.dumps({**status, "time": now}) + "\n")


def read_status(output: Path) -> dict[str, Any]:
    """State, step, steps and best of status.json; empty if the file is missing or damaged."""
    try:
        found = json.loads((output / STATUS).read_text())
        return {name: found[name] for name in ("state", "step", "steps")} | (
            {BEST: found[BEST]} if BEST in found else {}
        )
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _record_failure(output: Path) -> None:
    with contextlib.suppress(DlmBridgeError):  # the reason of the failure matters more
        status = read_status(output)
        if status.get("state") == "running":  # not that of an earlier run whose resume is refused
            write_status(output, "failed", status["step"], status["steps"], status.get(BEST))


@contextlib.contextmanager
def _locked(output: Path, resume: bool) -> Iterator[str]:
    """Context manager that creates the folder and holds its lock, whose token it yields. The kernel releases the lock
    of a process that was killed; a file system without locks is not protected."""
    lock, token = output / LOCK, secrets.token_hex(8)
    with contextlib.ExitStack() as stack:
        with disk_errors(lock):
            check_output(output, resume)
            try:
                output.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise SettingError("output", f"{output} cannot be created: {error.strerror}") from None
            file = stack.enter_context(_lock(lock))
            stack.callback(_remove, lock)
            check_output(output, resume)  # the run that held the lock may have ended in between
            file.truncate(0)
            start = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
            json.dump({"host": socket.gethostname(), "pid": os.getpid(), "start": start, "token": token}, file)
            file.flush()
            os.fsync(file.fileno())
        yield token


def _lock(lock: Path) -> IO[str]:
    """Open and lock a file, again if its owner has removed it in between. A file server releases a lost host's lock
    after a while, so that of another host is waited for. Raises SettingError if it is in use."""
    deadline, noted = time.monotonic() + LEASE_S, False
    while True:
        file = lock.open("a+")
        owner = None
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _HELD:
                owner = _owner(file)
        if owner is None and lock.exists() and os.path.samestat(lock.stat(), os.fstat(file.fileno())):
            return file
        file.close()
        used = f"{lock.parent} is used by another run ({owner})"
        if time.monotonic() > deadline or (owner is not None and socket.gethostname() in owner.split()):
            raise SettingError("output", f"{used}: wait for it, or use another folder")
        if owner is not None and not noted:
            noted = True
            logger.warning("%s: waiting up to %g s, in case its host is lost", used, LEASE_S)
        time.sleep(0.5)


def _remove(lock: Path) -> None:
    with contextlib.suppress(OSError):
        lock.unlink()


def _owner(file: IO[str]) -> str:
    """Host, process and start of the run that holds the lock."""
    file.seek(0)
    try:
        found = json.loads(file.read())
        return f"process {found['pid']} on {found['host']} since {found['start']}"
    except (ValueError, KeyError, TypeError):
        return "which has just started"


def _reads(lock: Path, token: str) -> bool:
    """True if this process reads the token in the lock file."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        # An open file of a POSIX lock must not be closed by its own process.
        return distributed.is_main() or bool(json.loads(lock.read_text())["token"] == token)
    return False


def appears(folder: Path, is_there: Callable[[], bool], within_s: float) -> bool:
    """True as soon as `is_there` finds a new file of the folder, which takes time on a network file system. False if
    that takes longer than `within_s`."""
    deadline = time.monotonic() + within_s
    while not is_there():
        if time.monotonic() > deadline:
            return False
        with contextlib.suppress(OSError):
            os.listdir(folder)  # lets NFS read the folder again
        time.sleep(0.1)
    return True


def _check_shared(output: Path, hosts: Sequence[str]) -> None:
    if unseen := sorted(filter(None, hosts)):
        raise SettingError(
            "output",
            f"{output} is not the same folder on {', '.join(dict.fromkeys(unseen))} as on {socket.gethostname()}: use "
            "one on a file system that all hosts share",
        )


def _or_raise(error: DlmBridgeError | None, value: Any) -> Any:
    if error is not None:
        raise error
    return value


def _remove_empty(folders: Sequence[Path]) -> None:
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.rmdir()

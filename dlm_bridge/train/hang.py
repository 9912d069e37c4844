"""Dumps of a run that hangs: Python stacks of all threads, and torch's flight recorder of collective operations."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import threading
from pathlib import Path
from typing import Any

import torch

FLIGHT_RECORDER = "flight_recorder_"  # prefix of its files: torchfrtrace --prefix flight_recorder_ DIR
ENTRIES = 2000  # of the ring buffer
DUMP_TIMEOUT_S = 20.0


def enable_flight_recorder(folder: Path) -> None:
    """Set the environment variables with which torch records the last collective operations of NCCL and gloo, and
    NCCL's own watchdog writes them to `folder` after a timeout. Variables that are set keep their values.

    To be called before process groups are created. With a GPU the folder is created in the output folder, because NCCL
    does not create it, and removed at the end of the process if it is empty.
    """
    for name, older, value in (
        ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE", str(ENTRIES)),
        ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE", str(folder.absolute() / FLIGHT_RECORDER)),
    ):
        os.environ.setdefault(name, os.environ.get(older, value))
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    if torch.cuda.is_available():
        with contextlib.suppress(OSError):  # the run reports a folder that cannot be written
            folder.mkdir(exist_ok=True)
        atexit.register(remove_if_empty, folder)


def remove_if_empty(folder: Path) -> None:
    """Remove a folder of dumps without dumps."""
    with contextlib.suppress(OSError):
        folder.rmdir()


def dump(folder: Path, rank: int) -> Path:
    """Write the Python stacks of all threads to `folder`/stacks_RANK.txt, and the entries of torch's flight recorder,
    if there are any, to `folder`/flight_recorder_RANK. Returns the first path.

    Ends within `DUMP_TIMEOUT_S`, even if the file system or the flight recorder blocks, and raises nothing: the caller
    is about to end the process.
    """
    path = folder / f"stacks_{rank}.txt"
    writer = threading.Thread(target=_write, args=(folder, path, rank), name="hang dump", daemon=True)
    writer.start()
    writer.join(DUMP_TIMEOUT_S)
    return path


def _write(folder: Path, path: Path, rank: int) -> None:
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        with path.open("w") as file:
            faulthandler.dump_traceback(file, all_threads=True)
            os.fsync(file.fileno())
        if trace := _flight_recorder():
            (folder / f"{FLIGHT_RECORDER}{rank}").write_bytes(trace)


def _flight_recorder() -> bytes:
    """Pickle of the recorded operations, as `torchfrtrace` reads it; empty if there are none.

    NCCL has its own recorder, which CPU builds of torch lack. Its JSON shows whether it has entries: no pickle is
    loaded.
    """
    from torch._C import _distributed_c10d as c10d

    for name in ("_dump_nccl_trace", "_dump_fr_trace"):
        read: Any = getattr(c10d, name, None)
        if read is not None and b'"entries":[' in bytes(getattr(c10d, f"{name}_json")()):
            return bytes(read())
    return b""

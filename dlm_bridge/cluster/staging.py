"""Copies of a run's data on the local disk of each host (`data_cache`).

For data on a file system that many hosts share and that is slower than their own disks: every rank reads the blocks of
a Megatron pair in random order, in every epoch. A copy has the absolute path of its source below the cache, so that
folders and globs name the same files there, and runs with the same data share the copies.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from dlm_bridge import job
from dlm_bridge.data.blocks import MOCK
from dlm_bridge.data.documents import find_files
from dlm_bridge.data.indexed import fingerprint_file, pair
from dlm_bridge.data.sources import PAIR_SUFFIXES, weight_of
from dlm_bridge.distributed import is_main, rank, world_size
from dlm_bridge.errors import InputFileError, ResourceError, SettingError, counted
from dlm_bridge.files.atomic import disk_errors
from dlm_bridge.files.reading import check_readable

THREADS = 8  # that copy
LOCK = ".lock"


def stage(items: Sequence[str], cache: str) -> list[str]:
    """Copy the files that `items` of the setting `data` name to the folder `cache`. Returns the items with their paths
    there. Weights, `mock`, names of datasets and paths that do not exist are returned unchanged.

    Collective. The first process of a host copies, while the others wait for its lock. Then all hosts wait for each
    other: one of them may need longer than the time limits of collective operations. A copy is used again if its size
    and its modification time are those of the source, and removed if its source is removed.

    Raises:
        SettingError: the cache lies in the data.
        ResourceError: there is not enough room for the copies, or the cache cannot be written.
        InputFileError: a file cannot be read, or changes while it is copied.
    """
    root = Path(cache).absolute()
    named = {item: _files(item) for item in items}
    for item, files in named.items():
        if files and root.is_relative_to(os.path.abspath(item)):
            raise SettingError("data_cache", f"{cache} lies in the data {item}: use a folder on a local disk")
    if any(named.values()):
        with disk_errors(root, f"the data are not copied to {socket.gethostname()}"), _locked(root):
            for item, files in named.items():
                _remove_others(_copy_of(item, root), {_copy_of(file, root) for file in files}, root)
            _copy_all({file for files in named.values() for file in files}, root)
    _wait_for_all()
    return [str(_copy_of(item, root)) if named[item] else item for item in items]


def _files(item: str) -> list[Path]:
    """Files of an item of `data`, with both files and the tokenizer fingerprint of every Megatron pair."""
    if item == MOCK or weight_of(item) is not None:
        return []
    folder = item.partition(":")[0]  # of FOLDER:SPLIT
    found = [file for file in pair(item) if file.is_file()] if not Path(item).exists() else []
    with contextlib.suppress(InputFileError):  # there are none
        found = found or find_files([folder if Path(folder).is_dir() else item])
    for prefix in {file.with_suffix("") for file in found if file.suffix in PAIR_SUFFIXES}:
        found += [file for file in (*pair(prefix), fingerprint_file(prefix)) if file.is_file() and file not in found]
    return found


def _copy_of(item: str | Path, root: Path) -> Path:
    return root / os.path.abspath(item).lstrip("/")


@contextmanager
def _locked(root: Path) -> Iterator[None]:
    """Context manager that one process of the host is in."""
    root.mkdir(parents=True, exist_ok=True)
    with (root / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _remove_others(item: Path, copies: set[Path], root: Path) -> None:
    """Remove files from the cache that an item names there, and that are not among its `copies`."""
    for file in _files(str(item)):
        if file not in copies:
            file.unlink()
            for folder in file.relative_to(root).parents[:-1]:
                with contextlib.suppress(OSError):  # it is not empty
                    (root / folder).rmdir()


def _copy_all(sources: Iterable[Path], root: Path) -> None:
    """Copy the files that are not in the cache yet. Raises ResourceError if there is not enough room for them."""
    missing = [source for source in sources if _state(source) != _state(_copy_of(source, root))]
    needed = sum(source.stat().st_size for source in missing)
    if needed > (free := shutil.disk_usage(root).free):
        raise ResourceError(
            "data_cache",
            f"{root} on {socket.gethostname()} has {free / 1e9:,.1f} GB free, the data need {needed / 1e9:,.1f} GB",
        )
    if missing and is_main():
        print(
            f"copying {counted(len(missing), 'file')} ({needed / 1e9:,.1f} GB) to {root}", file=sys.stderr, flush=True
        )
    with ThreadPoolExecutor(THREADS) as threads:
        list(threads.map(lambda source: _copy(source, _copy_of(source, root)), missing))


def _copy(source: Path, copy: Path) -> None:
    """Copy a file with its modification time under a hidden name, and rename it."""
    check_readable(source, InputFileError)
    copy.parent.mkdir(parents=True, exist_ok=True)
    temporary = copy.with_name(f".{copy.name}.part")
    before = source.stat()
    shutil.copyfile(source, temporary)
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    os.utime(temporary, ns=(before.st_atime_ns, before.st_mtime_ns))
    if not _state(source) == _state(temporary) == (before.st_size, before.st_mtime_ns):
        temporary.unlink()
        raise InputFileError(source, "changed while it was copied to `data_cache`: start again")
    temporary.replace(copy)


def _wait_for_all() -> None:
    """Wait until every rank has its copies. The watchdog ends the wait if a rank fails."""
    if (joined := job.current()) is not None:
        store = joined.store("staged")
        store.set(str(rank()), "")
        while not store.check([str(other) for other in range(world_size())]):
            time.sleep(0.2)


def _state(file: Path) -> tuple[int, int] | None:
    """Size and modification time of a file, None if there is none."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns

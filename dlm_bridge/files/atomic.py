"""Atomic output files and folders, and the errors of a disk.

An output folder is written under a hidden sibling's name, flushed, then renamed. A killed run leaves at most a hidden
sibling; the next run to the same output resumes it, or removes it. A running one holds a file lock on its sibling.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import io
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from safetensors import SafetensorError

from dlm_bridge.errors import DlmBridgeError, WorkerError, one_line

_NEW, _OLD = "new", "old"
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT}
_NAMED_ERRNO = re.compile(r"\[Errno (\d+)\]|\(os error (\d+)\)")  # as Python and safetensors name it
_TORCH_WRITER = re.compile(r"PytorchStreamWriter|inline_container|iostream error")  # torch.save forgets the errno
_FULL = 1 << 20  # bytes; with less than this free a disk is full where nothing names the reason


@contextmanager
def atomic_output(
    output: Path,
    sources: Sequence[Path],
    overwrite: bool = False,
    expected: int = 0,
    resume: Callable[[Path], bool] | None = None,
    keep: Callable[[Path], bool] | None = None,
) -> Iterator[Path]:
    """Yield a folder to write into; it becomes `output` when the block ends without an exception.

    `sources` are never written to: an output that is, holds or lies in one of them is refused. Raises DlmBridgeError
    for a refused output and for a disk that is full or has no room for `expected` bytes. After any exception nothing
    is left under the output's name that was not there before, and nothing beside it; but a KeyboardInterrupt and a
    WorkerError, which pass with a message that says so, leave an unfinished folder of which `keep` is true. The
    folder of an earlier run of which `resume` is true is yielded again, with what it holds.
    """
    check_output(output, sources, overwrite)
    output = output.absolute()
    make_parent(output)
    temporary, lock = _recover(output, resume)
    try:
        check_output(output, sources, overwrite)  # once more: an old one may be back
        if temporary is None:
            _check_room(output, expected)
            temporary = Path(tempfile.mkdtemp(prefix=_prefix(output, _NEW), dir=output.parent))
            lock = os.open(temporary, os.O_RDONLY)
            fcntl.flock(lock, fcntl.LOCK_EX)
        with disk_errors(output):
            yield temporary
            temporary.chmod(0o777 & ~_umask())
            publish_folder(temporary, output, overwrite)
    except (KeyboardInterrupt, WorkerError) as stopped:
        kind, why = type(stopped), str(stopped) or "interrupted"
        if temporary is None or keep is None or not keep(temporary):
            raise kind(f"{why}: {output} was not written, nothing is left behind") from None
        kept, temporary = temporary, None
        raise kind(
            f"{why}: {output} was not written; the same command with --resume goes on from what is done "
            f"({kept.name}), without it starts clean"
        ) from None
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
        if lock is not None:
            os.close(lock)


@contextmanager
def atomic_folder(output: Path, temporary: Path, remedy: str | None = None) -> Iterator[Path]:
    """Yield the new, empty folder `temporary`, a hidden sibling of `output`, which becomes `output` when the block
    ends without an exception; an older `output` is replaced. For writers of several processes, which all know both
    names.

    After an exception nothing is left of `temporary`. Raises DlmBridgeError where the disk refuses, with the `remedy`.
    """
    with disk_errors(output, remedy):
        try:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            yield temporary
            publish_folder(temporary, output)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def publish_folder(temporary: Path, output: Path, overwrite: bool = True) -> None:
    """Flush a written folder and give it its name, in one step where the system can; an older one is then removed.

    Raises DlmBridgeError where there is an older one, unless `overwrite`, and OSError.
    """
    share_weights(temporary)
    sync_tree(temporary)
    _put_in_place(temporary, output, overwrite)
    shutil.rmtree(temporary, ignore_errors=True)  # the older one, where the two were exchanged


def share_weights(folder: Path) -> None:
    """Give the safetensors files in a folder the mode that its other new files have: safetensors creates them readable
    by their owner alone."""
    mode = folder.stat().st_mode & 0o666  # of a new folder: by the umask
    for file in folder.rglob("*.safetensors"):
        if not file.is_symlink() and file.stat().st_mode & 0o777 == 0o600:
            file.chmod(mode)


@contextmanager
def disk_errors(output: Path, remedy: str | None = None) -> Iterator[None]:
    """Turn what the disk refuses while `output` is written into a DlmBridgeError; `remedy` ends its line."""
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        if (reason := disk_refusal(error, output, remedy)) is None:
            raise
        raise DlmBridgeError(reason) from error


def disk_refusal(error: BaseException, output: Path, remedy: str | None = None) -> str | None:
    """One line on an exception of the disk's that ended the writing of `output`; None for any other exception."""
    wraps = isinstance(error, SafetensorError) or any(p.search(str(error)) for p in (_NAMED_ERRNO, _TORCH_WRITER))
    if isinstance(error, ConnectionError) or not (wraps or isinstance(error, OSError)):  # a broken pipe is no disk's
        return None
    remedy = remedy or f"{output} was not written"
    found, free = _system_error(error), _free(output)
    if found.errno in _NO_SPACE if found is not None else free < _FULL:
        return f"no space left while writing {output} ({free / 1e6:,.1f} MB free): {remedy}"
    if found is None:
        return f"{output} cannot be written ({free / 1e6:,.1f} MB free): {one_line(error)[:200]}: {remedy}"
    if found.errno == errno.EFBIG:
        return f"{output} has a file that is larger than this process may write (see ulimit -f): {remedy}"
    return f"{found.filename or output}: {found.strerror or found}: {remedy}"


def _system_error(error: BaseException) -> OSError | None:
    """The operating system's error in an exception, in what it was raised from, or named in its message."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError):
            return cause
        if match := _NAMED_ERRNO.search(str(cause)):
            number = int(match[1] or match[2])
            return OSError(number, os.strerror(number))
        cause = cause.__cause__ or cause.__context__
    return None


def _free(output: Path) -> int:
    """Bytes that are free where `output` is, or will be."""
    return shutil.disk_usage(next(parent for parent in output.absolute().parents if parent.exists())).free


@contextmanager
def temporary_folder(prefix: str = "dlm-bridge-", place: Path | None = None) -> Iterator[Path]:
    """Yield a temporary folder, in `place` or where the system has them, which is removed when the block ends."""
    with tempfile.TemporaryDirectory(prefix=prefix, dir=place) as name:
        yield Path(name)


@contextmanager
def atomic_file(path: Path, overwrite: bool = False) -> Iterator[TextIO]:
    """Yield a text file to write into; it becomes `path` when the block ends without an exception, and else nothing
    is left of it. Raises DlmBridgeError for a file that exists, unless `overwrite`, and for a place that cannot be
    written."""
    check_new_file(path, overwrite)
    make_parent(path.absolute())
    temporary = path.with_name(f".{path.name}.dlm-bridge-{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except OSError as error:
        full = disk_refusal(error, path, "make room there") if error.errno in _NO_SPACE else None
        raise DlmBridgeError(full or f"{path}: cannot be written: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def replaced_file(path: Path, remedy: str | None = None) -> Iterator[Path]:
    """Yield the name of a hidden sibling of `path`, for a library to write; it becomes `path` when the block ends
    without an exception, and else nothing is left of it. Raises DlmBridgeError where the disk refuses."""
    temporary = path.with_name(f".{path.name}")  # the same suffix, by which libraries choose a format
    with disk_errors(path, remedy):
        try:
            yield temporary
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def check_new_file(path: Path, overwrite: bool) -> None:
    """Raise DlmBridgeError where `path` exists, unless it is a file and `overwrite`."""
    if os.path.lexists(path) and not (overwrite and path.is_file()):
        raise DlmBridgeError(f"{path} exists: choose another name" + (" or give --overwrite" if not overwrite else ""))


def append_line(file: io.FileIO, line: str) -> None:
    """Append a line with one write, so that a reader sees complete lines. Raises OSError where not all of it fits."""
    data = f"{line}\n".encode()
    while data:
        data = data[file.write(data) or 0 :]


def check_output(output: Path, sources: Sequence[Path], overwrite: bool) -> None:
    """Raise DlmBridgeError where `output` exists (and may not be replaced) or would touch a source."""
    real = output.resolve()
    for source in (source.resolve() for source in sources):
        if real == source:
            raise DlmBridgeError(f"{output}: the output is the source: choose another folder")
        if source in real.parents:
            raise DlmBridgeError(f"{output}: the output lies inside the source {source}: choose another folder")
        if real in source.parents:
            raise DlmBridgeError(f"{output}: the source {source} lies inside the output: choose another folder")
    if not os.path.lexists(output):
        return
    if not overwrite:
        raise DlmBridgeError(f"{output} exists: choose another name or give --overwrite")
    if output.is_symlink() or not output.is_dir():
        raise DlmBridgeError(f"{output} is not a folder, --overwrite does not replace it: remove it first")
    if real == Path.cwd() or real in Path.cwd().parents or output.is_mount():
        raise DlmBridgeError(f"{output} is in use (the working folder or a mount), --overwrite does not replace it")


def sync_tree(folder: Path) -> None:
    """Flush every file and folder below `folder` to the disk."""
    for directory, _, files in os.walk(folder):
        for name in (*files, "."):
            sync(os.path.join(directory, name))


def sync(path: str | Path) -> None:
    """Flush a file, or a folder's list of names, to the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _put_in_place(temporary: Path, output: Path, overwrite: bool) -> None:
    if not os.path.lexists(output):
        os.rename(temporary, output)
    elif not overwrite:
        raise DlmBridgeError(f"{output} appeared while it was being written: nothing was replaced")
    elif not _exchange(temporary, output):
        # No atomic exchange on this system: _recover puts the old folder back if we are killed in between.
        old = Path(tempfile.mkdtemp(prefix=_prefix(output, _OLD), dir=output.parent))
        os.rename(output, old)
        os.rename(temporary, output)
        shutil.rmtree(old, ignore_errors=True)
    sync(output.parent)


def _exchange(a: Path, b: Path) -> bool:
    """Swap two names in one step (Linux); False where the system cannot. What was `b` is then removed as `a`."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    at_cwd, exchange = -100, 2
    return renameat2(at_cwd, os.fsencode(a), at_cwd, os.fsencode(b), exchange) == 0


def _recover(output: Path, resume: Callable[[Path], bool] | None) -> tuple[Path | None, int | None]:
    """Put back an old output that a killed run had set aside, and remove what killed runs left.

    Returns the one unfinished folder to go on from, with its lock, where there is one.
    """
    left = sorted(path for path in output.parent.iterdir() if path.name.startswith(f".{output.name}.dlm-bridge-"))
    found: tuple[Path | None, int | None] = (None, None)
    for path in left:
        if path.name.startswith(_prefix(output, _OLD)) and not os.path.lexists(output):
            os.rename(path, output)
            continue
        if not path.name.startswith((_prefix(output, _OLD), _prefix(output, _NEW))):
            continue
        try:
            fd = os.open(path, os.O_RDONLY)
        except FileNotFoundError:  # removed by its own run in between
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise DlmBridgeError(f"{output} is being written by another process ({path.name})") from None
        if resume is not None and found[0] is None and resume(path):
            found = path, fd
            continue
        shutil.rmtree(path, ignore_errors=True)
        os.close(fd)
    return found


def _check_room(output: Path, expected: int) -> None:
    free = shutil.disk_usage(output.parent).free
    if expected > free:
        raise DlmBridgeError(
            f"no space for {output}: it needs {expected / 1e6:,.1f} MB, {free / 1e6:,.1f} MB are free"
        )


def make_parent(output: Path) -> None:
    """Make the folder of `output`. Raises DlmBridgeError where that, or writing in it, is not possible."""
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DlmBridgeError(f"cannot make the folder {output.parent}: {error.strerror}") from None
    if not os.access(output.parent, os.W_OK | os.X_OK):
        raise DlmBridgeError(f"cannot write in {output.parent}: permission denied")


def _prefix(output: Path, kind: str) -> str:
    return f".{output.name}.dlm-bridge-{kind}-"


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask

"""Atomic output files and folders, and errors of the disk.

An output folder is written under a hidden sibling's name, flushed, then renamed. A killed run leaves at most a hidden
sibling; the next run with the same output resumes or removes it. A running process holds a file lock on its sibling.
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

from dlm_bridge.errors import ResourceError, SettingError, WorkerError, one_line

_NEW, _OLD = "new", "old"
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT}
_NAMED_ERRNO = re.compile(r"\[Errno (\d+)\]|\(os error (\d+)\)")  # messages of Python and safetensors
_TORCH_WRITER = re.compile(r"PytorchStreamWriter|inline_container|iostream error")  # torch.save's errors have no errno
_FULL = 1 << 20  # bytes; an error without errno on a disk with less free space means that the disk is full


@contextmanager
def atomic_output(
    output: Path,
    sources: Sequence[Path],
    overwrite: bool = False,
    expected: int = 0,
    resume: Callable[[Path], bool] | None = None,
    keep: Callable[[Path], bool] | None = None,
) -> Iterator[Path]:
    """Context manager that yields a folder to write into, which becomes `output` if the block succeeds.

    After an exception the output is unchanged and the unfinished folder is removed. A KeyboardInterrupt or WorkerError
    keeps an unfinished folder that `keep` accepts, and is raised again with a message that says so.

    Args:
        output: the folder to create.
        sources: folders that are only read; `output` must not be, contain or lie in one of them.
        overwrite: replace an existing `output`.
        expected: size of the output in bytes; checked against the free space.
        resume: accepts an earlier run's unfinished folder, which is then yielded with its contents.
        keep: accepts an unfinished folder that a later run can resume.

    Raises:
        SettingError: `output` exists, overlaps a source, or is being written by another process.
        ResourceError: the disk is full or not writable, or has less than `expected` bytes free.
    """
    check_output(output, sources, overwrite)
    output = output.absolute()
    make_parent(output)
    temporary, lock = _recover(output, resume)
    try:
        check_output(output, sources, overwrite)  # again, because `_recover` may have restored an old output
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
        if temporary is None or keep is None or not keep(temporary):
            result = f"{output} was not written, nothing is left behind"
        else:
            result = (
                f"{output} was not written; the same command with `resume` continues from {temporary.name}, without "
                "it starts again"
            )
            temporary = None
        if isinstance(stopped, WorkerError):
            raise WorkerError(stopped.field, f"{stopped.reason}: {result}") from None
        raise KeyboardInterrupt(f"{str(stopped) or 'interrupted'}: {result}") from None
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
        if lock is not None:
            os.close(lock)


@contextmanager
def atomic_folder(output: Path, temporary: Path, remedy: str | None = None) -> Iterator[Path]:
    """Context manager that creates the folder `temporary`, a hidden sibling of `output`, and renames it to `output` if
    the block succeeds, replacing an older one. For several processes that write together and know both names.

    `temporary` is removed after an exception. Raises ResourceError with `remedy` if the disk cannot be written.
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
    """Flush the folder `temporary` and rename it to `output`, replacing an older one (atomically on Linux).

    Raises SettingError if `output` exists and `overwrite` is False, and OSError.
    """
    share_weights(temporary)
    sync_tree(temporary)
    _put_in_place(temporary, output, overwrite)
    shutil.rmtree(temporary, ignore_errors=True)  # the older output, if the two names were exchanged


def share_weights(folder: Path) -> None:
    """Set the default file mode on the safetensors files below `folder`, which safetensors creates readable by their
    owner only."""
    mode = folder.stat().st_mode & 0o666
    for file in folder.rglob("*.safetensors"):
        if not file.is_symlink() and file.stat().st_mode & 0o777 == 0o600:
            file.chmod(mode)


@contextmanager
def disk_errors(output: Path, remedy: str | None = None) -> Iterator[None]:
    """Context manager that raises the errors of a disk to which `output` is written as ResourceError; `remedy` ends
    the message."""
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        if (refusal := disk_refusal(error, output, remedy)) is None:
            raise
        raise refusal from error


def disk_refusal(error: BaseException, output: Path, remedy: str | None = None) -> ResourceError | None:
    """ResourceError for an exception raised because the disk could not be written; None for any other exception."""
    from_disk = isinstance(error, SafetensorError) or any(p.search(str(error)) for p in (_NAMED_ERRNO, _TORCH_WRITER))
    if isinstance(error, ConnectionError) or not (from_disk or isinstance(error, OSError)):
        return None
    remedy = remedy or f"{output} was not written"
    found, free = _system_error(error), _free(output)
    if found.errno in _NO_SPACE if found is not None else free < _FULL:
        return ResourceError(output, f"no space left on the disk ({free / 1e6:,.1f} MB free): {remedy}")
    if found is None:
        return ResourceError(
            output, f"cannot be written ({free / 1e6:,.1f} MB free): {one_line(error)[:200]}: {remedy}"
        )
    if found.errno == errno.EFBIG:
        return ResourceError(output, f"a file exceeds the size limit of this process (see ulimit -f): {remedy}")
    return ResourceError(found.filename or output, f"{found.strerror or found}: {remedy}")


def _system_error(error: BaseException) -> OSError | None:
    """The OSError that an exception is, was raised from, or names in its message."""
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
    """Free bytes on the disk of `output`, which need not exist yet."""
    return shutil.disk_usage(next(parent for parent in output.absolute().parents if parent.exists())).free


@contextmanager
def temporary_folder(prefix: str = "dlm-bridge-", place: Path | None = None) -> Iterator[Path]:
    """Context manager that yields a temporary folder in `place` (default: the system's) and removes it at the end."""
    with tempfile.TemporaryDirectory(prefix=prefix, dir=place) as name:
        yield Path(name)


@contextmanager
def atomic_file(path: Path, overwrite: bool = False) -> Iterator[TextIO]:
    """Context manager that yields a text file to write into, which becomes `path` if the block succeeds and is removed
    otherwise. Raises SettingError if `path` exists, unless `overwrite`, and ResourceError if it cannot be written."""
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
        raise full or ResourceError(path, f"cannot be written: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def replaced_file(path: Path, remedy: str | None = None) -> Iterator[Path]:
    """Context manager that yields the path of a hidden sibling of `path` for a library to write. It becomes `path` if
    the block succeeds and is removed otherwise. Raises ResourceError if the disk cannot be written."""
    temporary = path.with_name(f".{path.name}")  # the same suffix: libraries choose a format by it
    with disk_errors(path, remedy):
        try:
            yield temporary
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def check_new_file(path: Path, overwrite: bool) -> None:
    """Raise SettingError if `path` exists, unless it is a file and `overwrite`."""
    if os.path.lexists(path) and not (overwrite and path.is_file()):
        remedy = "choose another name" if overwrite else "choose another name or set `overwrite`"
        raise SettingError("output", f"{path} exists: {remedy}")


def append_line(file: io.FileIO, line: str) -> None:
    """Append a line with one write, so that a reader sees complete lines. Raises OSError if the disk is full."""
    data = f"{line}\n".encode()
    while data:
        data = data[file.write(data) or 0 :]


def check_output(output: Path, sources: Sequence[Path], overwrite: bool) -> None:
    """Raise SettingError if `output` overlaps a source, or exists and must not be replaced."""
    real = output.resolve()
    for source in (source.resolve() for source in sources):
        if real == source or source in real.parents or real in source.parents:
            raise SettingError("output", f"{output} overlaps the source {source}: choose another folder")
    if not os.path.lexists(output):
        return
    if not overwrite:
        raise SettingError("output", f"{output} exists: choose another name or set `overwrite`")
    if output.is_symlink() or not output.is_dir():
        raise SettingError("output", f"{output} is not a folder, which `overwrite` does not replace: remove it first")
    if real == Path.cwd() or real in Path.cwd().parents or output.is_mount():
        raise SettingError(
            "output", f"{output} is in use (the working folder or a mount), which `overwrite` does not replace"
        )


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
        raise SettingError("output", f"{output} appeared while it was being written: nothing was replaced")
    elif not _exchange(temporary, output):
        # No atomic exchange on this system: `_recover` restores the old folder after a kill in between.
        old = Path(tempfile.mkdtemp(prefix=_prefix(output, _OLD), dir=output.parent))
        os.rename(output, old)
        os.rename(temporary, output)
        shutil.rmtree(old, ignore_errors=True)
    sync(output.parent)


def _exchange(a: Path, b: Path) -> bool:
    """Exchange two names atomically (Linux only). Returns False if the system cannot."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    at_cwd, exchange = -100, 2
    return renameat2(at_cwd, os.fsencode(a), at_cwd, os.fsencode(b), exchange) == 0


def _recover(output: Path, resume: Callable[[Path], bool] | None) -> tuple[Path | None, int | None]:
    """Restore an old output that a killed run had renamed, and remove the unfinished folders of killed runs.

    Returns one unfinished folder that `resume` accepts, and the file descriptor of its lock, or (None, None).
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
        except FileNotFoundError:  # its own process has removed it
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise SettingError("output", f"{output} is being written by another process ({path.name})") from None
        if resume is not None and found[0] is None and resume(path):
            found = path, fd
            continue
        shutil.rmtree(path, ignore_errors=True)
        os.close(fd)
    return found


def _check_room(output: Path, expected: int) -> None:
    free = shutil.disk_usage(output.parent).free
    if expected > free:
        raise ResourceError(output, f"needs {expected / 1e6:,.1f} MB of disk space, {free / 1e6:,.1f} MB are free")


def make_parent(output: Path) -> None:
    """Create the parent folder of `output`. Raises ResourceError if that fails or the folder is not writable."""
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ResourceError(output.parent, f"the folder cannot be created: {error.strerror}") from None
    if not os.access(output.parent, os.W_OK | os.X_OK):
        raise ResourceError(output.parent, "cannot write in this folder: permission denied")


def _prefix(output: Path, kind: str) -> str:
    return f".{output.name}.dlm-bridge-{kind}-"


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask

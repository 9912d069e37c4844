"""Journal of an unfinished conversion, from which `resume` continues.

The journal is a file in the unfinished folder. Its first line identifies the conversion; each further line records one
parameter, and is written after the parameter was flushed to disk. A resumed conversion compares each line with the
bytes on disk before it skips the parameter.
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash

from dlm_bridge.convert.manifest import TensorRecord, tool_version

JOURNAL = ".dlm_bridge.journal"
_EVERY = 256 << 20  # bytes between two flushes; frequent flushes are slow
_ITERATION = re.compile(r"iter_\d+|release")


@dataclass(frozen=True)
class JournalEntry:
    """A written parameter: (read, written) records of its Hub tensors, and digests of its parts in the output."""

    tensors: tuple[tuple[TensorRecord, TensorRecord], ...]
    items: tuple[str, ...]


class Journal:
    """Journal that flushes the output files in a background thread, and then records the flushed parameters.

    `done` maps the parameters that an earlier run recorded to their entries.
    """

    def __init__(self, folder: Path, fingerprint: str, files: Iterable[str]) -> None:
        path = folder / JOURNAL
        self.fingerprint = fingerprint
        self.done: dict[str, JournalEntry] = _read(path)
        self._files = [folder / file for file in files]
        self._stream = path.open("a", encoding="utf-8")
        if self._stream.tell() == 0:
            self._append([json.dumps(fingerprint)])
        elif path.read_bytes()[-1:] != b"\n":  # a line that was cut off
            self._append([""])
        self._waiting: list[str] = []
        self._bytes = 0
        self._error: OSError | None = None
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._flush, name="dlm-bridge-flush", daemon=True)
        self._thread.start()

    def add(self, key: str, entry: JournalEntry, nbytes: int) -> None:
        """Record a written parameter of `nbytes` bytes. Raises OSError if earlier data could not be flushed."""
        line = json.dumps([key, asdict(entry)])
        with self._changed:
            if self._error is not None:
                raise self._error
            self._waiting.append(line)
            self._bytes += nbytes
            if self._bytes >= _EVERY:
                self._changed.notify()

    def close(self, remove: bool) -> None:
        """Flush the rest and stop; `remove` the journal if the output is complete."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()
        self._stream.close()
        if remove:
            Path(self._stream.name).unlink()
            if self._error is not None:
                raise self._error

    def _flush(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._bytes >= _EVERY)
                lines, self._waiting, self._bytes = self._waiting, [], 0
                closed = self._closed
            try:
                if lines:
                    for path in self._files:
                        _sync(path)
                    self._append(lines)
            except OSError as error:
                self._error = error
                return
            if closed:
                return

    def _append(self, lines: Sequence[str]) -> None:
        self._stream.write("".join(f"{line}\n" for line in lines))
        self._stream.flush()


def matches(folder: Path, fingerprint: str) -> bool:
    """True if an unfinished folder belongs to the conversion with this fingerprint."""
    try:
        with (folder / JOURNAL).open(encoding="utf-8") as stream:
            return bool(json.loads(stream.readline()) == fingerprint)
    except (OSError, ValueError):
        return False


def has_progress(folder: Path) -> bool:
    """True if an unfinished folder contains at least one recorded parameter."""
    return bool(_read(folder / JOURNAL))


def fingerprint(folders: Iterable[Path], iteration: Path | None, facts: dict[str, Any]) -> str:
    """Fingerprint that must match before an interrupted conversion is resumed.

    Args:
        folders: folders of the source, whose file names, sizes and times are included.
        iteration: folder of the converted iteration of a Megatron checkpoint; other iterations are skipped.
        facts: settings and plan of the conversion. The versions of dlm-bridge and torch are added.
    """
    state = xxhash.xxh3_128(json.dumps([facts, tool_version(), torch.__version__], sort_keys=True).encode())
    for folder in folders:
        for directory, subfolders, files in os.walk(folder):
            here = Path(directory)
            others = {name for name in subfolders if _ITERATION.fullmatch(name) and here / name != iteration}
            subfolders[:] = sorted({*subfolders} - others)
            for name in sorted(files):
                try:
                    found = (here / name).stat()
                except OSError:
                    continue
                facts_of = [str(here / name), found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]
                state.update(json.dumps(facts_of).encode())
    return state.hexdigest()


def _read(path: Path) -> dict[str, JournalEntry]:
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, ValueError):
        return {}
    done = {}
    for line in lines[1:]:
        try:
            key, entry = json.loads(line)
            done[key] = JournalEntry(
                tuple((TensorRecord.parse(read), TensorRecord.parse(written)) for read, written in entry["tensors"]),
                tuple(entry["items"]),
            )
        except (ValueError, TypeError, KeyError):  # cut off by a crash
            continue
    return done


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fdatasync(fd)
    finally:
        os.close(fd)

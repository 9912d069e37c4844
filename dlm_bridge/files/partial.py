"""Finished rows of an output that is not complete yet: OUT.partial, from which an interrupted command resumes."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.files.atomic import append_line, disk_errors, make_parent
from dlm_bridge.files.reading import bytes_digest, check_plain_file

MARK = "_partial"  # key of a row in the file: the row's index or name, and the digest of the call
MAKE_ROOM = "the finished rows are kept: make room there, then --resume"


class PartialOutput:
    """Rows of `output` as they finish, one JSON object a line in OUT.partial; process n > 0 writes OUT.partial.n.

    Args:
        call: everything that determines the rows, beside what their keys say, as JSON values; rows of another call
            are refused.
        part: number of the process that writes.
    """

    def __init__(self, output: Path, call: Any, part: int = 0) -> None:
        self._first = output.with_name(f"{output.name}.partial")
        self._path = self._first.with_name(f"{self._first.name}.{part}") if part else self._first
        self._digest = bytes_digest(json.dumps(call, sort_keys=True, default=str).encode())
        self._file: io.FileIO | None = None

    def start(self, resume: bool, overwrite: bool) -> dict[int | str, dict[str, Any]]:
        """Rows that an interrupted command has finished, by their keys; without `resume` none, and with `overwrite`
        its files are removed. Raises DlmBridgeError for files that would be lost, or are of another call."""
        if resume:
            return self._read()
        if self._parts() and not overwrite:
            raise DlmBridgeError(
                f"{self._first} holds finished rows of an interrupted command: --resume continues from them, "
                "--overwrite discards them"
            )
        self.remove()
        return {}

    def add(self, key: int | str, row: Mapping[str, Any]) -> None:
        """Append a finished row. Raises DlmBridgeError where the disk refuses."""
        with disk_errors(self._path, MAKE_ROOM):
            if self._file is None:
                make_parent(self._path.absolute())
                self._file = self._path.open("a+b", buffering=0)
                if size := self._file.tell():
                    self._file.seek(size - 1)
                    if self._file.read(1) != b"\n":  # a line that was cut off
                        append_line(self._file, "")
            append_line(self._file, json.dumps({**row, MARK: [key, self._digest]}, ensure_ascii=False))

    def remove(self) -> None:
        """Remove the files of all processes: the output is complete."""
        if self._file is not None:
            self._file.close()
        for path in self._parts():
            path.unlink(missing_ok=True)

    def note(self, remedy: str = "the same command with --resume continues") -> str:
        """What an interrupted command prints: where its rows are, if it has finished any, and what to do."""
        return f": {self._first} holds the finished rows, {remedy}" if self._parts() else ""

    def of_another_call(self, path: Path | None = None) -> DlmBridgeError:
        """The error for rows that are not those of this command."""
        return DlmBridgeError(
            f"{path or self._first} is of another call: give the model, input and settings that it was begun with, or "
            "--overwrite without --resume to discard it"
        )

    def _parts(self) -> list[Path]:
        name = re.compile(rf"{re.escape(self._first.name)}(\.\d+)?")
        folder = self._first.absolute().parent
        return sorted(path for path in folder.iterdir() if name.fullmatch(path.name)) if folder.is_dir() else []

    def _read(self) -> dict[int | str, dict[str, Any]]:
        rows: dict[int | str, dict[str, Any]] = {}
        for path in self._parts():
            check_plain_file(path)
            for line in path.read_text("utf-8", "replace").split("\n"):
                try:
                    row = json.loads(line)
                    key, digest = row.pop(MARK)
                    hash(key)
                except (ValueError, RecursionError, TypeError, KeyError, AttributeError):  # cut off, or damaged
                    continue
                if digest != self._digest:
                    raise self.of_another_call(path)
                rows.setdefault(key, row)
        return rows

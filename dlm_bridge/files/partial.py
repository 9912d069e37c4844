"""Finished rows of an output that is not complete yet: OUT.partial, from which an interrupted command resumes."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dlm_bridge.errors import InputFileError, SettingError
from dlm_bridge.files.atomic import append_line, disk_errors, make_parent
from dlm_bridge.files.reading import bytes_digest, check_plain_file

MARK = "_partial"  # key of a row in the file: the row's index or name, and the digest of the call
MAKE_ROOM = "the finished rows are kept: make room there, then `resume`"


class PartialOutput:
    """Rows of `output` as they finish, one JSON object per line of OUT.partial; process n > 0 writes OUT.partial.n.

    Args:
        output: the file or folder that the complete rows become.
        call: JSON values that determine the rows, except for their keys; rows of another call are refused.
        part: number of the process that writes.
    """

    def __init__(self, output: Path, call: Any, part: int = 0) -> None:
        self._first = output.with_name(f"{output.name}.partial")
        self._path = self._first.with_name(f"{self._first.name}.{part}") if part else self._first
        self._digest = bytes_digest(json.dumps(call, sort_keys=True, default=str).encode())
        self._file: io.FileIO | None = None

    def start(self, resume: bool, overwrite: bool) -> dict[int | str, dict[str, Any]]:
        """Return the rows that an interrupted command has finished, by key; none without `resume`.

        `overwrite` without `resume` removes its files. Raises SettingError if files exist and neither is set, or with
        `resume` if they belong to another call.
        """
        if resume:
            return self._read()
        if self._parts() and not overwrite:
            raise SettingError(
                "output",
                f"{self._first} has finished rows of an interrupted command: `resume` continues from them, "
                "`overwrite` discards them",
            )
        self.remove()
        return {}

    def add(self, key: int | str, row: Mapping[str, Any]) -> None:
        """Append a finished row. Raises ResourceError if the disk cannot be written."""
        with disk_errors(self._path, MAKE_ROOM):
            if self._file is None:
                make_parent(self._path.absolute())
                self._file = self._path.open("a+b", buffering=0)
                if size := self._file.tell():
                    self._file.seek(size - 1)
                    if self._file.read(1) != b"\n":  # an incomplete line
                        append_line(self._file, "")
            append_line(self._file, json.dumps({**row, MARK: [key, self._digest]}, ensure_ascii=False))

    def close(self) -> None:
        """Close this process's file."""
        if self._file is not None:
            self._file.close()

    def remove(self) -> None:
        """Remove the files of all processes once the output is complete."""
        self.close()
        for path in self._parts():
            path.unlink(missing_ok=True)

    def note(self, remedy: str = "the same command with `resume` continues") -> str:
        """Message of an interrupted command about its finished rows; empty without any."""
        return f": {self._first} has the finished rows, {remedy}" if self._parts() else ""

    def of_another_call(self, path: Path | None = None) -> SettingError:
        """Error for rows that another call has written."""
        return SettingError(
            "resume",
            f"{path or self._first} belongs to another call: use the model, input and settings of that call, or "
            "`overwrite` without `resume` to discard it",
        )

    def _parts(self) -> list[Path]:
        name = re.compile(rf"{re.escape(self._first.name)}(\.\d+)?")
        folder = self._first.absolute().parent
        return sorted(path for path in folder.iterdir() if name.fullmatch(path.name)) if folder.is_dir() else []

    def _read(self) -> dict[int | str, dict[str, Any]]:
        rows: dict[int | str, dict[str, Any]] = {}
        for path in self._parts():
            check_plain_file(path, InputFileError)
            for line in path.read_text("utf-8", "replace").split("\n"):
                try:
                    row = json.loads(line)
                    key, digest = row.pop(MARK)
                    hash(key)
                except (ValueError, RecursionError, TypeError, KeyError, AttributeError):  # incomplete or damaged
                    continue
                if digest != self._digest:
                    raise self.of_another_call(path)
                rows.setdefault(key, row)
        return rows

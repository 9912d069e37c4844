"""A digest of each file of a checkpoint that a training run writes: taken by the rank that wrote it, right after."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from dlm_bridge.convert.formats.dcp import read_metadata
from dlm_bridge.convert.manifest import FORMAT_VERSION, tool_version
from dlm_bridge.convert.pool import Progress, run_tasks, worker_count
from dlm_bridge.convert.tensors import bytes_digest, file_digest
from dlm_bridge.errors import DlmBridgeError, one_line

FILE_NAME = "dlm_bridge_files.json"


@dataclass(frozen=True)
class FileFinding:
    """A file that is not what it was."""

    file: str
    detail: str


def digests_of(files: Sequence[Path], workers: int | None = None, progress: Progress | None = None) -> dict[str, str]:
    """Name -> xxh3_128 of some files of one folder, several at once."""
    found: dict[str, str] = {}
    total = sum(file.stat().st_size for file in files)

    def take(file: Path) -> None:
        found[file.name] = file_digest(file)
        if progress is not None:
            progress(file.stat().st_size, total)

    run_tasks([(0, partial(take, file)) for file in files], worker_count(workers))
    return found


def write_digests(folder: Path, digests: Mapping[str, str]) -> None:
    """Write the digests of a folder's files into it, and one of the digests themselves."""
    files = dict(sorted(digests.items()))
    content = {"format_version": FORMAT_VERSION, "tool": tool_version(), "files": files, "digest": _of(files)}
    (folder / FILE_NAME).write_text(json.dumps(content, indent=1) + "\n")


def check_files(folder: Path, workers: int | None = None, progress: Progress | None = None) -> list[FileFinding]:
    """What of a folder is missing, new or other than its digests say. Raises DlmBridgeError where those cannot be
    read."""
    path = folder / FILE_NAME
    try:
        content = json.loads(path.read_text())
        recorded, own = dict(content["files"]), content["digest"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DlmBridgeError(f"{path}: cannot be read: {one_line(error)}") from None
    if own != _of(recorded):
        return [FileFinding(FILE_NAME, "is not as it was written")]
    there = [file for file in sorted(folder.iterdir()) if file.is_file() and file.name != FILE_NAME]
    found = digests_of([file for file in there if file.name in recorded], workers, progress)
    findings = [FileFinding(name, "is missing") for name in recorded if name not in found]
    findings += [FileFinding(file.name, "was not there") for file in there if file.name not in recorded]
    for name, digest in found.items():
        if digest != recorded[name]:
            findings.append(FileFinding(name, f"is not as it was written{_holding(folder, name)}"))
    return sorted(findings, key=lambda finding: finding.file)


def _holding(folder: Path, name: str) -> str:
    """What lies in a file that is damaged, if that can be told."""
    try:
        tensors = read_metadata(folder).tensors
    except DlmBridgeError:
        return ""
    held = [key for key, tensor in tensors.items() if any(chunk.place.file == name for chunk in tensor.chunks)]
    return f"; it holds parts of {len(held)} tensors, {held[0]} the first" if held else ""


def _of(files: Mapping[str, str]) -> str:
    return bytes_digest("".join(f"{name} {digest}\n" for name, digest in sorted(files.items())).encode())

"""Comparison of two checkpoints of any formats, tensor by tensor, or of a checkpoint with its manifest."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch

from dlm_bridge.convert.checkpoint import Checkpoint, TensorSpec
from dlm_bridge.convert.checkpoints import find_checkpoint, newest_iteration
from dlm_bridge.convert.formats.dcp import DCP_METADATA, read_metadata
from dlm_bridge.convert.formats.hub_weights import FP8, read_header
from dlm_bridge.convert.manifest import (
    FILE_DIGESTS,
    MANIFEST,
    Manifest,
    TensorRecord,
    check_files,
    file_names,
    is_intact,
    non_finite_note,
    read_manifest,
    record_of,
)
from dlm_bridge.convert.settings import Progress
from dlm_bridge.convert.streaming import count_non_finite, raw_bytes
from dlm_bridge.convert.workers import run_tasks, worker_count
from dlm_bridge.errors import ChangedTensorsError, CheckpointError, DlmBridgeError
from dlm_bridge.files.reading import file_digest
from dlm_bridge.hub import checkpoint_folder
from dlm_bridge.mapping.dtypes import bit_view, dtype_name, same_bits


@dataclass(frozen=True)
class Difference:
    """A difference in a tensor or file. `kind`: missing, extra, dtype, shape, values, unreadable or file."""

    name: str
    kind: str
    detail: str


@dataclass(frozen=True)
class LogitsVerdict:
    """Largest absolute difference of two models' fp32 logits on `positions` random tokens.

    `a` and `b` name the library that computed each side, megatron-core or transformers. `notes` explain why
    megatron-core did not compute a Megatron checkpoint, and name longer inputs that were skipped.
    """

    a: str
    b: str
    difference: float
    allowed: float
    largest: float  # largest logit of side a
    positions: int
    notes: list[str]


@dataclass
class Verdict:
    """Result of a comparison. `logits` is None if logits were not compared. `summary`: the line printed for an equal
    pair, if it is not the usual one."""

    a: str
    b: str
    equal: bool
    tensors: int
    bytes: int
    differences: list[Difference] = field(default_factory=list)
    logits: LogitsVerdict | None = None
    notes: list[str] = field(default_factory=list)
    summary: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Convert to a dict of plain values."""
        return asdict(self)


def verify_pair(
    a: str | os.PathLike[str], b: str | os.PathLike[str], workers: int | None = None, progress: Progress | None = None
) -> Verdict:
    """Compare every tensor of two checkpoints by its Hub name: presence, dtype, shape, every bit.

    A Megatron checkpoint without a manifest is read with the config of the other checkpoint. Tensors that cannot be
    read are differences. Raises CheckpointError if a path is not a checkpoint.
    """
    left, right = find_checkpoint(a), find_checkpoint(b)
    if not left.names_model:
        left.adopt(right)
    if not right.names_model:
        right.adopt(left)
    here_specs, there_specs = left.stored_specs(), right.stored_specs()
    differences = [*_unmapped(left), *_unmapped(right)]
    differences += [Difference(n, "missing", f"not in {right.where}") for n in here_specs if n not in there_specs]
    differences += [Difference(n, "missing", f"not in {left.where}") for n in there_specs if n not in here_specs]
    common = [name for name in here_specs if name in there_specs]
    non_finite: dict[str, int] = {}

    def compare(name: str, here: torch.Tensor, there: torch.Tensor) -> Difference | None:
        non_finite[name] = count_non_finite(raw_bytes(here.contiguous()), here.dtype)
        problem = _compare_specs(name, here_specs[name], there_specs[name])
        if problem is None and not same_bits(here, there):
            problem = Difference(name, "values", _first_difference(here, there))
        return problem

    differences += compare_tensors(common, here_specs, (left, right), compare, workers, progress)
    differences += [*_copies(left), *_copies(right)]
    notes = non_finite_note(non_finite)
    total = total_bytes(common, here_specs)
    return Verdict(left.where, right.where, not differences, len(common), total, differences, notes=notes)


def verify_manifest(
    path: str | os.PathLike[str], workers: int | None = None, progress: Progress | None = None
) -> Verdict:
    """Compare a checkpoint with its manifest: dtype, shape and digest of every tensor, digest of every side file.

    For a training run or one of its checkpoints, compare the digests of all files of the (newest) checkpoint.

    Raises CheckpointError without a manifest, or if it describes another iteration.
    """
    path = checkpoint_folder(path)
    written = newest_iteration(path) or path
    if (written / FILE_DIGESTS).is_file():  # checked before the checkpoint is opened, which damaged files may prevent
        return _verify_files(written, workers, progress)
    checkpoint = find_checkpoint(path)
    manifest = checkpoint.manifest
    if manifest is None or checkpoint.root is None:
        raise CheckpointError(checkpoint.where, f"has no {MANIFEST}: compare it with a second checkpoint")
    if manifest.iteration not in (None, checkpoint.iteration):
        raise CheckpointError(
            checkpoint.where,
            f"its {MANIFEST} describes {manifest.iteration}, but the newest iteration is {checkpoint.iteration}: "
            "compare it with a second checkpoint",
        )
    if not manifest.tensors:
        raise CheckpointError(checkpoint.where, f"its {MANIFEST} has no digests: compare it with a second checkpoint")
    records = manifest.tensors
    specs = checkpoint.stored_specs()
    differences = _unmapped(checkpoint)
    differences += [Difference(n, "missing", f"in {MANIFEST}, but not stored") for n in records if n not in specs]
    differences += [Difference(n, "extra", f"not in {MANIFEST}") for n in specs if n not in records]
    common = [name for name in specs if name in records]
    non_finite: dict[str, int] = {}

    def compare(name: str, tensor: torch.Tensor) -> Difference | None:
        now = record_of(tensor)
        non_finite[name] = now.non_finite
        return _compare_record(name, now, records[name])

    found = compare_tensors(common, specs, (checkpoint,), compare, workers, progress)
    differences += found
    differences += [*_compare_files(checkpoint.root, manifest), *_copies(checkpoint)]
    if not found:
        detail = f"its bytes outside the tensors differ from {MANIFEST}"
        differences += [Difference(file, "file", detail) for file in checkpoint.changed_files(manifest)]
    notes = [*non_finite_note(non_finite), *manifest.changed_note()]
    total = total_bytes(common, specs)
    return Verdict(checkpoint.where, MANIFEST, not differences, len(common), total, differences, notes=notes)


def check_recorded(checkpoint: Checkpoint) -> None:
    """Read all recorded tensors, or all files of a training run's checkpoint. Raises ChangedTensorsError if any
    differs from its recorded digest."""
    changed = [str(file) for file in checkpoint.damaged_files()]
    records = {} if checkpoint.record is None else checkpoint.record.tensors
    specs = {name: spec for name, spec in checkpoint.stored_specs().items() if name in records}

    def compare(group: Sequence[str]) -> None:
        tensors = checkpoint.read_group(group)
        changed.extend(name for name in group if record_of(tensors[name]) != records[name])

    groups = _groups(specs, checkpoint)
    run_tasks([(total_bytes(group, specs), partial(compare, group)) for group in groups], worker_count(None))
    if changed:
        raise ChangedTensorsError(checkpoint.where, changed)


def _verify_files(folder: Path, workers: int | None, progress: Progress | None) -> Verdict:
    differences = [Difference(found.file, "file", found.detail) for found in check_files(folder, workers, progress)]
    root = folder.absolute().parent
    if (root / MANIFEST).is_file():  # manifest of all iterations
        differences += _compare_files(root, read_manifest(root) if is_intact(root) else None)
    tensors = 0 if differences else _count_tensors(folder)
    size = sum((folder / name).stat().st_size for name in file_names(folder))
    return Verdict(str(folder), FILE_DIGESTS, not differences, tensors, size, differences)


def _count_tensors(folder: Path) -> int:
    if (folder / DCP_METADATA).is_file():
        return len(read_metadata(folder).tensors)
    return sum(len(read_header(file, (FP8,)).entries) for file in folder.glob("*.safetensors"))


def _unmapped(checkpoint: Checkpoint) -> list[Difference]:
    detail = f"in {checkpoint.where}, but not part of a Hub tensor"
    return [Difference(key, "extra", detail) for key in checkpoint.unmapped()]


def _copies(checkpoint: Checkpoint) -> list[Difference]:
    return [Difference(key, "values", detail) for key, detail in checkpoint.differing_copies()]


def compare_tensors(
    names: Sequence[str],
    specs: dict[str, TensorSpec],
    sides: Sequence[Checkpoint],
    compare: Callable[..., Difference | None],
    workers: int | None,
    progress: Progress | None,
) -> list[Difference]:
    """Call `compare` with each name and its tensors. Returns the differences and the unreadable tensors, ordered by
    `names`."""
    total = total_bytes(names, specs)
    found: dict[str, Difference] = {}

    def compare_group(group: Sequence[str]) -> None:
        try:
            tensors = [side.read_group(group) for side in sides]
        except DlmBridgeError as error:
            found.update({name: Difference(name, "unreadable", str(error)) for name in group})
            return
        for name in group:
            problem = compare(name, *(side[name] for side in tensors))
            if problem is not None:
                found[name] = problem
            if progress is not None:
                progress(tensors[0][name].nbytes, total)

    groups = _groups(names, *sides)
    run_tasks(
        [(2 * total_bytes(group, specs), partial(compare_group, group)) for group in groups], worker_count(workers)
    )
    return [found[name] for name in names if name in found]


def _groups(names: Iterable[str], *sides: Checkpoint) -> list[list[str]]:
    """Group names that are stored in one Megatron tensor, so that they are read together."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for name in names:
        key = next((side.group_of(name) for side in sides if side.group_of(name) != name), name)
        groups.setdefault((key,), []).append(name)
    return list(groups.values())


def total_bytes(names: Iterable[str], specs: dict[str, TensorSpec]) -> int:
    return sum(prod(specs[name][1]) * specs[name][0].itemsize for name in names)


def _compare_specs(name: str, a: TensorSpec, b: TensorSpec) -> Difference | None:
    if a[1] != b[1]:
        return Difference(name, "shape", f"{list(a[1])} and {list(b[1])}")
    if a[0] != b[0]:
        return Difference(name, "dtype", f"{dtype_name(a[0])} and {dtype_name(b[0])}")
    return None


def _compare_record(name: str, now: TensorRecord, record: TensorRecord) -> Difference | None:
    if now.shape != record.shape:
        return Difference(name, "shape", f"{list(now.shape)}, {MANIFEST} has {list(record.shape)}")
    if now.dtype != record.dtype:
        return Difference(name, "dtype", f"{now.dtype}, {MANIFEST} has {record.dtype}")
    if now.digest != record.digest:
        return Difference(name, "values", f"digest {now.digest}, {MANIFEST} has {record.digest}")
    return None


def _compare_files(root: Path, manifest: Manifest | None) -> list[Difference]:
    differences = [] if is_intact(root) else [Difference(MANIFEST, "file", "was changed")]
    for name, recorded in ({} if manifest is None else manifest.side_files).items():
        path = root / name
        if not path.is_file():
            differences.append(Difference(name, "file", "is missing"))
            continue
        try:
            if file_digest(path) != recorded:
                differences.append(Difference(name, "file", f"differs from {MANIFEST}"))
        except OSError as error:
            differences.append(Difference(name, "file", f"cannot be read: {error.strerror}"))
    return differences


def _first_difference(a: torch.Tensor, b: torch.Tensor) -> str:
    """Format the number of different elements, and the first of them, of two tensors of the same dtype and shape."""
    wrong = (bit_view(a) != bit_view(b)).reshape(-1)
    first = int(torch.argmax(wrong.to(torch.uint8)))
    index = [int(i) for i in torch.unravel_index(torch.tensor(first), a.shape)] if a.dim() else []
    values = f"{a.reshape(-1)[first].item()!r} and {b.reshape(-1)[first].item()!r}"
    return f"{int(wrong.sum())} of {wrong.numel()} elements, first at {index}: {values}"

"""Are two checkpoints equal, tensor by tensor, in any two formats? Is one what its own manifest says?"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch

from dlm_bridge.convert.checkpoint import HubMetadata, TensorSpec
from dlm_bridge.convert.checkpoints.dcp import DcpCheckpoint, dcp_folder
from dlm_bridge.convert.checkpoints.huggingface import HubCheckpoint, HubReader
from dlm_bridge.convert.checkpoints.legacy import LegacyReader
from dlm_bridge.convert.checkpoints.megatron import (
    MegatronCheckpoint,
    is_extra_state,
    is_training_state,
    megatron_root,
)
from dlm_bridge.convert.checkpoints.store import is_megatron, newest_iteration
from dlm_bridge.convert.formats.dcp_metadata import read_metadata
from dlm_bridge.convert.formats.legacy_writer import legacy_file_digest
from dlm_bridge.convert.formats.torch_dist_writer import read_file_digests
from dlm_bridge.convert.manifest import FILE_DIGESTS as FILE_DIGESTS
from dlm_bridge.convert.manifest import MANIFEST, Manifest, TensorRecord, check_files, is_intact, read_manifest
from dlm_bridge.convert.streaming import digest, file_digest, range_digest
from dlm_bridge.convert.workers import Progress, run_tasks, worker_count
from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.hub import resolve
from dlm_bridge.mapping.dtypes import bit_view, dtype_name, same_bits


@dataclass(frozen=True)
class Difference:
    """One thing that is not equal: `kind` is missing, extra, dtype, shape, values, unreadable or file."""

    name: str
    kind: str
    detail: str


@dataclass(frozen=True)
class LogitsVerdict:
    """How far two models' logits are apart at the most (fp32, absolute), on `positions` random tokens.

    `a` and `b` say what computed each side, megatron-core or transformers; `notes` why, where a Megatron checkpoint is
    not computed by megatron-core, and what was too long to try.
    """

    a: str
    b: str
    difference: float
    allowed: float
    largest: float  # logit of side a
    positions: int
    notes: list[str]


@dataclass
class Verdict:
    """The result of a comparison. `logits` is there where both models could be asked for them."""

    a: str
    b: str
    equal: bool
    tensors: int
    bytes: int
    differences: list[Difference] = field(default_factory=list)
    logits: LogitsVerdict | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def verify_pair(
    a: str | os.PathLike[str], b: str | os.PathLike[str], workers: int | None = None, progress: Progress | None = None
) -> Verdict:
    """Compare every tensor of two checkpoints by its Hub name: presence, dtype, shape, every bit.

    A Megatron checkpoint without a manifest is read by the other side's configuration. Raises DlmBridgeError for what
    is not a checkpoint; tensors that cannot be read are differences.
    """
    left, right = _open_pair(resolve(a), resolve(b))
    differences: list[Difference] = [*left.oddities(), *right.oddities()]
    for names, other, where in ((left.names, right, right.where), (right.names, left, left.where)):
        differences += [Difference(name, "missing", f"not in {where}") for name in names if name not in other.names]
    common = [name for name in left.names if name in right.names]
    total = _nbytes(common, left.names)
    found: dict[str, Difference] = {}
    for group in _groups(common, left, right):
        for name in group:
            if problem := _compare_specs(name, left.names[name], right.names[name]):
                found[name] = problem

    def compare(group: Sequence[str]) -> None:
        try:
            here, there = left.read(group), right.read(group)
        except DlmBridgeError as error:
            found.update({name: Difference(name, "unreadable", str(error)) for name in group})
            return
        for name in group:
            if name not in found and not same_bits(here[name], there[name]):
                found[name] = Difference(name, "values", _first_difference(here[name], there[name]))
            if progress is not None:
                progress(here[name].nbytes, total)

    tasks = [(2 * _nbytes(group, left.names), partial(compare, group)) for group in _groups(common, left, right)]
    run_tasks(tasks, worker_count(workers))
    differences += [found[name] for name in common if name in found]
    differences += [*left.compare_copies(), *right.compare_copies()]
    return Verdict(left.where, right.where, not differences, len(common), total, differences)


def verify_manifest(
    path: str | os.PathLike[str], workers: int | None = None, progress: Progress | None = None
) -> Verdict:
    """Compare a checkpoint with its own manifest: every tensor's dtype, shape and digest, every side file's digest; or
    every file of a training run's newest checkpoint (or of the one that is named) with the digests beside them.

    Raises DlmBridgeError where there is no manifest, or none of what is there now.
    """
    folder = resolve(path)
    if is_megatron(folder) and (newest_iteration(folder) / FILE_DIGESTS).is_file():
        return _verify_files(newest_iteration(folder), workers, progress)
    side = _open_one(folder)
    manifest = side.manifest
    if manifest is None:
        raise DlmBridgeError(f"{folder} has no {MANIFEST} to verify it against: name a second checkpoint")
    if manifest.iteration is not None and manifest.iteration != side.iteration:
        raise DlmBridgeError(
            f"{folder}: its {MANIFEST} describes {manifest.iteration}, the newest iteration is {side.iteration}: "
            "name a second checkpoint"
        )
    if not manifest.tensors:
        raise DlmBridgeError(
            f"{folder}: written by a training run before those had digests: name a second checkpoint to compare it "
            "with"
        )
    records = manifest.tensors
    differences = side.oddities()
    differences += [Difference(n, "missing", f"{MANIFEST} has it") for n in records if n not in side.names]
    differences += [Difference(n, "extra", f"{MANIFEST} does not have it") for n in side.names if n not in records]
    common = [name for name in side.names if name in records]
    total = _nbytes(common, side.names)
    found: dict[str, Difference] = {}

    def compare(group: Sequence[str]) -> None:
        try:
            tensors = side.read(group)
        except DlmBridgeError as error:
            found.update({name: Difference(name, "unreadable", str(error)) for name in group})
            return
        for name in group:
            problem = _compare_record(name, side.names[name], records[name], tensors[name])
            if problem is not None:
                found[name] = problem
            if progress is not None:
                progress(tensors[name].nbytes, total)

    groups = _groups(common, side)
    run_tasks([(2 * _nbytes(group, side.names), partial(compare, group)) for group in groups], worker_count(workers))
    differences += [found[name] for name in common if name in found]
    differences += _compare_files(side.root, manifest)
    differences += side.compare_copies()
    differences += [] if found else side.compare_headers(manifest)
    return Verdict(side.where, MANIFEST, not differences, len(common), total, differences)


def _verify_files(folder: Path, workers: int | None, progress: Progress | None) -> Verdict:
    differences = [Difference(found.file, "file", found.detail) for found in check_files(folder, workers, progress)]
    root = folder.absolute().parent
    if (root / MANIFEST).is_file() and not is_intact(root):
        differences.append(Difference(MANIFEST, "file", "is not as it was written"))
    tensors = 0 if differences else len(read_metadata(folder).tensors)
    size = sum(file.stat().st_size for file in folder.iterdir())
    return Verdict(str(folder), FILE_DIGESTS, not differences, tensors, size, differences)


class _Side:
    """A checkpoint as named tensors, whole or not."""

    where: str
    root: Path
    names: dict[str, TensorSpec]
    manifest: Manifest | None
    iteration: str | None = None

    def read(self, group: Sequence[str]) -> dict[str, torch.Tensor]:
        raise NotImplementedError

    def group_of(self, name: str) -> str:
        """Names with the same value are best read together."""
        return name

    def oddities(self) -> list[Difference]:
        """What is there and belongs to no Hub tensor."""
        return []

    def compare_headers(self, manifest: Manifest) -> list[Difference]:
        """Weight files that are not what the manifest says, though all their tensors are."""
        return []

    def compare_copies(self) -> list[Difference]:
        """Parameters that several ranks hold and that are not the same on all of them."""
        return []


class _HubTensors(_Side):
    def __init__(self, folder: Path) -> None:
        self.where, self.root = str(folder), folder
        self._reader = HubReader(folder)
        entries = [self._reader.entry(name) for name in self._reader.names]
        self.names = {entry.name: (entry.dtype, entry.shape) for entry in entries}
        self.manifest = read_manifest(folder)

    def read(self, group: Sequence[str]) -> dict[str, torch.Tensor]:
        return {name: self._reader.read(name) for name in group}

    def compare_headers(self, manifest: Manifest) -> list[Difference]:
        if manifest.format != "huggingface":
            return []
        found = {shard.file: shard for shard in self._reader.shards()}
        wrong = {shard.file for shard in manifest.shards if found.get(shard.file) != shard}
        wrong |= {file for file, recorded in manifest.files.items() if self._header_digest(file) != recorded}
        return [Difference(file, "file", f"its header is not what {MANIFEST} says") for file in sorted(wrong)]

    def _header_digest(self, file: str) -> str | None:
        content = self._reader.files.get(file)
        return None if content is None else range_digest(content.path, 0, content.start)


class _MegatronTensors(_Side):
    def __init__(self, folder: Path, hub: HubMetadata | None, twin: HubCheckpoint | None) -> None:
        self._checkpoint = MegatronCheckpoint(folder, hub, twin)
        self.where, self.root = str(folder), self._checkpoint.root
        self.manifest, self.iteration = self._checkpoint.manifest, self._checkpoint.iteration
        self.names = {}
        used = set()
        for param in self._checkpoint.params:
            key = self._checkpoint.stored_key(param)
            if key is None:
                continue
            used.add(key)
            for name in param.hub_names:
                self.names[name] = self._checkpoint.spec(name)
        self._odd = [key for key in self._checkpoint.reader.contents.tensors if key not in used]
        self._odd = [key for key in self._odd if not is_training_state(key) and not is_extra_state(key)]
        for name, entry in self._checkpoint.passthrough.items():
            if not entry.copy_of or entry.copy_of in self.names:
                self.names[name] = self._checkpoint.spec(name)

    def read(self, group: Sequence[str]) -> dict[str, torch.Tensor]:
        checkpoint = self._checkpoint
        if group[0] not in checkpoint.param_of:
            return {name: checkpoint.read(name) for name in group}
        param = checkpoint.param_of[group[0]]
        checkpoint.check_param(param)
        return dict(zip(param.hub_names, checkpoint.read_param(param), strict=True))

    def group_of(self, name: str) -> str:
        param = self._checkpoint.param_of.get(name)
        return param.megatron_name if param is not None else name

    def compare_headers(self, manifest: Manifest) -> list[Difference]:
        reader, iteration = self._checkpoint.reader, self._checkpoint.iteration
        if isinstance(reader, LegacyReader):
            found = {file: legacy_file_digest(reader.folder / file) for file in self._checkpoint.store.files()}
        else:
            found = read_file_digests(reader.folder, reader.contents)
        return [
            Difference(file, "file", f"its bytes around the tensors are not what {MANIFEST} says")
            for file, recorded in manifest.files.items()
            if found.get(file.removeprefix(f"{iteration}/")) != recorded
        ]

    def compare_copies(self) -> list[Difference]:
        reader = self._checkpoint.reader
        if not isinstance(reader, LegacyReader):
            return []
        return [Difference(key, "values", detail) for key, detail in reader.check_copies()]

    def oddities(self) -> list[Difference]:
        return [Difference(key, "extra", f"in {self.where}, but it belongs to no Hub tensor") for key in self._odd]


class _DcpTensors(_Side):
    def __init__(self, checkpoint: DcpCheckpoint) -> None:
        self._checkpoint = checkpoint
        self.where, self.root, self.manifest = checkpoint.where, checkpoint.folder, None
        self.names = {name: checkpoint.spec(name) for name in checkpoint.stored_names()}

    def read(self, group: Sequence[str]) -> dict[str, torch.Tensor]:
        return {name: self._checkpoint.read(name) for name in group}


def _open_one(folder: Path) -> _Side:
    if is_megatron(folder):
        return _MegatronTensors(folder, None, None)
    return _HubTensors(folder) if dcp_folder(folder) is None else _DcpTensors(DcpCheckpoint(folder))


def _open_pair(a: Path, b: Path) -> tuple[_Side, _Side]:
    """Each side by its own manifest, settings or config.json, or by the other's where it has none."""

    def open_by(folder: Path, other: Path) -> _Side:
        megatron = is_megatron(folder)
        if not megatron and dcp_folder(folder) is None:
            return _HubTensors(folder)
        if megatron and _manifest_of(folder) is not None:
            return _MegatronTensors(folder, None, None)
        twin = None
        if is_megatron(other):
            hub = MegatronCheckpoint(other).hub
        elif dcp_folder(other) is not None:
            hub = DcpCheckpoint(other).hub
        else:
            twin = HubCheckpoint(other)
            hub = twin.hub
        hub = replace(hub, dtypes={})
        return _MegatronTensors(folder, hub, twin) if megatron else _DcpTensors(DcpCheckpoint(folder, hub))

    return open_by(a, b), open_by(b, a)


def _manifest_of(folder: Path) -> Manifest | None:
    return read_manifest(megatron_root(folder, newest_iteration(folder)))


def _groups(names: Iterable[str], *sides: _Side) -> list[list[str]]:
    """Names that are read together, since they lie in one Megatron tensor."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for name in names:
        key = next((side.group_of(name) for side in sides if side.group_of(name) != name), name)
        groups.setdefault((key,), []).append(name)
    return list(groups.values())


def _nbytes(names: Iterable[str], specs: dict[str, TensorSpec]) -> int:
    return sum(prod(specs[name][1]) * specs[name][0].itemsize for name in names)


def _compare_specs(name: str, a: TensorSpec, b: TensorSpec) -> Difference | None:
    if a[1] != b[1]:
        return Difference(name, "shape", f"{list(a[1])} and {list(b[1])}")
    if a[0] != b[0]:
        return Difference(name, "dtype", f"{dtype_name(a[0])} and {dtype_name(b[0])}")
    return None


def _compare_record(name: str, spec: TensorSpec, record: TensorRecord, tensor: torch.Tensor) -> Difference | None:
    if spec[1] != record.shape:
        return Difference(name, "shape", f"{list(spec[1])}, {MANIFEST} says {list(record.shape)}")
    if dtype_name(spec[0]) != record.dtype:
        return Difference(name, "dtype", f"{dtype_name(spec[0])}, {MANIFEST} says {record.dtype}")
    found = digest(tensor)
    if found != record.digest:
        return Difference(name, "values", f"digest {found}, {MANIFEST} says {record.digest}")
    return None


def _compare_files(root: Path, manifest: Manifest) -> list[Difference]:
    differences = [] if is_intact(root) else [Difference(MANIFEST, "file", "is not as it was written")]
    for name, recorded in manifest.side_files.items():
        path = root / name
        if not path.is_file():
            differences.append(Difference(name, "file", "is missing"))
        elif file_digest(path) != recorded:
            differences.append(Difference(name, "file", f"is not what {MANIFEST} says"))
    return differences


def _first_difference(a: torch.Tensor, b: torch.Tensor) -> str:
    """Where two tensors of one dtype and shape differ first, and in how many elements."""
    wrong = (bit_view(a) != bit_view(b)).reshape(-1)
    first = int(torch.argmax(wrong.to(torch.uint8)))
    index = [int(i) for i in torch.unravel_index(torch.tensor(first), a.shape)] if a.dim() else []
    values = f"{a.reshape(-1)[first].item()!r} and {b.reshape(-1)[first].item()!r}"
    return f"{int(wrong.sum())} of {wrong.numel()} elements, first at {index}: {values}"

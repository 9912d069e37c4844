"""What a checkpoint is, from its headers alone: family, sizes, dtypes, parameters, files, layout, source."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import asdict, dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from dlm_bridge.convert.checkpoint import Checkpoint
from dlm_bridge.convert.checkpoints.dcp import DcpCheckpoint, dcp_folder
from dlm_bridge.convert.checkpoints.huggingface import HubCheckpoint, open_hub
from dlm_bridge.convert.checkpoints.megatron import MegatronCheckpoint, is_training_state, megatron_root
from dlm_bridge.convert.checkpoints.store import Store, is_megatron, newest_iteration, open_store
from dlm_bridge.convert.manifest import Manifest, read_manifest
from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.hub import resolve
from dlm_bridge.mapping.dtypes import dtype_name
from dlm_bridge.mapping.rules import Dims


@dataclass
class CheckpointInfo:
    """`family`, `architecture` and `sizes` are None for a Megatron checkpoint without a manifest, whose model is not
    known; its tensors are then counted under their Megatron keys."""

    path: str
    format: str
    family: str | None
    architecture: str | None
    parameters: int
    tensors: int
    bytes: int
    dtypes: dict[str, int]  # name -> tensors
    files: dict[str, int]  # weight file -> bytes
    sizes: dict[str, Any] | None = None
    layout: dict[str, Any] | None = None
    iteration: int | str | None = None
    training_state: int = 0  # tensors and objects besides the weights
    source: dict[str, Any] | None = None
    side_files: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    tool: str | None = None  # what wrote the manifest
    derived: list[dict[str, Any]] = field(default_factory=list)  # key, value, origin, assumed: of a derived config
    notes: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def inspect_checkpoint(
    path: str | os.PathLike[str], revision: str | None = None, family: str | None = None
) -> CheckpointInfo:
    """The facts of a Hub folder, a Hub id, a Megatron checkpoint or a plain distributed one. Raises DlmBridgeError."""
    folder = resolve(path, revision)
    if is_megatron(folder):
        return _megatron_facts(folder, family)
    if dcp_folder(folder) is not None:
        checkpoint = DcpCheckpoint(folder, family=family)
        checkpoint.check()
        facts = _facts(checkpoint, str(folder), None)
        facts.files = checkpoint.files()
        return facts
    return _hub_facts(open_hub(os.fspath(path), revision, family))


def _megatron_facts(folder: Path, family: str | None) -> CheckpointInfo:
    iteration = newest_iteration(folder)
    manifest = read_manifest(megatron_root(folder, iteration))
    try:
        checkpoint = MegatronCheckpoint(folder, family=family)
        checkpoint.check()
    except DlmBridgeError as error:
        if manifest is not None:
            raise
        return _unknown_megatron(folder, open_store(iteration), str(error))
    facts = _facts(checkpoint, str(folder), manifest)
    _add_megatron(facts, checkpoint.store)
    if manifest is not None and manifest.iteration == checkpoint.iteration:
        facts.layout = manifest.layout
    return facts


def _hub_facts(checkpoint: HubCheckpoint) -> CheckpointInfo:
    checkpoint.check()
    facts = _facts(checkpoint, str(checkpoint.folder), read_manifest(checkpoint.folder))
    facts.files = {name: (checkpoint.folder / name).stat().st_size for name in checkpoint.reader.files}
    return facts


def _facts(checkpoint: Checkpoint, path: str, manifest: Manifest | None) -> CheckpointInfo:
    specs = {name: checkpoint.spec(name) for name in checkpoint.hub_names()}
    architectures = checkpoint.config.get("architectures") or [None]
    return CheckpointInfo(
        path=path,
        format=checkpoint.format,
        family=checkpoint.family.name,
        architecture=architectures[0],
        parameters=sum(prod(shape) for name, (_, shape) in specs.items() if name not in checkpoint.passthrough),
        tensors=len(specs),
        bytes=sum(prod(shape) * dtype.itemsize for dtype, shape in specs.values()),
        dtypes=dict(Counter(dtype_name(dtype) for dtype, _ in specs.values())),
        files={},
        sizes=_sizes(checkpoint.dims),
        source=manifest.source if manifest else checkpoint.hub.source,
        side_files=list(checkpoint.hub.files),
        left_out=list(checkpoint.hub.excluded),
        tool=manifest.tool if manifest else None,
        derived=[asdict(row) for row in checkpoint.hub.derived],
        notes=list(checkpoint.notes),
    )


def _sizes(dims: Dims) -> dict[str, Any]:
    """The sizes that the model has: what is zero or empty does not apply to it."""
    values = asdict(dims)
    plain = {name: sorted(value) if isinstance(value, frozenset) else value for name, value in values.items()}
    return {name: value for name, value in plain.items() if value or name == "tied"}


def _unknown_megatron(folder: Path, store: Store, reason: str) -> CheckpointInfo:
    """`reason` says why the model is not known."""
    tensors = {key: tensor for key, tensor in store.tensors().items() if not is_training_state(key)}
    facts = CheckpointInfo(
        path=str(folder),
        format=store.format,
        family=None,
        architecture=None,
        parameters=sum(prod(tensor.shape) for tensor in tensors.values()),
        tensors=len(tensors),
        bytes=sum(tensor.nbytes for tensor in tensors.values()),
        dtypes=dict(Counter(tensor.dtype for tensor in tensors.values())),
        files={},
        notes=[reason],
    )
    if store.format == "torch":
        facts.notes.append("tensors and parameters are counted on every rank that holds them")
    _add_megatron(facts, store)
    return facts


def _add_megatron(facts: CheckpointInfo, store: Store) -> None:
    facts.files = store.files()
    iteration = store.common.get("iteration")
    facts.iteration = iteration if isinstance(iteration, int) else store.folder.name
    facts.training_state = sum(map(is_training_state, (*store.tensors(), *store.objects())))
    facts.layout = store.layout

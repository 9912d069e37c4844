"""Checkpoint inspection without loading weights: family, sizes, dtypes, parameters, files, layout, source."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import asdict, dataclass, field
from math import prod
from typing import Any

from dlm_bridge.convert.checkpoint import Checkpoint
from dlm_bridge.convert.checkpoints import find_checkpoint
from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.mapping.rules import Dims


@dataclass
class CheckpointInfo:
    """Facts about a checkpoint. If its model is unknown (a Megatron checkpoint without a manifest), `family`,
    `architecture` and `sizes` are None, and tensors are counted by their Megatron keys."""

    path: str
    format: str
    family: str | None
    architecture: str | None
    parameters: int
    tensors: int
    bytes: int
    dtypes: dict[str, int]  # dtype -> number of tensors
    files: dict[str, int] = field(default_factory=dict)  # weight file -> size in bytes
    sizes: dict[str, Any] | None = None
    layout: dict[str, Any] | None = None
    iteration: int | str | None = None
    training_state: int = 0  # number of tensors and objects that are not weights
    source: dict[str, Any] | None = None
    side_files: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    tool: str | None = None  # program that wrote the manifest
    derived: list[dict[str, Any]] = field(default_factory=list)  # derived config: key, value, origin, assumed
    notes: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Convert to a dict of plain values."""
        return asdict(self)


def inspect_checkpoint(
    path: str | os.PathLike[str], revision: str | None = None, family: str | None = None
) -> CheckpointInfo:
    """Inspect a Hub folder, a Hub id, a Megatron checkpoint or a plain torch distributed checkpoint.

    Raises:
        CheckpointError: not a checkpoint, or one that is damaged or does not match its config.
    """
    checkpoint = find_checkpoint(path, revision, family)
    try:
        checkpoint.check()
        info = _model_info(checkpoint)
    except DlmBridgeError as error:
        if checkpoint.names_model:
            raise
        info = _raw_info(checkpoint, str(error))
    manifest = checkpoint.manifest
    info.files = checkpoint.files()
    info.training_state = len(checkpoint.training_state())
    info.iteration, info.layout = checkpoint.step, checkpoint.layout
    if manifest is not None:
        info.source, info.tool = manifest.source, manifest.tool
        info.notes += [] if checkpoint.record is None else manifest.notes()
        info.layout = manifest.layout if manifest.iteration == checkpoint.iteration else checkpoint.layout
    return info


def _model_info(checkpoint: Checkpoint) -> CheckpointInfo:
    tensors = {name: checkpoint.described(name) for name in checkpoint.hub_names()}
    architectures = checkpoint.config.get("architectures") or [None]
    return CheckpointInfo(
        path=checkpoint.where,
        format=checkpoint.format,
        family=checkpoint.family.name,
        architecture=architectures[0],
        parameters=sum(prod(each.shape) for name, each in tensors.items() if name not in checkpoint.passthrough),
        tensors=len(tensors),
        bytes=sum(each.nbytes for each in tensors.values()),
        dtypes=dict(Counter(each.dtype for each in tensors.values())),
        sizes=_sizes(checkpoint.dims),
        source=checkpoint.hub.source,
        side_files=list(checkpoint.hub.files),
        left_out=list(checkpoint.hub.excluded),
        derived=[asdict(row) for row in checkpoint.hub.derived],
        notes=list(checkpoint.notes),
    )


def _raw_info(checkpoint: Checkpoint, reason: str) -> CheckpointInfo:
    """Facts by stored names, for an unknown model. `reason`: why it is unknown."""
    state = set(checkpoint.training_state())
    tensors = [tensor for key, tensor in checkpoint.stored_tensors().items() if key not in state]
    counted = ["tensors and parameters are counted once per rank that stores them"] * (checkpoint.format == "torch")
    return CheckpointInfo(
        path=checkpoint.where,
        format=checkpoint.format,
        family=None,
        architecture=None,
        parameters=sum(prod(tensor.shape) for tensor in tensors),
        tensors=len(tensors),
        bytes=sum(tensor.nbytes for tensor in tensors),
        dtypes=dict(Counter(tensor.dtype for tensor in tensors)),
        notes=[reason, *counted],
    )


def _sizes(dims: Dims) -> dict[str, Any]:
    """Sizes that are neither zero nor empty, as plain values."""
    values = asdict(dims)
    values |= dict(values.pop("sizes"))
    plain = {name: sorted(value) if isinstance(value, frozenset) else value for name, value in values.items()}
    return {name: value for name, value in plain.items() if value or name == "tied"}

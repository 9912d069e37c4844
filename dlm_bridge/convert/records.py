"""Digests of the Hub tensors as they pass through a conversion, and the manifest that comes of them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import torch

from dlm_bridge.convert.checkpoint import Checkpoint, TensorSpec, config_bytes, first_of
from dlm_bridge.convert.checkpoints.megatron import MegatronCheckpoint
from dlm_bridge.convert.manifest import Manifest, TensorRecord, combined_digest
from dlm_bridge.convert.streaming import digest
from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.mapping.dtypes import cast, dtype_name


class Records:
    """What was read and what was written of every Hub tensor. Methods may be called from several threads."""

    def __init__(self, source: Checkpoint, specs: dict[str, TensorSpec]) -> None:
        self._source, self._specs = source, specs
        self._read: dict[str, TensorRecord] = {}
        self._written: dict[str, TensorRecord] = {}

    def convert(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Cast a tensor that was read to its target dtype, contiguous, and note both digests."""
        tensor = tensor.contiguous()
        target = cast(tensor, self._specs[name][0], name)
        self._read[name] = record_of(tensor)
        self._written[name] = self._read[name] if target is tensor else record_of(target)
        return target

    def note(self, name: str, digest: str) -> None:
        """Note the digest of a tensor that went through unchanged."""
        dtype, shape = self._specs[name]
        self._read[name] = self._written[name] = TensorRecord(dtype_name(dtype), shape, digest)

    def entry(self, names: Iterable[str]) -> list[tuple[TensorRecord, TensorRecord]]:
        """What was read and written of each of these tensors, for the journal."""
        return [(self._read[name], self._written[name]) for name in names]

    def restore(self, names: Iterable[str], entry: Iterable[tuple[TensorRecord, TensorRecord]]) -> None:
        """Take over what an earlier run noted as `entry`."""
        for name, (read, written) in zip(names, entry, strict=True):
            self._read[name], self._written[name] = read, written

    def alias(self, name: str, copy_of: str) -> None:
        """A passthrough tensor that is derived from another: nothing was read for it."""
        self._read[name] = self._read[copy_of]
        self._written[name] = self._written[copy_of]

    def check_copies(self) -> None:
        """Raise DlmBridgeError where a passthrough tensor is not the copy that it must be."""
        for name, entry in self._source.passthrough.items():
            if entry.copy_of and self._read[name] != self._read[entry.copy_of]:
                raise DlmBridgeError(
                    f"{self._source.where}: tensor {name} differs from {entry.copy_of}, of which it must be a copy, "
                    "since the config ties them"
                )

    def notes(self) -> list[str]:
        """What the report says of a source that is no longer what its own manifest describes."""
        source = self._source
        if not isinstance(source, MegatronCheckpoint) or source.manifest is None:
            return []
        if source.manifest.iteration != source.iteration:
            return []
        known = source.manifest.tensors
        changed = [name for name, record in self._read.items() if known.get(name) != record]
        return [f"tensors that differ from the source's own manifest: {first_of(changed)}"] if changed else []

    def manifest(self, format_: str, dtype: torch.dtype | None) -> Manifest:
        """The manifest of what was written, but for layout and side files."""
        hub = self._source.hub
        origin: dict[str, Any] = {key: hub.source.get(key) for key in ("name", "revision")}
        origin["digest"] = hub.source.get("digest") or combined_digest(self._read)
        return Manifest(
            format=format_,
            family=self._source.family.name,
            config=json.loads(config_bytes(self._source, dtype)),
            dtype="keep" if dtype is None else dtype_name(dtype),
            tensors={name: self._written[name] for name in self._source.hub_names()},
            source=origin,
            shards=hub.shards,
            left_out=list(hub.excluded),
            carried=list(self._source.passthrough),
        )


def record_of(tensor: torch.Tensor) -> TensorRecord:
    """dtype, shape and digest of a tensor."""
    return TensorRecord(dtype_name(tensor.dtype), tuple(tensor.shape), digest(tensor))

"""Megatron's distributed checkpoint (`torch_dist`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from dlm_bridge.convert.checkpoint import OutputRequest, PlannedOutput
from dlm_bridge.convert.checkpoints.fsdp_dtensor import PerLayerReader, singleton_names
from dlm_bridge.convert.checkpoints.megatron import DistributedCheckpoint
from dlm_bridge.convert.formats.chunked_reader import ChunkedReader
from dlm_bridge.convert.formats.dcp_metadata import DCP_METADATA, Contents, read_metadata
from dlm_bridge.convert.formats.torch_dist_writer import BACKEND_FILE, TorchDistWriter, plan_torch_dist
from dlm_bridge.convert.formats.unpickler import Inert, read_torch_file, read_torch_item
from dlm_bridge.convert.optimizer_state import (
    AVERAGED,
    COMMON_STATE,
    OptimizerState,
    find_optimizer_state,
    is_optimizer_key,
)
from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.hub import read_json
from dlm_bridge.mapping.rules import ParamMapping


class TorchDistCheckpoint(DistributedCheckpoint):
    """megatron-core's distributed checkpoint, read and written as version 0.16 does."""

    format = "torch_dist"
    writable = True
    _as_stored: TorchDistReader

    @classmethod
    def recognises(cls, folder: Path) -> bool:
        return (folder / DCP_METADATA).is_file() and (folder / BACKEND_FILE).is_file()

    @classmethod
    def open(cls, path: Path, folder: Path, family: str | None = None) -> TorchDistCheckpoint:
        reader = TorchDistReader(folder)
        checkpoint = cls(path, folder, reader.common, family)
        checkpoint.contents, checkpoint._as_stored = reader.contents, reader
        return checkpoint

    @classmethod
    def plan_output(cls, request: OutputRequest) -> PlannedOutput:
        more, dtypes = ([], {}) if request.state is None else (request.state.params, request.state.dtypes)
        plan = plan_torch_dist([*request.params, *more], request.layout, {**request.dtypes, **dtypes})
        return PlannedOutput(plan.files, lambda folder: TorchDistWriter(folder, plan))

    def use_averages(self) -> None:
        tensors = self.contents.tensors
        averages = {
            key.removeprefix(f"{AVERAGED}."): tensor
            for key, tensor in tensors.items()
            if key.startswith(f"{AVERAGED}.")
        }
        if not averages:
            super().use_averages()
        self.contents = self._as_stored.contents = Contents(averages, {})

    def _reader(self, params: Iterable[ParamMapping], tied: bool) -> ChunkedReader:
        content = self.common.get("content_metadata")
        if isinstance(content, dict) and content.get("singleton_local_shards"):
            return PerLayerReader(self.folder, self.contents, singleton_names(self.contents), params)
        return self._as_stored

    def _expected_name(self, param: ParamMapping) -> str:
        return param.megatron_key

    def optimizer_state(self, padded: Sequence[ParamMapping], format_: str) -> OptimizerState | None:
        if format_ != self.format or not any(map(is_optimizer_key, self.training_state())):
            return super().optimizer_state(padded, format_)
        return find_optimizer_state(self.reader, self.where, self.params, padded)


class TorchDistReader(ChunkedReader):
    """One iteration's tensors. Opening reads `.metadata`, `metadata.json` and `common.pt`, no tensor.

    `common` is what is not sharded, with `args` as a plain dict. Raises DlmBridgeError for what is unreadable, hostile
    or not whole.
    """

    def __init__(self, folder: Path) -> None:
        _check_backend(folder)
        super().__init__(folder, read_metadata(folder))
        self.common = _read_common(folder, self.contents)


def _check_backend(folder: Path) -> None:
    path = folder / BACKEND_FILE
    try:
        backend = read_json(path)
    except FileNotFoundError:
        raise DlmBridgeError(
            f"{folder} is not a torch_dist checkpoint: it has no {BACKEND_FILE}, nor are its tensors named as "
            "Megatron FSDP does (model.module.decoder...)"
        ) from None
    name = backend.get("sharded_backend")
    if name != "torch_dist" or backend.get("sharded_backend_version") != 1:
        raise DlmBridgeError(f"{path}: sharded backend {name!r} is not supported, only torch_dist version 1")


def _read_common(folder: Path, contents: Contents) -> dict[str, Any]:
    path = folder / "common.pt"
    if path.is_file():
        common = read_torch_file(path)
    elif place := contents.objects.get(COMMON_STATE):
        path = folder / place.file
        common = read_torch_item(path, place.offset, place.length)
    else:
        raise DlmBridgeError(f"{folder} is not a torch_dist checkpoint: it has no common.pt")
    if isinstance(common, list) and len(common) == 1:  # a sharded object is saved in a list
        common = common[0]
    if not isinstance(common, dict):
        raise DlmBridgeError(f"{path}: is not a dict")
    args = common.get("args")
    return {**common, "args": args.fields} if isinstance(args, Inert) else common

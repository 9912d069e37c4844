"""torch.distributed.checkpoint's reader with restricted unpickling."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader, LoadPlan, LoadPlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.futures import Future

from dlm_bridge.convert.formats.dcp import Contents, read_metadata
from dlm_bridge.files.pickles import restricted_loading
from dlm_bridge.files.reading import FileWindow


def torch_metadata(contents: Contents, storage: StorageMeta) -> Metadata:
    """Contents of a `.metadata` as torch's own classes."""
    state: dict[str, Any] = {}
    places: dict[MetadataIndex, Any] = {}
    for name, tensor in contents.tensors.items():
        chunks = [ChunkStorageMetadata(torch.Size(each.offsets), torch.Size(each.sizes)) for each in tensor.chunks]
        properties = TensorProperties(dtype=getattr(torch, tensor.dtype_name))
        state[name] = TensorStorageMetadata(properties, torch.Size(tensor.shape), chunks)
        places |= {MetadataIndex(name, each.offsets): each.place for each in tensor.chunks}
    for name, place in contents.objects.items():
        state[name] = BytesStorageMetadata()
        places[MetadataIndex(name)] = place
    found = {index: _StorageInfo(place.file, place.offset, place.length) for index, place in places.items()}
    return Metadata(state, storage_data=found, storage_meta=storage)


class RestrictedReader(FileSystemReader):
    """FileSystemReader that unpickles neither `.metadata` (`read_metadata`) nor items (`restricted_loading`) freely.

    Raises:
        CheckpointError: `.metadata` is damaged, hostile or inconsistent with the files.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        contents = read_metadata(Path(self.path))  # here, because torch logs errors that are raised during a load
        self._metadata = torch_metadata(contents, StorageMeta(load_id=self.load_id))

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        return self._metadata

    def _slice_file(self, file: Any, place: Any) -> Any:
        window: Any = FileWindow(file, place.offset, place.length)  # torch's own cannot seek from its end
        window.name = file.name
        return window

    @restricted_loading()
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        return super().read_data(plan, planner)

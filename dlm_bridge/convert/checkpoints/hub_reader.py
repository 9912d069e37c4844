"""The tensors of a Hub folder: safetensors files or torch's pickled ones, with their index, read one by one."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from dlm_bridge.convert.formats.safetensors_file import (
    SAFETENSORS_INDEX,
    SINGLE_FILE,
    SafetensorsFile,
    ShardRecord,
    TensorEntry,
    read_header,
)
from dlm_bridge.convert.streaming import FileRegion, SliceRange, read_tensor
from dlm_bridge.errors import DlmBridgeError, one_line
from dlm_bridge.hub import inside
from dlm_bridge.mapping.dtypes import dtype_name

if TYPE_CHECKING:
    import torch  # imported where tensors are moved

BIN_FILE = "pytorch_model.bin"
BIN_INDEX = "pytorch_model.bin.index.json"


class HubReader:
    """The tensors of a Hub folder. Only headers are read on opening; a tensor is read when asked for.

    Raises DlmBridgeError for a file that is missing, outside the folder, truncated or corrupt, and where the index
    and the files do not name the same tensors.
    """

    def __init__(self, folder: Path, quantised: str | None = None) -> None:
        self.folder = folder
        self.pickled = not any(os.path.lexists(folder / name) for name in (SINGLE_FILE, SAFETENSORS_INDEX))
        self.pickled &= any(os.path.lexists(folder / name) for name in (BIN_FILE, BIN_INDEX))
        self._single, self._index = (BIN_FILE, BIN_INDEX) if self.pickled else (SINGLE_FILE, SAFETENSORS_INDEX)
        index = _read_index(folder, self._single, self._index)
        names = [self._single] if index is None else list(dict.fromkeys(index.values()))
        self.files: dict[str, SafetensorsFile] = {}
        for name in sorted(names):
            path = inside(folder, name)
            self.files[name] = read_bin(path) if self.pickled else read_header(path, quantised)
        self._where: dict[str, tuple[Path, TensorEntry]] = {}
        for file, content in self.files.items():
            for entry in content.entries:
                if entry.name in self._where:
                    other = self._where[entry.name][0].name
                    raise DlmBridgeError(f"{folder}: tensor {entry.name} is in two files, {other} and {file}")
                self._where[entry.name] = (content.path, entry)
        if index is not None:
            self._check_index(index)

    @property
    def names(self) -> list[str]:
        """The Hub names, in the order of files and bytes."""
        return list(self._where)

    def entry(self, name: str) -> TensorEntry:
        """dtype, shape and place of a tensor; KeyError where there is none."""
        return self._where[name][1]

    def stored_dtype(self, name: str) -> torch.dtype:
        """The dtype of a tensor's bytes in its file."""
        return self._where[name][1].dtype

    def read(self, name: str) -> torch.Tensor:
        """One tensor, in a buffer of its own. Raises DlmBridgeError for a file that has been truncated since."""
        path, entry = self._where[name]
        return read_tensor(path, entry.offset, entry.dtype, entry.shape)

    def read_elements(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Elements `start` to `stop` of a tensor in row-major order; only their bytes are read."""
        path, entry = self._where[name]
        return read_tensor(path, entry.offset + start * entry.dtype.itemsize, entry.dtype, (stop - start,))

    def region(self, name: str, part: SliceRange) -> FileRegion:
        """Where a tensor lies that is `part` of a slice, in `stored_dtype`."""
        path, entry = self._where[name]
        return FileRegion(path, entry.offset, part)

    def shards(self) -> list[ShardRecord]:
        """The folder's own shard map; none for pickled files, since these are not written."""
        if self.pickled:
            return []
        return [
            ShardRecord(file, content.metadata, tuple(entry.name for entry in content.entries))
            for file, content in self.files.items()
        ]

    def _check_index(self, index: dict[str, str]) -> None:
        path = self.folder / self._index
        for name, file in index.items():
            if name not in self._where or self._where[name][0] != self.files[file].path:
                raise DlmBridgeError(f"{path}: tensor {name} is not in {file}, where the index has it")
        for name, (file_path, _) in self._where.items():
            if name not in index:
                raise DlmBridgeError(f"{path}: tensor {name} of {file_path.name} is not in the index")


def _read_index(folder: Path, single: str, index_file: str) -> dict[str, str] | None:
    """Tensor name -> file, None for a folder with one file."""
    if not os.path.lexists(folder / index_file):
        if not os.path.lexists(folder / single):
            raise DlmBridgeError(f"{folder} is not a checkpoint: it has neither {single} nor {index_file}")
        return None
    path = inside(folder, index_file)
    try:
        index = json.loads(path.read_text("utf-8"))
        weight_map = index["weight_map"]
    except (OSError, ValueError, RecursionError, KeyError, TypeError) as error:
        raise DlmBridgeError(f"{path}: is not a safetensors index: {one_line(error)}") from None
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(f, str) for f in weight_map.values()):
        raise DlmBridgeError(f"{path}: 'weight_map' must map tensor names to files")
    if os.path.lexists(folder / single) and single not in weight_map.values():
        raise DlmBridgeError(
            f"{folder}: has both {single} and {index_file}, which does not name it: remove one of them"
        )
    first = {file: name for name, file in reversed(weight_map.items())}
    for file, name in first.items():
        kind = single.rpartition(".")[2]
        if not file.endswith(f".{kind}"):
            raise DlmBridgeError(f"{path}: tensor {name} is in '{file}', which is not a {kind} file")
        try:
            inside(folder, file)
        except DlmBridgeError as error:
            raise DlmBridgeError(f"{path} names '{file}': {error}") from None
    return weight_map


def read_bin(path: Path) -> SafetensorsFile:
    """The file's tensors in the order of their bytes, as a safetensors header would list them.

    Raises DlmBridgeError for what is not a state dict of weights, and as `read_torch_file` does.
    """
    from dlm_bridge.convert.formats.unpickler import FileTensor, read_torch_file
    from dlm_bridge.mapping.dtypes import SAFETENSORS_NAMES

    content = read_torch_file(path)
    if not isinstance(content, Mapping):
        raise DlmBridgeError(f"{path}: is not a dict of tensors")
    entries = []
    for name, tensor in content.items():
        if not isinstance(name, str) or not isinstance(tensor, FileTensor):
            raise DlmBridgeError(f"{path}: {name!r} is not a tensor: a weight file is a dict of tensors")
        if tensor.dtype not in SAFETENSORS_NAMES:
            raise DlmBridgeError(f"{path}: tensor {name} has dtype {dtype_name(tensor.dtype)}, no weight's dtype")
        entries.append(TensorEntry(name, SAFETENSORS_NAMES[tensor.dtype], tensor.shape, tensor.offset))
    entries.sort(key=lambda entry: (entry.offset, entry.nbytes))
    return SafetensorsFile(path, None, tuple(entries), entries[0].offset if entries else 0)

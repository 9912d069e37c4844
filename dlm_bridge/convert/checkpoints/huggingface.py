"""Hub folders: config.json, weights in one file or in shards with an index, side files.

Weights are safetensors. torch's pickled files (`pytorch_model*.bin`) are read where a folder has no others.
Block-scaled FP8 weights, as DeepSeek-V3 publishes them, are read as bfloat16: each block of a matrix has a scale.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from dlm_bridge.convert.checkpoint import ByNameCheckpoint, HubMetadata
from dlm_bridge.convert.formats.safetensors_file import (
    FP8,
    SAFETENSORS_INDEX,
    SINGLE_FILE,
    SafetensorsFile,
    ShardRecord,
    TensorEntry,
    read_header,
)
from dlm_bridge.convert.formats.unpickler import FileTensor, read_torch_file
from dlm_bridge.convert.manifest import ChangedFile, Manifest, TensorRecord, record_of
from dlm_bridge.convert.side_files import list_side_files
from dlm_bridge.convert.streaming import (
    FileRegion,
    SliceRange,
    range_digest,
    read_tensor,
)
from dlm_bridge.convert.workers import gc_paused
from dlm_bridge.errors import DlmBridgeError, one_line
from dlm_bridge.hub import ADAPTER_CONFIG, CONFIG_FILE, TRACKER, inside, read_config, resolve
from dlm_bridge.mapping.dtypes import SAFETENSORS_NAMES, dtype_name
from dlm_bridge.mapping.rules import ParamMapping
from dlm_bridge.models.families import find_family

BIN_FILE = "pytorch_model.bin"
BIN_INDEX = "pytorch_model.bin.index.json"
_OTHER_KINDS = {  # by a file that tells them, where there is no config.json
    ADAPTER_CONFIG: "a LoRA adapter: see dlm-bridge adapter",
    TRACKER: "a Megatron checkpoint already: dlm-bridge reshard or export it",
}
SCALE = "_scale_inv"  # beside "weight" stands "weight_scale_inv", by which the stored values are multiplied


class HubCheckpoint(ByNameCheckpoint):
    """A Hub folder. Raises DlmBridgeError for everything that HubReader does; what names the model is read later.

    With `dequantize_fp8` block-scaled FP8 weights are bfloat16 ones, and config.json no longer names the quantisation.
    """

    format = "huggingface"
    folder: Path
    root: Path

    def __init__(
        self,
        folder: Path,
        family: str | None = None,
        source: dict[str, Any] | None = None,
        dequantize_fp8: bool = False,
    ) -> None:
        super().__init__(str(folder))
        self.folder = self.root = folder
        self._family, self._source, self._dequantize = family, source, dequantize_fp8
        self.reader = DequantisedReader(folder, self._config()) if dequantize_fp8 else HubReader(folder)
        entries = [self.reader.entry(name) for name in self.reader.names]
        self._stored = {entry.name: (entry.dtype, entry.shape) for entry in entries}
        if isinstance(self.reader, DequantisedReader):
            self.notes.append(f"{len(self.reader.quantised)} FP8 tensors are dequantised to bfloat16")

    @classmethod
    def recognises(cls, folder: Path) -> bool:
        return (folder / CONFIG_FILE).is_file()

    def _config(self) -> dict[str, Any]:
        path = self.root / CONFIG_FILE
        return read_config(inside(self.root, CONFIG_FILE) if path.exists() else path)

    def _hub_metadata(self) -> HubMetadata:
        config, texts = self._config(), {}
        family = find_family(config, self._family, f"{self.root / CONFIG_FILE}")
        if self._dequantize:
            config = {key: value for key, value in config.items() if key != "quantization_config"}
            texts[CONFIG_FILE] = (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()
        files = list_side_files(self.root, self.reader.files)
        return HubMetadata(
            family=family,
            config=config,
            source=self._source or {"name": str(self.root), "revision": None},
            folder=self.root,
            files=files.kept,
            excluded=files.excluded,
            texts=texts,
            shards=self.reader.shards(),
            dtypes={name: dtype for name, (dtype, _) in self._stored.items()},
        )

    def _tensor(self, name: str) -> torch.Tensor:
        return self.reader.read(name)

    def streams(self, param: ParamMapping) -> bool:
        dtypes = {self.reader.stored_dtype(name) for name in param.hub_names}
        return param.hub_rows is not None and dtypes == {self.spec(param.hub_names[0])[0]}

    def regions(self, param: ParamMapping) -> list[FileRegion]:
        assert param.hub_rows is not None
        return [
            self.reader.region(name, SliceRange(rows))
            for name, rows in zip(param.hub_names, param.hub_rows, strict=True)
        ]

    def folders(self) -> list[Path]:
        return [self.root]

    def files(self) -> dict[str, int]:
        return {name: (self.root / name).stat().st_size for name in self.reader.files}

    def changed_files(self, manifest: Manifest) -> list[str]:
        if manifest.format != self.format:
            return []
        found = {shard.file: shard for shard in self.reader.shards()}
        headers = {name: range_digest(file.path, 0, file.start) for name, file in self.reader.files.items()}
        wrong = {shard.file for shard in manifest.shards if found.get(shard.file) != shard}
        return sorted(wrong | {name for name, recorded in manifest.files.items() if headers.get(name) != recorded})


class MadeOfHub(ByNameCheckpoint):
    """Another model, made of a Hub folder's tensors as they are read; a subclass lists its own in `_stored`.

    What the source's manifest records is compared with what was read: `_note` keeps the record of a source tensor for
    the first tensor that is made of it, and `_recorded_as` gives that one's name.
    """

    format = "huggingface"

    def __init__(self, source: HubCheckpoint, hub: HubMetadata) -> None:
        super().__init__(source.where, hub)
        self._source = source
        self._read: dict[str, TensorRecord] = {}

    def _note(self, name: str, stored: torch.Tensor) -> None:
        self._read[name] = record_of(stored)

    def _recorded_as(self, name: str) -> str:
        return name

    @cached_property
    def record(self) -> Manifest | None:
        manifest = self._source.record
        if manifest is None:
            return None
        return replace(manifest, tensors={self._recorded_as(name): found for name, found in manifest.tensors.items()})

    def stored_record(self, name: str) -> TensorRecord | None:
        return self._read.pop(name, None)

    def damaged_files(self, workers: int | None = None) -> list[ChangedFile]:
        return self._source.damaged_files(workers)

    def folders(self) -> list[Path]:
        return self._source.folders()


@gc_paused()
def open_hub(
    name: str | Path, revision: str | None = None, family: str | None = None, dequantize_fp8: bool = False
) -> HubCheckpoint:
    """Open a local folder or a Hub id. Raises DlmBridgeError."""
    folder = resolve(name, revision)
    if not (folder / CONFIG_FILE).exists():
        for file, what in _OTHER_KINDS.items():
            if (folder / file).is_file():
                raise DlmBridgeError(f"{folder} has no {CONFIG_FILE}: it is {what}")
    is_local = Path(name).expanduser().is_dir()
    source = {"name": str(folder.absolute()) if is_local else str(name), "revision": revision}
    if folder.parent.name == "snapshots":  # the Hub's cache names a snapshot by its commit
        source["revision"] = folder.name
    return HubCheckpoint(folder, family, source, dequantize_fp8).bind()


class HubReader:
    """The tensors of a Hub folder. Only headers are read on opening; a tensor is read when asked for.

    Raises DlmBridgeError for a file that is missing, outside the folder, truncated or corrupt, and where the index
    and the files do not name the same tensors.
    """

    def __init__(self, folder: Path, fp8: bool = False) -> None:
        self.folder = folder
        self.pickled = not any(os.path.lexists(folder / name) for name in (SINGLE_FILE, SAFETENSORS_INDEX))
        self.pickled &= any(os.path.lexists(folder / name) for name in (BIN_FILE, BIN_INDEX))
        self._single, self._index = (BIN_FILE, BIN_INDEX) if self.pickled else (SINGLE_FILE, SAFETENSORS_INDEX)
        index = _read_index(folder, self._single, self._index)
        names = [self._single] if index is None else list(dict.fromkeys(index.values()))
        self.files: dict[str, SafetensorsFile] = {}
        for name in sorted(names):
            path = inside(folder, name)
            self.files[name] = read_bin(path) if self.pickled else read_header(path, fp8)
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
    content = read_torch_file(path)
    if not isinstance(content, Mapping):
        raise DlmBridgeError(f"{path}: is not a dict of tensors")
    entries = []
    for name, tensor in content.items():
        if not isinstance(name, str) or not isinstance(tensor, FileTensor):
            raise DlmBridgeError(f"{path}: {name!r} is not a tensor: a weight file is a dict of tensors")
        if tensor.dtype not in SAFETENSORS_NAMES:
            raise DlmBridgeError(f"{path}: tensor {name} has dtype {dtype_name(tensor.dtype)}, no weight's dtype")
        entries.append(TensorEntry(name, tensor.dtype, tensor.shape, tensor.offset))
    entries.sort(key=lambda entry: (entry.offset, entry.nbytes))
    return SafetensorsFile(path, None, tuple(entries), entries[0].offset if entries else 0)


class DequantisedReader(HubReader):
    """A HubReader that gives FP8 weights multiplied by their scales, rounded to bfloat16, and no scales.

    `config` is config.json's dict. Raises DlmBridgeError as HubReader does, where there is no FP8 weight, and where
    weights and scales do not belong together.
    """

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        super().__init__(folder, fp8=True)
        self._raw = {entry.name: entry for file in self.files.values() for entry in file.entries}
        self.quantised = {name for name, entry in self._raw.items() if entry.dtype == FP8}
        if not self.quantised:
            raise DlmBridgeError(f"{folder}: no tensor is FP8: leave --dequantize-fp8 out")
        self._block = _block_size(folder, config)
        self._scales = {name + SCALE for name in self.quantised}
        for name in self.quantised:
            self._check(name)
        for name in self._raw:
            if name.endswith(SCALE) and name not in self._scales:
                raise DlmBridgeError(f"{folder}: tensor {name} is a scale, but {name.removesuffix(SCALE)} is not FP8")

    @property
    def names(self) -> list[str]:
        """The Hub names but for the scales."""
        return [name for name in self._raw if name not in self._scales]

    def entry(self, name: str) -> TensorEntry:
        """As in HubReader, with the dtype that `read` gives."""
        entry = self._raw[name]
        return replace(entry, dtype=torch.bfloat16) if entry.dtype == FP8 else entry

    def read(self, name: str) -> torch.Tensor:
        """One tensor, dequantised where it is FP8."""
        if name not in self.quantised:
            return super().read(name)
        return dequantise(super().read(name), super().read(name + SCALE), self._block)

    def shards(self) -> list[ShardRecord]:
        """None: the files that hold the dequantised weights are other ones."""
        return []

    def _check(self, name: str) -> None:
        if name + SCALE not in self._raw:
            raise DlmBridgeError(f"{self.folder}: tensor {name} is FP8, but its scales {name + SCALE} are missing")
        shape, scale = self._raw[name].shape, self._raw[name + SCALE]
        blocks = tuple(-(-size // block) for size, block in zip(shape, self._block, strict=False))
        if len(shape) != 2 or scale.shape != blocks or scale.dtype != torch.float32:
            raise DlmBridgeError(
                f"{self.folder}: tensor {name + SCALE} is {scale.dtype} {list(scale.shape)}, blocks of "
                f"{list(self._block)} in {list(shape)} ask for float32 {list(blocks)}"
            )


def dequantise(weight: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """bfloat16 [R, C] of an FP8 weight [R, C] and its scales [R / block, C / block], rounded up."""
    factors = scale.repeat_interleave(block[1], 1)[:, : weight.shape[1]]
    result = torch.empty(weight.shape, dtype=torch.bfloat16)
    for number, factor in enumerate(factors):  # a row of blocks at a time stays in the processor's cache
        rows = slice(number * block[0], (number + 1) * block[0])
        result[rows] = weight[rows].float() * factor
    return result


def _block_size(folder: Path, config: dict[str, Any]) -> tuple[int, int]:
    found = config.get("quantization_config")
    block = found.get("weight_block_size") if isinstance(found, dict) else None
    if not isinstance(block, list) or len(block) != 2 or not all(type(n) is int and n > 0 for n in block):
        raise DlmBridgeError(
            f"{folder / 'config.json'}: --dequantize-fp8 needs quantization_config.weight_block_size, two numbers"
        )
    return block[0], block[1]

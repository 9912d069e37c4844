"""Hub folders: config.json, weights in one file or in shards with an index, side files.

Weights are safetensors. torch's pickled files (`pytorch_model*.bin`) are read where a folder has no others; quantised
ones as bfloat16, on request.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlm_bridge.convert.checkpoint import ByNameCheckpoint, HubMetadata, RawTensor, TensorSpec
from dlm_bridge.convert.formats.hub_weights import HubReader
from dlm_bridge.convert.manifest import ChangedFile, Manifest, TensorRecord, record_of
from dlm_bridge.convert.side_files import list_side_files
from dlm_bridge.convert.streaming import (
    FileRegion,
    SliceRange,
    range_digest,
)
from dlm_bridge.convert.workers import gc_paused
from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.hub import ADAPTER_CONFIG, CONFIG_FILE, TRACKER, inside, read_config, resolve
from dlm_bridge.mapping.rules import ParamMapping
from dlm_bridge.models.families import find_family

if TYPE_CHECKING:
    import torch  # imported where tensors are moved: headers alone must not cost that

_OTHER_KINDS = {  # by a file that tells them, where there is no config.json
    ADAPTER_CONFIG: "a LoRA adapter: see dlm-bridge adapter",
    TRACKER: "a Megatron checkpoint already: dlm-bridge reshard or export it",
}


class HubCheckpoint(ByNameCheckpoint):
    """A Hub folder. Raises DlmBridgeError for everything that HubReader does; what names the model is read later.

    With `dequantize_fp8` block-scaled FP8 weights are bfloat16 ones, with `dequantize_mxfp4` those in MXFP4, and
    config.json no longer names the quantisation.
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
        dequantize_mxfp4: bool = False,
    ) -> None:
        super().__init__(str(folder))
        self.folder = self.root = folder
        self._family, self._source, self._dequantize = family, source, dequantize_fp8 or dequantize_mxfp4
        if dequantize_fp8 and dequantize_mxfp4:
            raise DlmBridgeError("--dequantize-fp8 and --dequantize-mxfp4: a checkpoint is one of them")
        if not self._dequantize:
            self.reader = HubReader(folder)
        else:
            from dlm_bridge.convert.checkpoints.dequantised import FP8Reader, MXFP4Reader

            self.reader = reader = FP8Reader(folder, self._config()) if dequantize_fp8 else MXFP4Reader(folder)
            self.notes.append(f"{len(reader.quantised)} {reader.kind} tensors are dequantised to bfloat16")
        names = self.reader.names
        self._dtypes = Computed(names, lambda name: self.reader.entry(name).dtype)
        self._stored = Computed(names, lambda name: (self._dtypes[name], self.shape(name)))

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
            dtypes=self._dtypes,
        )

    def shape(self, name: str) -> tuple[int, ...]:
        return self.reader.entry(name).shape

    def described(self, name: str) -> RawTensor:
        entry = self.reader.entry(name)
        return RawTensor(entry.dtype_name, entry.shape, entry.nbytes)

    def _tensor(self, name: str) -> torch.Tensor:
        return self.reader.read(name)

    def read_elements(self, name: str, start: int, stop: int) -> torch.Tensor:
        return self.reader.read_elements(name, start, stop)

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


class Computed(Mapping[str, Any]):
    """Names with values that are computed when they are asked for."""

    def __init__(self, names: Collection[str], value: Callable[[str], Any]) -> None:
        self._names, self._value = dict.fromkeys(names), value

    def __getitem__(self, name: str) -> Any:
        if name not in self._names:
            raise KeyError(name)
        return self._value(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names


class MadeOfHub(ByNameCheckpoint):
    """Another model, made of a Hub folder's tensors as they are read; a subclass lists its own in `_stored`.

    What the source's manifest records is compared with what was read: `_note` keeps the record of a source tensor for
    the first tensor that is made of it, and `_recorded_as` gives that one's name.
    """

    format = "huggingface"
    _stored: dict[str, TensorSpec]

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
    name: str | Path,
    revision: str | None = None,
    family: str | None = None,
    dequantize_fp8: bool = False,
    dequantize_mxfp4: bool = False,
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
    return HubCheckpoint(folder, family, source, dequantize_fp8, dequantize_mxfp4).bind()

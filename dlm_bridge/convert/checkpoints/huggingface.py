"""Hub folders: config.json, weights in one file or in shards with an index, side files.

Weights are safetensors. torch's pickled files (`pytorch_model*.bin`) are read if a folder has no safetensors.
Quantised weights are read as bfloat16 on request.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from dlm_bridge.convert.checkpoint import ByNameCheckpoint, Checkpoint, HubMetadata, RawTensor, TensorSpec
from dlm_bridge.convert.formats.hub_weights import (
    METADATA,
    SAFETENSORS_INDEX,
    HubReader,
    HubWriter,
    ShardFile,
    ShardRecord,
    build_header,
    index_text,
)
from dlm_bridge.convert.manifest import FILE_DIGESTS, MANIFEST, ChangedFile, Manifest, TensorRecord, record_of
from dlm_bridge.convert.settings import HubSourceSettings
from dlm_bridge.convert.streaming import FileRegion, SliceRange
from dlm_bridge.errors import CheckpointError, SettingError, counted
from dlm_bridge.files.reading import file_digest, gc_paused
from dlm_bridge.hub import ADAPTER_CONFIG, CONFIG_FILE, TRACKER, inside, quantization_method, read_config, resolve
from dlm_bridge.mapping.dtypes import QUANTISED_DTYPES
from dlm_bridge.mapping.rules import ParamMapping
from dlm_bridge.models.families import FamilySpec, families, find_family

if TYPE_CHECKING:
    import torch  # imported where tensors are moved: headers alone must not cost that

_LEFT_FOLDERS = {".git", "original"}
_DOWNLOAD_CACHE = (".cache", "huggingface")  # bookkeeping of `hf download --local-dir`
_WEIGHT_SUFFIXES = {
    ".safetensors", ".pt", ".pth", ".ckpt", ".gguf", ".ggml", ".h5", ".msgpack", ".onnx", ".ot", ".tflite", ".distcp",
    ".nemo", ".npz",
}  # fmt: skip
_WEIGHT_STEMS = ("pytorch_model", "model", "consolidated", "adapter_model", "diffusion_pytorch_model", "weights")
_TORCH_MAGIC = (b"PK\x03\x04", b"\x80\x02", b"\x80\x04")
HUB_FOLDER = "hf"  # folder of the Hub's side files in a Megatron checkpoint's root
CARRIED_FILE = "carried.safetensors"
_OTHER_KINDS = {  # folders without config.json, by a file that identifies them
    ADAPTER_CONFIG: "a LoRA adapter: see dlm-bridge adapter",
    TRACKER: "a Megatron checkpoint already: dlm-bridge reshard or export it",
}


class HubCheckpoint(ByNameCheckpoint):
    """Hub folder. Opening it reads the weight files' headers; config.json is read when the model is identified.

    Args:
        dequantize_fp8: read block-scaled FP8 weights as bfloat16, and remove the quantisation from config.json.
        dequantize_mxfp4: the same for MXFP4.
        reader: another reader that dequantises the folder's weights.

    Raises:
        CheckpointError: as HubReader.
        SettingError: no weight has the quantisation asked for.
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
        reader: HubReader | None = None,
    ) -> None:
        super().__init__(str(folder))
        self.folder = self.root = folder
        self._family, self._source = family, source
        self._dequantize = dequantize_fp8 or dequantize_mxfp4 or reader is not None
        if dequantize_fp8 and dequantize_mxfp4:
            raise SettingError("dequantize_fp8", "contradicts `dequantize_mxfp4`: give one of them")
        self._compressed = not self._dequantize and quantization_method(folder) == "compressed-tensors"
        if reader is not None:
            self.reader = reader
        elif not self._dequantize:
            self.reader = HubReader(folder, QUANTISED_DTYPES if self._compressed else ())
        else:
            from dlm_bridge.convert.checkpoints.dequantised import FP8Reader, MXFP4Reader

            self.reader = reader = FP8Reader(folder, self._config()) if dequantize_fp8 else MXFP4Reader(folder)
            kind, number = f"{reader.kind} tensor", len(reader.quantised)
            self.notes.append(f"{counted(number, f'{kind} is', f'{kind}s are')} dequantised to bfloat16")
        names = self.reader.names
        self._dtypes = ComputedMapping(names, lambda name: self.reader.entry(name).dtype)
        self._stored = ComputedMapping(names, lambda name: (self._dtypes[name], self.shape(name)))

    @classmethod
    def recognises(cls, folder: Path) -> bool:
        return (folder / CONFIG_FILE).is_file()

    def _config(self) -> dict[str, Any]:
        path = self.root / CONFIG_FILE
        return read_config(inside(self.root, CONFIG_FILE) if path.exists() else path)

    def check(self) -> list[str]:
        """Extends Checkpoint: a folder of compressed-tensors can be verified and sampled from, but not converted."""
        if self._compressed:
            raise CheckpointError(self.where, "its weights are quantised: use the checkpoint that it was made from")
        return super().check()

    def _hub_metadata(self) -> HubMetadata:
        config, texts = self._config(), {}
        family = find_family(config, self._family, f"{self.root / CONFIG_FILE}")
        if self._dequantize:
            config = {key: value for key, value in config.items() if key != "quantization_config"}
            texts[CONFIG_FILE] = json_bytes(config)
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
        headers = {name: file_digest(file.path, 0, file.start) for name, file in self.reader.files.items()}
        wrong = {shard.file for shard in manifest.shards if found.get(shard.file) != shard}
        return sorted(wrong | {name for name, recorded in manifest.files.items() if headers.get(name) != recorded})


class ComputedMapping(Mapping[str, Any]):
    """Mapping of fixed names whose values are computed at each access."""

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


class ConvertedCheckpoint(ByNameCheckpoint):
    """New model whose tensors are computed from a Hub folder's as they are read. A subclass lists them in `_stored`.

    Source tensors are compared with the source's manifest: `_note` stores the digest record of one under the first
    tensor computed from it, and `_recorded_as` returns that tensor's name.

    Args:
        config: the new config.json.
        texts: other side files that change.
    """

    format = "huggingface"
    _stored: dict[str, TensorSpec]

    def __init__(
        self,
        source: HubCheckpoint,
        target: FamilySpec,
        config: dict[str, Any],
        texts: dict[str, bytes] | None = None,
        shards: Iterable[ShardRecord] = (),
    ) -> None:
        texts = {**(texts or {}), CONFIG_FILE: json_bytes(config)}
        hub = HubMetadata(
            family=target,
            config=config,
            source=source.hub.source,
            folder=source.folder,
            files=tuple(name for name in source.hub.files if name not in texts),
            excluded=source.hub.excluded,
            texts=texts,
            shards=list(shards),
        )
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


def json_bytes(value: dict[str, Any]) -> bytes:
    """JSON as the Hub's side files have it, in UTF-8."""
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


@gc_paused()
def open_hub(name: str | os.PathLike[str], settings: HubSourceSettings) -> HubCheckpoint:
    """Open a local folder or a Hub id. Raises CheckpointError and SettingError."""
    folder = resolve(name, settings.revision)
    if not (folder / CONFIG_FILE).exists():
        for file, what in _OTHER_KINDS.items():
            if (folder / file).is_file():
                raise CheckpointError(folder, f"has no {CONFIG_FILE}: it is {what}")
    is_local = Path(name).expanduser().is_dir()
    source = {"name": str(folder.absolute()) if is_local else os.fspath(name), "revision": settings.revision}
    if folder.parent.name == "snapshots":  # in the Hub's cache a snapshot's name is its commit
        source["revision"] = folder.name
    checkpoint = HubCheckpoint(folder, settings.family, source, settings.dequantize_fp8, settings.dequantize_mxfp4)
    return checkpoint.bind()


@dataclass(frozen=True)
class SideFiles:
    """Files beside the weights, as POSIX paths relative to the folder."""

    kept: tuple[str, ...]
    excluded: tuple[str, ...]  # a folder ends with "/"


def list_side_files(folder: Path, weights: Collection[str]) -> SideFiles:
    """List the side files of a Hub folder, whose weight files are `weights`.

    Raises:
        CheckpointError: a link leaves the folder, or an entry is not a plain file.
    """
    kept: list[str] = []
    excluded: list[str] = []
    for directory, subfolders, files in os.walk(folder):
        below = PurePosixPath(Path(directory).relative_to(folder).as_posix())
        for name in sorted(subfolders):
            path = below / name
            if name in _LEFT_FOLDERS or path.parts == _DOWNLOAD_CACHE:
                subfolders.remove(name)
                excluded.append(f"{path}/")
            elif (folder / path).is_symlink():
                raise CheckpointError(folder / path, "is a link to a folder, which cannot be copied: remove it")
        subfolders.sort()
        for name in sorted(files):
            path = below / name
            if str(path) in (*weights, MANIFEST, FILE_DIGESTS):
                continue
            if _is_weight_file(folder, path):
                excluded.append(str(path))
            else:
                inside(folder, str(path))
                kept.append(str(path))
    return SideFiles(tuple(kept), tuple(excluded))


def copy_files(source: Path, names: Iterable[str], target: Path) -> None:
    """Copy files byte for byte (links become files), with their folders."""
    for name in names:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, target / name)


def _is_weight_file(folder: Path, path: PurePosixPath) -> bool:
    """True for weight files, by suffix; a ".bin" in a sub-folder may be an asset, so its name and magic decide."""
    suffix = path.suffix.lower()
    if suffix in _WEIGHT_SUFFIXES:
        return True
    if path.name.endswith((".safetensors.index.json", ".bin.index.json")):
        return path.as_posix() != SAFETENSORS_INDEX
    if suffix != ".bin":
        return False
    if len(path.parts) == 1 or path.name.startswith(_WEIGHT_STEMS):
        return True
    with inside(folder, str(path)).open("rb") as stream:
        return stream.read(4).startswith(_TORCH_MAGIC)


def write_side_files(source: Checkpoint, folder: Path, dtype: torch.dtype | None, index: bytes | None) -> None:
    """Write the side files byte for byte, config.json last because it makes the folder a checkpoint.

    In config.json the dtype field follows a cast, and a spelling that only transformers reads becomes the Hub's.
    `index` replaces the source's index.
    """
    hub = source.hub
    if hub.folder is not None:
        copy_files(hub.folder, [name for name in hub.files if name not in (CONFIG_FILE, SAFETENSORS_INDEX)], folder)
    for name, text in hub.texts.items():
        if name != CONFIG_FILE:
            (folder / name).write_bytes(text)
    if index is not None:
        (folder / SAFETENSORS_INDEX).write_bytes(index)
    (folder / CONFIG_FILE).write_bytes(hub.config_bytes(dtype))


def publish_config(folder: Path) -> None:
    """Rewrite the config.json of `save_pretrained` in the Hub's spelling."""
    path = folder / CONFIG_FILE
    if not path.is_file():  # an adapter's folder
        return
    text = path.read_text(encoding="utf-8")
    names = json.loads(text).get("architectures") or ()
    for family in families():
        if set(names) & set(family.architectures):
            path.write_text(family.published_config(text), encoding="utf-8")


def side_file_digests(folder: Path, skip: Collection[str]) -> dict[str, str]:
    """Digests by path of every file below `folder`, except those in `skip` (the weights)."""
    found = {}
    for directory, subfolders, files in os.walk(folder):
        subfolders.sort()
        for name in sorted(files):
            path = Path(directory, name)
            key = path.relative_to(folder).as_posix()
            if key not in skip:
                found[key] = file_digest(path)
    return found


def index_bytes(
    source: Checkpoint, plans: Sequence[ShardFile], specs: dict[str, TensorSpec], like_source: bool
) -> bytes | None:
    """model.safetensors.index.json of the planned files; None for one file whose source has no index.

    The source's own index is kept byte for byte if files (`like_source`) and sizes are the same.
    """
    old = None
    if SAFETENSORS_INDEX in source.hub.files and source.hub.folder is not None:
        old = (source.hub.folder / SAFETENSORS_INDEX).read_bytes()
    if not like_source:
        return index_text(plans, _parsed_index(old)).encode() if len(plans) > 1 else None
    if old is None:
        return index_text(plans, {}).encode() if len(plans) > 1 else None
    same = all(source.hub.dtypes.get(name) == dtype for name, (dtype, _) in specs.items())
    text = index_text(plans, _parsed_index(old)).encode()
    same = same or _parsed_index(old).get("metadata") == _parsed_index(text)["metadata"]
    return old if same else text


def write_passthrough(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write passthrough tensors that are not copies into one safetensors file, if there are any."""
    if not tensors:
        return
    header, entries = build_header(METADATA, [(name, t.dtype, t.shape) for name, t in tensors.items()])
    writer = HubWriter(path.parent, [ShardFile(CARRIED_FILE, METADATA, header, entries)])
    for name, tensor in tensors.items():
        writer.write(name, tensor)
    writer.finish()


def _parsed_index(index: bytes | None) -> dict[str, Any]:
    if index is None:
        return {}
    try:
        value = json.loads(index)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}

"""Files of a checkpoint that are not weights: side files, config.json, the index, passthrough tensors."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from dlm_bridge.convert.checkpoint import Checkpoint, TensorSpec
from dlm_bridge.convert.formats.hub_weights import (
    METADATA,
    SAFETENSORS_INDEX,
    HubWriter,
    ShardPlan,
    ShardRecord,
    build_header,
    index_text,
    plan_by_size,
    plan_like,
)
from dlm_bridge.convert.manifest import FILE_DIGESTS, MANIFEST
from dlm_bridge.convert.streaming import file_digest
from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.hub import CONFIG_FILE, inside
from dlm_bridge.models.families import families

if TYPE_CHECKING:
    import torch  # imported where tensors are moved

_LEFT_FOLDERS = {".git", "original"}
_DOWNLOAD_CACHE = (".cache", "huggingface")  # what `hf download --local-dir` notes for itself
_WEIGHT_SUFFIXES = {
    ".safetensors", ".pt", ".pth", ".ckpt", ".gguf", ".ggml", ".h5", ".msgpack", ".onnx", ".ot", ".tflite", ".distcp",
    ".nemo", ".npz",
}  # fmt: skip
_WEIGHT_STEMS = ("pytorch_model", "model", "consolidated", "adapter_model", "diffusion_pytorch_model", "weights")
_TORCH_MAGIC = (b"PK\x03\x04", b"\x80\x02", b"\x80\x04")
HUB_FOLDER = "hf"  # in a Megatron checkpoint's root: the Hub's side files
CARRIED_FILE = "carried.safetensors"
SHARD_SIZE = 5_000_000_000  # bytes; where neither a shard map nor --shard-size says more
Specs = dict[str, TensorSpec]


@dataclass(frozen=True)
class SideFiles:
    """Paths below the folder, with "/" between the parts."""

    kept: tuple[str, ...]
    excluded: tuple[str, ...]  # a folder ends with "/"


def list_side_files(folder: Path, weights: Collection[str]) -> SideFiles:
    """The side files of a Hub folder whose weights are the files `weights`.

    Raises DlmBridgeError for a link that leads out of the folder and for what is not a plain file.
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
                raise DlmBridgeError(f"{folder / path}: a link to a folder cannot be carried over: remove it")
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
    """Weight files go by their suffix; a ".bin" in a sub-folder may also be an asset, so its name and head decide."""
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
    """Write the side files byte for byte; config.json, which makes the folder a checkpoint, comes last.

    Only the dtype field of config.json follows a cast, and a spelling that transformers alone reads becomes the Hub's.
    `index` takes the place of the source's own.
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
    """Give the config.json that `save_pretrained` has written to a folder the spelling of the Hub."""
    path = folder / CONFIG_FILE
    if not path.is_file():  # there is none beside an adapter
        return
    text = path.read_text(encoding="utf-8")
    names = json.loads(text).get("architectures") or ()
    for family in families():
        if set(names) & set(family.architectures):
            path.write_text(family.published_config(text), encoding="utf-8")


def side_file_digests(folder: Path, skip: Collection[str]) -> dict[str, str]:
    """Digests of every file below `folder` but those in `skip` (the weights), by path."""
    found = {}
    for directory, subfolders, files in os.walk(folder):
        subfolders.sort()
        for name in sorted(files):
            path = Path(directory, name)
            key = path.relative_to(folder).as_posix()
            if key not in skip:
                found[key] = file_digest(path)
    return found


def shard_plans(source: Checkpoint, specs: Specs, shard_size: int | None) -> list[ShardPlan]:
    """The safetensors files to write: by size where asked, else the Hub's own map, else by the Hub's default size.

    Raises DlmBridgeError for a shard map that does not name the model's tensors, each once, in plain files.
    """
    names = source.hub_names()
    if shard_size is not None and shard_size < 1:
        raise DlmBridgeError(f"--shard-size must be at least one byte, not {shard_size}")
    if shard_size is not None or not source.hub.shards:
        return plan_by_size({name: specs[name] for name in names}, shard_size or SHARD_SIZE)
    check_shard_map(source.where, source.hub.shards, names)
    return plan_like(source.hub.shards, specs)


def check_shard_map(where: str, shards: Sequence[ShardRecord], names: Sequence[str]) -> None:
    """Raise DlmBridgeError unless the map names exactly `names` and stays inside the folder."""
    listed = [name for shard in shards for name in shard.tensors]
    if sorted(listed) != sorted(names):
        odd = sorted(set(listed) ^ set(names)) or sorted(name for name in set(listed) if listed.count(name) > 1)
        raise DlmBridgeError(f"{where}: shard map and model do not agree on tensor {odd[0]}: give --shard-size")
    for shard in shards:
        path = PurePosixPath(shard.file)
        if path.is_absolute() or ".." in path.parts or "\\" in shard.file or path.suffix != ".safetensors":
            raise DlmBridgeError(f"{where}: its shard map names the file '{shard.file}', outside the output")


def index_bytes(source: Checkpoint, plans: Sequence[ShardPlan], specs: Specs, like_source: bool) -> bytes | None:
    """model.safetensors.index.json of the files in `plans`, None where there is one file and the source had no index.

    It is the source's own, byte for byte, where files (`like_source`) and sizes are.
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
    """The passthrough tensors that are copies of nothing, in one safetensors file; no file where there are none."""
    if not tensors:
        return
    header, entries = build_header(METADATA, [(name, t.dtype, t.shape) for name, t in tensors.items()])
    writer = HubWriter(path.parent, [ShardPlan(CARRIED_FILE, METADATA, header, entries)])
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

"""`dlm_bridge.json`: what a written checkpoint is, where it came from, and a digest of every tensor and side file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import xxhash

from dlm_bridge.convert.tensors import WEIGHT_DTYPES, bytes_digest
from dlm_bridge.errors import DlmBridgeError, one_line

FILE_NAME = "dlm_bridge.json"
FORMAT_VERSION = 1
_DIGEST, _END = b',\n "digest": "', b'"\n}\n'  # the file's last entry is the xxh3_128 of all bytes before it


@dataclass(frozen=True)
class TensorRecord:
    """One Hub tensor: "bfloat16", (rows, columns), xxh3_128 of its raw bytes."""

    dtype: str
    shape: tuple[int, ...]
    digest: str


@dataclass(frozen=True)
class ShardRecord:
    """One safetensors file of the Hub source: its name, its metadata, its tensors in the order of their bytes."""

    file: str
    metadata: Mapping[str, str] | None
    tensors: tuple[str, ...]


@dataclass
class Manifest:
    """The content of dlm_bridge.json. `config` is the Hub's config.json; `layout` is None for a Hub folder."""

    format: str  # "torch_dist", "torch" (Megatron's legacy one) or "huggingface"
    family: str
    config: dict[str, Any]
    dtype: str  # "keep", or what the weights were cast to
    tensors: dict[str, TensorRecord]
    source: dict[str, Any]  # name, revision, digest of its tensors
    layout: dict[str, Any] | None = None
    iteration: str | None = None  # folder of a Megatron checkpoint that `tensors` describes, "iter_0000000"
    vocab_multiple: int | None = None
    shards: list[ShardRecord] = field(default_factory=list)
    side_files: dict[str, str] = field(default_factory=dict)  # path below the folder -> digest
    files: dict[str, str] = field(default_factory=dict)  # weight file -> digest of its items' digests, or its header's
    left_out: list[str] = field(default_factory=list)
    carried: list[str] = field(default_factory=list)
    format_version: int = FORMAT_VERSION
    tool: str = ""

    def write(self, folder: Path) -> None:
        """Write it as `folder`/dlm_bridge.json."""
        self.tool = self.tool or tool_version()
        text = json.dumps(asdict(self), indent=1, ensure_ascii=False).removesuffix("\n}").encode()
        tail = _DIGEST + bytes_digest(text).encode() + _END
        (folder / FILE_NAME).write_bytes(text + tail)


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a checkpoint folder, None where it has none. Raises DlmBridgeError for a broken one."""
    path = folder / FILE_NAME
    try:
        data = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise DlmBridgeError(f"{path}: cannot be read: {one_line(error)}") from None
    if not isinstance(data, dict) or data.get("format_version") != FORMAT_VERSION:
        found = data.get("format_version") if isinstance(data, dict) else None
        raise DlmBridgeError(f"{path}: format version {found!r}, this dlm-bridge reads {FORMAT_VERSION}")
    try:
        return _parse(data)
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise DlmBridgeError(f"{path}: is not a dlm-bridge manifest: {one_line(error)}") from None


def tool_version() -> str:
    """ "dlm-bridge 0.1.0"."""
    try:
        return f"dlm-bridge {version('dlm-bridge')}"
    except PackageNotFoundError:
        return "dlm-bridge unknown"


def is_intact(folder: Path) -> bool:
    """Whether every byte of `folder`/dlm_bridge.json is as it was written."""
    text, found, tail = (folder / FILE_NAME).read_bytes().rpartition(_DIGEST)
    return bool(found) and tail == bytes_digest(text).encode() + _END


def combined_digest(tensors: dict[str, TensorRecord]) -> str:
    """One digest of a whole set of tensors, independent of their order and files."""
    state = xxhash.xxh3_128()
    for name in sorted(tensors):
        record = tensors[name]
        state.update(f"{name} {record.dtype} {list(record.shape)} {record.digest}\n".encode())
    return state.hexdigest()


def _parse(data: dict[str, Any]) -> Manifest:
    known = {item.name for item in fields(Manifest)}
    values = {key: value for key, value in data.items() if key in known}
    values["tensors"] = {
        name: TensorRecord(record["dtype"], tuple(record["shape"]), record["digest"])
        for name, record in data["tensors"].items()
    }
    values["shards"] = [
        ShardRecord(shard["file"], shard["metadata"], tuple(shard["tensors"])) for shard in data["shards"]
    ]
    manifest = Manifest(**values)
    for name, record in manifest.tensors.items():
        if record.dtype not in WEIGHT_DTYPES:
            raise ValueError(f"tensor {name} has dtype {record.dtype}")
    for kind, value in (
        ("config", manifest.config),
        ("source", manifest.source),
        ("side_files", manifest.side_files),
        ("files", manifest.files),
    ):
        if not isinstance(value, dict):
            raise TypeError(f"{kind} is not an object")
    return manifest

"""Manifests of written checkpoints.

`dlm_bridge.json` of a conversion: what the checkpoint is, where it came from, and a digest of every tensor and side
file, taken as the tensors pass through. `dlm_bridge_files.json` of a training checkpoint, of either engine: a digest
of each file, taken by the rank that wrote it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, get_args, get_origin, get_type_hints

import xxhash

from dlm_bridge.convert.formats.hub_weights import ShardRecord
from dlm_bridge.convert.streaming import Sink, tensor_bands
from dlm_bridge.convert.workers import Progress, run_tasks, worker_count
from dlm_bridge.errors import DlmBridgeError, one_line
from dlm_bridge.files.reading import bytes_digest, file_digest, read_json
from dlm_bridge.hub import CONFIG_FILE, HUB_ID, checkpoint_folder, from_hub, read_config
from dlm_bridge.mapping.dtypes import STORED_DTYPES, cast, dtype_name

if TYPE_CHECKING:
    import torch  # imported where tensors are moved

MANIFEST = "dlm_bridge.json"
FORMAT_VERSION = 1
_DIGEST, _END = b',\n "digest": "', b'"\n}\n'  # the file's last entry is the xxh3_128 of all bytes before it
FILE_DIGESTS = "dlm_bridge_files.json"
ACCEPT = "--accept-changed-tensors"
_NAMED = 3  # tensors in a message


@dataclass(frozen=True)
class TensorRecord:
    """One Hub tensor: "bfloat16", (rows, columns), xxh3_128 of its raw bytes, how many values are NaN or infinite."""

    dtype: str
    shape: tuple[int, ...]
    digest: str
    non_finite: int = field(default=0, compare=False)  # what equal digests imply; manifests before it do not say

    @classmethod
    def parse(cls, data: Mapping[str, Any]) -> TensorRecord:
        """The inverse of `as_dict`. Raises KeyError and TypeError."""
        return cls(data["dtype"], tuple(data["shape"]), data["digest"], int(data.get("non_finite", 0)))

    def as_dict(self) -> dict[str, Any]:
        """Plain values; `non_finite` only where there are any."""
        values = asdict(self)
        return values if self.non_finite else {key: values[key] for key in ("dtype", "shape", "digest")}


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
    shared: dict[str, str] = field(default_factory=dict)  # carried tensor -> the trained one that is given back for it
    # Tensor or file of the source -> what was "recorded" and what "found", where they differed and were accepted.
    changed: dict[str, dict[str, Any]] = field(default_factory=dict)
    fingerprint: str = ""  # of source and options, by which a resume knows that it was finished
    format_version: int = FORMAT_VERSION
    tool: str = ""

    def notes(self) -> list[str]:
        """What a report says of the tensors: NaN and infinite values, and changes of the source that were accepted."""
        return [
            *non_finite_note({name: record.non_finite for name, record in self.tensors.items()}),
            *self.changed_note(),
        ]

    def changed_note(self) -> list[str]:
        """The line about the second alone; none where there were none."""
        if not self.changed:
            return []
        return [f"its source differed from its recorded digests, which {ACCEPT} accepted: {_some(self.changed)}"]

    def write(self, folder: Path) -> None:
        """Write it as `folder`/dlm_bridge.json."""
        self.tool = self.tool or tool_version()
        values = asdict(self) | {"tensors": {name: record.as_dict() for name, record in self.tensors.items()}}
        (folder / MANIFEST).write_bytes(_with_digest(values))


def non_finite_note(counts: Mapping[str, int]) -> list[str]:
    """The line that names the tensors with NaN or infinite values, of which `counts` are given; none without any."""
    found = {name: count for name, count in counts.items() if count}
    if not found:
        return []
    counted = _some(f"{name} ({count:,})" for name, count in found.items())
    return [f"{sum(found.values()):,} values are NaN or infinite: {counted}"]


def read_model_config(path: str | Path, revision: str | None = None) -> tuple[dict[str, Any], str | None]:
    """config.json of a Hub folder, a Hub id or a Megatron checkpoint, and the family that a manifest names.

    No weights are read or downloaded. Raises DlmBridgeError.
    """
    folder = checkpoint_folder(path)
    if (folder / CONFIG_FILE).is_file():
        return read_config(folder / CONFIG_FILE), None
    if (folder / MANIFEST).is_file() and (manifest := read_manifest(folder)) is not None:
        return manifest.config, manifest.family
    if folder.exists():
        raise DlmBridgeError(
            f"{folder}: has neither a {CONFIG_FILE} nor a {MANIFEST}: name a Hub folder or a config's"
        )
    if not HUB_ID.fullmatch(str(path)):
        raise DlmBridgeError(f"{path}: no such folder, and not a Hub id (owner/name)")
    from huggingface_hub import hf_hub_download

    def fetch(local: bool) -> Path:
        return Path(hf_hub_download(str(path), CONFIG_FILE, revision=revision, local_files_only=local))

    return read_config(from_hub(fetch, str(path), f"its {CONFIG_FILE}")), None


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a checkpoint folder, None where it has none. Raises DlmBridgeError for a broken one."""
    path = folder / MANIFEST
    try:
        data = read_json(path)
    except FileNotFoundError:
        return None
    if data.get("format_version") != FORMAT_VERSION:
        found = data.get("format_version")
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
    try:
        text, found, tail = (folder / MANIFEST).read_bytes().rpartition(_DIGEST)
    except OSError:  # it cannot be read
        return False
    return bool(found) and tail == bytes_digest(text).encode() + _END


def renamed_source(folder: Path, name: str) -> bytes:
    """`folder`/dlm_bridge.json with this name of its source; one that was changed since it was written stays so."""
    values: dict[str, Any] = read_json(folder / MANIFEST)
    digest = values.pop("digest", None)
    values["source"] = {**values["source"], "name": name}
    return _with_digest(values, None if is_intact(folder) else str(digest))


def _with_digest(values: dict[str, Any], digest: str | None = None) -> bytes:
    text = json.dumps(values, indent=1).removesuffix("\n}").encode()  # ASCII: a path may be no UTF-8
    return text + _DIGEST + (digest or bytes_digest(text)).encode() + _END


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
    values["tensors"] = {name: TensorRecord.parse(record) for name, record in data["tensors"].items()}
    values["shards"] = [
        ShardRecord(shard["file"], shard["metadata"], tuple(shard["tensors"])) for shard in data["shards"]
    ]
    manifest = Manifest(**values)
    for name, record in manifest.tensors.items():
        if record.dtype not in (name for name, _ in STORED_DTYPES.values()):
            raise ValueError(f"tensor {name} has dtype {record.dtype}")
    for name, kind in get_type_hints(Manifest).items():
        if not _fits(getattr(manifest, name), kind):
            raise TypeError(f"{name} has another type")
    return manifest


def _fits(value: Any, kind: Any) -> bool:
    """Whether a value is of an annotated type, its items and fields included."""
    if kind is Any:
        return True
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is UnionType:
        return any(_fits(value, each) for each in arguments)
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        return isinstance(value, kind) and all(_fits(getattr(value, name), hints[name]) for name in hints)  # type: ignore[arg-type]
    if origin in (dict, Mapping):
        return isinstance(value, dict) and all(
            _fits(key, arguments[0]) and _fits(item, arguments[1]) for key, item in value.items()
        )
    if origin in (list, tuple):
        return isinstance(value, origin) and all(_fits(item, arguments[0]) for item in value)
    return isinstance(value, kind) and not (kind is int and isinstance(value, bool))


class Records:
    """dtype, shape and digest of every Hub tensor as read and as written. Methods are thread-safe."""

    def __init__(self, specs: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> None:
        self._specs = specs  # dtypes and shapes after the cast
        self.read: dict[str, TensorRecord] = {}
        self.written: dict[str, TensorRecord] = {}

    def convert(self, name: str, tensor: torch.Tensor, stored: TensorRecord | None = None) -> torch.Tensor:
        """Cast a tensor that was read to its target dtype, contiguous, and note both digests. `stored` is what the
        files hold where it is not the tensor."""
        tensor = tensor.contiguous()
        target = cast(tensor, self._specs[name][0], name)
        found = record_of(tensor)
        self.read[name] = stored or found
        self.written[name] = found if target is tensor else record_of(target)
        return target

    def note(self, name: str, found: str, non_finite: int) -> None:
        """Note the digest of a tensor that went through unchanged, and its NaN and infinite values."""
        dtype, shape = self._specs[name]
        self.read[name] = self.written[name] = TensorRecord(dtype_name(dtype), shape, found, non_finite)

    def changed(self, recorded: Mapping[str, TensorRecord]) -> dict[str, dict[str, Any]]:
        """What was read and is not as `recorded`, as `Manifest.changed` has it."""
        return {
            name: {"recorded": recorded[name].as_dict(), "found": record.as_dict()}
            for name, record in self.read.items()
            if name in recorded and recorded[name] != record
        }

    def entry(self, names: Iterable[str]) -> list[tuple[TensorRecord, TensorRecord]]:
        """What was read and written of each of these tensors, for the journal."""
        return [(self.read[name], self.written[name]) for name in names]

    def restore(self, names: Iterable[str], entry: Iterable[tuple[TensorRecord, TensorRecord]]) -> None:
        """Take over what an earlier run noted as `entry`."""
        for name, (read, written) in zip(names, entry, strict=True):
            self.read[name], self.written[name] = read, written

    def alias(self, name: str, copy_of: str) -> None:
        """A passthrough tensor that is derived from another: nothing was read for it."""
        self.read[name] = self.read[copy_of]
        self.written[name] = self.written[copy_of]

    def check_copies(self, copies: Mapping[str, str], where: str) -> None:
        """Raise DlmBridgeError where a tensor is not the copy that it must be: name -> name of the original."""
        for name, copy_of in copies.items():
            if self.read[name] != self.read[copy_of]:
                raise DlmBridgeError(
                    f"{where}: tensor {name} differs from {copy_of}, of which it must be a copy, since the config "
                    "ties them"
                )


def record_of(tensor: torch.Tensor) -> TensorRecord:
    """dtype, shape and digest of a tensor, and how many of its values are NaN or infinite."""
    with Sink(dtype=tensor.dtype) as sink:
        for _, band in tensor_bands(tensor.contiguous()):
            sink.take(band.reshape(-1).data)
    return TensorRecord(dtype_name(tensor.dtype), tuple(tensor.shape), sink.digest.hexdigest(), sink.non_finite)


def _some(names: Iterable[str]) -> str:
    """The first names, and how many there are."""
    found = sorted(names)
    more = f" ... ({len(found)} in all)" if len(found) > _NAMED else ""
    return f"{', '.join(found[:_NAMED])}{more}"


@dataclass(frozen=True)
class ChangedFile:
    """A file that is not what it was: its digests then and now, None where it was or is not there."""

    file: str  # path below the folder, with "/" between the parts
    detail: str
    recorded: str | None = None
    found: str | None = None
    is_new: bool = False

    def __str__(self) -> str:
        return f"{self.file} ({self.detail})"


def file_names(folder: Path) -> list[str]:
    """Paths of a folder's files below it, but for that of their digests."""
    found = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return sorted(name for name in found if name != FILE_DIGESTS)


def digests_of(
    folder: Path, names: Sequence[str], workers: int | None = None, progress: Progress | None = None
) -> dict[str, str]:
    """Path below the folder -> xxh3_128 of some of its files, several at once."""
    found: dict[str, str] = {}
    total = sum((folder / name).stat().st_size for name in names)

    def take(name: str) -> None:
        found[name] = file_digest(folder / name)
        if progress is not None:
            progress((folder / name).stat().st_size, total)

    run_tasks([(0, partial(take, name)) for name in names], worker_count(workers))
    return found


def write_digests(folder: Path, digests: Mapping[str, str]) -> None:
    """Write the digests of a folder's files into it, and one of the digests themselves."""
    files = dict(sorted(digests.items()))
    content = {"format_version": FORMAT_VERSION, "tool": tool_version(), "files": files, "digest": _digest_of(files)}
    (folder / FILE_DIGESTS).write_text(json.dumps(content, indent=1) + "\n")


def check_files(
    folder: Path,
    workers: int | None = None,
    progress: Progress | None = None,
    rank: int = 0,
    ranks: int = 1,
    only: Collection[str] | None = None,
) -> list[ChangedFile]:
    """What of a folder, or of some files in it, is missing, new or other than its digests say; of several processes
    each reads the files of its `rank`. Raises DlmBridgeError where the digests, or a file, cannot be read."""
    path = folder / FILE_DIGESTS
    try:
        content = read_json(path)
        recorded, own = dict(content["files"]), content["digest"]
    except DlmBridgeError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DlmBridgeError(f"{path}: cannot be read: {one_line(error)}") from None
    if own != _digest_of(recorded):
        return [ChangedFile(FILE_DIGESTS, "is not as it was written")]
    there = set(file_names(folder))
    if only is not None:
        there.intersection_update(only)
        recorded = {name: value for name, value in recorded.items() if name in only}
    findings = [ChangedFile(name, "is missing") for name in recorded if name not in there]
    findings += [ChangedFile(name, "was not there", is_new=True) for name in there if name not in recorded]
    try:
        found = digests_of(folder, sorted(there.intersection(recorded))[rank::ranks], workers, progress)
    except OSError as error:
        raise DlmBridgeError(f"{error.filename or folder}: cannot be read: {error.strerror}") from None
    for name, now in found.items():
        if now != recorded[name]:
            detail = f"is not as it was written{_holding(folder, name)}"
            findings.append(ChangedFile(name, detail, recorded[name], now))
    return sorted(findings, key=lambda finding: finding.file)


def _holding(folder: Path, name: str) -> str:
    """What lies in a damaged file of a Megatron checkpoint, if that can be told."""
    try:
        from dlm_bridge.convert.formats.dcp import read_metadata

        tensors = read_metadata(folder).tensors
    except DlmBridgeError:
        return ""
    held = [key for key, tensor in tensors.items() if any(chunk.place.file == name for chunk in tensor.chunks)]
    return f"; it holds parts of {len(held)} tensors, {held[0]} the first" if held else ""


def _digest_of(files: Mapping[str, str]) -> str:
    return bytes_digest(
        "".join(f"{name} {digest}\n" for name, digest in sorted(files.items())).encode(errors="surrogatepass")
    )

"""Manifests of written checkpoints.

`dlm_bridge.json` describes a converted checkpoint: its format, its source, and a digest of every tensor and side file,
computed during the conversion. `dlm_bridge_files.json` lists a digest of each file of a training checkpoint of either
engine, computed by the rank that wrote the file.
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
from dlm_bridge.convert.settings import Progress
from dlm_bridge.convert.streaming import Sink, tensor_bands
from dlm_bridge.convert.workers import run_tasks, worker_count
from dlm_bridge.errors import CheckpointError, DlmBridgeError, counted, first_of, one_line
from dlm_bridge.files.reading import bytes_digest, file_digest, read_json
from dlm_bridge.hub import CONFIG_FILE, HUB_ID, checkpoint_folder, from_hub, read_config
from dlm_bridge.mapping.dtypes import QUANTISED_DTYPES, STORED_DTYPES, cast, dtype_name

if TYPE_CHECKING:
    import torch  # imported where tensors are moved

MANIFEST = "dlm_bridge.json"
FORMAT_VERSION = 1
_DIGEST, _END = b',\n "digest": "', b'"\n}\n'  # the last entry of the file: xxh3_128 of all bytes before it
FILE_DIGESTS = "dlm_bridge_files.json"
_NAMED = 3  # maximum number of tensors in a message


@dataclass(frozen=True)
class TensorRecord:
    """A Hub tensor: dtype such as "bfloat16", shape, xxh3_128 of its raw bytes, number of NaN and infinite values."""

    dtype: str
    shape: tuple[int, ...]
    digest: str
    non_finite: int = field(default=0, compare=False)  # old manifests do not have it

    @classmethod
    def parse(cls, data: Mapping[str, Any]) -> TensorRecord:
        """Parse the result of `as_dict`. Raises KeyError or TypeError."""
        return cls(data["dtype"], tuple(data["shape"]), data["digest"], int(data.get("non_finite", 0)))

    def as_dict(self) -> dict[str, Any]:
        """Convert to a dict of plain values, with `non_finite` only if it is not zero."""
        values = asdict(self)
        return values if self.non_finite else {key: values[key] for key in ("dtype", "shape", "digest")}


@dataclass
class Manifest:
    """Contents of dlm_bridge.json. `config` is the Hub's config.json; `layout` is None for a Hub folder."""

    format: str  # "torch_dist", "torch" (Megatron's legacy format) or "huggingface"
    family: str
    config: dict[str, Any]
    dtype: str  # "keep", or the dtype to which the weights were cast
    tensors: dict[str, TensorRecord]
    source: dict[str, Any]  # name, revision, digest of its tensors
    layout: dict[str, Any] | None = None
    iteration: str | None = None  # folder of the iteration that `tensors` describes, such as "iter_0000000"
    vocab_multiple: int | None = None
    shards: list[ShardRecord] = field(default_factory=list)
    side_files: dict[str, str] = field(default_factory=dict)  # path below the folder -> digest
    files: dict[str, str] = field(default_factory=dict)  # weight file -> digest of its header or of its parts' digests
    left_out: list[str] = field(default_factory=list)
    carried: list[str] = field(default_factory=list)  # passthrough tensors
    shared: dict[str, str] = field(default_factory=dict)  # passthrough tensor -> tensor exported in its place
    # Accepted changes of the source: tensor or file -> its "recorded" and its "found" digest record.
    changed: dict[str, dict[str, Any]] = field(default_factory=dict)
    fingerprint: str = ""  # of source and settings, so that `resume` recognises a complete output
    format_version: int = FORMAT_VERSION
    tool: str = ""

    def notes(self) -> list[str]:
        """Report notes on NaN and infinite values, and on accepted changes of the source."""
        return [
            *non_finite_note({name: record.non_finite for name, record in self.tensors.items()}),
            *self.changed_note(),
        ]

    def changed_note(self) -> list[str]:
        """Report note on accepted changes of the source, if any."""
        if not self.changed:
            return []
        names = first_of(self.changed, _NAMED)
        return [f"the source differed from its recorded digests (`accept_changed_tensors`): {names}"]

    def write(self, folder: Path) -> None:
        """Write `folder`/dlm_bridge.json."""
        self.tool = self.tool or tool_version()
        values = asdict(self) | {"tensors": {name: record.as_dict() for name, record in self.tensors.items()}}
        (folder / MANIFEST).write_bytes(_with_digest(values))


def non_finite_note(counts: Mapping[str, int]) -> list[str]:
    """Report note on tensors with NaN or infinite values, if any. `counts` maps tensors to numbers of such values."""
    found = {name: count for name, count in counts.items() if count}
    if not found:
        return []
    named = first_of((f"{name} ({count:,})" for name, count in found.items()), _NAMED)
    return [f"{counted(sum(found.values()), 'value is', 'values are')} NaN or infinite: {named}"]


def read_model_config(path: str | Path, revision: str | None = None) -> tuple[dict[str, Any], str | None]:
    """Read config.json of a Hub folder, a Hub id or a Megatron checkpoint. Reads and downloads no weights.

    Returns:
        The config, and the family recorded in the manifest (None without a manifest).

    Raises:
        CheckpointError: there is no config, or it is damaged.
    """
    folder = checkpoint_folder(path)
    if (folder / CONFIG_FILE).is_file():
        return read_config(folder / CONFIG_FILE), None
    if (folder / MANIFEST).is_file() and (manifest := read_manifest(folder)) is not None:
        return manifest.config, manifest.family
    if folder.exists():
        raise CheckpointError(folder, f"has neither a {CONFIG_FILE} nor a {MANIFEST}: use a Hub folder")
    if not HUB_ID.fullmatch(str(path)):
        raise CheckpointError(path, "no such folder, and not a Hub id (owner/name)")
    from huggingface_hub import hf_hub_download

    def fetch(local: bool) -> Path:
        return Path(hf_hub_download(str(path), CONFIG_FILE, revision=revision, local_files_only=local))

    return read_config(from_hub(fetch, str(path), f"its {CONFIG_FILE}")), None


def read_manifest(folder: Path) -> Manifest | None:
    """Read the manifest of a checkpoint folder; None if there is none. Raises CheckpointError for a damaged one."""
    path = folder / MANIFEST
    try:
        data = read_json(path)
    except FileNotFoundError:
        return None
    if data.get("format_version") != FORMAT_VERSION:
        found = data.get("format_version")
        raise CheckpointError(path, f"format version {found!r}, this dlm-bridge reads {FORMAT_VERSION}")
    try:
        return _parse(data)
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise CheckpointError(path, f"is not a dlm-bridge manifest: {one_line(error)}") from None


def tool_version() -> str:
    """Name and version, such as "dlm-bridge 0.1.0"."""
    try:
        return f"dlm-bridge {version('dlm-bridge')}"
    except PackageNotFoundError:
        return "dlm-bridge unknown"


def is_intact(folder: Path) -> bool:
    """True if `folder`/dlm_bridge.json is unchanged since it was written."""
    try:
        text, found, tail = (folder / MANIFEST).read_bytes().rpartition(_DIGEST)
    except OSError:
        return False
    return bool(found) and tail == bytes_digest(text).encode() + _END


def renamed_source(folder: Path, name: str) -> bytes:
    """Contents of `folder`/dlm_bridge.json with another source name. The digest of a changed file stays wrong."""
    values: dict[str, Any] = read_json(folder / MANIFEST)
    digest = values.pop("digest", None)
    values["source"] = {**values["source"], "name": name}
    return _with_digest(values, None if is_intact(folder) else str(digest))


def _with_digest(values: dict[str, Any], digest: str | None = None) -> bytes:
    text = json.dumps(values, indent=1).removesuffix("\n}").encode()  # ASCII, because paths need not be valid UTF-8
    return text + _DIGEST + (digest or bytes_digest(text)).encode() + _END


def combined_digest(tensors: dict[str, TensorRecord]) -> str:
    """Digest of a set of tensors, independent of their order and files."""
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
    dtypes = STORED_DTYPES | (QUANTISED_DTYPES if manifest.format == "huggingface" else {})
    for name, record in manifest.tensors.items():
        if record.dtype not in (name for name, _ in dtypes.values()):
            raise ValueError(f"tensor {name} has dtype {record.dtype}")
    for name, kind in get_type_hints(Manifest).items():
        if not _fits(getattr(manifest, name), kind):
            raise TypeError(f"{name} has another type")
    return manifest


def _fits(value: Any, kind: Any) -> bool:
    """True if a value, with its items and fields, has an annotated type."""
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
    """Records of every Hub tensor as read and as written. Methods are thread-safe."""

    def __init__(self, specs: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> None:
        self._specs = specs  # dtypes and shapes after the cast
        self.read: dict[str, TensorRecord] = {}
        self.written: dict[str, TensorRecord] = {}

    def convert(self, name: str, tensor: torch.Tensor, stored: TensorRecord | None = None) -> torch.Tensor:
        """Cast a tensor to its output dtype, make it contiguous, and record both digests.

        Args:
            stored: record of the bytes in the source's files, if the tensor was converted from them.
        """
        tensor = tensor.contiguous()
        target = cast(tensor, self._specs[name][0], name)
        found = record_of(tensor)
        self.read[name] = stored or found
        self.written[name] = found if target is tensor else record_of(target)
        return target

    def note(self, name: str, found: str, non_finite: int) -> None:
        """Record a tensor that was copied unchanged: its digest, and its number of NaN and infinite values."""
        dtype, shape = self._specs[name]
        self.read[name] = self.written[name] = TensorRecord(dtype_name(dtype), shape, found, non_finite)

    def changed(self, recorded: Mapping[str, TensorRecord]) -> dict[str, dict[str, Any]]:
        """Tensors whose records differ from `recorded`, in the form of `Manifest.changed`."""
        return {
            name: {"recorded": recorded[name].as_dict(), "found": record.as_dict()}
            for name, record in self.read.items()
            if name in recorded and recorded[name] != record
        }

    def entry(self, names: Iterable[str]) -> list[tuple[TensorRecord, TensorRecord]]:
        """(read, written) records of tensors, for the journal."""
        return [(self.read[name], self.written[name]) for name in names]

    def restore(self, names: Iterable[str], entry: Iterable[tuple[TensorRecord, TensorRecord]]) -> None:
        """Add records of an earlier run, as returned by `entry`."""
        for name, (read, written) in zip(names, entry, strict=True):
            self.read[name], self.written[name] = read, written

    def alias(self, name: str, copy_of: str) -> None:
        """Record a passthrough tensor that is a copy of another and was not read."""
        self.read[name] = self.read[copy_of]
        self.written[name] = self.written[copy_of]

    def check_copies(self, copies: Mapping[str, str], where: str) -> None:
        """Raise CheckpointError if a tensor differs from its original. `copies` maps names to originals."""
        for name, copy_of in copies.items():
            if self.read[name] != self.read[copy_of]:
                raise CheckpointError(where, f"tensor {name} differs from {copy_of}, although the config ties them")


def record_of(tensor: torch.Tensor) -> TensorRecord:
    """Compute the record of a tensor."""
    with Sink(dtype=tensor.dtype) as sink:
        for _, band in tensor_bands(tensor.contiguous()):
            sink.take(band.reshape(-1).data)
    return TensorRecord(dtype_name(tensor.dtype), tuple(tensor.shape), sink.digest.hexdigest(), sink.non_finite)


@dataclass(frozen=True)
class ChangedFile:
    """A file that differs from its recorded digest. `recorded` or `found` is None if the file was or is missing."""

    file: str  # path below the folder, with "/" between the parts
    detail: str
    recorded: str | None = None
    found: str | None = None
    is_new: bool = False

    def __str__(self) -> str:
        return f"{self.file} ({self.detail})"


def file_names(folder: Path) -> list[str]:
    """Relative paths of the files of a folder, except dlm_bridge_files.json."""
    found = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return sorted(name for name in found if name != FILE_DIGESTS)


def digests_of(
    folder: Path, names: Sequence[str], workers: int | None = None, progress: Progress | None = None
) -> dict[str, str]:
    """Compute the xxh3_128 of files of a folder in threads. Returns digests by relative path."""
    found: dict[str, str] = {}
    total = sum((folder / name).stat().st_size for name in names)

    def take(name: str) -> None:
        found[name] = file_digest(folder / name)
        if progress is not None:
            progress((folder / name).stat().st_size, total)

    run_tasks([(0, partial(take, name)) for name in names], worker_count(workers))
    return found


def write_digests(folder: Path, digests: Mapping[str, str]) -> None:
    """Write dlm_bridge_files.json: digests of the folder's files, and a digest of these digests."""
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
    """Compare files of a folder with their recorded digests, and with what a `.metadata` in it lists.

    Args:
        rank, ranks: each process of `ranks` reads a part of the files, the first one each `.metadata`.
        only: compare only these files, and only with their digests.

    Returns:
        Files that are missing, new or changed.

    Raises:
        CheckpointError: the digests or a file cannot be read.
    """
    path = folder / FILE_DIGESTS
    try:
        content = read_json(path)
        recorded, own = dict(content["files"]), content["digest"]
    except DlmBridgeError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(path, f"cannot be read: {one_line(error)}") from None
    if own != _digest_of(recorded):
        return [ChangedFile(FILE_DIGESTS, "was changed")]
    there = set(file_names(folder))
    if only is not None:
        there.intersection_update(only)
        recorded = {name: value for name, value in recorded.items() if name in only}
    findings = [ChangedFile(name, "is missing") for name in recorded if name not in there]
    findings += [ChangedFile(name, "is new", is_new=True) for name in there if name not in recorded]
    try:
        found = digests_of(folder, sorted(there.intersection(recorded))[rank::ranks], workers, progress)
    except OSError as error:
        raise CheckpointError(error.filename or folder, f"cannot be read: {error.strerror}") from None
    for name, now in found.items():
        if now != recorded[name]:
            detail = f"was changed{_tensors_in(folder, name)}"
            findings.append(ChangedFile(name, detail, recorded[name], now))
    if rank == 0 and only is None:
        named = {finding.file for finding in findings if not finding.is_new}
        findings += [finding for finding in check_stored(folder) if finding.file not in named]
    return sorted(findings, key=lambda finding: finding.file)


def check_stored(folder: Path) -> list[ChangedFile]:
    """Find files that are missing or truncated in the distributed checkpoints in a folder and its subfolders, by the
    `.metadata` of each."""
    from dlm_bridge.convert.formats.dcp import DCP_METADATA, metadata_errors

    findings = []
    for metadata in sorted(folder.rglob(DCP_METADATA)):
        for error in metadata_errors(metadata.parent):
            path = Path(str(error.field))
            shown = path if path.parent == metadata.parent else metadata  # a very long name was shortened
            findings.append(ChangedFile(shown.relative_to(folder).as_posix(), error.reason))
    return findings


def _tensors_in(folder: Path, name: str) -> str:
    """Format the tensors stored in a damaged file of a Megatron checkpoint, if its metadata can be read."""
    try:
        from dlm_bridge.convert.formats.dcp import read_contents

        tensors = read_contents(folder).tensors
    except DlmBridgeError:
        return ""
    stored = [key for key, tensor in tensors.items() if any(chunk.place.file == name for chunk in tensor.chunks)]
    return f"; it contains parts of {counted(len(stored), 'tensor')}, such as {stored[0]}" if stored else ""


def _digest_of(files: Mapping[str, str]) -> str:
    return bytes_digest(
        "".join(f"{name} {digest}\n" for name, digest in sorted(files.items())).encode(errors="surrogatepass")
    )

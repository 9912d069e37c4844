"""Safe reading of untrusted files: plain files, JSON and YAML of bounded size, digests, errors of libraries."""

from __future__ import annotations

import gc
import io
import json
import os
import stat
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import xxhash
import yaml

from dlm_bridge.errors import CheckpointError, DlmBridgeError, InputFileError, one_line

# Suffixes of the files that transformers, tokenizers and PEFT open in a folder.
_OPENED = (".json", ".safetensors", ".bin", ".pt", ".model", ".txt", ".jinja", ".py")
_OBJECTS = (
    "config.json", "generation_config.json", "adapter_config.json", "tokenizer_config.json", "tokenizer.json",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "chat_template.json",
)  # fmt: skip
_MAX_NESTING = 100  # levels of lists and objects in a JSON file: copying more exhausts Python's stack
_MAX_YAML = 100_000  # values of a YAML document, including those that aliases repeat
_AGAIN = "copy or download it again"


@contextmanager
def reading(
    field: object, problem: str, remedy: str = "", kind: type[DlmBridgeError] = CheckpointError
) -> Iterator[None]:
    """Context manager that raises any exception of a library as `kind`(`field`, "`problem`: cause`remedy`").

    A damaged file can make a library raise any exception: TypeError, RecursionError, a panic of Rust code, which does
    not derive from Exception. Put only the calls that read the file into the block, so that bugs of this package keep
    their traceback.
    """
    try:
        yield
    except DlmBridgeError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise  # KeyboardInterrupt, SystemExit
        raise kind(field, f"{problem}: {library_cause(error)}{remedy}") from error


def library_cause(error: BaseException) -> str:
    """One-line message of a library's exception."""
    kind = "" if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: "
    cause = f"{kind}{one_line(error)[:300]}"
    if "weights_only" in cause:  # torch's message advises to disable its protection
        return "torch does not recognise weights in it: it is damaged or contains code"
    return cause


@contextmanager
def opening(
    place: str | os.PathLike[str],
    field: object,
    problem: str,
    remedy: str = "",
    kind: type[DlmBridgeError] = CheckpointError,
) -> Iterator[None]:
    """`reading` for libraries that open the folder `place`, or a Hub id's files in the cache.

    Refuses named pipes and other special files first, because opening a pipe may block forever. After an error, looks
    for the damaged file and names it. Raises CheckpointError for a file, `kind` for the folder.
    """
    folder = Path(place).expanduser()
    check_plain_files(folder)
    try:
        with reading(field, problem, remedy, kind):
            yield
    except DlmBridgeError as error:
        if error.__cause__ is not None and folder.is_dir() and (damaged := _damaged_file(folder)):
            raise kind(field, f"{problem}: {damaged}: {_AGAIN}{remedy}") from error.__cause__
        raise


def check_plain_files(folder: Path) -> None:
    """Raise CheckpointError if `folder` contains a pipe, a socket, a device, or a broken link named like a file that
    libraries open."""
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.name.endswith(_OPENED) or path.exists():
            check_plain_file(path)


def check_plain_file(path: Path, kind: type[DlmBridgeError] = CheckpointError) -> None:
    """Raise `kind` for a pipe, socket, device or broken link, which could block a reader, and for an unreadable file.
    Raises FileNotFoundError if nothing exists under the name."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        if path.is_symlink():
            raise kind(path, f"is a broken link: {_AGAIN}") from None
        raise
    except OSError as error:
        raise kind(path, error.strerror or "cannot be read") from None
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise kind(path, f"is not a plain file: {_AGAIN}")
    if path.suffix in _OPENED:
        check_readable(path, kind)


def check_text_file(path: Path) -> None:
    """Raise InputFileError for a device, which may be endless, and for a named pipe, which may never get a writer. The
    pipes of a shell (`<(...)`, /dev/stdin) are allowed."""
    if path.is_char_device() or path.is_block_device():
        raise InputFileError(path, "is a device: use a file")
    if path.is_fifo() and not str(path).startswith(("/dev/", "/proc/")):
        raise InputFileError(path, f"is a named pipe: read it as /dev/stdin (< {path})")


def check_readable(path: Path, kind: type[DlmBridgeError] = CheckpointError) -> None:
    """Raise `kind` for a file without read permission, which libraries would report as damaged."""
    if path.exists() and not os.access(path, os.R_OK):
        raise kind(path, "permission denied: make it readable for you")


def _damaged_file(folder: Path) -> str | None:
    """Message about the first file of a folder that is damaged on its own, or None."""
    for name in (*_OBJECTS, *sorted(path.name for path in folder.glob("*.index.json"))):
        try:
            read_json(folder / name)
        except FileNotFoundError:
            continue
        except DlmBridgeError as error:
            return str(error)
    for path in sorted(folder.glob("*.safetensors")):
        try:
            check_safetensors(path)
        except DlmBridgeError as error:
            return str(error)
    return None


def check_safetensors(path: Path) -> None:
    """Raise CheckpointError for a truncated or damaged file; checks header and length only."""
    from safetensors import safe_open

    try:
        with safe_open(path, framework="numpy"):
            pass
    except Exception as error:  # SafetensorError, OSError and ValueError
        raise CheckpointError(path, f"truncated or damaged safetensors file: {one_line(error)[:300]}") from None


def check_characters(value: Any, field: object, kind: type[DlmBridgeError] = InputFileError) -> None:
    """Raise `kind` if a JSON value contains a lone surrogate, which cannot be written to a file or tokenized."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise kind(field, "contains a lone surrogate, which is not a character: it is damaged") from None


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises FileNotFoundError, and CheckpointError for any other file."""
    try:
        check_plain_file(path)
        value = json.loads(path.read_text("utf-8"))
    except (FileNotFoundError, DlmBridgeError):
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(path, f"is not valid JSON: {one_line(error)}") from None
    if not isinstance(value, dict):
        raise CheckpointError(path, "is not a JSON object")
    if _nested_deeper(value, _MAX_NESTING):
        raise CheckpointError(path, f"is nested more than {_MAX_NESTING} levels deep: it is damaged")
    return value


class _YamlLoader(yaml.SafeLoader):
    """PyYAML's safe loader with a limit on the number of values; each alias counts the values of its node again."""

    def __init__(self, stream: Any) -> None:
        super().__init__(stream)
        self._count, self._sizes = 0, dict[int, int]()

    def compose_node(self, parent: Any, index: Any) -> Any:
        is_alias, before = self.check_event(yaml.AliasEvent), self._count
        self._count += 1
        node = super().compose_node(parent, index)
        if is_alias:
            self._count += self._sizes.get(id(node), _MAX_YAML)  # no size yet: the node contains itself
        else:
            self._sizes[id(node)] = self._count - before
        if self._count > _MAX_YAML:
            raise ValueError(f"it has more than {_MAX_YAML:,} values, including those that aliases repeat")
        return node


def parse_yaml(text: str) -> Any:
    """Parse a YAML document of plain types. Raises ValueError for any other text."""
    try:
        return yaml.load(text, _YamlLoader)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(one_line(error)) from None


def _nested_deeper(value: Any, levels: int) -> bool:
    """True if lists and objects of a JSON value are nested more than `levels` deep; iterative."""
    level = [value]
    for _ in range(levels):
        level = [item for each in level for item in (each.values() if isinstance(each, dict) else each)]
        level = [item for item in level if isinstance(item, dict | list)]
        if not level:
            return False
    return True


def bytes_digest(data: bytes) -> str:
    """xxh3_128 of `data`, in hexadecimal."""
    return xxhash.xxh3_128_hexdigest(data)


def file_digest(path: Path, offset: int = 0, length: int = sys.maxsize) -> str:
    """xxh3_128 of a file, or of at most `length` bytes from `offset` on, in hexadecimal."""
    state = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as stream:
        stream.seek(offset)
        while length and (chunk := stream.read(min(length, 1 << 20))):
            state.update(chunk)
            length -= len(chunk)
    return state.hexdigest()


def combined_digests(items: Iterable[tuple[str, int, bytes]]) -> dict[str, str]:
    """One xxh3_128 per file over the digests of its items (file, offset, digest), sorted by offset."""
    states: dict[str, Any] = {}
    for file, _, found in sorted(items, key=lambda item: item[:2]):
        states.setdefault(file, xxhash.xxh3_128()).update(found)
    return {file: state.hexdigest() for file, state in states.items()}


class VirtualFile(io.RawIOBase):
    """Read-only file object of `size` bytes; subclasses implement `readinto`."""

    def __init__(self, size: int) -> None:
        self.size, self._position = size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self.size}[whence]
        if base + offset < 0:
            raise ValueError("seek before the start")
        self._position = base + offset
        return self._position

    def _part(self, buffer: Any) -> memoryview:
        """The first bytes of `buffer`, at most as many as are left in the file."""
        view = memoryview(buffer).cast("B")
        return view[: max(0, min(len(view), self.size - self._position))]


class FileWindow(VirtualFile):
    """File object of the bytes [offset, offset + length) of an open file."""

    def __init__(self, stream: Any, offset: int, length: int) -> None:
        super().__init__(length)
        self._stream, self._offset = stream, offset

    def readinto(self, buffer: Any) -> int:
        self._stream.seek(self._offset + self._position)
        count = int(self._stream.readinto(self._part(buffer)))
        self._position += count
        return count


@contextmanager
def gc_paused() -> Iterator[None]:
    """Context manager that pauses the garbage collector, whose cost grows faster than the number of live objects."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()

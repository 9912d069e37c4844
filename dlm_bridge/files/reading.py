"""Reading of files that others wrote: plain files, JSON and YAML of bounded size, digests, guards of libraries."""

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

from dlm_bridge.errors import DlmBridgeError, one_line

# What transformers, tokenizers and PEFT open in a folder by itself.
_OPENED = (".json", ".safetensors", ".bin", ".pt", ".model", ".txt", ".jinja", ".py")
_OBJECTS = (
    "config.json", "generation_config.json", "adapter_config.json", "tokenizer_config.json", "tokenizer.json",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "chat_template.json",
)  # fmt: skip
_MAX_NESTING = 100  # of a JSON file's lists and objects: copies of more exhaust Python's stack
_MAX_YAML = 100_000  # values of a YAML document, those that its aliases repeat included
_AGAIN = "copy or download it again"


@contextmanager
def reading(what: str, remedy: str = "") -> Iterator[None]:
    """Turn whatever a library raises while it reads `what`, a file or folder of the user's, into a DlmBridgeError.

    A damaged file can make a library fail with anything: a TypeError, a RecursionError, a panic of Rust code, which is
    no Exception. Only calls that read such a file belong in the block, so that our own mistakes keep their traceback.
    """
    try:
        yield
    except DlmBridgeError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise  # an interrupt
        raise DlmBridgeError(f"{what}: {library_cause(error)}{remedy}") from error


def library_cause(error: BaseException) -> str:
    """What a library says of a file that it could not read, on one line."""
    kind = "" if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: "
    cause = f"{kind}{one_line(error)[:300]}"
    if "weights_only" in cause:  # torch advises to switch its protection off
        return "torch does not take it for weights: it is damaged, or holds code"
    return cause


@contextmanager
def opening(place: str | os.PathLike[str], what: str, remedy: str = "") -> Iterator[None]:
    """The guard around libraries that open the folder `place` (or a Hub id's files in the cache), as `reading`.

    Before they do, what is no plain file is refused: to open a named pipe waits for ever. Where they fail, the error
    names the damaged file, if one can be told. Raises DlmBridgeError, which starts with `what`.
    """
    folder = Path(place).expanduser()
    check_plain_files(folder)
    try:
        with reading(what, remedy):
            yield
    except DlmBridgeError as error:
        if error.__cause__ is not None and folder.is_dir() and (damaged := _damaged_file(folder)):
            raise DlmBridgeError(f"{what}: {damaged}: {_AGAIN}{remedy}") from error.__cause__
        raise


def check_plain_files(folder: Path) -> None:
    """Raise DlmBridgeError where there is a pipe, a socket or a device in a folder, or a broken link in the place of a
    file that libraries open."""
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.name.endswith(_OPENED) or path.exists():
            check_plain_file(path)


def check_plain_file(path: Path) -> None:
    """Raise DlmBridgeError for a pipe, a socket, a device or a broken link, none of which must be waited for, and for
    a file that may not be read."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        if path.is_symlink():
            raise DlmBridgeError(f"{path} is a broken link: {_AGAIN}") from None
        raise
    except OSError as error:
        raise DlmBridgeError(f"{path}: {error.strerror}") from None
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise DlmBridgeError(f"{path} is not a plain file: {_AGAIN}")
    if path.suffix in _OPENED:
        check_readable(path)


def check_text_file(path: Path, what: str) -> None:
    """Raise DlmBridgeError for a device, which may have no end, and for a named pipe, which may wait for its writer
    for ever; a pipe that the shell gives (`<(...)`, /dev/stdin) has one. The error starts with `what`."""
    if path.is_char_device() or path.is_block_device():
        raise DlmBridgeError(f"{what}: is a device: name a file")
    if path.is_fifo() and not str(path).startswith(("/dev/", "/proc/")):
        raise DlmBridgeError(f"{what}: is a named pipe: read it as /dev/stdin (< {path})")


def check_readable(path: Path) -> None:
    """Raise DlmBridgeError for a file that may not be read, which libraries would call damaged."""
    if path.exists() and not os.access(path, os.R_OK):
        raise DlmBridgeError(f"{path}: permission denied: make it readable for you")


def _damaged_file(folder: Path) -> str | None:
    """The first file of a folder that is damaged by itself, and how."""
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
    """Raise DlmBridgeError for a file that is truncated or damaged, by its header and its length."""
    from safetensors import safe_open

    try:
        with safe_open(path, framework="numpy"):
            pass
    except Exception as error:  # the library's own, OSError and ValueError
        raise DlmBridgeError(f"{path}: not a whole safetensors file: {one_line(error)[:300]}") from None


def check_characters(value: Any, where: str) -> None:
    """Raise DlmBridgeError where a JSON value holds half of a character, which no file and no tokenizer can take."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise DlmBridgeError(f"{where}: holds a lone surrogate, which is not a character: it is damaged") from None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises FileNotFoundError, and DlmBridgeError for a file that is anything else."""
    try:
        check_plain_file(path)
        value = json.loads(path.read_text("utf-8"))
    except (FileNotFoundError, DlmBridgeError):
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise DlmBridgeError(f"{path}: is not valid JSON: {one_line(error)}") from None
    if not isinstance(value, dict):
        raise DlmBridgeError(f"{path}: is not a JSON object")
    if _nested_deeper(value, _MAX_NESTING):
        raise DlmBridgeError(f"{path}: is nested more than {_MAX_NESTING} levels deep: it is damaged")
    return value


class _YamlLoader(yaml.SafeLoader):
    """PyYAML's safe loader with a limit to the values, which counts those of a node again at each of its aliases."""

    def __init__(self, stream: Any) -> None:
        super().__init__(stream)
        self._count, self._sizes = 0, dict[int, int]()

    def compose_node(self, parent: Any, index: Any) -> Any:
        is_alias, before = self.check_event(yaml.AliasEvent), self._count
        self._count += 1
        node = super().compose_node(parent, index)
        if is_alias:
            self._count += self._sizes.get(id(node), _MAX_YAML)  # none yet: it contains itself
        else:
            self._sizes[id(node)] = self._count - before
        if self._count > _MAX_YAML:
            raise ValueError(f"it has more than {_MAX_YAML:,} values, of which aliases repeat some")
        return node


def parse_yaml(text: str) -> Any:
    """The value of a YAML document of plain types. Raises ValueError for any other text."""
    try:
        return yaml.load(text, _YamlLoader)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(one_line(error)) from None


def _nested_deeper(value: Any, levels: int) -> bool:
    """Whether lists and objects of a JSON value are nested more than `levels` deep, found level by level."""
    level = [value]
    for _ in range(levels):
        level = [item for each in level for item in (each.values() if isinstance(each, dict) else each)]
        level = [item for item in level if isinstance(item, dict | list)]
        if not level:
            return False
    return True


def bytes_digest(data: bytes) -> str:
    """xxh3_128 of some bytes."""
    return xxhash.xxh3_128_hexdigest(data)


def file_digest(path: Path, offset: int = 0, length: int = sys.maxsize) -> str:
    """xxh3_128 of a file, or of its `length` bytes from `offset` on; of fewer where the file ends before."""
    state = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as stream:
        stream.seek(offset)
        while length and (chunk := stream.read(min(length, 1 << 20))):
            state.update(chunk)
            length -= len(chunk)
    return state.hexdigest()


def combined_digests(items: Iterable[tuple[str, int, bytes]]) -> dict[str, str]:
    """One xxh3_128 for each file, of the digests of its items in their order: (file, offset, digest)."""
    states: dict[str, Any] = {}
    for file, _, found in sorted(items, key=lambda item: item[:2]):
        states.setdefault(file, xxhash.xxh3_128()).update(found)
    return {file: state.hexdigest() for file, state in states.items()}


class VirtualFile(io.RawIOBase):
    """A file of `size` bytes that is read through `readinto`."""

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
        """As much of `buffer` as there are bytes left."""
        view = memoryview(buffer).cast("B")
        return view[: max(0, min(len(view), self.size - self._position))]


class FileWindow(VirtualFile):
    """The bytes [offset, offset + length) of an open file, as a file of their own."""

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
    """Pause Python's garbage collector, whose work grows faster than the number of objects that a plan makes."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()

"""Hub folders and Hub ids: resolution, a run's newest checkpoint, files inside a folder, and the guard of opening."""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies

import yaml

from dlm_bridge.errors import DlmBridgeError, one_line, printable, reading

T = TypeVar("T")
_SNAPSHOT = re.compile(r"models--([\w.-]+?)--([\w.-]+)/snapshots/[0-9a-f]+/?$")
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_NOT_NEEDED = ["original/*", "*.bin", "*.pt", "*.pth", "*.gguf", "*.h5", "*.msgpack", "*.onnx"]
_PICKLED = ["pytorch_model*.bin"]  # for repositories that have no safetensors
CONFIG_FILE = "config.json"
ADAPTER_CONFIG = "adapter_config.json"  # PEFT's
TRACKER = "latest_checkpointed_iteration.txt"  # of a Megatron checkpoint with several iterations
STEP_NAME = re.compile(r"step-(\d{7,})")  # a checkpoint of a run in the Hub's layout
# What transformers, tokenizers and PEFT open in a folder by itself.
_OPENED = (".json", ".safetensors", ".bin", ".pt", ".model", ".txt", ".jinja", ".py")
_OBJECTS = (
    "config.json", "generation_config.json", "adapter_config.json", "tokenizer_config.json", "tokenizer.json",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "chat_template.json",
)  # fmt: skip
_MAX_NESTING = 100  # of a JSON file's lists and objects: copies of more exhaust Python's stack
_MAX_YAML = 100_000  # values of a YAML document, those that its aliases repeat included
_LAYERS = ("num_hidden_layers", "n_layers")
_MOST_LAYERS = 10_000  # transformers makes a module for each before it looks at the weights
_AGAIN = "copy or download it again"
logger = logging.getLogger(__name__)


def checkpoint_folder(place: str | os.PathLike[str]) -> Path:
    """What `place` stands for: of a training run's folder its newest whole checkpoint (a `step-NNNNNNN` folder, or
    the root of a Megatron run's iterations), which is logged; anything else is itself.

    Raises DlmBridgeError for a run that has no whole checkpoint.
    """
    folder = Path(place).expanduser()
    root = folder / "checkpoints"
    if not root.is_dir() or any((folder / name).exists() for name in (CONFIG_FILE, ADAPTER_CONFIG, TRACKER)):
        return folder
    if (root / TRACKER).is_file():
        with reading(f"{root / TRACKER}: cannot be read"):
            newest = (root / TRACKER).read_text("utf-8", "replace").strip()
        _log_taken(folder, root, f"its iteration {ascii(newest[:16])[1:-1]}")
        return root
    steps = {int(match[1]): path for path in root.iterdir() if (match := STEP_NAME.fullmatch(path.name))}
    found = [steps[step] for step in sorted(steps, reverse=True)]
    whole = next((path for path in found if _has_weights(path)), None)
    if whole is None:
        raise DlmBridgeError(f"{folder}: a training run without a whole checkpoint: {root} has none with weights")
    skipped = found[: found.index(whole)]
    _log_taken(folder, whole, "its newest checkpoint" + (f" with weights, not {skipped[0].name}" if skipped else ""))
    return whole


def public_name(name: str) -> str:
    """A checkpoint's name for other machines: the Hub id, also of a snapshot in the Hub's cache; of a local path the
    last part."""
    if match := _SNAPSHOT.search(name):
        return f"{match[1]}/{match[2]}"
    return name if HUB_ID.fullmatch(name) and not Path(name).exists() else Path(name).name


def share_weights(folder: Path) -> None:
    """Give the safetensors files in a folder the mode that its other new files have: safetensors creates them readable
    by their owner alone."""
    mode = folder.stat().st_mode & 0o666  # of a new folder: by the umask
    for file in folder.rglob("*.safetensors"):
        if not file.is_symlink() and file.stat().st_mode & 0o777 == 0o600:
            file.chmod(mode)


def _has_weights(folder: Path) -> bool:
    has_config = any((folder / name).is_file() for name in (CONFIG_FILE, ADAPTER_CONFIG))
    return has_config and any(folder.glob("*.safetensors"))


def _log_taken(run: Path, folder: Path, what: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        logger.warning(printable(f"{run} is a training run: {folder} is taken, {what}"))


def resolve(name: str | os.PathLike[str], revision: str | None = None) -> Path:
    """The folder of a local checkpoint (of a training run its newest) or of a Hub id's snapshot. Raises
    DlmBridgeError with one line."""
    path = checkpoint_folder(name)
    if os.path.lexists(path):
        if revision is not None:
            raise DlmBridgeError(f"--revision {revision} needs a Hub id, but {path} is a local folder")
        if not path.is_dir():
            raise DlmBridgeError(f"{path} is not a checkpoint: not a folder")
        return path
    text = os.fspath(name)
    if not HUB_ID.fullmatch(text):
        raise DlmBridgeError(f"{text}: no such folder, and not a Hub id (owner/name)")
    from huggingface_hub import snapshot_download

    def fetch(local: bool) -> Path:
        options: dict[str, Any] = {"revision": revision, "local_files_only": local}
        folder = Path(snapshot_download(text, ignore_patterns=_NOT_NEEDED, **options))
        if not any(folder.glob("*.safetensors")) and (folder / CONFIG_FILE).exists():
            snapshot_download(text, allow_patterns=_PICKLED, **options)
        return folder

    return from_hub(fetch, text, "it")


def from_hub(fetch: Callable[[bool], T], name: str, what: str) -> T:
    """What `fetch` gets of the Hub id `name`; it is told to look in the cache alone (True) where the Hub's host cannot
    be found, which would be tried for half a minute. Raises DlmBridgeError with one line."""
    from huggingface_hub import constants

    host = urlsplit(constants.ENDPOINT).hostname
    local = not getproxies() and not _is_known(host)
    retries = logging.getLogger("huggingface_hub.utils._http")  # it tells of each
    level = retries.level
    retries.setLevel(logging.ERROR)
    try:
        return fetch(local)
    except Exception as error:  # whatever the network or the Hub says: it is the user's input that cannot be had
        cause = f"{host} cannot be found, and the Hub's cache does not have it" if local else one_line(error)[:300]
        raise DlmBridgeError(f"{name}: no such folder, and the Hub did not give {what}: {cause}") from None
    finally:
        retries.setLevel(level)


def _is_known(host: str | None) -> bool:
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        return False
    return True


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
    from safetensors import safe_open

    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="numpy"):
                pass
        except Exception as error:  # the library's own, and OSError
            return f"{path}: not a whole safetensors file: {one_line(error)[:300]}"
    return None


def read_config(path: Path) -> dict[str, Any]:
    """config.json's dict. Raises DlmBridgeError."""
    try:
        config = read_json(path)
    except FileNotFoundError:
        raise DlmBridgeError(f"{path.parent} is not a checkpoint: it has no {path.name}") from None
    check_characters(config, f"{path}")
    for key in _LAYERS:
        if type(layers := config.get(key)) is int and layers > _MOST_LAYERS:
            raise DlmBridgeError(f"{path}: {key} is {layers}, more than any model has: it is damaged")
    return config


def check_characters(value: Any, where: str) -> None:
    """Raise DlmBridgeError where a JSON value holds half of a character, which no file and no tokenizer can take."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise DlmBridgeError(f"{where}: holds a lone surrogate, which is no character: it is damaged") from None


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


def with_dtype(text: str, dtype: str) -> str:
    """config.json's text with its top-level dtype field ("torch_dtype" or "dtype") set, every other byte kept."""
    config = json.loads(text)
    for key in ("torch_dtype", "dtype"):
        if isinstance(config.get(key, 0), str | None):
            for match in re.finditer(rf'("{key}"\s*:\s*)("(?:[^"\\]|\\.)*"|null)', text):
                edited = text[: match.start(2)] + json.dumps(dtype) + text[match.end(2) :]
                if json.loads(edited) == {**config, key: dtype}:  # a nested field of the same name is not it
                    text = edited
                    config = json.loads(text)
                    break
    return text


def inside(folder: Path, name: str) -> Path:
    """The path of a plain file inside `folder`, links followed.

    The Hub's cache links its snapshots' files to ../../blobs; every other way out is refused. Raises DlmBridgeError.
    """
    relative = PurePosixPath(name)
    if relative.is_absolute() or ".." in relative.parts or "\\" in name or "\0" in name or not relative.parts:
        raise DlmBridgeError(f"{folder}: '{name}' points outside the folder")
    path = folder / relative
    try:
        real = path.resolve(strict=True)
    except FileNotFoundError:
        what = "is a broken link" if path.is_symlink() else "does not exist"
        raise DlmBridgeError(f"{path} {what}") from None
    except (OSError, RuntimeError):
        raise DlmBridgeError(f"{path} is a link that cannot be followed") from None
    allowed = [folder.resolve()]
    home = folder.resolve().parent
    if home.name == "snapshots":
        allowed.append(home.parent / "blobs")
    if not any(root in real.parents for root in allowed):
        raise DlmBridgeError(f"{path} is a link to {real}, outside the folder: copy the file in its place")
    if not stat.S_ISREG(real.stat().st_mode):
        raise DlmBridgeError(f"{path} is not a plain file")
    check_readable(path)
    return path


def check_named_base(named: Any, base: str | None, where: str, compared: bool = False) -> None:
    """Raise DlmBridgeError where adapter_config.json names another Hub id than `base`. Where one of the two is a
    folder, which may hold a copy of the other, and their weights are not `compared`, log that in the first process."""
    if not isinstance(named, str) or not isinstance(base, str) or os.path.realpath(named) == os.path.realpath(base):
        return
    if HUB_ID.fullmatch(named) and HUB_ID.fullmatch(base):
        raise DlmBridgeError(
            f"{where}: is an adapter of {named}, not of {base}: give its own base, or correct base_model_name_or_path "
            f"in {ADAPTER_CONFIG}"
        )
    if not compared and os.environ.get("RANK", "0") == "0":
        logger.warning(
            printable(f"{where}: names {named} as its base; whether {base} has the same weights is not known")
        )

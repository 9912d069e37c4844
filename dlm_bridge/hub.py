"""Hub ids and Hub folders: resolution, the newest checkpoint of a run, config.json, safe paths inside a folder."""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import stat
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies

from dlm_bridge.distributed import is_main
from dlm_bridge.errors import CheckpointError, SettingError, one_line, printable
from dlm_bridge.files.reading import check_characters, check_readable, read_json, reading

T = TypeVar("T")
_SNAPSHOT = re.compile(r"models--([\w.-]+?)--([\w.-]+)/snapshots/[0-9a-f]+/?$")
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_NOT_NEEDED = ["original/*", "*.bin", "*.pt", "*.pth", "*.gguf", "*.h5", "*.msgpack", "*.onnx"]
_PICKLED = ["pytorch_model*.bin"]  # for repositories without safetensors
CONFIG_FILE = "config.json"
ADAPTER_CONFIG = "adapter_config.json"  # PEFT's
TRACKER = "latest_checkpointed_iteration.txt"  # of a Megatron checkpoint with several iterations
STATUS, BEST = "status.json", "best"  # of a run; its checkpoint with the lowest validation loss
STEP_NAME = re.compile(r"step-(\d{7,})")  # a run's checkpoint in the Hub layout
_LAYERS = ("num_hidden_layers", "n_layers")
_MOST_LAYERS = 10_000  # transformers creates a module per layer before it reads the weights
logger = logging.getLogger(__name__)


def checkpoint_folder(place: str | os.PathLike[str]) -> Path:
    """Resolve a training run's folder to its best checkpoint, if it had early stopping, else to its newest complete
    one, and log which: a `step-NNNNNNN` folder, or a Megatron run's iteration, or for the newest the root folder of
    the iterations. Any other path is returned unchanged.

    Raises CheckpointError for a run without a complete checkpoint.
    """
    folder = Path(place).expanduser()
    root = folder / "checkpoints"
    if not root.is_dir() or any((folder / name).exists() for name in (CONFIG_FILE, ADAPTER_CONFIG, TRACKER)):
        return folder
    if (best := _best_checkpoint(folder)) is not None:
        _log_taken(folder, best, "the checkpoint with the lowest validation loss")
        return best
    if (root / TRACKER).is_file():
        with reading(root / TRACKER, "cannot be read"):
            newest = (root / TRACKER).read_text("utf-8", "replace").strip()
        _log_taken(folder, root, f"iteration {ascii(newest[:16])[1:-1]}")
        return root
    steps = {int(match[1]): path for path in root.iterdir() if (match := STEP_NAME.fullmatch(path.name))}
    found = [steps[step] for step in sorted(steps, reverse=True)]
    whole = next((path for path in found if _has_weights(path)), None)
    if whole is None:
        raise CheckpointError(folder, f"is a training run without a complete checkpoint: none in {root} has weights")
    skipped = found[: found.index(whole)]
    without = f" with weights ({skipped[0].name} has none)" if skipped else ""
    _log_taken(folder, whole, f"the newest checkpoint{without}")
    return whole


def public_name(name: str) -> str:
    """Name of a checkpoint that is valid on other machines: its Hub id (also for a snapshot in the Hub's cache), or
    the last component of a local path."""
    if match := _SNAPSHOT.search(name):
        return f"{match[1]}/{match[2]}"
    return name if HUB_ID.fullmatch(name) and not Path(name).exists() else Path(name).name


def _best_checkpoint(run: Path) -> Path | None:
    """Checkpoint that status.json names as the best, if it is there."""
    try:
        step = json.loads((run / STATUS).read_text("utf-8"))[BEST]["step"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    if type(step) is not int:
        return None
    hub, megatron = (run / "checkpoints" / f"{name}{step:07d}" for name in ("step-", "iter_"))
    return hub if _has_weights(hub) else megatron if megatron.is_dir() else None


def _has_weights(folder: Path) -> bool:
    has_config = any((folder / name).is_file() for name in (CONFIG_FILE, ADAPTER_CONFIG))
    return has_config and any(folder.glob("*.safetensors"))


def _log_taken(run: Path, folder: Path, what: str) -> None:
    if is_main():
        logger.warning(printable(f"Using {what} of {run}: {folder.relative_to(run)}"))


def resolve(name: str | os.PathLike[str], revision: str | None = None) -> Path:
    """Folder of a local checkpoint (the newest one of a training run), or of a Hub id's snapshot.

    Raises SettingError for a revision of a local folder, CheckpointError if there is no such folder or Hub id.
    """
    path = checkpoint_folder(name)
    if os.path.lexists(path):
        if revision is not None:
            raise SettingError("revision", f"{revision} needs a Hub id, but {path} is a local folder")
        if not path.is_dir():
            raise CheckpointError(path, "is not a checkpoint: not a folder")
        return path
    text = os.fspath(name)
    if not HUB_ID.fullmatch(text):
        raise CheckpointError(text, "no such folder, and not a Hub id (owner/name)")
    from huggingface_hub import snapshot_download

    def fetch(local: bool) -> Path:
        options: dict[str, Any] = {"revision": revision, "local_files_only": local}
        folder = Path(snapshot_download(text, ignore_patterns=_NOT_NEEDED, **options))
        if not any(folder.glob("*.safetensors")) and (folder / CONFIG_FILE).exists():
            snapshot_download(text, allow_patterns=_PICKLED, **options)
        return folder

    return from_hub(fetch, text, "it")


def from_hub(fetch: Callable[[bool], T], name: str, what: str) -> T:
    """Fetch `what` of the Hub id `name`.

    Args:
        fetch: is called with True if the Hub's host cannot be resolved, to look in the cache only; huggingface_hub
            would retry for half a minute.
        name: the Hub id.
        what: name of the fetched thing in errors.

    Raises:
        CheckpointError: `fetch` raised any exception.
    """
    from huggingface_hub import constants

    host = urlsplit(constants.ENDPOINT).hostname
    local = not getproxies() and not _is_known(host)
    retries = logging.getLogger("huggingface_hub.utils._http")  # logs every retry as a warning
    level = retries.level
    retries.setLevel(logging.ERROR)
    try:
        return fetch(local)
    except Exception as error:
        cause = f"{host} cannot be found, and the Hub's cache does not have it" if local else one_line(error)[:300]
        raise CheckpointError(name, f"no such folder, and the Hub did not provide {what}: {cause}") from None
    finally:
        retries.setLevel(level)


def _is_known(host: str | None) -> bool:
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        return False
    return True


def read_config(path: Path) -> dict[str, Any]:
    """Read config.json, or another JSON object of a checkpoint. Raises CheckpointError."""
    try:
        config = read_json(path)
    except FileNotFoundError:
        raise CheckpointError(path.parent, f"is not a checkpoint: it has no {path.name}") from None
    check_characters(config, path, CheckpointError)
    for key in _LAYERS:
        if type(layers := config.get(key)) is int and layers > _MOST_LAYERS:
            raise CheckpointError(path, f"{key} is {layers}, more than any model has: it is damaged")
    return config


def quantization_method(folder: Path) -> str | None:
    """`quant_method` of a Hub folder's config.json; None if the weights are not quantised or the file is damaged."""
    try:
        found = read_config(folder / CONFIG_FILE).get("quantization_config")
    except (CheckpointError, OSError):
        return None
    return str(found.get("quant_method")) if isinstance(found, dict) else None


def with_dtype(text: str, dtype: str) -> str:
    """Set the top-level dtype field ("torch_dtype" or "dtype") in the text of a config.json; all other bytes stay."""
    config = json.loads(text)
    for key in ("torch_dtype", "dtype"):
        if isinstance(config.get(key, 0), str | None):
            for match in re.finditer(rf'("{key}"\s*:\s*)("(?:[^"\\]|\\.)*"|null)', text):
                edited = text[: match.start(2)] + json.dumps(dtype) + text[match.end(2) :]
                if json.loads(edited) == {**config, key: dtype}:  # not a nested field of the same name
                    text = edited
                    config = json.loads(text)
                    break
    return text


def inside(folder: Path, name: str) -> Path:
    """Path of a plain file inside `folder`.

    The file may be a link into the folder, or from a snapshot in the Hub's cache to ../../blobs. Raises
    CheckpointError for any path that leads outside, and for a file that is missing or unreadable.
    """
    relative = PurePosixPath(name)
    if relative.is_absolute() or ".." in relative.parts or "\\" in name or "\0" in name or not relative.parts:
        raise CheckpointError(folder, f"'{name}' points outside the folder")
    path = folder / relative
    try:
        real = path.resolve(strict=True)
    except FileNotFoundError:
        raise CheckpointError(path, "is a broken link" if path.is_symlink() else "does not exist") from None
    except (OSError, RuntimeError):
        raise CheckpointError(path, "is a link that cannot be followed") from None
    allowed = [folder.resolve()]
    home = folder.resolve().parent
    if home.name == "snapshots":
        allowed.append(home.parent / "blobs")
    if not any(root in real.parents for root in allowed):
        raise CheckpointError(path, f"is a link to {real}, outside the folder: replace it by a copy of the file")
    if not stat.S_ISREG(real.stat().st_mode):
        raise CheckpointError(path, "is not a plain file")
    check_readable(path)
    return path


def check_named_base(named: Any, base: str | None, adapter: str | Path, compared: bool = False) -> None:
    """Raise CheckpointError if the `adapter`'s config names another Hub id (`named`) than `base`.

    A folder may contain a copy of a Hub id's model: then log that the base is not verified, in the first process,
    unless the weights were `compared`.
    """
    if not isinstance(named, str) or not isinstance(base, str) or os.path.realpath(named) == os.path.realpath(base):
        return
    if HUB_ID.fullmatch(named) and HUB_ID.fullmatch(base):
        raise CheckpointError(
            adapter,
            f"is an adapter of {named}, not of {base}: use its own base, or correct base_model_name_or_path in "
            f"{ADAPTER_CONFIG}",
        )
    if not compared and is_main():
        logger.warning(
            printable(f"{adapter}: its config names {named} as the base; not verified: {base} has the same weights")
        )

"""Hub folders and Hub ids: resolution, a run's newest checkpoint, files inside a folder, config.json."""

from __future__ import annotations

import json
import logging
import os
import re
import stat
from pathlib import Path, PurePosixPath
from typing import Any

from dlm_bridge.errors import DlmBridgeError, one_line

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_NOT_NEEDED = ["original/*", "*.bin", "*.pt", "*.pth", "*.gguf", "*.h5", "*.msgpack", "*.onnx"]
_PICKLED = ["pytorch_model*.bin"]  # for repositories that have no safetensors
CONFIG_FILE = "config.json"
ADAPTER_CONFIG = "adapter_config.json"  # PEFT's
TRACKER = "latest_checkpointed_iteration.txt"  # of a Megatron checkpoint with several iterations
STEP_NAME = re.compile(r"step-(\d{7,})")  # a checkpoint of a run in the Hub's layout
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
        newest = (root / TRACKER).read_text("utf-8", "replace").strip()
        _log_taken(folder, root, f"its iteration {ascii(newest)[1:17]}")
        return root
    steps = {int(match[1]): path for path in root.iterdir() if (match := STEP_NAME.fullmatch(path.name))}
    found = [steps[step] for step in sorted(steps, reverse=True)]
    whole = next((path for path in found if _has_weights(path)), None)
    if whole is None:
        raise DlmBridgeError(f"{folder}: a training run without a whole checkpoint: {root} has none with weights")
    skipped = found[: found.index(whole)]
    _log_taken(folder, whole, "its newest checkpoint" + (f" with weights, not {skipped[0].name}" if skipped else ""))
    return whole


def _has_weights(folder: Path) -> bool:
    has_config = any((folder / name).is_file() for name in (CONFIG_FILE, ADAPTER_CONFIG))
    return has_config and any(folder.glob("*.safetensors"))


def _log_taken(run: Path, folder: Path, what: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        logger.warning(f"{run} is a training run: {folder} is taken, {what}")


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

    try:
        folder = Path(snapshot_download(text, revision=revision, ignore_patterns=_NOT_NEEDED))
        if not any(folder.glob("*.safetensors")) and (folder / "config.json").exists():
            snapshot_download(text, revision=revision, allow_patterns=_PICKLED)
        return folder
    except Exception as error:  # whatever the network or the Hub says: it is the user's input that cannot be had
        cause = one_line(error)[:300]
        raise DlmBridgeError(f"{text}: no such folder, and the Hub did not give it: {cause}") from None


def read_config(path: Path) -> dict[str, Any]:
    """config.json's dict. Raises DlmBridgeError."""
    try:
        return read_json(path)
    except FileNotFoundError:
        raise DlmBridgeError(f"{path.parent} is not a checkpoint: it has no {path.name}") from None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises FileNotFoundError, and DlmBridgeError for a file that is anything else."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise DlmBridgeError(f"{path}: is not valid JSON: {one_line(error)}") from None
    if not isinstance(value, dict):
        raise DlmBridgeError(f"{path}: is not a JSON object")
    return value


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
    return path

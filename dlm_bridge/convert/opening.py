"""From a path to a checkpoint: which format it is, and where a Megatron checkpoint's Hub side comes from."""

from __future__ import annotations

import os
import re
from pathlib import Path

from dlm_bridge.convert.checkpoint import Checkpoint
from dlm_bridge.convert.formats.megatron_store import is_megatron
from dlm_bridge.convert.hub_checkpoint import open_hub
from dlm_bridge.convert.megatron_checkpoint import MegatronCheckpoint, hub_side_like, hub_side_of_config
from dlm_bridge.errors import DlmBridgeError

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def open_megatron(
    path: str | os.PathLike[str],
    like: str | os.PathLike[str] | None = None,
    hf_config: str | os.PathLike[str] | None = None,
    family: str | None = None,
) -> MegatronCheckpoint:
    """Open a Megatron checkpoint; `like` (a Hub folder or id) or `hf_config` (a config.json) names its Hub model
    in place of its own manifest. Raises DlmBridgeError."""
    root = _folder(path)
    if not is_megatron(root):
        raise DlmBridgeError(f"{root} is not a Megatron checkpoint: it has no latest_checkpointed_iteration.txt")
    if like is not None and hf_config is not None:
        raise DlmBridgeError("give --like or --hf-config, not both")
    if like is not None:
        twin = open_hub(os.fspath(like), family=family)
        return MegatronCheckpoint(root, hub_side_like(twin), twin)
    if hf_config is not None:
        return MegatronCheckpoint(root, hub_side_of_config(Path(hf_config), family))
    return MegatronCheckpoint(root, family=family)


def open_any(path: str | os.PathLike[str], revision: str | None = None, family: str | None = None) -> Checkpoint:
    """Open a checkpoint of either format. Raises DlmBridgeError."""
    folder = Path(path).expanduser()
    if folder.is_dir() and is_megatron(folder):
        return open_megatron(folder, family=family)
    return open_hub(os.fspath(path), revision, family)


def parse_size(text: str | int | None) -> int | None:
    """ "5GB" is 5 * 10**9 bytes and "5GiB" 5 * 2**30, as the Hub writes sizes. Raises DlmBridgeError."""
    if text is None or isinstance(text, int):
        return text
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", text.strip(), re.IGNORECASE)
    if not match or (match[3] and not match[2]):
        raise DlmBridgeError(f"--shard-size {text}: write a size such as 5GB or 500MB")
    unit = match[2].upper()
    size = int(float(match[1]) * (_BINARY_UNITS[unit] if match[3] else _UNITS[unit]))
    if size < 1:
        raise DlmBridgeError(f"--shard-size {text}: must be at least one byte")
    return size


def _folder(path: str | os.PathLike[str]) -> Path:
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise DlmBridgeError(
            f"{folder} is not a checkpoint: " + ("not a folder" if folder.exists() else "no such folder")
        )
    return folder

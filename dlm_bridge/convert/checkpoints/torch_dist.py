"""Megatron's distributed checkpoint (`torch_dist`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dlm_bridge.convert.formats.chunked_reader import (
    ChunkedReader,
)
from dlm_bridge.convert.formats.dcp_metadata import DCP_METADATA, Contents, read_metadata
from dlm_bridge.convert.formats.unpickler import Inert, read_torch_file, read_torch_item
from dlm_bridge.errors import DlmBridgeError, one_line

TRACKER = "latest_checkpointed_iteration.txt"
COMMON_STATE = "common_state/shard_0_1"  # the object that newer Megatron-LM saves in place of common.pt
BACKEND = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


def is_torch_dist(path: Path) -> bool:
    """Whether the folder is (or claims to be) a Megatron checkpoint or one of its iterations."""
    return (path / TRACKER).is_file() or (path / DCP_METADATA).is_file()


def iteration_folder(root: Path) -> Path:
    """The folder of the newest iteration, by the tracker file; an iteration's own folder is itself.

    Raises DlmBridgeError.
    """
    if (root / DCP_METADATA).is_file():
        return root
    tracker = root / TRACKER
    try:
        text = tracker.read_text("utf-8").strip()
    except FileNotFoundError:
        raise DlmBridgeError(f"{root} is not a Megatron checkpoint: it has no {TRACKER}") from None
    except (OSError, ValueError) as error:
        raise DlmBridgeError(f"{tracker}: cannot be read: {one_line(error)}") from None
    if text != "release" and not (text.isascii() and text.isdigit() and len(text) < 16):
        raise DlmBridgeError(f"{tracker}: says {text[:40]!r}, neither an iteration's number nor 'release'")
    folder = root / (text if text == "release" else f"iter_{int(text):07d}")
    if not folder.is_dir():
        raise DlmBridgeError(f"{tracker} names iteration {text}, but {folder} does not exist")
    return folder


class TorchDistReader(ChunkedReader):
    """One iteration's tensors. Opening reads `.metadata`, `metadata.json` and `common.pt`, no tensor.

    Raises DlmBridgeError for what is unreadable, hostile or not whole.
    """

    def __init__(self, folder: Path) -> None:
        _check_backend(folder)
        contents = read_metadata(folder)
        super().__init__(folder, contents, _read_common(folder, contents))


def _check_backend(folder: Path) -> None:
    path = folder / "metadata.json"
    try:
        backend = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise DlmBridgeError(f"{folder} is not a torch_dist checkpoint: it has no metadata.json") from None
    except (OSError, ValueError, RecursionError) as error:
        raise DlmBridgeError(f"{path}: is not valid JSON: {one_line(error)}") from None
    name = backend.get("sharded_backend") if isinstance(backend, dict) else None
    if name != "torch_dist" or backend.get("sharded_backend_version") != 1:
        raise DlmBridgeError(f"{path}: sharded backend {name!r} is not supported, only torch_dist version 1")


def _read_common(folder: Path, contents: Contents) -> dict[str, Any]:
    """What is not sharded: `common.pt`, or in newer checkpoints the object `common_state`; `args` as a plain dict."""
    path = folder / "common.pt"
    if path.is_file():
        common = read_torch_file(path)
    elif place := contents.objects.get(COMMON_STATE):
        path = folder / place.file
        common = read_torch_item(path, place.offset, place.length)
    else:
        raise DlmBridgeError(f"{folder} is not a torch_dist checkpoint: it has no common.pt")
    if isinstance(common, list) and len(common) == 1:  # a sharded object is saved in a list
        common = common[0]
    if not isinstance(common, dict):
        raise DlmBridgeError(f"{path}: is not a dict")
    args = common.get("args")
    return {**common, "args": args.fields} if isinstance(args, Inert) else common

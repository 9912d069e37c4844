"""Megatron's distributed checkpoint (`torch_dist`)."""

from __future__ import annotations

import argparse
import io
import json
from pathlib import Path
from typing import Any

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from dlm_bridge.convert.formats.chunked_reader import (
    ChunkedReader,
)
from dlm_bridge.convert.formats.dcp_metadata import DCP_METADATA, Contents, read_metadata
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


# What is but named: Megatron-LM's groups of an offloaded optimizer hold the classes of optimizers.
_INERT = ("megatron.", "transformer_engine.", "apex.optimizers.", "torch.optim.", "signal.Signals")


class _InertSetting:
    """Stands for what is another package's in `common.pt`, such as an enum in `args`: kept, never run."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state


def _read_common(folder: Path, contents: Contents) -> dict[str, Any]:
    """What is not sharded: `common.pt`, or in newer checkpoints the object `common_state`."""
    path = folder / "common.pt"
    if path.is_file():
        return _load_plain(path, path)
    place = contents.objects.get(COMMON_STATE)
    if place is None:
        raise DlmBridgeError(f"{folder} is not a torch_dist checkpoint: it has no common.pt")
    item = folder / place.file
    with item.open("rb") as stream:
        stream.seek(place.offset)
        data = stream.read(place.length)
    return _load_plain(io.BytesIO(data), item)


def _load_plain(source: Any, path: Path) -> dict[str, Any]:
    """torch.load with `weights_only`, argparse.Namespace and inert stand-ins for megatron's own classes."""
    try:
        asked = get_unsafe_globals_in_checkpoint(source)
        refused = sorted(name for name in asked if name != "argparse.Namespace" and not name.startswith(_INERT))
        if refused:
            raise DlmBridgeError(f"{path}: its pickle asks for {refused[0]}, which no checkpoint needs: refused")
        inert = [(type("Inert", (_InertSetting,), {}), name) for name in asked if name.startswith(_INERT)]
        if hasattr(source, "seek"):
            source.seek(0)
        with safe_globals([argparse.Namespace, *inert]):
            common = torch.load(source, map_location="cpu", weights_only=True)
    except DlmBridgeError:
        raise
    except Exception as error:  # a damaged archive or pickle raises nearly anything
        raise DlmBridgeError(f"{path}: cannot be read: {one_line(error)[:200]}") from None
    if isinstance(common, list) and len(common) == 1:  # a sharded object is saved in a list
        common = common[0]
    if not isinstance(common, dict):
        raise DlmBridgeError(f"{path}: is not a dict")
    return common

"""Opening of a checkpoint: which format a path is in, and where a Megatron checkpoint's Hub side comes from."""

from __future__ import annotations

import os
from pathlib import Path

from dlm_bridge.convert.checkpoint import Checkpoint
from dlm_bridge.convert.checkpoints.dcp import DcpCheckpoint, dcp_folder
from dlm_bridge.convert.checkpoints.huggingface import open_hub
from dlm_bridge.convert.checkpoints.megatron import MegatronCheckpoint, hub_side_like, hub_side_of_config
from dlm_bridge.convert.checkpoints.store import is_megatron
from dlm_bridge.convert.workers import gc_paused
from dlm_bridge.errors import DlmBridgeError


@gc_paused()
def open_megatron(
    path: str | os.PathLike[str],
    like: str | os.PathLike[str] | None = None,
    hf_config: str | os.PathLike[str] | None = None,
    family: str | None = None,
) -> MegatronCheckpoint | DcpCheckpoint:
    """Open a Megatron checkpoint of any format, or a plain distributed one of a Hub model; `like` (a Hub folder or id)
    or `hf_config` (a config.json) names its Hub model in place of its own manifest or settings.

    Raises DlmBridgeError.
    """
    root = _folder(path)
    if like is not None and hf_config is not None:
        raise DlmBridgeError("give --like or --hf-config, not both")
    megatron = is_megatron(root)
    if not megatron and dcp_folder(root) is None:
        runs = f" (a training run's are in {root / 'checkpoints'})" if (root / "checkpoints").is_dir() else ""
        raise DlmBridgeError(f"{root} is not a Megatron checkpoint: it has no latest_checkpointed_iteration.txt{runs}")
    twin = None if like is None else open_hub(os.fspath(like), family=family)
    hub = None if twin is None else hub_side_like(twin)
    if hf_config is not None:
        hub = hub_side_of_config(Path(hf_config), family)
    return MegatronCheckpoint(root, hub, twin, family) if megatron else DcpCheckpoint(root, hub, family)


def open_any(path: str | os.PathLike[str], revision: str | None = None, family: str | None = None) -> Checkpoint:
    """Open a checkpoint of any format. Raises DlmBridgeError."""
    folder = Path(path).expanduser()
    if folder.is_dir() and (is_megatron(folder) or dcp_folder(folder) is not None):
        return open_megatron(folder, family=family)
    return open_hub(os.fspath(path), revision, family)


def _folder(path: str | os.PathLike[str]) -> Path:
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise DlmBridgeError(
            f"{folder} is not a checkpoint: " + ("not a folder" if folder.exists() else "no such folder")
        )
    return folder

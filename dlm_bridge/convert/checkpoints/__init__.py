"""Kinds of checkpoints, one module each, and how a path is opened.

A new format is a module with a `Checkpoint` class, and its row in `KINDS`.
"""

from __future__ import annotations

import importlib
import os
from functools import cache
from pathlib import Path

from dlm_bridge.convert.checkpoint import Checkpoint
from dlm_bridge.convert.checkpoints.huggingface import HUB_FOLDER, HubCheckpoint, open_hub
from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.files.reading import check_plain_files, gc_paused
from dlm_bridge.hub import CONFIG_FILE, TRACKER, checkpoint_folder

# In the order in which they are asked whether a folder is theirs, with patterns of which such a folder has one. Only
# where it has they are imported: a Hub folder's headers are read without torch.
KINDS = (
    ("legacy:LegacyCheckpoint", ("mp_rank_*",)),
    ("torch_dist:TorchDistCheckpoint", (".metadata",)),
    ("fsdp_dtensor:FsdpDtensorCheckpoint", (".metadata",)),
    ("dcp:DcpCheckpoint", (".metadata", "pytorch_model_fsdp_0/.metadata")),  # its own, or Accelerate's below it
    ("huggingface:HubCheckpoint", (CONFIG_FILE,)),
)
PathLike = str | os.PathLike[str]


@cache
def load_kind(place: str) -> type[Checkpoint]:
    """The class of a row of `KINDS`."""
    module, name = place.split(":")
    kind: type[Checkpoint] = getattr(importlib.import_module(f"{__name__}.{module}"), name)
    return kind


@gc_paused()
def find_checkpoint(path: PathLike, revision: str | None = None, family: str | None = None) -> Checkpoint:
    """A checkpoint of any kind, of a training run's folder its newest, whose model is looked up when it is asked for.
    Raises DlmBridgeError."""
    folder = checkpoint_folder(path)
    kind, iteration = _kind(folder)
    if kind is None or kind is HubCheckpoint:
        return open_hub(os.fspath(folder), revision, family)
    return kind.open(folder, iteration, family)


def open_checkpoint(path: PathLike, family: str | None = None) -> Checkpoint:
    """A checkpoint of any kind and its model. Raises DlmBridgeError, also where nothing names the model."""
    return find_checkpoint(path, family=family).bind()


@gc_paused()
def open_megatron(
    path: PathLike,
    like: PathLike | None = None,
    hf_config: PathLike | None = None,
    family: str | None = None,
    averaged: bool = False,
) -> Checkpoint:
    """Open a Megatron checkpoint of any format, or a plain distributed one of a Hub model; `like` (a Hub folder or id)
    or `hf_config` (a config.json) names its Hub model in place of its own manifest or settings. `averaged`: with the
    moving averages of its run in place of the weights.

    Raises DlmBridgeError.
    """
    root = checkpoint_folder(path)
    if not root.is_dir():
        raise DlmBridgeError(f"{root} is not a checkpoint: " + ("not a folder" if root.exists() else "no such folder"))
    if like is not None and hf_config is not None:
        raise DlmBridgeError("give --like or --hf-config, not both")
    kind, _ = _kind(root)
    if kind in (None, HubCheckpoint):
        from dlm_bridge.convert.optimizer_state import AVERAGED

        why = "it is in the Hub's layout already" if kind is HubCheckpoint else f"it has no {TRACKER}"
        where = f", and so are its averages, {root / AVERAGED}" if averaged and (root / AVERAGED).is_dir() else ""
        raise DlmBridgeError(f"{root} is not a Megatron checkpoint: {why}{where}")
    twin = None if like is None else open_hub(os.fspath(like), family=family)
    checkpoint = find_checkpoint(root, family=family)
    if averaged:
        checkpoint.use_averages()
    if twin is not None:
        twin.check()
        checkpoint.adopt(twin)
    if hf_config is not None:
        from dlm_bridge.convert.checkpoints.dcp import hub_of_config

        checkpoint.hub = hub_of_config(Path(hf_config), family, str(hf_config))
    return checkpoint.bind()


def is_megatron(folder: Path) -> bool:
    """Whether a folder is (or claims to be) a Megatron checkpoint of any format, or one of its iterations."""
    return newest_iteration(folder) is not None


def newest_iteration(folder: Path) -> Path | None:
    """The folder of a Megatron checkpoint's newest iteration; None for other checkpoints. Raises DlmBridgeError."""
    kind, iteration = _kind(folder)
    return iteration if kind is not None and _is_megatrons(kind) else None


def _kind(folder: Path) -> tuple[type[Checkpoint] | None, Path]:
    """The kind of a folder, and the iteration's folder of a Megatron checkpoint. Raises DlmBridgeError."""
    found = folder
    if is_root := (folder / TRACKER).is_file():
        from dlm_bridge.convert.checkpoints.megatron import iteration_folder

        found = iteration_folder(folder)
    for place in dict.fromkeys((folder, folder / HUB_FOLDER, found, *found.glob("mp_rank_*"))):
        check_plain_files(place)
    rows = [row for row, patterns in KINDS if any(any(found.glob(pattern)) for pattern in patterns)]
    kind = next((kind for kind in map(load_kind, rows) if kind.recognises(found)), None)
    if is_root and (kind is None or not _is_megatrons(kind)):
        kind = load_kind("torch_dist:TorchDistCheckpoint")  # its error names what the folder lacks
    return kind, found


def _is_megatrons(kind: type[Checkpoint]) -> bool:
    if kind is HubCheckpoint:
        return False
    from dlm_bridge.convert.checkpoints.megatron import MegatronCheckpoint

    return issubclass(kind, MegatronCheckpoint)

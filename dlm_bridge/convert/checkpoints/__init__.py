"""Checkpoint formats, one module each, and functions that open a path of any format.

A new format is a module with a `Checkpoint` class and its row in `KINDS`.
"""

from __future__ import annotations

import importlib
import os
from functools import cache
from pathlib import Path

from dlm_bridge.convert.checkpoint import Checkpoint
from dlm_bridge.convert.checkpoints.huggingface import HUB_FOLDER, HubCheckpoint, open_hub
from dlm_bridge.convert.settings import HubSourceSettings
from dlm_bridge.errors import CheckpointError, SettingError
from dlm_bridge.files.reading import check_plain_files, gc_paused
from dlm_bridge.hub import CONFIG_FILE, TRACKER, checkpoint_folder

# (class, glob patterns), in the order of recognition. A class is imported only if a pattern matches, so that reading
# a Hub folder's headers does not import torch.
KINDS = (
    ("legacy:LegacyCheckpoint", ("mp_rank_*",)),
    ("torch_dist:TorchDistCheckpoint", (".metadata",)),
    ("fsdp_dtensor:FsdpDtensorCheckpoint", (".metadata",)),
    ("dcp:DcpCheckpoint", (".metadata", "pytorch_model_fsdp_0/.metadata")),  # the second is Accelerate's
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
    """Open a checkpoint of any format without identifying its model. A training run's folder is its newest checkpoint.

    Raises:
        CheckpointError: the folder is not a checkpoint, or is damaged.
    """
    folder = checkpoint_folder(path)
    kind, iteration = _kind(folder)
    if kind is None or kind is HubCheckpoint:
        return open_hub(folder, HubSourceSettings(revision=revision, family=family))
    return kind.open(folder, iteration, family)


def open_checkpoint(path: PathLike, family: str | None = None) -> Checkpoint:
    """Open a checkpoint of any format and identify its model. Raises CheckpointError."""
    return find_checkpoint(path, family=family).bind()


@gc_paused()
def open_megatron(
    path: PathLike,
    like: PathLike | None = None,
    hf_config: PathLike | None = None,
    family: str | None = None,
    averaged: bool = False,
) -> Checkpoint:
    """Open a Megatron checkpoint of any format, or a torch.distributed.checkpoint of a Hub model.

    Args:
        like: Hub folder or id of the model, in place of the checkpoint's own manifest or settings.
        hf_config: the model's config.json, likewise.
        averaged: read the run's moving averages in place of its weights.

    Raises:
        CheckpointError: the folder is not such a checkpoint, is damaged, or does not identify its model.
        SettingError: both `like` and `hf_config` are given.
    """
    root = checkpoint_folder(path)
    if like is not None and hf_config is not None:
        raise SettingError("like", "contradicts `hf_config`: give one of them")
    kind, _ = _kind(root)
    if kind in (None, HubCheckpoint):
        from dlm_bridge.convert.optimizer_state import AVERAGED

        if kind is HubCheckpoint:
            averages = root / AVERAGED
            also = f", and so are its averages, {averages}" if averaged and averages.is_dir() else ""
            why = f"it is in the Hub's layout already{also}"
        else:
            why = f"it has no {TRACKER}" if root.is_dir() else "not a folder" if root.exists() else "no such folder"
        raise CheckpointError(root, f"is not a Megatron checkpoint: {why}")
    twin = None if like is None else open_hub(like, HubSourceSettings(family=family))
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
    """True if a folder is (or claims to be) a Megatron checkpoint of any format, or one of its iterations."""
    return newest_iteration(folder) is not None


def newest_iteration(folder: Path) -> Path | None:
    """Folder of a Megatron checkpoint's newest iteration; None for other checkpoints. Raises CheckpointError."""
    kind, iteration = _kind(folder)
    return iteration if kind is not None and _is_megatrons(kind) else None


def _kind(folder: Path) -> tuple[type[Checkpoint] | None, Path]:
    """Checkpoint class of a folder, and the newest iteration's folder if it is Megatron's. Raises CheckpointError."""
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

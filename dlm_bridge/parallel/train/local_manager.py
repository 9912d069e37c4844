"""nvidia-resiliency-ext's manager of local checkpoints over files of ours.

It decides which checkpoint all ranks have, copies them between nodes and removes old ones. What it would store is a
pickle that may run anything when it is read; here a file holds tensors and plain values, which `load_torch_file`
reads, beside a digest of it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import shutil
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.base_manager import (
    BaseCheckpointManager,
    CheckpointingException,
)
from nvidia_resiliency_ext.checkpointing.local.replication.strategies import CliqueReplicationStrategy

from dlm_bridge.convert.atomic import atomic_folder
from dlm_bridge.convert.formats.unpickler import load_torch_file
from dlm_bridge.convert.manifest import check_files, digests_of, write_digests
from dlm_bridge.errors import DlmBridgeError, first_of, one_line
from dlm_bridge.parallel import platform
from dlm_bridge.parallel.core import MCoreTensorAwareStateDict, ShardedObject, ShardedTensor, nested_values
from dlm_bridge.parallel.mcore_patches.process_wide import original_device, replicas_on_cpu
from dlm_bridge.train.checkpoints import from_all

FILE = "state.pt"
_NAME = re.compile(r"step-(\d{7,})\.rank-(\d+)")

CheckpointId = tuple[int, int, str]  # step, rank whose state it is, folder of the start


class LocalManager(BaseCheckpointManager):
    """The local checkpoints of one start of a run, in `folder`. Every process makes one and calls it together."""

    def __init__(self, folder: Path, distance: int = 1, copies: int = 1) -> None:
        """With `copies` above 1 the state of a rank is also kept by those at this `distance`, twice it and so on."""
        strategy = CliqueReplicationStrategy.from_replication_params(distance, copies) if copies > 1 else None
        super().__init__(folder.name, strategy)
        self.folder = folder / f"rank-{dist.get_rank()}"
        self.sources = {dist.get_rank()} if strategy is None else set(strategy.local_group.ranks)
        self.excluded: set[CheckpointId] = set()
        self.failure: str | None = None

    def path(self, checkpoint: CheckpointId) -> Path:
        step, rank, _ = checkpoint
        return self.folder / f"step-{step:07d}.rank-{rank}"

    # -- what a run calls

    def find_whole(self, below: int) -> tuple[int | None, list[str]]:
        """The newest step below `below` of which every rank has a whole checkpoint, or a rank near it; and a line on
        each newer one."""
        notes: list[str] = []
        self.excluded |= {found for found in self._my_ckpt_ids() if found[0] >= below}
        while True:
            self.latest_iteration = -1  # what it would return again
            step = self.find_latest()
            if step < 0:
                return None, [*self._incomplete(0), *notes]
            mine = [found for found in self._my_ckpt_ids() if found[0] == step]
            problems = {found: problem for found in mine if (problem := _problem(self.path(found))) is not None}
            self.excluded |= problems.keys()
            lines = from_all([f"{self.path(found)}: {problem}" for found, problem in problems.items()])
            if not any(lines):
                return step, [*self._incomplete(step), *notes]
            notes += [line for rank in lines for line in rank]

    def read(self) -> MCoreTensorAwareStateDict:
        """This rank's state at the step that `find_whole` has found."""
        with replicas_on_cpu() if platform.current().name == "cpu" else contextlib.nullcontext():
            state, _ = self.load()
        return state

    def write(self, state: MCoreTensorAwareStateDict, step: int) -> None:
        """Write the checkpoint of `step` and remove those before it. Raises DlmBridgeError on every rank where the
        disk of one refuses; the one before stays."""
        try:
            self.save(state, step)
        except CheckpointingException as error:
            failures = [failure for failure in from_all(self.failure) if failure is not None]
            raise DlmBridgeError(failures[0] if failures else one_line(error)) from error

    def _incomplete(self, above: int) -> list[str]:
        """A line on each checkpoint after a step that some rank lacks."""
        ranks = defaultdict(set)
        for found in self.globally_available_ids:
            for step, rank, _ in found:
                ranks[step].add(rank)
        everyone = set(range(dist.get_world_size()))
        return [
            f"the local checkpoint of step {step} is incomplete: "
            f"{first_of(f'rank {rank} has none' for rank in everyone - having)}"
            for step, having in sorted(ranks.items(), reverse=True)
            if step > above and having != everyone
        ]

    # -- what it is made of

    def _my_ckpt_ids(self) -> Iterable[CheckpointId]:
        names = [_NAME.fullmatch(path.name) for path in self.folder.iterdir()] if self.folder.is_dir() else []
        found = [(int(name[1]), int(name[2]), self.session_id) for name in names if name is not None]
        return [each for each in found if each[1] in self.sources and each not in self.excluded]

    def _save(self, state: MCoreTensorAwareStateDict, checkpoint: CheckpointId) -> None:
        """Nothing is raised: the ranks would wait for this one. All see that the checkpoint is not there."""
        platform.current().synchronize()  # tensors are still on their way from the device
        folder = self.path(checkpoint)
        remedy = "make room there, leave out --local-folder, or choose another"
        try:
            with atomic_folder(folder, folder.with_name(f".{folder.name}"), remedy) as temporary:
                with (temporary / FILE).open("wb") as stream:  # torch's own files do not say why they fail
                    torch.save(_as_plain_values(state), stream)
                write_digests(temporary, digests_of(temporary, [FILE]))
        except DlmBridgeError as error:
            self.failure = str(error)

    def _load(self, checkpoint: CheckpointId) -> MCoreTensorAwareStateDict:
        return read_state(self.path(checkpoint) / FILE)

    def _cleanup(self, iteration: int) -> None:
        self._remove(found for found in self._my_ckpt_ids() if found[0] != iteration)

    def _cleanup_failed_save(self, iteration: int) -> None:
        self._remove(found for found in self._my_ckpt_ids() if found[0] == iteration)

    def _remove(self, checkpoints: Iterable[CheckpointId]) -> None:
        for checkpoint in checkpoints:
            shutil.rmtree(self.path(checkpoint), ignore_errors=True)


def read_state(path: Path) -> MCoreTensorAwareStateDict:
    """The state in a file. Raises DlmBridgeError for one that is damaged, or holds more than tensors and plain
    values."""
    try:
        saved = load_torch_file(path)
        shards = [ShardedTensor(**_on_device(fields)) for fields in saved["tensors"]]
        objects = [ShardedObject(**fields) for fields in saved["objects"]]
        return MCoreTensorAwareStateDict(saved["common"], dict(enumerate([*shards, *objects])))
    except Exception as error:
        raise DlmBridgeError(f"{path}: cannot be read: {one_line(error)[:300]}: remove {path.parent}") from error


def _as_plain_values(state: MCoreTensorAwareStateDict) -> dict[str, Any]:
    tensors, objects = [], []
    for each in nested_values(state.sharded_state_dict):
        fields = {field.name: getattr(each, field.name) for field in dataclasses.fields(each)}
        if isinstance(each, ShardedTensor):
            tensors.append({**fields, "data": each.data.detach(), "device": original_device(each)})
        else:
            objects.append(fields)
    return {"common": state.common, "tensors": tensors, "objects": objects}


def _on_device(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of a tensor that is on the device again where it came from one."""
    device = fields.pop("device")
    data = fields["data"] if device == "cpu" else fields["data"].to(platform.current().device())
    return {**fields, "data": data}


def _problem(folder: Path) -> str | None:
    """What is wrong with a checkpoint's files; None where nothing is."""
    try:
        changed = check_files(folder)
    except (DlmBridgeError, OSError) as error:
        return f"is damaged: {error}"
    return f"is damaged: {changed[0].file} {changed[0].detail}" if changed else None

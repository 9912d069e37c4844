"""Local checkpoints of a Megatron run: each rank writes its own state to its node's disk or memory, often.

For runs on many nodes whose shared storage takes minutes per checkpoint; tried on processes of one machine only.

They are what a run resumes from where they are newer than its checkpoints, on the same number of processes and with
the same options of layout, precision and engine; nothing else reads them. Each start of a run writes into a folder of
its own, FOLDER/run-ID/START, and DIR/local_checkpoints.json names the one that counts: the files of another start, of
another run, or of a run that has gone on without them are never taken for this run's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import shutil
import uuid
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

from dlm_bridge.convert.manifest import check_files, digests_of, write_digests
from dlm_bridge.distributed import from_all, local_world_size, raised_everywhere
from dlm_bridge.errors import DlmBridgeError, SettingError, first_of, one_line, printable
from dlm_bridge.files.atomic import atomic_file, atomic_folder, disk_errors
from dlm_bridge.files.pickles import load_torch_file
from dlm_bridge.files.reading import read_json
from dlm_bridge.parallel import platform
from dlm_bridge.parallel.core import MCoreTensorAwareStateDict, ShardedObject, ShardedTensor, nested_values
from dlm_bridge.parallel.mcore_patches.process_wide import original_device, replicas_on_cpu
from dlm_bridge.parallel.train import fp8_state
from dlm_bridge.parallel.train.checkpoints import (
    LOCAL_RECORD,
    OPTIMIZER_KEY,
    STATE,
    named_load_errors,
    restore_state,
    sharded_state,
)
from dlm_bridge.settings import options_of
from dlm_bridge.train.config import TrainConfig

try:
    from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.base_manager import (
        BaseCheckpointManager,
        CheckpointingException,
    )
    from nvidia_resiliency_ext.checkpointing.local.replication.strategies import CliqueReplicationStrategy
except ImportError:  # `check_mcore_config` refuses --local-folder without it
    BaseCheckpointManager, CheckpointingException = object, Exception

SAME_LAYOUT = "dp_reshardable"  # megatron-core's word for an optimizer state that each rank writes as it has it
FILE = "state.pt"
_NAME = re.compile(r"step-(\d{7,})\.rank-(\d+)")

CheckpointId = tuple[int, int, str]  # step, rank whose state it is, folder of the start


@dataclass(frozen=True)
class Record:
    """DIR/local_checkpoints.json: which local checkpoints are those of the run, and with what they were made."""

    run: str = field(default_factory=lambda: uuid.uuid4().hex[:12])
    start: str | None = None  # the folder that counts; None: the run has none yet, or has gone on without
    settings: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, output: Path) -> Record:
        """That of a run, a new one where it has none. Raises DlmBridgeError."""
        try:
            content = read_json(output / LOCAL_RECORD)
            record = cls(content["run"], content["start"], content["settings"])
        except FileNotFoundError:
            return cls()
        except (KeyError, DlmBridgeError) as error:
            raise DlmBridgeError(f"{output / LOCAL_RECORD} is damaged ({error}): remove it to go on without") from None
        names = (record.run, record.start or "")
        if not all(isinstance(name, str) and (name + "0").isalnum() for name in names):
            raise DlmBridgeError(f"{output / LOCAL_RECORD} is damaged (names no folder): remove it to go on without")
        return record

    def write(self, output: Path) -> None:
        with atomic_file(output / LOCAL_RECORD, overwrite=True) as file:
            json.dump(dataclasses.asdict(self), file, indent=1)


def go_on_without(output: Path, console: Console) -> None:
    """Record that a run goes on without the local checkpoints that it has, so that they are not resumed from later.
    One process calls it."""
    if (record := Record.read(output)).start is not None:
        dataclasses.replace(record, start=None).write(output)
        console.print("without --local-folder: the run's local checkpoints are not used, now or later", soft_wrap=True)


class LocalCheckpoints:
    """Writes and reads the local checkpoints of one run. Every process makes one and calls it together."""

    def __init__(self, config: TrainConfig) -> None:
        options = config.checkpoint
        self.output, self.steps, self.copies = Path(options.output), config.schedule.steps, options.local_copies
        with raised_everywhere():
            record, start = Record.read(self.output), uuid.uuid4().hex[:12]
        self.record, self.start = from_all((record, start))[0]
        self.settings = _settings(config)
        self.folder = Path(str(options.local_folder)).absolute() / f"run-{self.record.run}"
        self.node = local_world_size()  # processes
        if dist.get_world_size() % (self.node * self.copies):
            raise SettingError(
                "local_copies",
                f"{self.copies}: {dist.get_world_size()} processes, {self.node} a node, are not groups of that many "
                "nodes",
            )
        self.step: int | None = None  # of the local checkpoint that this start resumes from
        self.source: LocalManager | None = None  # which reads it
        self.manager: LocalManager | None = None  # which writes those of this start
        self.distribution: Any = None  # megatron-core checks how a state is sharded at its first save

    # -- reading

    def find(self, step: int, checkpoint: Path | None, console: Console) -> int:
        """The step that the run goes on from: that of the newest local checkpoint which every rank has, where it is
        newer than the `checkpoint`, which is of `step`. Lines say which it is, and why newer ones are not used."""
        newest, notes = None, []
        if self.record.start is None:
            notes.append("the run has no local checkpoints")
        elif changed := [key for key, value in self.settings.items() if self.record.settings.get(key) != value]:
            notes.append(f"warning: local checkpoints are not used: they were made with another {first_of(changed)}")
        else:
            self.source = self._manager(self.record.start)
            newest, problems = self.source.find_whole(below=self.steps)
            notes += [f"warning: {problem}: it is not used" for problem in problems]
        if newest is not None and newest > step:
            self.step = newest
        other = f"the checkpoint of step {step}" if checkpoint is not None else "the run's beginning"
        if self.step is not None:
            notes.append(f"going on from the local checkpoint of step {self.step}, which is newer than {other}")
        else:
            local = "no newer local checkpoint" if newest is None else f"a local checkpoint of step {newest} only"
            notes.append(f"going on from {other}: there is {local}")
        if dist.get_rank() == 0:
            for line in notes:
                console.print(printable(line), markup=False, highlight=False, soft_wrap=True)
        return step if self.step is None else self.step

    @fp8_state.rewritten_extra_states()
    def load(self, chunks: Sequence[Any], optimizer: Any) -> dict[str, Any]:
        """Set weights and optimizer to what `find` has found, and return our own values. Raises DlmBridgeError."""
        assert self.source is not None
        with named_load_errors(self.source.folder):
            request = sharded_state(chunks, optimizer, True, SAME_LAYOUT)
            state = self.source.read().to_state_dict(request, algo="atomic", validate_access_integrity=False)
        saved = state[OPTIMIZER_KEY]
        restore_state(self.source.folder, chunks, optimizer, state, lambda: optimizer.load_state_dict(saved))
        return dict(state[STATE])

    # -- writing

    def begin(self) -> None:
        """Note what the run goes on from, before it does. Raises DlmBridgeError where the folder cannot be made."""
        with disk_errors(self.folder, "leave out --local-folder, or choose another"):
            self.folder.mkdir(parents=True, exist_ok=True)
        if dist.get_rank() == 0:
            start = None if self.step is None else self.record.start
            Record(self.record.run, start, self.settings).write(self.output)

    @torch.no_grad()  # or the weights, which are broadcast to other nodes, would have a history
    def save(self, step: int, values: dict[str, Any], chunks: Sequence[Any], optimizer: Any) -> None:
        """Write the local checkpoint of `step` with our own `values`, and remove those before it. Raises
        DlmBridgeError where the disk of any node refuses."""
        state = {STATE: values, **sharded_state(chunks, optimizer, False, SAME_LAYOUT)}
        tensors, self.distribution = MCoreTensorAwareStateDict.from_state_dict(
            state, algo="atomic", cached_metadata=self.distribution
        )
        if self.manager is not None:
            self.manager.write(tensors, step)
            return
        self.manager = self._manager(self.start)
        self.manager.write(tensors, step)
        with raised_everywhere():
            if dist.get_rank() == 0:  # from here on a resume takes these
                Record(self.record.run, self.start, self.settings).write(self.output)
        for other in self.folder.iterdir():
            if other.name != self.start:
                shutil.rmtree(other, ignore_errors=True)

    def _manager(self, start: str) -> LocalManager:
        return LocalManager(self.folder / start, self.node, self.copies)


def _settings(config: TrainConfig) -> dict[str, Any]:
    """What must be the same for a rank's state to fit."""
    flags = config.as_flags()
    compared = {
        option.flag: flags[key]
        for key, option in options_of(type(config)).items()
        if option.section in ("parallel", "precision") or option.flag == "--megatron"
    }
    del compared["--rank-timeout"]
    return {"number of processes": dist.get_world_size(), **compared}


# -- nvidia-resiliency-ext's manager over files of ours
#
# It decides which checkpoint all ranks have, copies them between nodes and removes old ones. What it would store is a
# pickle that may run anything when it is read; here a file holds tensors and plain values, which `load_torch_file`
# reads, beside a digest of it.


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

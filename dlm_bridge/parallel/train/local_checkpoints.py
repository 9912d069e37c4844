"""Local checkpoints of a Megatron run: each rank frequently writes its own state to its node's disk or memory.

For runs on many nodes whose shared storage takes minutes per checkpoint; tested only with processes of one machine.

A run resumes from a local checkpoint that is newer than its checkpoints, on the same number of processes and with the
same layout, precision and engine; nothing else reads them. Each start of a run writes into its own folder,
FOLDER/run-ID/START, and DIR/local_checkpoints.json names the current one, so that files of another start, of another
run, or of a run that continued without them are never used.
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
from dlm_bridge.errors import (
    CheckpointError,
    DlmBridgeError,
    LayoutError,
    ResourceError,
    first_of,
    one_line,
    printable,
)
from dlm_bridge.files.atomic import atomic_file, atomic_folder, disk_errors
from dlm_bridge.files.pickles import load_torch_file
from dlm_bridge.files.reading import read_json
from dlm_bridge.job import named_rank
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
from dlm_bridge.train.checkpoints import agreed
from dlm_bridge.train.config import TrainConfig

try:
    from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.base_manager import (
        BaseCheckpointManager,
        CheckpointingException,
    )
    from nvidia_resiliency_ext.checkpointing.local.replication.strategies import CliqueReplicationStrategy
except ImportError:  # `check_mcore_config` refuses local checkpoints without it
    BaseCheckpointManager, CheckpointingException = object, Exception

SAME_LAYOUT = "dp_reshardable"  # megatron-core's name for an optimizer state that is not resharded
FILE = "state.pt"
REMEDY = "leave out `local_folder`, or choose another"
_NAME = re.compile(r"step-(\d{7,})\.rank-(\d+)")

CheckpointId = tuple[int, int, str]  # step, rank whose state it is, folder of the start


@dataclass(frozen=True)
class Record:
    """Contents of DIR/local_checkpoints.json: the run's current local checkpoints, and their settings."""

    run: str = field(default_factory=lambda: uuid.uuid4().hex[:12])
    start: str | None = None  # current folder; None if the run has none yet, or continued without
    settings: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, output: Path) -> Record:
        """Read a run's record; a new one if it has none. Raises CheckpointError."""
        try:
            content = read_json(output / LOCAL_RECORD)
            record = cls(content["run"], content["start"], content["settings"])
            names = (record.run, record.start or "")
            if not all(isinstance(name, str) and (name + "0").isalnum() for name in names):
                raise KeyError("folder")
        except FileNotFoundError:
            return cls()
        except (KeyError, DlmBridgeError) as error:
            raise CheckpointError(
                output / LOCAL_RECORD, f"is damaged ({one_line(error)}): remove it to continue without"
            ) from None
        return record

    def write(self, output: Path) -> None:
        with atomic_file(output / LOCAL_RECORD, overwrite=True) as file:
            json.dump(dataclasses.asdict(self), file, indent=1)


def _content(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace")
    except FileNotFoundError:
        return None
    except OSError as error:
        return str(error.strerror)


def go_on_without(output: Path, console: Console) -> None:
    """Record that a run continues without its local checkpoints, so that they are not resumed from later. One process
    calls it."""
    if (record := Record.read(output)).start is not None:
        dataclasses.replace(record, start=None).write(output)
        console.print("without `local_folder`: the run's local checkpoints are not used, now or later", soft_wrap=True)


class LocalCheckpoints:
    """Writes and reads the local checkpoints of one run. Every process creates one, and all call it together. Raises
    LayoutError if the number of nodes is not a multiple of `local_copies`."""

    def __init__(self, config: TrainConfig) -> None:
        options = config.checkpoint
        self.output, self.steps, self.copies = Path(options.output), config.schedule.last_step, options.local_copies
        agreed(self.output, [LOCAL_RECORD], _content)
        with raised_everywhere():
            record, start = Record.read(self.output), uuid.uuid4().hex[:12]
        self.record, self.start = from_all((record, start))[0]
        self.settings = _settings(config)
        self.folder = Path(str(options.local_folder)).absolute() / f"run-{self.record.run}"
        self.node = local_world_size()  # processes per node
        if dist.get_world_size() % (self.node * self.copies):
            raise LayoutError(
                "local_copies",
                f"{self.copies} does not divide the nodes of {dist.get_world_size()} processes, {self.node} per node",
            )
        self.step: int | None = None  # of the local checkpoint that this start resumes from
        self.source: LocalManager | None = None  # reads it
        self.manager: LocalManager | None = None  # writes the local checkpoints of this start
        self.distribution: Any = None  # sharding metadata that megatron-core collects at the first save

    # -- reading

    def find(self, step: int, checkpoint: Path | None, console: Console) -> int:
        """Find the step that the run resumes from: the newest local checkpoint that every rank has, if it is newer
        than the `checkpoint` of `step`. The console shows which it is, and why newer ones are not used."""
        newest, notes = None, []
        if self.record.start is None:
            notes.append("the run has no local checkpoints")
        elif changed := [
            _shown(key) for key, value in self.settings.items() if self.record.settings.get(key) != value
        ]:
            notes.append(f"warning: local checkpoints are not used: they were made with another {first_of(changed)}")
        else:
            self.source = self._manager(self.record.start)
            newest, problems = self.source.find_whole(below=self.steps)
            notes += [f"warning: {problem}: it is not used" for problem in problems]
        if newest is not None and newest > step:
            self.step = newest
        other = f"the checkpoint of step {step}" if checkpoint is not None else "the run's beginning"
        if self.step is not None:
            notes.append(f"resuming from the local checkpoint of step {self.step}, which is newer than {other}")
        else:
            local = "there is no newer local checkpoint"
            if newest is not None:
                local = f"the newest local checkpoint is of step {newest}"
            notes.append(f"resuming from {other}: {local}")
        if dist.get_rank() == 0:
            for line in notes:
                console.print(printable(line), markup=False, highlight=False, soft_wrap=True)
        return step if self.step is None else self.step

    @fp8_state.rewritten_extra_states()
    def load(self, chunks: Sequence[Any], optimizer: Any) -> dict[str, Any]:
        """Load weights and optimizer from the checkpoint that `find` has found, and return our own values. Raises
        CheckpointError."""
        assert self.source is not None
        with named_load_errors(self.source.folder):
            request = sharded_state(chunks, optimizer, True, SAME_LAYOUT)
            state = self.source.read().to_state_dict(request, algo="atomic", validate_access_integrity=False)
        saved = state[OPTIMIZER_KEY]
        restore_state(self.source.folder, chunks, optimizer, state, lambda: optimizer.load_state_dict(saved))
        return dict(state[STATE])

    # -- writing

    def begin(self) -> None:
        """Write the record before the run continues. Raises ResourceError if the folder cannot be created."""
        with disk_errors(self.folder, REMEDY):
            self.folder.mkdir(parents=True, exist_ok=True)
        if dist.get_rank() == 0:
            start = None if self.step is None else self.record.start
            Record(self.record.run, start, self.settings).write(self.output)

    @torch.no_grad()  # weights are broadcast to other nodes
    def save(self, step: int, values: dict[str, Any], chunks: Sequence[Any], optimizer: Any) -> None:
        """Write the local checkpoint of `step` with our own `values`, and remove earlier ones. Raises ResourceError if
        any node cannot write it."""
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
            if dist.get_rank() == 0:  # from now on a resume uses this start's
                Record(self.record.run, self.start, self.settings).write(self.output)
        for other in self.folder.iterdir():
            if other.name != self.start:
                shutil.rmtree(other, ignore_errors=True)

    def _manager(self, start: str) -> LocalManager:
        return LocalManager(self.folder / start, self.node, self.copies)


def _settings(config: TrainConfig) -> dict[str, Any]:
    """Settings that a resume from a rank's state must not change, by flag."""
    flags = config.as_flags()
    compared = {
        option.flag: flags[key]
        for key, option in options_of(type(config)).items()
        if option.section in ("parallel", "precision") or option.flag == "--megatron"
    }
    del compared["--rank-timeout"]
    return {"number of processes": dist.get_world_size(), **compared}


def _shown(key: str) -> str:
    return f"`{key[2:].replace('-', '_')}`" if key.startswith("--") else key


# -- nvidia-resiliency-ext's manager with our own files
#
# It determines which checkpoint all ranks have, copies checkpoints between nodes and removes old ones. Its own files
# are pickles, which can run arbitrary code; ours contain tensors and plain values, which `load_torch_file` reads, and
# have digests.


class LocalManager(BaseCheckpointManager):
    """Local checkpoints of one start of a run, in `folder`. Every process creates one, and all call it together.

    Args:
        copies: number of ranks that store the state of a rank: its own, those at `distance`, twice it and so on.
    """

    def __init__(self, folder: Path, distance: int = 1, copies: int = 1) -> None:
        strategy = CliqueReplicationStrategy.from_replication_params(distance, copies) if copies > 1 else None
        super().__init__(folder.name, strategy)
        self.folder = folder / f"rank-{dist.get_rank()}"
        self.sources = {dist.get_rank()} if strategy is None else set(strategy.local_group.ranks)
        self.excluded: set[CheckpointId] = set()
        self.failure: DlmBridgeError | None = None

    def path(self, checkpoint: CheckpointId) -> Path:
        step, rank, _ = checkpoint
        return self.folder / f"step-{step:07d}.rank-{rank}"

    # -- interface

    def find_whole(self, below: int) -> tuple[int | None, list[str]]:
        """Newest step below `below` with an intact checkpoint of every rank, on it or on a rank with a copy; and a
        message about each newer one."""
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
        """Read this rank's state at the step that `find_whole` has found."""
        with replicas_on_cpu() if platform.current().name == "cpu" else contextlib.nullcontext():
            state, _ = self.load()
        return state

    def write(self, state: MCoreTensorAwareStateDict, step: int) -> None:
        """Write the checkpoint of `step` and remove earlier ones. If a rank cannot write it, or a copy, ResourceError
        is raised on every rank; the earlier one remains, unless other ranks have copies of all that is missing."""
        incomplete = None
        try:
            self.save(state, step)
        except CheckpointingException as error:
            incomplete = error
        failures = [failure for failure in from_all(self.failure) if failure is not None]
        if incomplete is not None and not failures:
            failures = [ResourceError(self.folder, one_line(incomplete))]
        for failure in failures:
            raise failure from incomplete

    def _incomplete(self, above: int) -> list[str]:
        """Messages about checkpoints after a step that some rank lacks."""
        ranks = defaultdict(set)
        for found in self.globally_available_ids:
            for step, rank, _ in found:
                ranks[step].add(rank)
        everyone = set(range(dist.get_world_size()))
        return [
            f"the local checkpoint of step {step} is incomplete: "
            f"{first_of(f'{named_rank(rank)} has none' for rank in everyone - having)}"
            for step, having in sorted(ranks.items(), reverse=True)
            if step > above and having != everyone
        ]

    # -- methods that nvidia-resiliency-ext calls

    def _my_ckpt_ids(self) -> Iterable[CheckpointId]:
        names = [_NAME.fullmatch(path.name) for path in self.folder.iterdir()] if self.folder.is_dir() else []
        found = [(int(name[1]), int(name[2]), self.session_id) for name in names if name is not None]
        return [each for each in found if each[1] in self.sources and each not in self.excluded]

    def _save(self, state: MCoreTensorAwareStateDict, checkpoint: CheckpointId) -> None:
        """Write a checkpoint. Does not raise, because other ranks would wait; all detect the missing checkpoint."""
        platform.current().synchronize()  # tensors are copied from the device asynchronously
        folder = self.path(checkpoint)
        try:
            with atomic_folder(folder, folder.with_name(f".{folder.name}"), f"make room there, {REMEDY}") as temporary:
                with (temporary / FILE).open("wb") as stream:  # torch's own files hide the cause of failures
                    torch.save(_as_plain_values(state), stream)
                write_digests(temporary, digests_of(temporary, [FILE]))
        except DlmBridgeError as error:
            self.failure = error

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
    """Read the state in a file. Raises CheckpointError if it is damaged, or contains more than tensors and plain
    values."""
    try:
        saved = load_torch_file(path)
        shards = [ShardedTensor(**_on_device(fields)) for fields in saved["tensors"]]
        objects = [ShardedObject(**fields) for fields in saved["objects"]]
        return MCoreTensorAwareStateDict(saved["common"], dict(enumerate([*shards, *objects])))
    except Exception as error:
        raise CheckpointError(path, f"cannot be read: {one_line(error)[:300]}: remove {path.parent}") from error


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
    """Fields of a tensor, which is copied to the device if it was saved from one."""
    device = fields.pop("device")
    data = fields["data"] if device == "cpu" else fields["data"].to(platform.current().device())
    return {**fields, "data": data}


def _problem(folder: Path) -> str | None:
    """Description of the damage in a checkpoint's files; None if they are intact."""
    try:
        changed = check_files(folder)
    except (DlmBridgeError, OSError) as error:
        return f"is damaged: {error}"
    return f"is damaged: {changed[0].file} {changed[0].detail}" if changed else None

"""Local checkpoints of a Megatron run: each rank writes its own state to its node's disk or memory, often.

They are what a run resumes from where they are newer than its checkpoints, on the same number of processes and with
the same options of layout, precision and engine; nothing else reads them. Each start of a run writes into a folder of
its own, FOLDER/run-ID/START, and DIR/local_checkpoints.json names the one that counts: the files of another start, of
another run, or of a run that has gone on without them are never taken for this run's.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from rich.console import Console

from dlm_bridge.convert.atomic import atomic_file, disk_errors
from dlm_bridge.errors import DlmBridgeError, first_of, printable
from dlm_bridge.hub import read_json
from dlm_bridge.parallel.core import MCoreTensorAwareStateDict
from dlm_bridge.parallel.train import loaded_state
from dlm_bridge.parallel.train.checkpoints import STATE, named_load_errors, restore_state, sharded_state
from dlm_bridge.parallel.train.mcore_config import check_mcore_config
from dlm_bridge.train.checkpoints import from_all, raised_everywhere
from dlm_bridge.train.config import TrainConfig
from dlm_bridge.train.config.options import OptionError, options_of

if TYPE_CHECKING:
    from dlm_bridge.parallel.train.local_manager import LocalManager

RECORD = "local_checkpoints.json"
SAME_LAYOUT = "dp_reshardable"  # megatron-core's word for an optimizer state that each rank writes as it has it


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
            content = read_json(output / RECORD)
            record = cls(content["run"], content["start"], content["settings"])
        except FileNotFoundError:
            return cls()
        except (KeyError, DlmBridgeError) as error:
            raise DlmBridgeError(f"{output / RECORD} is damaged ({error}): remove it to go on without") from None
        names = (record.run, record.start or "")
        if not all(isinstance(name, str) and (name + "0").isalnum() for name in names):
            raise DlmBridgeError(f"{output / RECORD} is damaged (names no folder): remove it to go on without")
        return record

    def write(self, output: Path) -> None:
        with atomic_file(output / RECORD, overwrite=True) as file:
            json.dump(dataclasses.asdict(self), file, indent=1)


def open_local(config: TrainConfig) -> LocalCheckpoints | None:
    """The local checkpoints of a run, None where its options ask for none. Every process calls it. Raises
    DlmBridgeError."""
    check_mcore_config(config)
    return None if config.checkpoint.local_folder is None else LocalCheckpoints(config)


def go_on_without(output: Path) -> str | None:
    """Note that a run goes on without local checkpoints, so that those it has are not resumed from later: a line that
    says so, None where it has none. One process calls it."""
    if not (output / RECORD).is_file() or (record := Record.read(output)).start is None:
        return None
    dataclasses.replace(record, start=None).write(output)
    return "without --local-folder: the run's local checkpoints are not used, now or later"


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
        self.node = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))  # processes
        if dist.get_world_size() % (self.node * self.copies):
            raise OptionError(
                "--local-copies",
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

    @loaded_state.rewritten_extra_states()
    def load(self, chunks: Sequence[Any], optimizer: Any) -> dict[str, Any]:
        """Set weights and optimizer to what `find` has found, and return our own values. Raises DlmBridgeError."""
        assert self.source is not None
        with named_load_errors(self.source.folder):
            request = sharded_state(chunks, optimizer, True, SAME_LAYOUT)
            state = self.source.read().to_state_dict(request, algo="atomic", validate_access_integrity=False)
        saved = state[loaded_state.OPTIMIZER_KEY]
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
        from dlm_bridge.parallel.train.local_manager import LocalManager

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

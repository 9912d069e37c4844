"""Local checkpoints of the Megatron engine, in one process: a run that is killed goes on from the newest whole one, to
the very same figures and files."""

from __future__ import annotations

import io
import json
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from dlm_bridge.convert.manifest import FILE_DIGESTS, check_files, digests_of, write_digests
from dlm_bridge.errors import (
    CheckpointError,
    DlmBridgeError,
    LayoutError,
    MissingExtraError,
    ResourceError,
    SettingError,
)
from dlm_bridge.train.config import TrainConfig
from tests.parallel.conftest import megatron_alone
from tests.refusals import hide, refused
from tests.train.conftest import read_metrics, run_values, undrawn, without_speed
from tests.train.test_damaged_checkpoints import flip
from tests.train.test_full_disk import limited_files

pytest.importorskip("megatron.core")

OPTIONS = {"engine": "megatron", "precision": "bf16", "steps": 6, "save_interval": 2, "eval_interval": 0}
RECORD = "local_checkpoints.json"
Train = Callable[..., str]


class KilledError(Exception):
    pass


@pytest.fixture(scope="module")
def train(seed_folder: Path, corpus: Path) -> Iterator[Train]:
    """Train on the Megatron engine in this process, up to where the run is `killed`: what the run prints."""
    with pytest.MonkeyPatch.context() as patch, megatron_alone():
        undrawn(patch)
        from dlm_bridge.parallel.train.assembly import train
        from dlm_bridge.parallel.train.trainer import MegatronTrainer

        def _train(output: Path, resume: bool = False, killed: int | None = None, **changes: Any) -> str:
            take, said = MegatronTrainer.start_step, io.StringIO()

            def start_step(self: Any, step: int, want_stop: bool) -> Any:
                if step == killed:
                    raise KilledError
                return take(self, step, want_stop)

            values = {**run_values(seed_folder, corpus), **OPTIONS, "output": str(output), **changes}
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(MegatronTrainer, "start_step", start_step)
                try:
                    train(TrainConfig.from_flags(**values), resume, Console(file=said, width=10_000))
                except KilledError:
                    assert killed is not None
            return said.getvalue()

        yield _train


@pytest.fixture(scope="module")
def whole(train: Train, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing has happened to."""
    output = tmp_path_factory.mktemp("whole") / "run"
    train(output)
    return output


@pytest.fixture(scope="module")
def stopped(train: Train, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run that was killed before step 4, and its local checkpoints."""
    pytest.importorskip("nvidia_resiliency_ext")
    root = tmp_path_factory.mktemp("stopped")
    train(root / "run", killed=4, local_folder=str(root / "local"), local_interval=1)
    return root


@pytest.fixture
def copy(stopped: Path, tmp_path: Path) -> Path:
    return shutil.copytree(stopped, tmp_path / "copy")


def local_files(root: Path) -> list[str]:
    return sorted(path.name for path in (root / "local").rglob("step-*"))


def goes_on(train: Train, root: Path, whole: Path, **changes: Any) -> str:
    """Resume to the end: the figures, weights and optimizer state of the run that nothing has happened to."""
    options = {"local_folder": str(root / "local"), "local_interval": 1, **changes}
    said = train(root / "run", resume=True, **options)
    assert without_speed(read_metrics(root / "run")) == without_speed(read_metrics(whole))
    last = "checkpoints/iter_0000006"
    assert not check_files(root / "run" / last)
    found, wanted = (json.loads((run / last / FILE_DIGESTS).read_text())["files"] for run in (root / "run", whole))
    assert {**found, ".metadata": ""} == {**wanted, ".metadata": ""}  # which names the save
    return said


def test_the_newest_is_resumed_exactly(copy: Path, whole: Path, train: Train) -> None:
    assert local_files(copy) == ["step-0000003.rank-0"]
    said = goes_on(train, copy, whole)
    assert "resuming from the local checkpoint of step 3, which is newer than the checkpoint of step 2" in said
    assert "resuming at step 3" in said
    assert local_files(copy) == ["step-0000005.rank-0"]  # of this start: those of the one before are removed


@pytest.mark.parametrize("name", ["state.pt", FILE_DIGESTS])
@pytest.mark.fast("state.pt")
def test_a_damaged_one_is_skipped(name: str, copy: Path, whole: Path, train: Train) -> None:
    (file,) = (copy / "local").rglob(name)
    flip(file)
    said = goes_on(train, copy, whole)
    assert f"warning: {file.parent}: is damaged: {name}" in said
    assert "resuming from the checkpoint of step 2: there is no newer local checkpoint" in said


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"precision": "fp32"}, id="fp32", marks=pytest.mark.slow),
        pytest.param({"precision": "fp16"}, id="fp16"),
        pytest.param({"distributed_optimizer": False}, id="unsharded"),
        pytest.param({"optimizer": "sgd"}, id="sgd", marks=pytest.mark.slow),
    ],
)
def test_other_optimizers(options: dict[str, Any], train: Train, tmp_path: Path) -> None:
    pytest.importorskip("nvidia_resiliency_ext")
    train(tmp_path / "whole", **options)
    train(tmp_path / "run", killed=4, local_folder=str(tmp_path / "local"), local_interval=1, **options)
    said = goes_on(train, tmp_path, tmp_path / "whole", **options)
    assert "resuming from the local checkpoint of step 3" in said


@pytest.mark.slow
def test_a_missing_one(copy: Path, whole: Path, train: Train) -> None:
    shutil.rmtree(copy / "local")
    said = goes_on(train, copy, whole)
    assert "resuming from the checkpoint of step 2: there is no newer local checkpoint" in said


def test_a_newer_checkpoint_wins(copy: Path, whole: Path, train: Train) -> None:
    """As after a run that was stopped by SIGTERM, and saved."""
    shutil.copytree(whole / "checkpoints/iter_0000004", copy / "run/checkpoints/iter_0000004")
    (copy / "run/checkpoints/latest_checkpointed_iteration.txt").write_text("4")
    shutil.copy(whole / "metrics.jsonl", copy / "run")
    said = goes_on(train, copy, whole)
    assert "resuming from the checkpoint of step 4" in said


@pytest.mark.slow
def test_before_the_first_checkpoint(whole: Path, train: Train, tmp_path: Path) -> None:
    pytest.importorskip("nvidia_resiliency_ext")
    local = {"local_folder": str(tmp_path / "local"), "local_interval": 1}
    train(tmp_path / "run", killed=2, **local)
    said = goes_on(train, tmp_path, whole)
    assert "resuming from the local checkpoint of step 1, which is newer than the run's beginning" in said


def test_a_start_that_is_killed_before_it_saves_keeps_those_of_the_one_before(
    copy: Path, whole: Path, train: Train
) -> None:
    local = {"local_folder": str(copy / "local")}
    train(copy / "run", resume=True, killed=4, **local, local_interval=3)
    said = goes_on(train, copy, whole)
    assert "resuming from the local checkpoint of step 3" in said


@pytest.mark.slow
def test_other_settings_and_other_runs(copy: Path, whole: Path, train: Train) -> None:
    """Local checkpoints are of one run, with one layout, and of its newest start only."""
    other, without = (shutil.copytree(copy, copy.with_name(name)) for name in ("other", "without"))
    options = {"local_interval": 1}
    local = {**options, "local_folder": str(other / "local")}
    said = train(other / "run", resume=True, killed=3, **local, overlap_communication=False)
    assert "local checkpoints are not used: they were made with another" in said
    assert "overlap" in said

    said = train(without / "run", resume=True, killed=4)
    assert "local_folder" in said
    said = train(without / "run", resume=True, killed=3, **options, local_folder=str(without / "local"))
    assert local_files(without) == ["step-0000003.rank-0"]
    assert "resuming from the checkpoint of step 2: there is no newer local checkpoint" in said

    train(copy / "new", killed=2, **options, local_folder=str(copy / "local"))
    assert "local checkpoint of step 3" in goes_on(train, copy, whole)


@pytest.mark.slow
def test_a_shorter_run_goes_on_from_before_its_end(copy: Path, train: Train) -> None:
    local = {"local_folder": str(copy / "local"), "lr_schedule": "constant"}
    said = train(copy / "run", resume=True, steps=3, **local)
    assert "resuming from the checkpoint of step 2" in said
    assert [row["step"] for row in read_metrics(copy / "run")] == [1, 2, 3]


def test_a_full_disk_is_one_line_and_the_one_before_stays(copy: Path, whole: Path, train: Train) -> None:
    from dlm_bridge.parallel.train.local_checkpoints import LocalManager

    local = {"local_folder": str(copy / "local"), "local_interval": 1}
    write = LocalManager.write
    with pytest.MonkeyPatch.context() as patch:

        def limited(self: Any, state: Any, step: int) -> None:
            with limited_files(20_000):
                write(self, state, step)

        patch.setattr(LocalManager, "write", limited)
        with refused(ResourceError, None, "step-0000005.rank-0"):
            train(copy / "run", resume=True, **local, save_interval=4)
    assert local_files(copy) == ["step-0000003.rank-0"]
    said = goes_on(train, copy, whole)
    assert "resuming from the checkpoint of step 4" in said


class Harm:
    """What a manipulated file may do where it is unpickled without care."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


def test_nothing_in_a_file_runs(copy: Path, train: Train, tmp_path: Path) -> None:
    """Not even in one whose digest is right."""
    from dlm_bridge.parallel.train.local_checkpoints import read_state

    (file,) = (copy / "local").rglob("state.pt")
    saved = torch.load(file, weights_only=True)
    torch.save({**saved, "common": Harm(tmp_path / "harmed")}, file)
    write_digests(file.parent, digests_of(file.parent, [file.name]))
    with refused(CheckpointError, file):
        goes_on(train, copy, copy / "run")
    file.write_bytes(pickle.dumps(Harm(tmp_path / "harmed")))
    write_digests(file.parent, digests_of(file.parent, [file.name]))
    with refused(CheckpointError, file):
        goes_on(train, copy, copy / "run")
    with refused(CheckpointError, file):
        read_state(file)
    assert not (tmp_path / "harmed").exists()


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"run": "../..", "start": null, "settings": {}}'])
def test_a_damaged_record_is_named(content: str, copy: Path, train: Train) -> None:
    (copy / "run" / RECORD).write_text(content)
    with refused(CheckpointError, copy / "run" / RECORD):
        train(copy / "run", resume=True, local_folder=str(copy / "local"))


def test_what_is_refused(train: Train, values: dict[str, Any], tmp_path: Path) -> None:

    for others in ({"fsdp": "optim"}, {"precision": "fp8", "fp8_params": True}, {"optimizer_cpu_offload": True}):
        with refused(SettingError, "local_folder"):
            TrainConfig.from_flags(**{**values, **OPTIONS, **others, "output": "o", "local_folder": "l"})
    with refused(SettingError, "local_copies"):
        TrainConfig.from_flags(**{**values, **OPTIONS, "output": "o", "local_copies": 2})
    pytest.importorskip("nvidia_resiliency_ext")
    with refused(LayoutError, "local_copies", "2"):
        train(tmp_path / "run", local_folder=str(tmp_path / "local"), local_copies=2)
    (tmp_path / "file").touch()
    with pytest.raises(DlmBridgeError, match=f"{tmp_path / 'file'}"):
        train(tmp_path / "run", local_folder=str(tmp_path / "file"))
    assert not (tmp_path / "run").exists()
    with pytest.MonkeyPatch.context() as patch:
        hide(patch, "nvidia_resiliency_ext")
        with refused(MissingExtraError, "local_folder", "dlm-bridge[resiliency]"):
            train(tmp_path / "run", local_folder=str(tmp_path / "local"))
    assert not (tmp_path / "run").exists()

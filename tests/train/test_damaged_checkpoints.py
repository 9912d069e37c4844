"""A damaged or incomplete checkpoint is never resumed: the one before it is, and it is kept under another name."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from rich.console import Console

from dlm_bridge.convert.manifest import FILE_DIGESTS, check_files, digests_of, file_names, write_digests
from dlm_bridge.errors import CheckpointError
from dlm_bridge.train import checkpoints
from dlm_bridge.train.accelerate.trainer import train
from dlm_bridge.train.config import TrainConfig
from tests.convert.helpers import run_cli
from tests.refusals import refused
from tests.train.conftest import Run, read_metrics, run_values, undrawn, without_speed

OPTIONS = {"steps": 4, "save_interval": 2, "eval_interval": 0}
FIRST, LAST = "step-0000002", "step-0000004"


def flip(file: Path) -> None:
    """Change one bit in the middle of a file."""
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def lose(file: Path, folder: Path, length: int | None = None) -> None:
    """Remove or cut a file of a checkpoint, whose digests are then of what is left: as if it had been published
    without the files of another host."""
    data = file.read_bytes()
    file.unlink()
    if length is not None:
        file.write_bytes(data[:length])
    write_digests(folder, digests_of(folder, file_names(folder)))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, seed_folder: Path, corpus: Path) -> Path:
    """A run with two checkpoints."""
    output = tmp_path_factory.mktemp("trained") / "run"
    with pytest.MonkeyPatch.context() as patch:
        undrawn(patch)
        config = TrainConfig.from_flags(**{**run_values(seed_folder, corpus), **OPTIONS, "output": str(output)})
        train(config, False, Console(quiet=True))
    return output


@pytest.fixture
def finished(trained: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return shutil.copytree(trained, tmp_path / "finished")


@pytest.fixture
def console(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """What the runs of this test print."""
    said = io.StringIO()
    monkeypatch.setattr("tests.train.conftest.Console", lambda **_: Console(file=said, width=10_000))
    return said


def resume_point(run: Path) -> checkpoints.ResumePoint:
    found = checkpoints.named_checkpoints(run / "checkpoints")
    return checkpoints.find_resume_point(found, checkpoints.STATE)


def test_a_flipped_bit_in_any_file_is_found(finished: Path, tmp_path: Path) -> None:
    names = file_names(finished / "checkpoints" / LAST)
    assert {"model.safetensors", "trainer_state.pt", "config.json", "tokenizer.json"} <= set(names)
    for damage in (flip, Path.unlink):
        for name in (*names, FILE_DIGESTS):
            copy = tmp_path / damage.__name__ / name
            shutil.copytree(finished, copy)
            damage(copy / "checkpoints" / LAST / name)
            point = resume_point(copy)
            if damage is not flip and name == FILE_DIGESTS:
                assert (point.step, point.damaged) == (4, ())
                assert "cannot be checked" in point.notes[0]
                continue
            assert point.step == 2, name
            ((folder, problem),) = point.damaged
            assert folder == copy / "checkpoints" / LAST
            assert name in problem


def test_a_run_goes_on_from_the_checkpoint_before(finished: Path, run: Run, console: io.StringIO) -> None:
    finished = finished.rename(finished.with_name("red\x1b[31m"))  # which no terminal must see
    rows = without_speed(read_metrics(finished))
    weights = (finished / "checkpoints" / LAST / "model.safetensors").read_bytes()
    flip(finished / "checkpoints" / LAST / "model.safetensors")
    damaged = (finished / "checkpoints" / LAST / "model.safetensors").read_bytes()
    assert without_speed(run(finished, resume=True, **OPTIONS)) == rows
    said = console.getvalue()
    assert f"{LAST}: is damaged: model.safetensors" in said
    assert f"{LAST}.damaged, the run resumes from step" in said
    assert "\x1b" not in said
    root = finished / "checkpoints"
    assert sorted(path.name for path in root.iterdir()) == [FIRST, LAST, f"{LAST}.damaged"]
    assert (root / f"{LAST}.damaged/model.safetensors").read_bytes() == damaged
    assert (root / LAST / "model.safetensors").read_bytes() == weights
    assert not check_files(root / LAST)
    flip(root / LAST / "trainer_state.pt")  # once more: the first one is still kept
    run(finished, resume=True, **OPTIONS)
    assert sorted(path.name for path in root.iterdir()) == [FIRST, LAST, f"{LAST}.damaged", f"{LAST}.damaged-2"]


def without_state(folder: Path) -> None:
    (folder / checkpoints.STATE).unlink()


def without_state_or_digests(folder: Path) -> None:
    without_state(folder)
    (folder / FILE_DIGESTS).unlink()


def cut_weights_without_digests(folder: Path) -> None:
    (folder / FILE_DIGESTS).unlink()
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])


def cut_state_without_digests(folder: Path) -> None:
    (folder / FILE_DIGESTS).unlink()
    state = folder / checkpoints.STATE
    state.write_bytes(state.read_bytes()[:1000])


DAMAGES = {
    without_state: "it has no trainer_state.pt",
    without_state_or_digests: "it has no trainer_state.pt",
    cut_weights_without_digests: "model.safetensors",
    cut_state_without_digests: "trainer_state.pt is truncated",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_an_incomplete_checkpoint_is_set_aside(
    damage: Callable[[Path], None], finished: Path, run: Run, console: io.StringIO
) -> None:
    damage(finished / "checkpoints" / LAST)
    run(finished, resume=True, keep_last=1, **OPTIONS)
    assert DAMAGES[damage] in console.getvalue()
    assert sorted(path.name for path in (finished / "checkpoints").iterdir()) == [LAST, f"{LAST}.damaged"]
    assert not check_files(finished / "checkpoints" / LAST)


def test_no_whole_checkpoint_is_an_error_that_names_each(finished: Path, run: Run) -> None:
    flip(finished / "checkpoints" / FIRST / "trainer_state.pt")
    (finished / "checkpoints" / LAST / "model.safetensors").unlink()
    with refused(CheckpointError, finished / "checkpoints", LAST, "model.safetensors", FIRST, "trainer_state.pt"):
        run(finished, resume=True, **OPTIONS)
    assert [folder.name for _, folder in checkpoints.run_checkpoints(finished)] == [FIRST, LAST]  # nothing is renamed


def test_a_checkpoint_without_digests_is_resumed_with_a_note(finished: Path, run: Run, console: io.StringIO) -> None:
    (finished / "checkpoints" / LAST / FILE_DIGESTS).unlink()
    rows = run(finished, resume=True, **(OPTIONS | {"steps": 5}))
    assert len(rows) == 5
    (line,) = [line for line in console.getvalue().splitlines() if "cannot be checked" in line]
    assert line.startswith("warning: ")
    assert FILE_DIGESTS in line


def test_digests_that_are_no_text_are_found(finished: Path) -> None:
    folder = finished / "checkpoints" / LAST
    content = json.loads((folder / FILE_DIGESTS).read_text())
    content["files"]["config.json"] = "\ud800"
    (folder / FILE_DIGESTS).write_text(json.dumps(content))
    assert [finding.file for finding in check_files(folder)] == [FILE_DIGESTS]


def test_a_file_that_was_added_does_no_harm(finished: Path) -> None:
    (finished / "checkpoints" / LAST / "notes.txt").write_text("mine")
    assert resume_point(finished).step == 4


def test_processes_share_the_reading(finished: Path) -> None:
    folder = finished / "checkpoints" / LAST
    names = file_names(folder)
    for name in names:
        flip(folder / name)
    found = [{each.file for each in check_files(folder, rank=rank, ranks=3)} for rank in range(3)]
    assert sorted(name for files in found for name in files) == names


def test_verify_reads_a_checkpoint_and_a_run(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = finished / "checkpoints" / LAST
    for path in (folder, finished):
        assert run_cli(capsys, "verify", path)[0] == 0
    flip(folder / "trainer_state.pt")
    for path in (folder, finished):
        code, out, _ = run_cli(capsys, "verify", path)
        assert code == 1
        assert "trainer_state.pt" in out


@pytest.mark.parametrize("length", [None, 100])
@pytest.mark.parametrize("digests", [True, False])
@pytest.mark.parametrize("place", ["optimizer", "value/optimizer"])
def test_files_that_only_metadata_lists(
    place: str, digests: bool, length: int | None, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the optimizer of a sharded model, and of that of a value model."""
    folder = finished / "checkpoints" / LAST
    dcp.save({"optimizer": {"step": torch.ones(100)}}, checkpoint_id=folder / place, no_dist=True)
    write_digests(folder, digests_of(folder, file_names(folder)))
    assert run_cli(capsys, "verify", finished)[0] == 0
    assert resume_point(finished).step == 4
    (file,) = (folder / place).glob("*.distcp")
    lose(file, folder, length)
    name = f"{place}/{file.name}"
    code, out, _ = run_cli(capsys, "verify", finished)
    assert code == 1
    assert name in out
    if not digests:
        (folder / FILE_DIGESTS).unlink()
    point = resume_point(finished)
    assert point.step == 2
    ((_, problem),) = point.damaged
    assert name in problem


@pytest.mark.extension("plan")
def test_a_dry_run_says_it_and_renames_nothing(finished: Path, values: dict[str, Any]) -> None:
    from dlm_bridge.plan.dry_run import dry_run

    flip(finished / "checkpoints" / LAST / "model.safetensors")
    plan = dry_run(TrainConfig.from_flags(**{**values, **OPTIONS, "output": str(finished)}), resume=True)
    assert plan.step == 2
    assert any(f"{LAST}: is damaged: model.safetensors" in note for note in plan.notes)
    assert [folder.name for _, folder in checkpoints.run_checkpoints(finished)] == [FIRST, LAST]

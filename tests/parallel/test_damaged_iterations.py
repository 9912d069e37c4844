"""Iterations of the Megatron engine that are damaged or incomplete: the one before is resumed, whatever the tracker
says, and the damaged one is kept."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from dlm_bridge.convert.manifest import FILE_DIGESTS, MANIFEST, check_files, file_names
from dlm_bridge.errors import CheckpointError, DlmBridgeError
from dlm_bridge.train.config import TrainConfig
from tests import launcher
from tests.convert.helpers import run_cli
from tests.parallel.conftest import megatron_alone
from tests.processes import environments
from tests.refusals import refused
from tests.train.conftest import read_metrics, run_values, undrawn, without_speed
from tests.train.test_damaged_checkpoints import flip, lose
from tests.train.test_full_disk import limited_files

pytest.importorskip("megatron.core")

OPTIONS = {"engine": "megatron", "steps": 4, "save_interval": 2, "eval_interval": 0}
FIRST, LAST, TRACKER = "iter_0000002", "iter_0000004", "latest_checkpointed_iteration.txt"
Train = Callable[..., str]


@pytest.fixture(scope="module")
def train(seed_folder: Path, corpus: Path) -> Iterator[Train]:
    """Train on the Megatron engine in this process: what the run prints."""
    with pytest.MonkeyPatch.context() as patch, megatron_alone():
        undrawn(patch)
        from dlm_bridge.parallel.train.assembly import train

        def _train(output: Path, resume: bool = False, **changes: Any) -> str:
            said = io.StringIO()
            values = {**run_values(seed_folder, corpus), **OPTIONS, "output": str(output), **changes}
            train(TrainConfig.from_flags(**values), resume, Console(file=said, width=10_000))
            return said.getvalue()

        yield _train


@pytest.fixture(scope="module")
def trained(train: Train, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("trained") / "run"
    train(output)
    return output


@pytest.fixture
def finished(trained: Path, tmp_path: Path) -> Path:
    """A copy of a run with two iterations."""
    return shutil.copytree(trained, tmp_path / "finished")


def names(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir() if path.name.startswith(("iter", ".iter")))


def test_a_flipped_bit_in_any_file_is_found(finished: Path, tmp_path: Path) -> None:
    from dlm_bridge.parallel.train.checkpoints import find_iteration

    files = file_names(finished / "checkpoints" / LAST)
    assert {".metadata", "metadata.json"} < set(files)
    for name in (*files, FILE_DIGESTS):
        copy = tmp_path / f"flip{name}"
        shutil.copytree(finished, copy)
        flip(copy / "checkpoints" / LAST / name)
        point = find_iteration(copy)
        assert point.step == 2, name
        ((folder, problem),) = point.damaged
        assert folder == copy / "checkpoints" / LAST
        assert name in problem


def test_a_file_that_only_metadata_lists(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As an iteration that was published without the files of another host."""
    from dlm_bridge.parallel.train.checkpoints import find_iteration

    folder = finished / "checkpoints" / LAST
    file = next(folder.glob("*.distcp"))
    lose(file, folder)
    code, out, _ = run_cli(capsys, "verify", finished)
    assert code == 1
    assert file.name in out
    point = find_iteration(finished)
    assert point.step == 2
    ((_, problem),) = point.damaged
    assert file.name in problem


def test_a_run_goes_on_from_the_iteration_before(
    finished: Path, train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, root = without_speed(read_metrics(finished)), finished / "checkpoints"
    file = next((root / LAST).glob("*.distcp"))
    flip(file)
    said = train(finished, resume=True, keep_last=2)
    assert file.name in said
    assert without_speed(read_metrics(finished)) == rows
    assert names(finished) == [FIRST, LAST, f"{LAST}.damaged"]
    assert not check_files(root / LAST)
    assert (root / TRACKER).read_text() == "4"
    assert run_cli(capsys, "verify", finished)[0] == 0


def test_the_tracker_names_what_a_run_goes_on_from(finished: Path, train: Train) -> None:
    """An export of the run's folder reads it, also when the run that goes on is killed before it saves."""
    (finished / "checkpoints" / LAST / ".metadata").unlink()
    said = train(finished, resume=True, steps=2)
    assert f"{LAST}: is incomplete: it has no .metadata" in said
    assert "the run is finished" in said
    assert (finished / "checkpoints" / TRACKER).read_text() == "2"
    assert names(finished) == [FIRST, f"{LAST}.damaged"]


@pytest.mark.parametrize("text", [None, "", "6", "release", "\0\0\0", "a pipe"])
def test_a_tracker_that_is_lost_or_damaged(text: str | None, finished: Path, train: Train) -> None:
    tracker = finished / "checkpoints" / TRACKER
    if text in (None, "a pipe"):
        tracker.unlink()
    if text == "a pipe":
        os.mkfifo(tracker)
    elif text is not None:
        tracker.write_text(text)
    said = train(finished, resume=True)
    assert f"{tracker} now names step 4" in said
    assert tracker.read_text() == "4"
    assert names(finished) == [FIRST, LAST]


def test_a_tracker_that_was_set_back_is_followed_and_keeps_its_iteration(finished: Path, train: Train) -> None:
    (finished / "checkpoints" / TRACKER).write_text("2")
    train(finished, resume=True, steps=3, keep_last=1)
    assert (finished / "checkpoints" / TRACKER).read_text() == "3"
    assert names(finished) == ["iter_0000003", LAST]


def test_no_whole_iteration_is_an_error_that_names_each(finished: Path, train: Train) -> None:
    flip(finished / "checkpoints" / FIRST / "metadata.json")
    flip(finished / "checkpoints" / LAST / ".metadata")
    with pytest.raises(DlmBridgeError, match=rf"{LAST}.*\.metadata.*{FIRST}.*metadata\.json"):
        train(finished, resume=True)
    assert names(finished) == [FIRST, LAST]
    assert (finished / "checkpoints" / TRACKER).read_text() == "4"


def test_a_file_that_all_iterations_share(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip(finished / "checkpoints/hf/tokenizer.json")
    code, out, _ = run_cli(capsys, "verify", finished)
    assert code == 1
    assert "hf/tokenizer.json" in out


def test_a_new_config_that_a_full_disk_refuses_leaves_the_old_one(finished: Path, values: dict[str, Any]) -> None:
    from dlm_bridge.parallel.train.checkpoints import write_hub_config
    from dlm_bridge.train.setup import open_megatron_source

    source = open_megatron_source(TrainConfig.from_flags(**{**values, **OPTIONS, "output": str(finished)}), None)
    root, source.model.config.block_size = finished / "checkpoints", 4
    before = [(root / name).read_bytes() for name in (MANIFEST, "hf/config.json")]
    with limited_files(100), pytest.raises(DlmBridgeError, match=MANIFEST):
        write_hub_config(finished, source)
    assert [(root / name).read_bytes() for name in (MANIFEST, "hf/config.json")] == before
    assert not list(root.glob(".hub-*"))
    write_hub_config(finished, source)
    assert not check_files(root / LAST)
    assert json.loads((root / "hf/config.json").read_text())["block_size"] == 4


def test_a_damaged_manifest_of_all_iterations(finished: Path, train: Train) -> None:
    flip(finished / "checkpoints" / MANIFEST)
    with refused(CheckpointError, finished / "checkpoints" / MANIFEST):
        train(finished, resume=True, steps=5)


def test_an_iteration_that_one_rank_cannot_read_ends_all(trained: Path, tmp_path: Path) -> None:
    logs = [tmp_path / "log_0.txt", tmp_path / "log_1.txt"]
    words = f"pretrain --config {trained / 'config.yaml'} --output {trained} --resume --steps 5"
    assert not launcher.run("tests.parallel.unreadable_worker", words.split(), environments(2), logs, 120)
    (line,) = [line for log in logs for line in log.read_text().splitlines() if "dlm-bridge: " in line]
    assert str(trained / "checkpoints" / LAST) in line
    assert os.strerror(errno.EIO) in line

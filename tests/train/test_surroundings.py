"""What stands around a run's steps: trackers, further save steps, the report of slow ranks."""

from __future__ import annotations

import datetime
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dlm_bridge.cli.app import main
from dlm_bridge.errors import SettingError
from dlm_bridge.job import Attempt
from dlm_bridge.train.config import TrainConfig
from dlm_bridge.train.ranks import StragglerDetector, Watchdog, straggler_report
from tests.processes import assert_ok, launch, work
from tests.refusals import hide, refused
from tests.train.conftest import Run
from tests.train.wandb_standin import logged


def test_tensorboard_has_every_figure_of_every_step(tmp_path: Path, run: Run) -> None:
    rows = run(tmp_path / "run", steps=3, trackers="tensorboard", eval_interval=3, save_interval=0)
    (folder,) = {path.parent for path in (tmp_path / "run/tensorboard").rglob("events*")}
    events = EventAccumulator(str(folder))
    events.Reload()
    for name in ("loss", "grad_norm", "lr", "tokens_per_s", "eval_loss"):
        shown = {event.step: event.value for event in events.Scalars(name)}
        wanted = {row["step"]: row[name] for row in rows if name in row}
        assert shown == pytest.approx(wanted, rel=1e-6), name
        assert wanted, name


@pytest.mark.parametrize(
    ("options", "variables", "project", "name"),
    [
        ({}, {}, "dlm-bridge", "run"),
        ({}, {"WANDB_PROJECT": "mine", "WANDB_NAME": "first"}, "mine", "first"),
        ({"tracker_project": "ours", "run_name": "second"}, {"WANDB_PROJECT": "mine"}, "ours", "second"),
    ],
)
def test_project_and_name_of_a_tracked_run(
    tmp_path: Path,
    run: Run,
    wandb: Any,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, str],
    variables: dict[str, str],
    project: str,
    name: str,
) -> None:
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    run(tmp_path / "run", steps=2, eval_interval=0, save_interval=0, trackers="wandb", **options)
    init, steps = logged(wandb)
    assert init == {"project": project, "name": name, "steps": 2}
    assert [row["step"] for row in steps] == [1, 2]


def test_a_tracker_without_a_key(tmp_path: Path, run: Run, wandb: Any) -> None:
    wandb.KEY = None
    with refused(SettingError, "trackers", "wandb", "no API key"):
        run(tmp_path / "run", steps=2, trackers="wandb")
    assert not (tmp_path / "run").exists()


def test_a_tracker_that_fails_does_not_end_the_run(
    tmp_path: Path, run: Run, wandb: Any, caplog: pytest.LogCaptureFixture
) -> None:
    wandb.FAILS = 2
    assert len(run(tmp_path / "run", steps=3, eval_interval=0, save_interval=0, trackers="wandb")) == 3
    assert [row["step"] for row in logged(wandb)[1]] == [1]
    assert [record.levelname for record in caplog.records if "gone" in record.getMessage()] == ["WARNING"]


def test_trackio_has_every_step(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read when it is imported
    pytest.importorskip("trackio")
    run(tmp_path / "run", steps=2, eval_interval=0, save_interval=0, trackers="trackio", tracker_project="mine")
    assert (tmp_path / "trackio/mine.db").is_file()


def test_mlflow_has_every_step(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)
    rows = run(tmp_path / "run", steps=2, eval_interval=0, save_interval=0, trackers="mlflow", tracker_project="mine")
    client = mlflow.MlflowClient()
    (tracked,) = client.search_runs([client.get_experiment_by_name("mine").experiment_id])
    assert (tracked.info.run_name, tracked.info.status) == ("run", "FINISHED")
    history = client.get_metric_history(tracked.info.run_id, "loss")
    assert [(each.step, each.value) for each in history] == [(row["step"], row["loss"]) for row in rows]


def test_further_save_steps(tmp_path: Path, run: Run) -> None:
    run(tmp_path / "run", steps=5, save_steps="1, 3", save_interval=4, eval_interval=0)
    saved = sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir())
    assert saved == [f"step-{step:07d}" for step in (1, 3, 4, 5)]


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"save_steps": "0,3"}, "save_steps"),
        ({"save_steps": "3;4"}, "save_steps"),
        ({"trackers": "tensorboard,comet"}, "trackers"),
        ({"straggler_interval": 5}, "straggler_interval"),  # of the Megatron engine
        ({"straggler_interval": -1, "engine": "megatron"}, "straggler_interval"),
    ],
)
def test_refuses(options: dict[str, Any], field: str) -> None:
    with refused(SettingError, field):
        TrainConfig.from_flags(model="m", data=["mock"], output="o", **options)


def test_a_tracker_that_is_not_installed(
    tmp_path: Path, values: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hide(monkeypatch, "wandb")
    options = [
        "--model",
        values["model"],
        "--from-scratch",
        "--data",
        values["data"][0],
        "--trackers",
        "wandb",
        "--steps",
        "9",
    ]
    flags = [*options, "--output", str(tmp_path / "run"), "--seq-length", "16", "--global-batch-size", "2"]
    monkeypatch.setattr(sys, "argv", ["dlm-bridge", "pretrain", *flags])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    said = capsys.readouterr().err.strip()
    assert said.splitlines()[-1] == "dlm-bridge: --trackers: wandb is not installed: pip install wandb"
    assert not (tmp_path / "run/checkpoints").exists()


def test_the_slowest_rank_is_named_among_those_of_its_stage() -> None:
    found = [(0, 1.0, "a"), (0, 1.1, "b"), (1, 4.0, "c"), (1, 5.0, "d")]
    assert straggler_report(20, found) == (
        "step 20: forward passes of stage 1 take 5.000 s on rank 3 (d), the slowest, and 4.000 s on rank 2 (c), the "
        "fastest: 25.0% more"
    )


def test_a_first_rank_that_is_silent_from_its_start_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store, ended = dist.HashStore(), threading.Semaphore(0)
    store.set_timeout(datetime.timedelta(seconds=2))
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(os, "_exit", lambda code: ended.release(code // 2))
    Watchdog(Attempt("", ("node0", "node1"), 2.0, lambda _: store), 2.0, tmp_path)
    assert ended.acquire(timeout=20)
    (line,) = capsys.readouterr().err.splitlines()
    assert "rank 0 (node0, which has not started)" in line
    assert (tmp_path / "stacks_1.txt").is_file()


@pytest.mark.parametrize("stopped", [0, 2])
def test_a_silent_rank_ends_the_run_by_its_name(
    stopped: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store, ended = dist.HashStore(), threading.Semaphore(0)
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setattr(os, "_exit", lambda code: ended.release(code // 2))
    job = Attempt("", ("node0", "node1", "node1"), 2.0, lambda _: store)
    monkeypatch.setattr(Attempt, "unique", lambda self, name: name)  # one process stands for three
    watchdogs = {}
    for rank in range(3):
        monkeypatch.setenv("RANK", str(rank))
        watchdogs[rank] = Watchdog(job, 2.0, tmp_path)
    assert not ended.acquire(timeout=3)
    watchdogs[stopped].closed.set()  # its thread is as one of a process that is stopped
    for _ in range(2):
        assert ended.acquire(timeout=20)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert all(f"rank {stopped} (node{min(stopped, 1)}, process {os.getpid()})" in line for line in lines)


def test_a_rank_that_has_finished_does_not_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Semaphore(0)
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setattr(os, "_exit", lambda code: ended.release(code // 2))
    monkeypatch.setattr(Attempt, "unique", lambda self, name: name)
    for leaves in ((1, 2), (0, 1)):  # of the three ranks; the others are as at the end of a long upload
        store, watchdogs = dist.HashStore(), {}
        job = Attempt("", ("node0", "node1", "node1"), 1.0, lambda _, store=store: store)  # type: ignore[misc]
        for rank in range(3):
            monkeypatch.setenv("RANK", str(rank))
            watchdogs[rank] = Watchdog(job, 1.0, tmp_path)
        for rank in leaves:
            watchdogs[rank].close()
        assert not ended.acquire(timeout=3)
        for watchdog in watchdogs.values():
            watchdog.close()


def test_ranks_compare_their_times(tmp_path: Path) -> None:
    assert_ok("report", launch(__name__, tmp_path))


def _report() -> None:
    rank = dist.get_rank()
    stragglers = StragglerDetector(2, 0, torch.device("cpu"), dist.group.WORLD)
    for _ in range(2):
        with stragglers.timed():
            pass
    timed = stragglers.take_timed()
    assert 0 < sum(timed) < 0.5  # type: ignore[arg-type]
    stragglers.seconds = 2.0 * (1 + rank)
    assert stragglers.end_step(1, []) is None
    line = stragglers.end_step(2, [])
    assert line is not None
    assert "2.000 s on rank 1" in line
    assert "1.000 s on rank 0" in line
    assert stragglers.seconds == 0


def _checks() -> Iterator[tuple[str, Callable[[], None]]]:
    yield "report", _report


if __name__ == "__main__":
    dist.init_process_group("gloo")
    work(Path(sys.argv[1]), _checks())

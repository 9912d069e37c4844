"""Early stopping: when a run ends, which checkpoints stay, and that a resumed run ends as an uninterrupted one."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from dlm_bridge.errors import SettingError
from dlm_bridge.hub import checkpoint_folder
from dlm_bridge.train.early_stopping import EarlyStopping, KeptCheckpoints
from dlm_bridge.train.trainer import Trainer, TrainingLoop
from tests.refusals import refused
from tests.train.conftest import TEXT, Run, without_speed

LOSSES = {2: 5.0, 4: 4.0, 6: 4.5, 8: 3.0, 10: 3.5, 12: 3.2, 14: 1.0}  # ends at 12 with a patience of two
OPTIONS: dict[str, Any] = {"steps": 14, "eval_interval": 2, "early_stopping_patience": 2, "save_interval": 0}


class CrashError(Exception):
    pass


def check_early_stopping(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run ends after the second validation without a lower loss; a crash in between changes nothing."""
    losses = lambda self, metrics: dataclasses.replace(metrics, eval_loss=LOSSES[metrics.step])  # noqa: E731
    monkeypatch.setattr(TrainingLoop, "evaluated", losses)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    rows = without_speed(run(whole, **OPTIONS))
    assert len(rows) == 12
    start_step = Trainer.start_step

    def crash(self: Any, step: int, want_stop: bool) -> Any:
        if step == 11:
            raise CrashError
        return start_step(self, step, want_stop)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "start_step", crash)
        with pytest.raises(CrashError):
            run(cut, **OPTIONS)
    for _ in range(2):  # the second finds that it has ended
        assert without_speed(run(cut, resume=True, **OPTIONS)) == rows
    for output in (whole, cut):
        status = json.loads((output / "status.json").read_text())
        assert (status["state"], status["step"], status["best"]) == ("finished", 12, {"step": 8, "eval_loss": 3.0})
        named = sorted(
            int(folder.name.split("_")[-1].split("-")[-1]) for folder in (output / "checkpoints").glob("*0*")
        )
        assert named == [8, 12]
        assert checkpoint_folder(output).name in ("step-0000008", "iter_0000008")


def test_a_run_ends_early_and_keeps_its_best_checkpoint(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_early_stopping(run, tmp_path, monkeypatch)


def test_the_best_checkpoint_stays_beside_the_newest() -> None:
    found = [(step, Path(str(step))) for step in (10, 20, 30, 40)]

    def removed(**options: int) -> list[int]:
        return [int(folder.name) for folder in KeptCheckpoints(**options).removed(found)]

    assert removed() == []
    assert removed(newest=1) == [10, 20, 30]
    assert removed(newest=2, best=10) == [20]
    assert removed(best=40, superseded=30) == [30]


def test_a_loss_that_is_nan_is_not_lower() -> None:
    early = EarlyStopping(patience=2)
    assert early.add(1, 2.0)
    assert not early.add(2, float("nan"))
    assert not early.ends
    assert not early.add(3, 2.0)
    assert early.ends


def test_patience_without_validation_rows_is_refused_before_the_first_step(run: Run, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text(TEXT[:40])  # one row
    with refused(SettingError, "early_stopping_patience"):
        run(tmp_path / "run", **OPTIONS, data=[str(tmp_path / "short.txt")])
    assert not (tmp_path / "run/checkpoints").exists()

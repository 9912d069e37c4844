"""A run that stops, however it stops, goes on to the very losses of one that did not: compared bit for bit."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dlm_bridge.errors import CheckpointError, InputFileError, SettingError
from dlm_bridge.train.accelerate import trainer
from dlm_bridge.train.config import TrainConfig
from dlm_bridge.train.config.files import load_config
from tests import launcher
from tests.refusals import refused
from tests.train.conftest import Run, read_metrics, without_speed

STEPS = 14


def _equal(resumed: Path, uninterrupted: Path) -> None:
    assert without_speed(read_metrics(resumed)) == without_speed(read_metrics(uninterrupted))
    last = Path("checkpoints") / f"step-{STEPS:07d}" / "model.safetensors"
    ours, theirs = load_file(resumed / last), load_file(uninterrupted / last)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.fixture
def values(values: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    """With dropout, whose random numbers must come back, too."""
    folder = tmp_path / "model"
    shutil.copytree(values["model"], folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "attention_dropout": 0.1}))
    return {**values, "model": str(folder)}


@pytest.fixture
def uninterrupted(tmp_path: Path, run: Run) -> Path:
    run(tmp_path / "uninterrupted", steps=STEPS)
    return tmp_path / "uninterrupted"


def _wait_for_step(output: Path, step: int) -> None:
    """Until metrics.jsonl holds `step`."""
    for _ in range(6000):
        metrics = output / "metrics.jsonl"
        if metrics.exists() and f'{{"step": {step},' in metrics.read_text():
            return
        time.sleep(0.01)
    raise AssertionError(f"step {step} never came")


def test_sigkill_and_a_torn_line(tmp_path: Path, run: Run, uninterrupted: Path, values: dict[str, Any]) -> None:
    output = tmp_path / "killed"
    config = TrainConfig.from_flags(**{**values, "steps": STEPS, "output": str(output)})
    (tmp_path / "run.yaml").write_text(config.to_yaml())
    # One thread, as here: the number of threads decides in which order a sum is added up.
    environment, log = {**os.environ, "OMP_NUM_THREADS": "1"}, tmp_path / "log.txt"
    arguments = ["10", "--config", str(tmp_path / "run.yaml")]
    assert not launcher.run("tests.train.killed_worker", arguments, [environment], [log], 300)
    assert [row["step"] for row in read_metrics(output)] == list(range(1, 9)), log.read_text()  # one step late
    with (output / "metrics.jsonl").open("a") as file:
        file.write('{"step": 13, "loss": 0.1')
    # What a kill while saving leaves behind.
    (output / "checkpoints/.step-0000012.tmp").mkdir()
    (output / "checkpoints/.step-0000012.tmp/model.safetensors").write_bytes(b"half")
    run(output, resume=True, steps=STEPS)
    _equal(output, uninterrupted)
    assert not list((output / "checkpoints").glob(".*"))


def test_crash_between_checkpoints(
    tmp_path: Path, run: Run, uninterrupted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class CrashError(Exception):
        pass

    step = trainer.AccelerateTrainer.start_step

    def crashing(self: Any, number: int, want_stop: bool) -> Any:
        if number == 7:
            raise CrashError
        return step(self, number, want_stop)

    with monkeypatch.context() as patch:
        patch.setattr(trainer.AccelerateTrainer, "start_step", crashing)
        with pytest.raises(CrashError):
            run(tmp_path / "crashed", steps=STEPS)
    assert [row["step"] for row in read_metrics(tmp_path / "crashed")] == [1, 2, 3, 4, 5, 6]
    run(tmp_path / "crashed", resume=True, steps=STEPS)
    _equal(tmp_path / "crashed", uninterrupted)


def test_sigterm_saves_and_returns(tmp_path: Path, run: Run, uninterrupted: Path) -> None:
    output = tmp_path / "terminated"

    def terminate() -> None:
        _wait_for_step(output, 2)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=terminate)
    thread.start()
    rows = run(output, steps=STEPS)
    thread.join()
    last = rows[-1]["step"]
    assert 2 < last < STEPS
    assert (output / f"checkpoints/step-{last:07d}/trainer_state.pt").exists()
    run(output, resume=True, steps=STEPS)
    # The validation of the last step before the stop is the only row that may hold more.
    assert [row["loss"] for row in read_metrics(output)] == [row["loss"] for row in read_metrics(uninterrupted)]


def test_exit_duration_saves_and_stops(tmp_path: Path, run: Run) -> None:
    rows = run(tmp_path / "run", steps=STEPS, exit_duration=0.0)
    assert [row["step"] for row in rows] == [1]
    assert (tmp_path / "run/checkpoints/step-0000001/model.safetensors").exists()


def test_resume_of_a_finished_run_and_of_an_empty_folder(tmp_path: Path, run: Run) -> None:
    rows = run(tmp_path / "run", resume=True, steps=2)  # nothing there yet: starts
    assert [row["step"] for row in rows] == [1, 2]
    assert run(tmp_path / "run", resume=True, steps=2) == rows


def test_resume_with_other_data_is_refused(tmp_path: Path, run: Run, corpus: Path) -> None:
    run(tmp_path / "run", steps=2)
    longer = tmp_path / "longer.txt"
    longer.write_text(corpus.read_text() * 2)
    with refused(InputFileError, "data"):
        run(tmp_path / "run", resume=True, steps=4, data=[str(longer)])


def test_resume_of_another_model_is_refused(tmp_path: Path, run: Run, seed_folder: Path) -> None:
    run(tmp_path / "run", steps=2)
    other = shutil.copytree(seed_folder, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"n_layers": 3}))
    with refused(SettingError, "model", str(other)):
        run(tmp_path / "run", resume=True, steps=2, model=str(other))
    with refused(SettingError, "engine", "megatron", "accelerate"):
        load_config({"output": str(tmp_path / "run"), "engine": "megatron"}, resume=True)


def test_a_damaged_state_is_named(tmp_path: Path, run: Run) -> None:
    run(tmp_path / "run", steps=1)
    state = tmp_path / "run/checkpoints/step-0000001/trainer_state.pt"
    state.write_bytes(state.read_bytes()[:100])
    with refused(CheckpointError, tmp_path / "run/checkpoints", "trainer_state.pt"):
        run(tmp_path / "run", resume=True, steps=2)

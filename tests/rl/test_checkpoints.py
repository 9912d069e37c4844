"""Checkpoints of reinforcement learning: digests, damage, a full disk."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from dlm_bridge.convert.manifest import check_files, file_names
from dlm_bridge.errors import ResourceError, SettingError
from dlm_bridge.train import checkpoints
from dlm_bridge.train.rl.trainer import RLTrainer
from tests import launcher
from tests.processes import environments
from tests.refusals import refused
from tests.rl.conftest import Run
from tests.rl.test_autoregressive import causal  # noqa: F401  a fixture
from tests.train.test_damaged_checkpoints import FIRST, LAST, flip
from tests.train.test_full_disk import limited_files

STATE = checkpoints.STATE
OPTIONS = {"steps": 4, "save_interval": 2, "global_batch_size": 8}


@pytest.fixture(params=("diffu-grpo", "grpo"))
def options(request: pytest.FixtureRequest, causal: Path) -> dict[str, Any]:  # noqa: F811
    own = {"model": str(causal)} if request.param == "grpo" else {}
    return {"method": request.param, **OPTIONS, **own}


def names(output: Path) -> list[str]:
    return sorted(path.name for path in (output / "checkpoints").iterdir())


@pytest.mark.fast("diffu-grpo")
def test_damage_is_found_and_a_run_goes_on_from_before(run: Run, options: dict[str, Any], tmp_path: Path) -> None:
    output = tmp_path / "run"
    run(output, **options)
    files = file_names(output / "checkpoints" / LAST)
    assert {"model.safetensors", STATE} <= set(files)
    for name in files:
        copy = shutil.copytree(output, tmp_path / "copies" / name)
        flip(copy / "checkpoints" / LAST / name)
        point = checkpoints.find_resume_point(checkpoints.named_checkpoints(copy / "checkpoints"), STATE)
        assert point.step == 2, name
        assert name in point.damaged[0][1]
    (output / "checkpoints" / LAST / STATE).unlink()
    rows = run(output, resume=True, keep_last=1, **options)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert names(output) == [LAST, f"{LAST}.damaged"]
    assert not check_files(output / "checkpoints" / LAST)


@pytest.mark.fast("diffu-grpo")
def test_a_full_disk(run: Run, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "run"
    run(output, **{**options, "steps": 2})
    save = RLTrainer.save

    def limited(*arguments: Any, **named: Any) -> Any:
        with limited_files(4000):
            return save(*arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(RLTrainer, "save", limited)
        with refused(ResourceError, output / "checkpoints" / LAST, FIRST):
            run(output, resume=True, **options)
    assert names(output) == [FIRST]
    assert len(run(output, resume=True, **options)) == 4
    assert names(output) == [FIRST, LAST]


@pytest.mark.fast("grpo")
def test_a_run_does_not_go_on_with_another_model(run: Run, options: dict[str, Any], tmp_path: Path) -> None:
    output, other = tmp_path / "run", tmp_path / "other"
    run(output, **{**options, "steps": 1})
    shutil.copytree(yaml.safe_load((output / "config.yaml").read_text())["model"]["model"], other)
    config = json.loads((other / "config.json").read_text())
    layers = "n_layers" if "n_layers" in config else "num_hidden_layers"
    (other / "config.json").write_text(json.dumps({**config, layers: 2}))
    with refused(SettingError, "model", "/other"):
        run(output, resume=True, **{**options, "model": str(other)})


@pytest.mark.slow
def test_two_processes_agree_about_damage(run: Run, causal: Path, tmp_path: Path) -> None:  # noqa: F811
    output = tmp_path / "run"
    run(output, **{**OPTIONS, "method": "grpo", "model": str(causal), "group_size": 4})
    flip(output / "checkpoints" / LAST / STATE)
    words = ["rl", "--config", str(output / "config.yaml"), "--output", str(output), "--resume"]
    logs = [tmp_path / f"log_{rank}.txt" for rank in range(2)]
    assert launcher.run("dlm_bridge.cli", words, environments(2), logs, 300), logs[0].read_text()
    assert f"{STATE} was changed" in logs[0].read_text()
    assert names(output) == [FIRST, LAST, f"{LAST}.damaged"]
    assert not check_files(output / "checkpoints" / LAST)

"""--ema-decay: the moving average of the weights, by hand, through a resume, and as a model of its own. Under FSDP2:
test_sharding.py."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from dlm_bridge.bridge import Bridge
from dlm_bridge.errors import CheckpointError, DlmBridgeError, SettingError
from dlm_bridge.train.config import TrainConfig
from tests.refusals import refused
from tests.train.conftest import Run, without_speed

OPTIONS: dict[str, Any] = {"steps": 4, "eval_interval": 0, "save_interval": 1, "warmup_steps": 0}


def _weights(run: Path, step: int, folder: str = "") -> dict[str, torch.Tensor]:
    return load_file(run / f"checkpoints/step-{step:07d}" / folder / "model.safetensors")


def test_the_average_by_hand_and_through_a_resume(tmp_path: Path, run: Run) -> None:
    """avg_1 = w_1, avg_n = 0.75 avg_(n - 1) + 0.25 w_n; training itself is not changed."""
    rows = run(tmp_path / "run", ema_decay=0.75, **OPTIONS)
    assert without_speed(rows) == without_speed(run(tmp_path / "plain", **OPTIONS))
    assert not (tmp_path / "plain/checkpoints/step-0000004/ema").exists()
    average = {name: weight.double() for name, weight in _weights(tmp_path / "run", 1).items()}
    for step in (2, 3, 4):
        for name, weight in _weights(tmp_path / "run", step).items():
            average[name] = 0.75 * average[name] + 0.25 * weight.double()
        found = _weights(tmp_path / "run", step, "ema")
        assert found.keys() == average.keys()
        for name, weight in found.items():
            assert weight.dtype == torch.float32
            torch.testing.assert_close(weight.double(), average[name], rtol=1e-6, atol=1e-7)
    last = _weights(tmp_path / "run", 4)
    assert not any(torch.equal(weight, last[name]) for name, weight in found.items())
    for folder in ("step-0000003", "step-0000004"):
        shutil.rmtree(tmp_path / "run/checkpoints" / folder)
    resumed = run(tmp_path / "run", resume=True, ema_decay=0.75, **OPTIONS)
    assert without_speed(resumed) == without_speed(rows)
    again = _weights(tmp_path / "run", 4, "ema")
    assert all(torch.equal(again[name], weight) for name, weight in found.items())


def test_the_averaged_folder_is_a_model(tmp_path: Path, run: Run) -> None:
    run(tmp_path / "run", ema_decay=0.5, **OPTIONS)
    folder = tmp_path / "run/checkpoints/step-0000004/ema"
    with pytest.raises(DlmBridgeError, match=str(folder)):
        Bridge.from_megatron(folder.parent, averaged=True)
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(tmp_path / "again")
    weights, again = _weights(tmp_path / "run", 4, "ema"), load_file(tmp_path / "again/model.safetensors")
    assert weights.keys() == again.keys()
    assert all(torch.equal(again[name], weight) for name, weight in weights.items())
    assert len(AutoTokenizer.from_pretrained(folder)) > 100


def test_a_checkpoint_whose_averages_are_damaged_is_not_resumed(tmp_path: Path, run: Run) -> None:
    rows = run(tmp_path / "run", ema_decay=0.5, **OPTIONS)
    wanted = _weights(tmp_path / "run", 4, "ema")
    for step, damage in ((4, "missing"), (3, "flipped")):
        file = tmp_path / f"run/checkpoints/step-{step:07d}/ema/model.safetensors"
        data = file.read_bytes()
        file.unlink()
        if damage == "flipped":
            file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert without_speed(run(tmp_path / "run", resume=True, ema_decay=0.5, **OPTIONS)) == without_speed(rows)
    found = _weights(tmp_path / "run", 4, "ema")
    assert all(torch.equal(found[name], weight) for name, weight in wanted.items())


def test_what_is_refused(tmp_path: Path, run: Run) -> None:
    options: dict[str, Any] = {"model": "m", "data": ["d"], "output": "o"}
    for changes in ({"ema_decay": 1.0}, {"ema_decay": 0.9, "lora_rank": 2}):
        with refused(SettingError, "ema_decay"):
            TrainConfig.from_flags(**options, **changes)
    run(tmp_path / "run", **{**OPTIONS, "steps": 1})
    with refused(CheckpointError, tmp_path / "run/checkpoints/step-0000001", "`ema_decay`"):
        run(tmp_path / "run", resume=True, ema_decay=0.5, **OPTIONS)

"""--norm-interval: norms of a run's parameters and of each layer's gradients, in metrics.jsonl and in trackers.

That every layout, and FSDP2, give one process's is in test_megatron.py and test_sharding.py.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file

from dlm_bridge.errors import SettingError
from dlm_bridge.train.config import TrainConfig
from dlm_bridge.train.metrics import StepMetrics
from dlm_bridge.train.monitoring import Trackers
from tests.refusals import refused
from tests.train.conftest import Run, without_speed

OPTIONS: dict[str, Any] = {"eval_interval": 0, "save_interval": 0, "warmup_steps": 0, "norm_interval": 2}


def check(rows: list[dict[str, Any]]) -> None:
    assert [("param_norm" in row, "layer_grad_norms" in row) for row in rows] == [(False, False), (True, True)] * 2
    for row in rows[1::2]:
        norms = row["layer_grad_norms"]
        assert list(norms) == ["embedding", "0", "1", "norm", "head"]
        assert all(norm > 0 for norm in norms.values())
        assert math.hypot(*norms.values()) == pytest.approx(row["grad_norm"], rel=1e-5)


def test_norms_are_those_of_the_gradients_and_of_the_checkpoint(tmp_path: Path, run: Run) -> None:
    rows = run(tmp_path / "run", steps=4, clip_grad=1e-3, **OPTIONS)
    check(rows)
    weights = load_file(tmp_path / "run/checkpoints/step-0000004/model.safetensors")
    assert rows[-1]["param_norm"] == pytest.approx(math.hypot(*(float(w.norm()) for w in weights.values())), rel=1e-6)
    plain = run(tmp_path / "plain", steps=4, clip_grad=1e-3, **{**OPTIONS, "norm_interval": 0})
    for row in rows[1::2]:
        del row["param_norm"], row["layer_grad_norms"]
    assert without_speed(rows) == without_speed(plain)


def test_an_adapter_has_norms_of_its_own_weights(tmp_path: Path, run: Run) -> None:
    run(tmp_path / "base", steps=1, **OPTIONS)
    base = {"model": str(tmp_path / "base/checkpoints/step-0000001"), "from_scratch": False, "lora_rank": 2}
    rows = run(tmp_path / "run", steps=2, **base, **OPTIONS)
    assert list(rows[1]["layer_grad_norms"]) == ["0", "1"]
    assert math.hypot(*rows[1]["layer_grad_norms"].values()) == pytest.approx(rows[1]["grad_norm"], rel=1e-5)


def test_trackers_have_a_figure_per_layer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("accelerate.PartialState", lambda: None)
    logged: list[dict[str, Any]] = []
    trackers = Trackers(TrainConfig.from_flags(model="m", data=["d"], output="o"), tmp_path)
    trackers.trackers = {"one": SimpleNamespace(log=lambda values, step: logged.append(values))}
    row = StepMetrics(1, 2.0, 1.0, 0.1, 8, 5.0, 5.0, None, param_norm=3.0, layer_grad_norms={"0": 4.0, "head": None})
    trackers.log(row)
    trackers.log(dataclasses.replace(row, param_norm=None, layer_grad_norms=None))
    assert [key for key in logged[0] if "norm" in key] == ["grad_norm", "param_norm", "layer_grad_norms/0"]
    assert [key for key in logged[1] if "norm" in key] == ["grad_norm"]


def test_what_is_refused() -> None:
    options: dict[str, Any] = {"model": "m", "data": ["d"], "output": "o"}
    with refused(SettingError, "fsdp", "`norm_interval`"):
        TrainConfig.from_flags(**options, engine="megatron", fsdp="optim", norm_interval=1)
    with refused(SettingError, "norm_interval", "at least 0"):
        TrainConfig.from_flags(**options, norm_interval=-1)

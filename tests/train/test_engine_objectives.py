"""The Accelerate engine with every kind of objective: it learns, and neither accumulation nor a resume changes it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dlm_bridge.errors import DlmBridgeError
from tests.families import dream, dreamon, fast_dllm_v2, illada, nemotron_labs_diffusion, sdar, wedlm
from tests.families.case import FamilyCase
from tests.train.conftest import Run, without_speed

CASES = {
    "masked": illada.CASES[0],
    "shifted": dream.CASE,
    "dreamon": dreamon.CASE,
    "block": sdar.CASES[0],
    "block_complementary": fast_dllm_v2.CASES[0],
    "nemotron": nemotron_labs_diffusion.CASES[0],
    "wedlm": wedlm.CASES[0],
}


def _options(case: FamilyCase, folder: Path) -> dict[str, Any]:
    """A folder with a config.json alone, and mock data."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**case.config, "mask_token_id": 99}))
    return {"model": str(folder), "data": ["mock"], "seq_length": 14, "warmup_steps": 0, "lr_schedule": "constant"}


def _weights(output: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(output / f"checkpoints/step-{step:07d}/model.safetensors")


@pytest.mark.parametrize(
    "objective",
    [pytest.param(name, marks=[pytest.mark.slow] * (name not in ("masked", "block", "nemotron"))) for name in CASES],
)
@pytest.mark.fast("block")
def test_accumulation_and_resume_change_nothing(objective: str, tmp_path: Path, run: Run) -> None:
    options = {**_options(CASES[objective], tmp_path / "model"), "save_interval": 2, "lr": 1e-3}
    whole = run(tmp_path / "whole", steps=4, **options)
    assert f"objective:\n  objective: {objective}\n" in (tmp_path / "whole/config.yaml").read_text()
    cut = run(tmp_path / "cut", steps=4, micro_batch_size=2, **options)
    for key in ("loss", "grad_norm"):
        assert [row[key] for row in cut] == pytest.approx([row[key] for row in whole], rel=1e-4)
    shutil.copytree(tmp_path / "whole", tmp_path / "resumed")
    shutil.rmtree(tmp_path / "resumed/checkpoints/step-0000004")
    resumed = run(tmp_path / "resumed", resume=True, steps=4, **options)
    assert without_speed(resumed)[2:] == without_speed(whole)[2:]
    ours, theirs = (_weights(tmp_path / name, 4) for name in ("resumed", "whole"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["shifted", "shifted_cart", "block", "block_levels", "block_editing"])
def test_the_loss_falls(objective: str, tmp_path: Path, run: Run) -> None:
    case = CASES[objective.split("_")[0]]
    options = {**_options(case, tmp_path / "model"), "objective": objective, "length_variation": 0.0}
    rows = run(tmp_path / "run", steps=40, lr=1e-2, eval_interval=20, save_interval=0, **options)
    evaluated = [row["eval_loss"] for row in rows if "eval_loss" in row]
    assert evaluated[-1] < evaluated[0]
    assert sum(row["loss"] for row in rows[-10:]) < sum(row["loss"] for row in rows[:10])


def test_another_familys_objective_is_refused(tmp_path: Path, run: Run) -> None:
    for case, objective in ((sdar.CASES[0], "masked"), (dream.CASE, "block"), (wedlm.CASES[0], "block")):
        options = _options(case, tmp_path / case.name)
        with pytest.raises(DlmBridgeError, match=f"objective.*{objective}.*"):
            run(tmp_path / "run", objective=objective, steps=1, **options)

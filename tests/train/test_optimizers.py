"""Muon for the layers' matrices, AdamW for everything else: by the formulas, saved and resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dlm_bridge.errors import SettingError
from dlm_bridge.train.accelerate.optimizers import MuonAndAdamW
from dlm_bridge.train.config import TrainConfig
from dlm_bridge.train.muon import muon_parameters
from dlm_bridge.train.setup import model_source
from tests.refusals import refused
from tests.train.conftest import Run, without_speed

MUON = {"optimizer": "muon", "lr": 0.01, "weight_decay": 0.1}


@pytest.fixture
def model(values: dict[str, Any]) -> nn.Module:
    found: nn.Module = model_source(TrainConfig.from_flags(**values, output="o")).load()
    return found


def test_muon_takes_the_matrices_of_the_layers(model: nn.Module) -> None:
    names = muon_parameters(model)
    shapes = {name: parameter.dim() for name, parameter in model.named_parameters()}
    assert names == {name for name, dims in shapes.items() if ".layers." in name and dims == 2}
    assert len(names) == 2 * 7


def test_a_step_is_that_of_the_papers_formula(model: nn.Module) -> None:
    """Nesterov momentum, orthogonalised, and scaled by 0.2 sqrt(max(rows, columns)), after decoupled decay."""
    config = TrainConfig.from_flags(model="m", data=["d"], output="o", **MUON)
    optimizer = MuonAndAdamW(config, model)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    optimizer.step()
    for name in muon_parameters(model):
        weight, update = before[name], before[name] * (1 - 0.01 * 0.1) - model.get_parameter(name)
        direction = update / (0.01 * 0.2 * max(weight.shape) ** 0.5)
        left, singular, right = torch.linalg.svd(gradients[name], full_matrices=False)
        found = torch.diagonal(left.T @ direction @ right.T)  # the quintic iteration ends between 0.7 and 1.2
        assert found[singular > 0.1 * singular.max()].min() > 0.5
        assert torch.linalg.svdvals(direction).max() < 1.3
    others = set(before) - muon_parameters(model)
    for name in others:  # AdamW's first step is the gradient's sign
        decay = 0.1 if before[name].dim() > 1 else 0.0
        expected = before[name] * (1 - 0.01 * decay) - 0.01 * gradients[name].sign()
        assert torch.allclose(model.get_parameter(name), expected, atol=1e-5), name


def test_a_run_resumes_exactly(tmp_path: Path, run: Run) -> None:
    options = {**MUON, "save_interval": 3, "eval_interval": 0, "lr_schedule": "constant"}
    whole = run(tmp_path / "whole", steps=6, **options)
    run(tmp_path / "run", steps=3, **options)
    resumed = run(tmp_path / "run", resume=True, steps=6, **options)
    assert without_speed(resumed) == without_speed(whole)
    assert whole[-1]["loss"] < whole[0]["loss"] - 0.5


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"optimizer": "muon", "engine": "megatron", "muon_momentum": 1.0}, "muon_momentum"),
        ({"optimizer": "sgd"}, "optimizer"),
        ({"muon_momentum": 0.9}, "muon_momentum"),
    ],
)
def test_what_is_refused(flags: dict[str, Any], named: str) -> None:
    with refused(SettingError, named):
        TrainConfig.from_flags(model="m", data=["d"], output="o", **flags)

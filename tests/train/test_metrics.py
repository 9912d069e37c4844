"""What a run writes down: whole rows, honest figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dlm_bridge.train.config import TrainConfig
from dlm_bridge.train.loading import load_model
from dlm_bridge.train.metrics import MetricsFile, StepMetrics, flops_per_token, peak_flops, read_rows


def _row(step: int, **changes: float) -> StepMetrics:
    values = {
        "loss": 2.0,
        "grad_norm": 1.0,
        "lr": 0.1,
        "tokens": 8 * step,
        "tokens_per_s": 5.0,
        "tokens_per_s_per_device": 5.0,
    }
    return StepMetrics(step=step, mfu=None, **{**values, **changes})  # type: ignore[arg-type]


def test_reopening_drops_later_rows_and_a_torn_one(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path, 0)
    for step in range(1, 6):
        metrics.append(_row(step))
        assert len(read_rows(path)) == step  # readable at once
    metrics.close()
    with path.open("a") as file:
        file.write('{"step": 6, "lo')
    assert [row["step"] for row in read_rows(path)] == [1, 2, 3, 4, 5]
    metrics = MetricsFile(path, 3)
    metrics.append(_row(4, loss=9.0))
    metrics.close()
    assert [(row["step"], row["loss"]) for row in read_rows(path)] == [(1, 2.0), (2, 2.0), (3, 2.0), (4, 9.0)]


def test_rows_are_strict_json() -> None:
    row = json.loads(_row(1, grad_norm=float("inf")).to_json(), parse_constant=pytest.fail)
    assert row["grad_norm"] is None
    assert "eval_loss" not in row


def test_flops_follow_the_formula(seed_folder: Path) -> None:
    model = load_model(TrainConfig.from_flags(model=str(seed_folder), data=["mock"], output="o", from_scratch=True))
    layers, hidden, ffn, vocab = 2, 32, 48, 288
    parameters = layers * (4 * hidden**2 + 3 * hidden * ffn + 2 * hidden) + hidden + vocab * hidden
    assert flops_per_token(model, seq_length=16) == 6 * parameters + 12 * layers * hidden * 16


def test_peak_flops_are_known_by_name_and_only_for_16_bits() -> None:
    assert peak_flops("NVIDIA H200", "bf16") == 989e12
    assert peak_flops("NVIDIA A100-SXM4-80GB", "fp16") == 312e12
    assert peak_flops("NVIDIA L40S", "bf16") == 362e12
    assert peak_flops("NVIDIA H200", "fp32") is None
    assert peak_flops("Some New Chip", "bf16") is None
    assert peak_flops(None, "bf16") is None

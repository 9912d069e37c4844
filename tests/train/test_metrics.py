"""What a run writes down: whole rows, honest figures."""

from __future__ import annotations

import io
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from rich.console import Console

from dlm_bridge.loading.source import ModelSource
from dlm_bridge.train.metrics import (
    MetricsFile,
    StepMetrics,
    TrainingProgress,
    flops_per_token,
    moving_average,
    peak_flops,
    plot_loss,
    read_rows,
)


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


@pytest.mark.parametrize("damaged", ['{"step": 2, "lo', "\\ufffd\\x00", "[2]", '{"step": true}', ""])
def test_reopening_keeps_the_rows_behind_a_damaged_one(
    tmp_path: Path, damaged: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        "".join(f"{line}\n" for line in (_row(1).to_json(), damaged, *map(StepMetrics.to_json, [_row(3), _row(4)])))
    )
    metrics = MetricsFile(path, 3)
    metrics.append(_row(4, loss=9.0))
    metrics.close()
    (message,) = caplog.messages
    assert f"{path}: line 2" in message
    assert [(row["step"], row["loss"]) for row in map(json.loads, path.read_text().splitlines())] == [
        (1, 2.0), (3, 2.0), (4, 9.0)
    ]  # fmt: skip


def test_reopening_keeps_any_text(tmp_path: Path) -> None:
    """Also half of a surrogate pair, which JSON can name and UTF-8 cannot hold."""
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "text": "\\ud800 \u00e9"}\n')
    MetricsFile(path, 1).close()
    assert read_rows(path) == [{"step": 1, "text": "\ud800 \u00e9"}]


def test_rows_are_strict_json() -> None:
    row = json.loads(_row(1, grad_norm=float("inf")).to_json(), parse_constant=pytest.fail)
    assert row["grad_norm"] is None
    assert "eval_loss" not in row


def test_flops_follow_the_formula(seed_folder: Path) -> None:
    model = ModelSource(str(seed_folder), seed=0).load()
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


def test_a_line_of_a_log_file_is_whole() -> None:
    file = io.StringIO()
    with TrainingProgress(Console(file=file, width=80), 10_000, 0, enabled=True) as progress:
        progress.show(_row(10_000, tokens_per_s=1234567.8, peak_memory=2**36, eval_loss=1.2345))
    assert file.getvalue().splitlines() == [
        "step 10000/10000  loss 2.0000  validation 1.2345  1,234,568 tokens/s (5 per device)  64.0 GiB"
    ]


def test_a_terminal_of_80_columns_shows_the_counter_and_the_time_left() -> None:
    file = io.StringIO()
    with TrainingProgress(Console(file=file, width=80, force_terminal=True), 10_000, 0, enabled=True) as progress:
        for step in (1, 2):
            progress.show(_row(step, tokens_per_s=1234567.8, peak_memory=2**36, eval_loss=1.2345))
    shown = re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", file.getvalue()))
    last = [line for line in shown if "loss 2.0000" in line][-1]
    assert re.search(r" 2/10000 +\d+:\d\d:\d\d left ", last)
    assert len(last.rstrip()) <= 80


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The axes of every figure that is saved."""
    saved: list[Any] = []
    save = Figure.savefig

    def saves(figure: Figure, *arguments: Any, **options: Any) -> None:
        saved.extend(figure.axes)
        save(figure, *arguments, **options)

    monkeypatch.setattr(Figure, "savefig", saves)
    return saved


def _losses(losses: list[float], **last: float) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [
        {"step": step, "loss": loss, "tokens": 1000 * step} for step, loss in enumerate(losses, 1)
    ]
    rows[-1] |= last
    return rows


@pytest.mark.parametrize(
    ("losses", "scale"),
    [
        ([10 * 0.95**step + 1 for step in range(100)], "log"),  # most of its fall is in the first steps
        ([3 - 0.001 * step for step in range(100)], "linear"),
        ([math.sin(step) for step in range(100)], "linear"),  # negative, as in reinforcement learning
        ([math.nan, *(10 * 0.95**step + 1 for step in range(100))], "log"),
    ],
    ids=["falls", "flat", "signs", "nan"],
)
def test_the_loss_curve_is_smoothed_on_the_axis_that_shows_it(
    losses: list[float], scale: str, figures: list[Any], tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    plot_loss(_losses(losses, eval_loss=1.5), tmp_path / "run" / "loss.png")
    (axes,) = figures
    assert axes.get_yscale() == scale
    assert axes.get_title() == f"run: step {len(losses)}, {len(losses)}.0 k tokens"
    every, smooth, validation = axes.lines
    finite = [loss for loss in losses if math.isfinite(loss)]
    assert list(every.get_ydata()) == finite
    assert list(smooth.get_ydata()) == moving_average(finite, 5)
    assert list(validation.get_xdata()) == [len(losses)]


def test_a_short_run_has_one_curve(figures: list[Any], tmp_path: Path) -> None:
    plot_loss(_losses([3.0, 2.0]), tmp_path / "loss.png")
    assert [list(line.get_ydata()) for line in figures[0].lines] == [[3.0, 2.0]]
    assert [text.get_text() for text in figures[0].get_legend().get_texts()] == ["training"]


def test_moving_average() -> None:
    assert moving_average([1.0, 2.0, 6.0, 3.0], 3) == [1.5, 3.0, 11 / 3, 4.5]

"""Defaults that follow from the data and the model, and what a run says before its first step."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from accelerate.state import AcceleratorState
from rich.console import Console

from dlm_bridge.plan.dry_run import dry_run
from dlm_bridge.train.accelerate.trainer import train
from dlm_bridge.train.config import TrainConfig
from dlm_bridge.train.config.files import load_config
from tests.train.conftest import read_metrics

pytestmark = pytest.mark.extension("plan")
WORDS = "def f(x):\n    return x\n"


@pytest.fixture
def answers(tmp_path: Path, seed_folder: Path) -> dict[str, Any]:
    """Options of `sft`; the longest of four rows has between 17 and 24 tokens."""
    file = tmp_path / "answers.jsonl"
    rows = [{"prompt": "x" * size, "completion": "return x"} for size in (2, 3, 5, 18)]
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return {
        "model": str(seed_folder), "from_scratch": True, "data": [str(file)], "output": str(tmp_path / "run"),
        "global_batch_size": 2, "eval_interval": 0, "split": "1,0,0",
    }  # fmt: skip


def _run(config: TrainConfig, resume: bool = False) -> str:
    AcceleratorState._reset_state(reset_partial_state=True)
    out = io.StringIO()
    train(config, resume, Console(file=out, width=80, markup=False))
    return out.getvalue()


def test_sft_reads_each_row_three_times_in_rows_of_the_longest(answers: dict[str, Any], tmp_path: Path) -> None:
    """In the dry run, the run, its config.yaml, and a resume."""
    config = TrainConfig.from_flags("sft", **answers)
    planned = dry_run(config).config
    said = _run(config).splitlines()
    stored = load_config({"output": answers["output"]}, resume=True, task="sft")
    assert planned.data.seq_length == stored.data.seq_length == 24
    assert planned.precision.precision == stored.precision.precision
    assert stored.schedule.steps == len(read_metrics(tmp_path / "run")) == 6  # 4 rows, three times, 2 per step
    names = ("model", "data", "length", "dtype", "memory", "output")
    assert [line.split()[0] for line in said[:6]] == list(names)
    assert "4 rows of 24 tokens" in said[1]
    assert "read 3 times" in said[1]
    assert "6 steps" in said[2]
    assert str(tmp_path / "run") in said[5]
    _run(config.replace(steps=7), resume=True)
    assert len(read_metrics(tmp_path / "run")) == 7


def test_rows_are_not_longer_than_the_context(answers: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "answers.jsonl").write_text(json.dumps({"prompt": "x", "completion": WORDS * 40}) + "\n")
    assert dry_run(TrainConfig.from_flags("sft", **answers, truncate=True)).config.data.seq_length == 64


def test_pretrain_cuts_blocks_of_at_most_the_context(answers: dict[str, Any], corpus: Path) -> None:
    options = {**answers, "data": [str(corpus)]}
    found = dry_run(TrainConfig.from_flags(**options, tokens=6400), gpus=1).config
    assert (found.data.seq_length, found.schedule.steps, found.precision.precision) == (64, 50, "bf16")

"""`distill --dry-run`: the run's length, its memory, and the refusals that need no device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dlm_bridge.cli.app import app
from dlm_bridge.errors import SettingError
from dlm_bridge.loading import load_model
from dlm_bridge.train.distill.dry_run import distill_dry_run
from tests.distill.conftest import Settings, opened
from tests.refusals import refused
from tests.rl.conftest import write_llama


@pytest.mark.parametrize("changes", [{}, {"on_policy": True, "gen_length": 4}], ids=["off-policy", "on-policy"])
def test_rows_are_as_long_as_in_the_run(changes: dict[str, Any], settings: Settings) -> None:
    config = settings(seq_length=0, **changes)
    planned = distill_dry_run(config, 1)
    with opened(config) as trainer:
        assert planned.config.data.seq_length == trainer.config.data.seq_length
    assert (planned.rollouts is not None) == bool(changes)
    assert planned.memory is not None
    assert "no second model" in planned.notes[0]


def test_the_parents_weights_are_named(settings: Settings, parent: Path) -> None:
    size = sum(weight.numel() for weight in load_model(parent).model.parameters()) * 4 / 2**10
    note = distill_dry_run(settings(parent=str(parent)), 1).notes[0]
    assert f"take another {size:.1f} KiB per device" in note
    sharded = settings(parent=str(parent), sharding="fsdp")
    assert f"take another {size / 2:.1f} KiB per device" in distill_dry_run(sharded, 2).notes[0]


def test_another_vocabulary_is_refused(settings: Settings, tmp_path: Path) -> None:
    other = write_llama(tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    words = tokenizer["model"]["vocab"]
    words["a"], words["b"] = words["b"], words["a"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with refused(SettingError, "parent"):
        distill_dry_run(settings(parent=str(other)), 1)


def test_on_the_command_line(settings: Settings, tmp_path: Path) -> None:
    config = settings()
    words = ["--model", config.model.model, "--data", config.data.data[0], "--output", str(tmp_path / "new")]
    command = ["distill", *words, "--lora-rank", "2", "--steps", "4", "--global-batch-size", "4"]
    shown = CliRunner().invoke(app, [*command, "--dry-run", "--gpus", "2", "--json"])
    assert shown.exit_code == 0, shown.output
    assert json.loads(shown.stdout)["gpus"] == 2
    assert not (tmp_path / "new").exists()
    without = CliRunner().invoke(app, [*command, "--gpus", "2"])
    assert without.exit_code == 2
    assert "--dry-run" in without.output

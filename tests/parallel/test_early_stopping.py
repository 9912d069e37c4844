"""Early stopping on the Megatron engine, also with checkpoints in the background, and the export of its best one."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlm_bridge import Bridge
from tests.train.conftest import Run
from tests.train.test_early_stopping import check_early_stopping


@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.fast("True")
def test_a_run_ends_early_and_its_best_iteration_is_exported(
    on_megatron: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_background: bool
) -> None:
    def run(output: Path, resume: bool = False, **changes: object) -> object:
        return on_megatron(output, resume, async_save=in_background, **changes)

    check_early_stopping(run, tmp_path, monkeypatch)  # type: ignore[arg-type]
    Bridge.from_megatron(tmp_path / "whole").to_hf(tmp_path / "best")
    Bridge.from_megatron(tmp_path / "whole/checkpoints/iter_0000008").to_hf(tmp_path / "eighth")
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("best", "eighth")]
    assert weights[0] == weights[1]

"""`dlm-bridge eval` of DiffusionGemma: tasks that generate, and no likelihoods."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dlm_bridge.cli.eval import evaluate
from dlm_bridge.errors import SettingError
from tests.canvas_models import has_class, write_canvas_model
from tests.refusals import refused

pytestmark = has_class


def test_evaluation_by_what_it_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    folder = write_canvas_model(tmp_path / "model")

    def run(**options: Any) -> dict[str, Any]:
        given: dict[str, Any] = {"output": tmp_path / "out", "max_length": 80, "device": "cpu", "overwrite": True}
        evaluate(str(folder), **{**given, **options})
        facts: dict[str, Any] = json.loads((tmp_path / "out/results.json").read_text())
        return facts

    found = run(tasks=["sums"], limit=2, set=["steps=2", "gen_length=8", "t_max=0.9"])
    assert (found["kind"], found["likelihood"]) == ("diffusion", "none")
    recorded = found["tasks"]["sums"]["sampler"]
    assert (recorded["max_denoising_steps"], recorded["max_new_tokens"], recorded["t_max"]) == (2, 8, 0.9)
    with refused(SettingError, "tasks"):
        run(tasks=["orders"], limit=1)
    (tmp_path / "text.txt").write_text("the cat")
    with refused(SettingError, "perplexity"):
        run(perplexity=tmp_path / "text.txt")

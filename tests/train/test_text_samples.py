"""Texts written while training: what is in them, and that training is the same with and without."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from dlm_bridge.errors import DlmBridgeError, InputFileError, SettingError
from dlm_bridge.train.metrics import read_rows
from tests.refusals import refused
from tests.train.conftest import Run, without_speed

PROMPTS = ["def f1(x):", "    return", "def"]


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    """Samples at steps 0, 4, 8 and 10; one prompt on the command line, two in a file."""
    (tmp_path / "prompts.txt").write_text("    return\n\ndef\n")
    given = [PROMPTS[0], f"@{tmp_path / 'prompts.txt'}"]
    return {"sample_interval": 4, "sample_prompt": given, "sample_length": 16}


def written_by(checkpoint: Path) -> list[str]:
    """What a checkpoint says after the prompts, by hand."""
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32),
        AutoTokenizer.from_pretrained(checkpoint),
    )
    tokenizer.pad_token = tokenizer.eos_token
    inputs = tokenizer(PROMPTS, return_tensors="pt", padding=True, padding_side="left")
    new = model.generate(inputs["input_ids"], attention_mask=inputs["attention_mask"], gen_length=16, seed=0)
    return list(tokenizer.batch_decode(new[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


def test_training_is_the_same_with_samples(tmp_path: Path, run: Run, options: dict[str, Any]) -> None:
    plain, sampled = tmp_path / "plain", tmp_path / "sampled"
    assert without_speed(run(plain)) == without_speed(run(sampled, **options))
    weights = [load_file(root / "checkpoints/step-0000010/model.safetensors") for root in (plain, sampled)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    rows = read_rows(sampled / "samples.jsonl")
    assert [(row["step"], row["prompt"]) for row in rows] == [(s, p) for s in (0, 4, 8, 10) for p in PROMPTS]
    for number, step in enumerate((4, 8, 10), 1):
        texts = [row["text"] for row in rows[3 * number :][:3]]
        assert texts == written_by(sampled / f"checkpoints/step-{step:07d}")
    assert len({row["text"] for row in rows}) > 3  # it learns to write something else
    assert not (plain / "samples.jsonl").exists()


def test_a_resumed_run_drops_what_came_after_its_checkpoint(tmp_path: Path, run: Run, options: dict[str, Any]) -> None:
    output = tmp_path / "run"
    run(output, **{**options, "steps": 8, "lr_schedule": "constant"})
    rows = read_rows(output / "samples.jsonl")
    with (output / "samples.jsonl").open("a") as file:
        file.write('{"step": 9, "prompt": "lost", "text": ""}\n{"step": 10, "prom')
    run(output, resume=True, **{**options, "lr_schedule": "constant"})
    again = read_rows(output / "samples.jsonl")
    assert again[: len(rows)] == rows
    assert [row["step"] for row in again] == [0] * 3 + [4] * 3 + [8] * 3 + [10] * 3


@pytest.mark.parametrize(
    ("changes", "kind", "field", "named"),
    [
        ({"sample_interval": 0}, SettingError, "sample_interval", "`sample_prompt`"),
        ({"sample_prompt": []}, SettingError, "sample_interval", "`sample_prompt`"),
        ({"sample_prompt": ["@/nowhere.txt"]}, InputFileError, "/nowhere.txt", "`sample_prompt`"),
        ({"sample_length": 0}, SettingError, "sample_length", "at least 1"),
        ({"sample_length": 500}, SettingError, "sample_prompt", "500"),
    ],
)
def test_what_cannot_be_sampled_ends_a_run_before_it_began(
    tmp_path: Path, run: Run, options: dict[str, Any], changes: dict[str, Any], kind: Any, field: str, named: str
) -> None:
    with refused(kind, field, named):
        run(tmp_path / "run", **{**options, **changes})
    assert not list(tmp_path.glob("run/checkpoints/*"))


def test_a_prompt_needs_a_tokenizer(tmp_path: Path, run: Run, seed_folder: Path) -> None:
    """Token ids alone do not; nothing is left of a run that lacks one."""
    (tmp_path / "model").mkdir()
    shutil.copy(seed_folder / "config.json", tmp_path / "model")
    options = {"model": str(tmp_path / "model"), "data": ["mock"], "steps": 1, "eval_interval": 0}
    run(tmp_path / "run", **options)
    with pytest.raises(DlmBridgeError, match="`tokenizer`"):
        run(tmp_path / "other/run", **options, sample_interval=1, sample_prompt=["def"])
    assert not (tmp_path / "other").exists()

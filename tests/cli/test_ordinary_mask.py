"""DiffuLLaMA's mask token is a piece of its tokenizer: texts with it are prompted, written, filled and scored."""

from __future__ import annotations

import json
import math
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dlm_bridge.cli.app import main
from dlm_bridge.errors import RowError
from dlm_bridge.evaluation.likelihood import Answer, is_greedy, likelihood_bounds
from dlm_bridge.loading import LoadedModel, Placement, load_model
from tests.cli.conftest import Cli
from tests.families.diffullama import write_with_ordinary_mask

THE, OTHER = 257, 271
LENGTH = ("--gen-length", 12, "--seed", 1, "--set", "eos_token_id=null", "--set", "diffusion_steps=6")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_with_ordinary_mask(tmp_path_factory.mktemp("models") / "diffullama")


@pytest.fixture(scope="module")
def loaded(folder: Path) -> LoadedModel:
    return load_model(folder, Placement("cpu"), family="diffullama")


def test_it_is_prompted_and_written(cli: Cli, folder: Path, tmp_path: Path) -> None:
    words = (folder, "--family", "diffullama", *LENGTH)
    sample = cli.report(*words, "--prompt", "the cat")["samples"][0]
    assert THE in sample["token_ids"]
    assert "the" in sample["text"]
    shared = cli.report(*words[:-2], "--steps", 6, "--prompt", "the cat")["samples"][0]  # diffusion_steps by its name
    assert shared["token_ids"] == sample["token_ids"]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("the cat", "a the")))
    code, out, err = cli(*words, "--jsonl", tmp_path / "in.jsonl", "--commit-steps")
    assert code == 0, err
    first, second = map(json.loads, out.splitlines())
    assert first["token_ids"] == sample["token_ids"]
    assert THE in second["prompt_token_ids"]
    assert all(first["commit_steps"] + second["commit_steps"])


def test_positions_to_fill_are_those_of_the_text(cli: Cli, folder: Path, loaded: LoadedModel) -> None:
    words = (folder, "--family", "diffullama", "--infill", "--seed", 1, "--set", "diffusion_steps=3")
    report = cli.report(*words, "--prompt", "the [MASK:3] cat the")
    assert report["tokens"] == 3
    assert re.fullmatch(r"the .* cat the", report["samples"][0]["text"], re.DOTALL)
    code, _, err = cli(*words, "--prompt", "the cat")
    assert (code, err.count("\n")) == (2, 1)
    assert "nothing to fill in" in err


@pytest.mark.parametrize("words", [["--tasks", "{task}"], ["--perplexity", "{text}"]], ids=["task", "perplexity"])
@pytest.mark.fast("task")
def test_it_is_evaluated(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "docs.jsonl").write_text('{"question": "the cat and the", "choices": ["the", "a"], "answer": 0}\n')
    (tmp_path / "text.txt").write_text("the cat and the other the")
    data = {"data_files": {"test": str(tmp_path / "docs.jsonl")}}
    task = {
        "task": "own", "dataset_path": "json", "dataset_kwargs": data,
        "test_split": "test", "output_type": "multiple_choice", "doc_to_text": "{{question}}",
        "doc_to_target": "answer", "doc_to_choice": "choices", "metric_list": [{"metric": "acc"}],
    }  # fmt: skip
    (tmp_path / "own.yaml").write_text(json.dumps(task))
    words = [word.format(task=tmp_path / "own.yaml", text=tmp_path / "text.txt") for word in words]
    command = ["eval", folder, "--family", "diffullama", *words, "--mc-samples", 2, "--json", "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", ["dlm-bridge", *map(str, command)])
    with pytest.raises(SystemExit) as exit_:
        main()
    out, err = capsys.readouterr()
    assert not exit_.value.code, err
    facts = json.loads(out)
    assert math.isfinite(
        facts["perplexity"]["nats"] if "--perplexity" in words else facts["tasks"]["own"]["metrics"]["acc,none"]
    )


def test_its_likelihood_is_that_of_a_mask_token_of_its_own(loaded: LoadedModel) -> None:
    """Which reads as it does."""
    model: Any = loaded.model
    answers = [Answer((5, THE, 7), (THE, 8, THE, THE, 9)), Answer((THE,), (4, THE))]
    found = likelihood_bounds(model, answers, samples=6)
    config, family = model.config.mask_token_id, model.family
    weight = model.get_input_embeddings().weight
    before = weight[OTHER].clone()
    try:
        with torch.no_grad():
            weight[OTHER] = weight[THE]
        model.config.mask_token_id, model.family = OTHER, replace(family, ordinary_mask=False)
        assert likelihood_bounds(model, answers, samples=6) == found
        with pytest.raises(RowError, match=f"mask token {OTHER}") as error:
            likelihood_bounds(model, [*answers, Answer((5,), (OTHER,)), Answer((OTHER,), (6,))], samples=2)
        assert error.value.rows == (2, 3)
    finally:
        model.config.mask_token_id, model.family = config, family
        with torch.no_grad():
            weight[OTHER] = before


def test_it_may_be_the_greedy_token(loaded: LoadedModel) -> None:
    prompts = [(5, 6), (THE,), (7, THE, 8), (9,), (10, 11, 12)]
    assert any(is_greedy(loaded.model, Answer(prompt, (THE,))) for prompt in prompts)

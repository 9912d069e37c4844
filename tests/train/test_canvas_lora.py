"""LoRA of DiffusionGemma: one adapter of both towers, its experts, PEFT's folder, merging."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dlm_bridge.errors import SettingError
from dlm_bridge.generation.offline import write_texts
from dlm_bridge.loading import load_model
from tests.canvas_models import has_class, write_canvas_model
from tests.convert.helpers import hub_tensors, run_cli
from tests.data.chats import conversation, write_rows
from tests.refusals import refused
from tests.train.conftest import Run, without_speed
from tests.train.test_canvas import options

pytestmark = has_class
PREFIX = "base_model.model.model."
ENCODER, DECODER = PREFIX + "encoder.language_model.", PREFIX + "decoder."


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_canvas_model(tmp_path_factory.mktemp("base") / "gemma")


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("chats") / "chats.jsonl", [conversation(4 * i) for i in range(12)])


def tune(run: Run, output: Path, base: Path, chats: Path, **changes: Any) -> tuple[list[dict[str, Any]], Path]:
    given = {"lora_rank": 4, "lr": 5e-2, "precision": "fp32", **changes}
    rows = run(output, given.pop("resume", False), **options(base, chats, **given))
    return rows, output / f"checkpoints/step-{len(rows):07d}"


def shared(folder: Path) -> dict[str, torch.Tensor]:
    """The decoder's factors, after the encoder's have been found equal."""
    tensors = load_file(folder / "adapter_model.safetensors")
    decoder = {name: tensor for name, tensor in tensors.items() if name.startswith(DECODER)}
    assert len(tensors) == 2 * len(decoder)
    for name, tensor in decoder.items():
        assert torch.equal(tensor, tensors[name.replace(DECODER, ENCODER)]), name
    return decoder


def answer(folder: Path, tokenizer: Path) -> tuple[tuple[int, ...], ...]:
    loaded = load_model(folder, tokenizer=str(tokenizer))
    prompt = loaded.tokenizer("def f")["input_ids"]
    settings = {"gen_length": 16, "steps": 3, "seed": 1, "eos_token_id": None}
    return write_texts(loaded.model, loaded.tokenizer, [prompt], settings).token_ids


@pytest.mark.parametrize("dora", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_one_adapter_changes_both_towers(
    dora: bool, run: Run, base: Path, chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, folder = tune(run, tmp_path / "out", base, chats, steps=3, save_interval=2, lora_dora=dora)
    assert rows[-1]["loss"] < rows[0]["loss"]
    factors = shared(folder)
    # q, k and o of two layers, v of the sliding one, the dense MLP of both: the recipe's, without self-conditioning.
    assert len(factors) == (2 + dora) * (2 * 3 + 1 + 2 * 3)
    assert all(tensor.abs().max() > 0 for tensor in factors.values())
    code, _, err = run_cli(capsys, "adapter", "export", folder, tmp_path / "merged", "--merge")
    assert code == 0, err
    merged, before = hub_tensors(tmp_path / "merged"), hub_tensors(base)
    settings = json.loads((folder / "adapter_config.json").read_text())
    scale = settings["lora_alpha"] / settings["r"]
    for name, weight in before.items():
        module = PREFIX.removesuffix("model.") + name.removesuffix(".weight")
        change: torch.Tensor | float = 0.0
        if (down := factors.get(f"{module}.lora_A.weight")) is not None:
            change = scale * factors[f"{module}.lora_B.weight"] @ down
        changed = weight + change
        if (magnitude := factors.get(f"{module}.lora_magnitude_vector")) is not None:
            changed = changed * (magnitude / changed.norm(dim=1))[:, None]
        torch.testing.assert_close(merged[name], changed)
    found = answer(folder, base)
    assert found == answer(tmp_path / "merged", base) != answer(base, base)
    folder.rename(tmp_path / "first")
    again, folder = tune(run, tmp_path / "out", base, chats, steps=3, save_interval=2, resume=True, lora_dora=dora)
    assert without_speed(again) == without_speed(rows)
    assert all(torch.equal(factors[name], tensor) for name, tensor in shared(folder).items())


def test_the_experts_are_a_target(run: Run, base: Path, chats: Path, tmp_path: Path) -> None:
    plain, _ = tune(run, tmp_path / "plain", base, chats, steps=1)
    rows, folder = tune(run, tmp_path / "out", base, chats, lora_targets="q_proj,experts")
    assert rows[0]["loss"] == pytest.approx(plain[0]["loss"], rel=1e-6)  # a new adapter changes nothing
    factors = shared(folder)
    assert len([name for name in factors if ".experts." in name]) == 2 * 2 * 2
    assert all(tensor.abs().max() > 0 for tensor in factors.values())
    assert answer(folder, base) != answer(base, base)
    going_on, folder = tune(run, tmp_path / "more", base, chats, steps=1, lora_rank=0, adapter=str(folder))
    assert going_on[0]["loss"] < rows[0]["loss"]
    shared(folder)
    with refused(SettingError, "lora_dropout", "experts"):
        tune(run, tmp_path / "dropout", base, chats, lora_targets="experts", lora_dropout=0.1)


def test_towers_that_were_trained_apart_are_not_merged(
    run: Run, base: Path, chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, folder = tune(run, tmp_path / "out", base, chats, steps=1, lora_targets="q_proj")
    tensors = load_file(folder / "adapter_model.safetensors")
    name = ENCODER + "layers.0.self_attn.q_proj.lora_B.weight"
    save_file({**tensors, name: tensors[name] + 1}, folder / "adapter_model.safetensors")
    words = ("adapter", "export", folder, tmp_path / "merged", "--merge", "--accept-changed-tensors")
    code, _, err = run_cli(capsys, *words)
    assert code == 2
    assert name in err

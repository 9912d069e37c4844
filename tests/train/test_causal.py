"""The autoregressive families under the engine: next-token training of transformers' own classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from dlm_bridge.data.blocks import Epochs, MockBlocks, split
from dlm_bridge.data.loader import BatchSampler
from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.objectives.base import mean_loss
from dlm_bridge.objectives.batches import IGNORE_INDEX
from dlm_bridge.objectives.noise import Uniforms
from dlm_bridge.objectives.single_stream import NextTokenPrediction
from tests.autoregressive.cases import CASES, Case
from tests.train.conftest import Run, without_speed

LLAMA = CASES[0]
SHORT: dict[str, Any] = {
    "from_scratch": False,
    "data": ["mock"],
    "warmup_steps": 0,
    "lr_schedule": "constant",
    "lr": 1e-3,
    "eval_interval": 2,
    "save_interval": 2,
    "length_variation": 0.0,
}


def _rows(step: int, count: int, length: int = 16) -> torch.Tensor:
    """The tokens of a step, as the engine reads mock data with the default split."""
    blocks = MockBlocks(length, tokens=130, seed=0)
    train = Epochs(split(blocks, (0.99, 0.01, 0.0))[0], seed=0)
    return train.rows(BatchSampler((count,)).samples(step, 0, 1, count)[0]).input_ids


def test_the_loss_is_transformers_own(tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(LLAMA.write(tmp_path / "llama")).eval()
    ids = torch.randint(130, (3, 12), generator=torch.Generator().manual_seed(0))
    real = torch.arange(12) < torch.tensor([12, 7, 10])[:, None]
    labels = ids.masked_fill(~real, IGNORE_INDEX)
    labels[:, :3] = IGNORE_INDEX  # a prompt
    objective = NextTokenPrediction()
    with torch.no_grad():
        theirs = model(ids, attention_mask=real, labels=labels).loss
        noisy = objective.noise(ids, Uniforms.keyed(0, 1, range(3), 12), labels, real)
        assert torch.equal(noisy.input_ids, ids)
        assert noisy.normaliser.item() == 9 + 4 + 7
        logits = model(noisy.input_ids, attention_mask=noisy.model_mask()).logits[noisy.mask]
        torch.testing.assert_close(mean_loss(objective.loss_sum(logits, noisy), noisy), theirs, rtol=1e-5, atol=0)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.label)
@pytest.mark.fast("qwen3", "qwen3-moe", "gemma3", "gpt-oss", "deepseek-v3", "phi3")
def test_every_family_trains(case: Case, tmp_path: Path, run: Run) -> None:
    folder = case.write(tmp_path / "model")
    (row,) = run(tmp_path / "run", **{**SHORT, "eval_interval": 0}, model=str(folder), steps=1)
    assert "objective:\n  objective: causal\n" in (tmp_path / "run/config.yaml").read_text()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = _rows(1, 8)
    with torch.no_grad():
        assert row["loss"] == pytest.approx(model(ids, labels=ids).loss.item(), rel=1e-5)
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run/checkpoints/step-0000001")
    assert type(saved) is type(model)
    before = model.state_dict()
    assert any(not torch.equal(tensor, before[name]) for name, tensor in saved.state_dict().items())


def test_from_scratch_cut_and_resumed(tmp_path: Path, run: Run) -> None:
    options = {**SHORT, "model": str(LLAMA.write(tmp_path / "llama")), "from_scratch": True, "length_variation": 0.3}
    whole = run(tmp_path / "whole", steps=3, **options)
    cut = run(tmp_path / "cut", steps=3, micro_batch_size=2, **options)
    assert [row["loss"] for row in cut] == pytest.approx([row["loss"] for row in whole], rel=1e-4)
    run(tmp_path / "resumed", steps=2, **options)
    assert without_speed(run(tmp_path / "resumed", resume=True, steps=3, **options))[2:] == without_speed(whole)[2:]
    ours, theirs = (
        load_file(tmp_path / name / "checkpoints/step-0000003/model.safetensors") for name in ("resumed", "whole")
    )
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_what_does_not_fit_is_refused(tmp_path: Path, run: Run) -> None:
    options = {**SHORT, "model": str(LLAMA.write(tmp_path / "llama")), "steps": 1}
    for changes, message in (
        ({"objective": "masked"}, "objective.*causal"),
        ({"mask_annealing_steps": 5}, "^mask_annealing_steps: Llama"),
        ({"block_schedule": "0:2"}, "^block_schedule: .*'causal'"),
    ):
        with pytest.raises(DlmBridgeError, match=message):
            run(tmp_path / "run", **{**options, **changes})
    run(tmp_path / "whole", **options)
    broken = tmp_path / "whole/checkpoints/step-0000001"
    tensors = load_file(broken / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, broken / "model.safetensors", {"format": "pt"})
    with pytest.raises(DlmBridgeError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        run(tmp_path / "run", **{**options, "model": str(broken)})

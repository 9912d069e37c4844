"""The adaptation schedules: attention that opens from causal to bidirectional, and blocks that grow."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from dlm_bridge.errors import SettingError
from dlm_bridge.objectives.base import mean_loss
from dlm_bridge.objectives.batches import NoisyBatch
from dlm_bridge.objectives.noise import Uniforms
from dlm_bridge.objectives.registry import family_objective
from dlm_bridge.objectives.single_stream import ShiftedDiffusion
from dlm_bridge.train.config import TrainConfig
from dlm_bridge.train.config.files import load_config
from dlm_bridge.train.schedule import anneal_mask, open_probability, with_block_size
from tests.families import a2d, dream, sdar, wedlm
from tests.families.case import FamilyCase, some_slow
from tests.refusals import refused
from tests.train.conftest import Run, without_speed

GIVEN: dict[str, Any] = {"model": "m", "data": ["d"], "output": "o", "seq_length": 14}
LENGTH = 14


def _options(case: FamilyCase, folder: Path) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**case.config, "mask_token_id": 99}))
    options = {"model": str(folder), "data": ["mock"], "seq_length": LENGTH, "warmup_steps": 0, "eval_interval": 2}
    return {**options, "lr_schedule": "constant", "lr": 1e-3, "save_interval": 2}


def _dream(tmp_path: Path) -> tuple[Any, Any, NoisyBatch]:
    """Dream, its objective, and a noisy batch of samples 0..3 with a padded row."""
    model = dream.CASE.load(dream.CASE.write(tmp_path / "dream", mask_token_id=99))
    objective = family_objective(model)
    ids = torch.randint(99, (4, LENGTH), generator=torch.Generator().manual_seed(0))
    real = torch.arange(LENGTH) < torch.tensor([LENGTH, 9, LENGTH, 11])[:, None]
    noisy = objective.noise(ids, Uniforms.keyed(0, 1, range(4), LENGTH), attention_mask=real)
    return model, objective, noisy


@torch.no_grad()
def _loss(model: Any, objective: Any, noisy: NoisyBatch) -> float:
    logits = model(input_ids=noisy.input_ids, attention_mask=noisy.model_mask()).logits[noisy.mask]
    return float(mean_loss(objective.loss_sum(logits, noisy), noisy))


def test_annealing_begins_causal_and_ends_bidirectional(tmp_path: Path) -> None:
    model, objective, noisy = _dream(tmp_path)
    config = TrainConfig.from_flags(**GIVEN, mask_annealing_steps=10)
    stock = transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(**{**model.config.to_dict(), "model_type": "qwen2"})
    )
    stock.load_state_dict(model.state_dict())
    stock.eval()
    causal, bidirectional = _loss(stock, objective, noisy), _loss(model, objective, noisy)
    assert abs(causal - bidirectional) > 1e-3
    first, last = (anneal_mask(noisy, config, step, range(4)) for step in (1, 11))
    assert _loss(model, objective, first) == pytest.approx(causal, rel=1e-5)
    assert _loss(model, objective, last) == bidirectional
    # The share just below one opens every pair but a few: its mask is the padding's, too.
    nearly = anneal_mask(noisy, TrainConfig.from_flags(**GIVEN, mask_annealing_steps=10**9), 10**9, range(4))
    assert nearly.pairs is not None
    assert nearly.pairs.dim() == 4
    assert _loss(model, objective, nearly) == pytest.approx(bidirectional, rel=1e-5)


def test_the_share_of_open_pairs_grows_linearly() -> None:
    length, config = 128, TrainConfig.from_flags(**{**GIVEN, "seq_length": 128}, mask_annealing_steps=100)
    ids = torch.zeros(4, length, dtype=torch.long)
    empty = torch.zeros(0)
    noisy = NoisyBatch(ids, None, None, None, ids.bool(), ids.bool(), empty, empty, None, empty)
    later = torch.ones(length, length).triu(1).bool()
    masks = {}
    for step in (1, 26, 51, 76):
        masks[step] = anneal_mask(noisy, config, step, [3, 5, 7, 9]).pairs
        assert masks[step].shape == (4, 1, length, length)
        assert masks[step][:, :, ~later].all()
        # 32512 pairs: five standard deviations are 0.014.
        assert masks[step][:, :, later].float().mean().item() == pytest.approx((step - 1) / 100, abs=0.014)
    assert open_probability(101, 100) == open_probability(500, 100) == 1.0
    assert not torch.equal(masks[26][0], masks[26][1])
    # A row depends on its own sample alone.
    alone = anneal_mask(dataclasses.replace(noisy, input_ids=ids[:1]), config, 26, [7]).pairs
    assert alone is not None
    assert torch.equal(alone[0], masks[26][2])


def test_packed_documents_stay_apart_while_attention_opens() -> None:
    config = TrainConfig.from_flags(**GIVEN, mask_annealing_steps=10)
    ids = torch.zeros(2, 12, dtype=torch.long)
    documents = (torch.arange(12) >= 5).long().expand(2, -1)
    uniforms = Uniforms.keyed(0, 1, range(2), 12)
    noisy = ShiftedDiffusion(7).noise(ids, uniforms, documents=documents)
    same = documents[0, :, None] == documents[0]
    causal = torch.ones(12, 12, dtype=torch.bool).tril()
    for step in (1, 5, 11):
        mask = anneal_mask(noisy, config, step, [0, 1]).model_mask()
        assert mask is not None
        assert not (mask[:, 0] & ~same).any()
        assert (mask[:, 0] | ~(same & causal)).all()
        assert bool((mask[:, 0] & ~causal).any()) == (step > 1)


def test_a_run_anneals_whatever_its_cut(tmp_path: Path, run: Run) -> None:
    options = _options(dream.CASE, tmp_path / "model")
    still = {**options, "lr": 0.0, "weight_decay": 0.0}
    plain = run(tmp_path / "plain", steps=4, **still)
    annealing = run(tmp_path / "annealing", steps=4, mask_annealing_steps=3, **still)
    same = [ours["loss"] == theirs["loss"] for ours, theirs in zip(annealing, plain, strict=True)]
    assert same == [False, False, False, True]
    # Validation is with the family's own attention, which the checkpoint is used with.
    assert [row.get("eval_loss") for row in annealing] == [row.get("eval_loss") for row in plain]

    options["mask_annealing_steps"] = 3
    whole = run(tmp_path / "whole", steps=4, **options)
    cut = run(tmp_path / "cut", steps=4, micro_batch_size=2, **options)
    assert [row["loss"] for row in cut] == pytest.approx([row["loss"] for row in whole], rel=1e-4)
    _check_resume(tmp_path, run, whole, options)


@pytest.mark.parametrize("case", some_slow((sdar.CASES[0], wedlm.CASES[0], a2d.CASES[0]), "wedlm"))
@pytest.mark.fast("sdar")
def test_a_run_grows_its_blocks(case: FamilyCase, tmp_path: Path, run: Run) -> None:
    options = {**_options(case, tmp_path / "model"), "block_schedule": "0:2,3:7"}
    if case.spec.objective == "masked":
        options["objective"] = "block"  # its config names no block size: the schedule does
    whole = run(tmp_path / "whole", steps=4, **options)
    cut = run(tmp_path / "cut", steps=4, micro_batch_size=2, **options)
    assert [row["loss"] for row in cut] == pytest.approx([row["loss"] for row in whole], rel=1e-4)
    for step, size in ((2, 2), (4, 7)):
        saved = json.loads((tmp_path / f"whole/checkpoints/step-{step:07d}/config.json").read_text())
        assert saved["block_size"] == size
    fixed = run(tmp_path / "fixed", steps=4, **{**options, "block_schedule": "0:2"})
    assert [row["loss"] for row in fixed[:2]] == [row["loss"] for row in whole[:2]]
    assert fixed[2]["loss"] != whole[2]["loss"]
    _check_resume(tmp_path, run, whole, options)


def _check_resume(tmp_path: Path, run: Run, whole: list[dict[str, Any]], options: dict[str, Any]) -> None:
    """Stopped after step 2, before the schedule's change, and resumed with what config.yaml says."""
    run(tmp_path / "resumed", steps=2, **options)
    own = load_config({"output": str(tmp_path / "resumed"), "steps": 4}, resume=True)
    resumed = run(
        tmp_path / "resumed", resume=True, **{key: value for key, value in own.as_flags().items() if key != "output"}
    )
    assert without_speed(resumed) == without_speed(whole)
    ours, theirs = (
        load_file(tmp_path / name / "checkpoints/step-0000004/model.safetensors") for name in ("resumed", "whole")
    )
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize(("step", "size"), [(1, 2), (9, 2), (10, 7), (99, 7)])
@torch.no_grad()
def test_the_block_size_of_a_step_is_what_the_streams_see(step: int, size: int, tmp_path: Path) -> None:
    case = sdar.CASES[0]
    model = case.load(case.write(tmp_path / "sdar", mask_token_id=99))
    config = TrainConfig.from_flags(**GIVEN, block_schedule="0:2,10:7")
    objective = with_block_size(family_objective(model), model, config, step)
    ids = torch.arange(LENGTH)[None]
    noisy = objective.noise(ids, Uniforms.keyed(0, step, [0], LENGTH))

    def logits(input_ids: torch.Tensor) -> torch.Tensor:
        return model(input_ids, attention_mask=noisy.model_mask(), position_ids=noisy.position_ids).logits[0]

    before = logits(noisy.input_ids)
    block = torch.arange(LENGTH) // size
    for position in (3, 8):
        for clean in (False, True):
            changed = noisy.input_ids.clone()
            changed[0, position + LENGTH * clean] = 77
            moved = ((logits(changed) - before).abs() > 1e-6).any(dim=1)
            own, later = block == block[position], block > block[position]
            seen = torch.cat([later, own | later]) if clean else torch.cat([own, torch.zeros_like(own)])
            assert torch.equal(moved, seen)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("mask_annealing_steps", -1),
        ("block_schedule", ""),
        ("block_schedule", "0:4,x:7"),
        ("block_schedule", "0:2:4"),
        ("block_schedule", "5:2"),
        ("block_schedule", "0:7,5:2"),
        ("block_schedule", "0:1,5:2,5:7"),
        ("block_schedule", "0:2,5:4"),
        ("block_schedule", "0:0"),
    ],
)
def test_bad_schedules_are_refused(field: str, value: Any) -> None:
    with refused(SettingError, field):
        TrainConfig.from_flags(**GIVEN, **{field: value})


def test_models_and_objectives_that_cannot_follow_are_refused(tmp_path: Path, run: Run) -> None:
    for case, field, value, named in (
        (sdar.CASES[0], "mask_annealing_steps", 5, "'block'"),
        (wedlm.CASES[0], "mask_annealing_steps", 5, "'wedlm'"),
        (dream.CASE, "block_schedule", "0:2", "'shifted'"),
    ):
        with refused(SettingError, field, named):
            run(tmp_path / "run", steps=1, **{**_options(case, tmp_path / case.name), field: value})


def test_a_resume_with_another_schedule_is_refused(tmp_path: Path) -> None:
    began = {**GIVEN, "output": str(tmp_path), "mask_annealing_steps": 5, "block_schedule": "0:2"}
    (tmp_path / "config.yaml").write_text(TrainConfig.from_flags(**began).to_yaml())
    again = load_config({"output": str(tmp_path)}, resume=True)
    assert (again.objective.mask_annealing_steps, again.objective.block_sizes) == (5, ((0, 2),))
    for change in ({"mask_annealing_steps": 6}, {"block_schedule": "0:7"}, {"family": "dream"}):
        with refused(SettingError, next(iter(change))):
            load_config({"output": str(tmp_path), **change}, resume=True)

"""What both engines do alike, on the Megatron engine: the checks of `tests.train`."""

# ruff: noqa: F401, F811 (fixtures)

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from dlm_bridge import Bridge
from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.train.config import TrainConfig
from dlm_bridge.train.metrics import read_rows
from tests.train import test_norms as norms
from tests.train import test_objectives_resizing as resizing
from tests.train import test_sft as sft
from tests.train import test_text_samples as samples
from tests.train.conftest import Run, without_speed
from tests.train.test_damaged_processes import check_two_processes
from tests.train.test_full_disk import (
    OPTIONS,
    check_disk_without_room,
    check_goes_on,
    limit_save,
    limited_files,
    small_disk,
)
from tests.train.test_schedule import check_jump
from tests.train.test_sft import chat, chats
from tests.train.test_sft import options as answers
from tests.train.test_text_samples import options as sampling
from tests.train.test_unshared_output import STEPS, check_unshared_save
from tests.train.wandb_standin import logged

pytest.importorskip("megatron.core")


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.fast("True")
def test_norms_in_half_precision_are_of_fp32_parameters(tmp_path: Path, bf16_run: Run, inside: bool) -> None:
    """Main params that megatron-core has, or that it leaves to the optimizer inside its own."""
    megatron = ["optimizer.use_precision_aware_optimizer=true"] if inside else []
    rows = bf16_run(tmp_path / "run", steps=4, megatron=megatron, **norms.OPTIONS)
    norms.check(rows)
    exact = bf16_run(tmp_path / "exact", steps=4, precision="fp32", **norms.OPTIONS)
    assert rows[-1]["param_norm"] == pytest.approx(exact[-1]["param_norm"], rel=1e-3)


@pytest.mark.slow
def test_dreamons_objective_is_the_families_default(tmp_path: Path, run: Run, bf16_run: Run) -> None:
    given = {**resizing.options(tmp_path / "model"), "lr_schedule": "constant", "eval_interval": 0, "save_interval": 0}
    ours = run(tmp_path / "accelerate", **given)
    assert "objective:\n  objective: dreamon\n" in (tmp_path / "accelerate/config.yaml").read_text()
    theirs = bf16_run(tmp_path / "megatron", precision="fp32", **given)
    assert len(theirs) == 3
    for key in ("loss", "grad_norm"):
        assert [row[key] for row in theirs] == pytest.approx([row[key] for row in ours], rel=1e-4)


@pytest.mark.slow
def test_a_longer_run_says_that_its_learning_rate_jumps(tmp_path: Path, on_megatron: Run) -> None:
    check_jump(on_megatron, tmp_path)


def test_wandb_has_every_step_through_accelerates_tracker(tmp_path: Path, on_megatron: Run, wandb: Any) -> None:
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)  # as in a process of its own
    rows = on_megatron(tmp_path / "run", steps=2, eval_interval=0, trackers="wandb")
    _, steps = logged(wandb)
    assert [(row["step"], row["loss"]) for row in steps] == [(row["step"], row["loss"]) for row in rows]


def test_the_megatron_engine_hands_its_weights_to_the_hub_side(
    tmp_path: Path, on_megatron: Run, run: Run, sampling: dict[str, Any]
) -> None:
    plain, sampled = tmp_path / "plain", tmp_path / "sampled"
    assert without_speed(on_megatron(plain)) == without_speed(on_megatron(sampled, **sampling))
    rows = read_rows(sampled / "samples.jsonl")
    assert [(row["step"], row["prompt"]) for row in rows] == [(s, p) for s in (0, 4, 8, 10) for p in samples.PROMPTS]
    Bridge.from_megatron(sampled / "checkpoints").to_hf(tmp_path / "hub")
    assert [row["text"] for row in rows[-3:]] == samples.written_by(tmp_path / "hub")
    # Both engines start from the same weights.
    run(tmp_path / "accelerate", **{**sampling, "steps": 1})
    assert read_rows(tmp_path / "accelerate/samples.jsonl")[:3] == rows[:3]


@pytest.mark.slow
def test_a_resumed_run_samples_after_its_checkpoint_was_removed(
    tmp_path: Path, on_megatron: Run, sampling: dict[str, Any]
) -> None:
    """The first sampling after the resume is at step 10; by then --keep-last has removed step 4."""
    saves = {**sampling, "save_interval": 2, "keep_last": 1, "lr_schedule": "constant"}
    on_megatron(tmp_path / "whole", **{**saves, "sample_interval": 10})
    on_megatron(tmp_path / "run", **{**saves, "steps": 4})
    on_megatron(tmp_path / "run", resume=True, **{**saves, "sample_interval": 10})
    assert [path.name for path in (tmp_path / "run/checkpoints").glob("iter_*")] == ["iter_0000010"]
    whole, resumed = (read_rows(tmp_path / name / "samples.jsonl")[-3:] for name in ("whole", "run"))
    assert [row["step"] for row in resumed] == [10] * 3
    assert resumed == whole


@pytest.mark.parametrize("declared", [None, 5])
@pytest.mark.fast("5")
def test_checkpoints_end_where_training_ended_answers(
    tmp_path: Path, on_megatron: Run, answers: dict[str, Any], declared: int | None
) -> None:
    sft.declare_end(answers, declared)
    on_megatron(tmp_path / "run", steps=1, lr=0.0, **answers)
    Bridge.from_megatron(tmp_path / "run/checkpoints").to_hf(tmp_path / "exported")
    sft.check_ends(tmp_path / "exported", declared)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "background"), [(500, False), pytest.param(8_000, False, marks=pytest.mark.slow), (8_000, True)]
)
def test_a_full_disk(
    size: int, background: bool, tmp_path: Path, on_megatron: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The common values, or the tensors, which processes of their own write."""
    from dlm_bridge.parallel.train.trainer import MegatronTrainer

    rows = on_megatron(tmp_path / "whole", **OPTIONS)
    output = tmp_path / "run"
    with monkeypatch.context() as patch:
        limit_save(patch, MegatronTrainer, size)
        with pytest.raises(DlmBridgeError, match=r"iter_0000004.*iter_0000002"):
            on_megatron(output, async_save=background, **OPTIONS)
    assert (output / "checkpoints/latest_checkpointed_iteration.txt").read_text() == "2"
    check_goes_on(output, "iter_0000002", rows, on_megatron, async_save=background)


def test_a_background_save_that_fails_is_not_called_done(
    tmp_path: Path, values: dict[str, Any], on_megatron: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dlm_bridge.parallel.train.assembly import train
    from dlm_bridge.parallel.train.trainer import MegatronTrainer

    start, said = MegatronTrainer.finish, io.StringIO()

    def finish(self: MegatronTrainer) -> None:
        with limited_files(20):  # the background has its own limits; what is published after it has these
            start(self)

    monkeypatch.setattr(MegatronTrainer, "finish", finish)
    options = {**values, "engine": "megatron", "output": str(tmp_path / "run"), "steps": 1, "async_save": True}
    with pytest.raises(DlmBridgeError, match="iter_0000001"):
        train(TrainConfig.from_flags(**options), False, Console(file=said, width=10_000))
    assert "done: " not in said.getvalue()


@pytest.mark.parametrize("room", [0, 60_000])
@pytest.mark.fast("60000")
def test_a_disk_without_room(room: int, small_disk: Path, on_megatron: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    check_disk_without_room(on_megatron, "iter_0000002", room, small_disk, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("flags", ["", "--async-save"])
def test_two_processes(flags: str, tmp_path: Path, seed_folder: Path, corpus: Path) -> None:
    flags = f"--engine megatron --tp 2 {flags}"
    check_two_processes(flags, 8_000, "__1_0.distcp", tmp_path, seed_folder, corpus)


@pytest.mark.slow
@pytest.mark.parametrize("flags", ["--tp 2", "--tp 2 --async-save", "--pp 2 --ema-decay 0.5"])
def test_an_output_that_is_not_shared(flags: str, tmp_path: Path, seed_folder: Path, corpus: Path) -> None:
    words = f"pretrain --model {seed_folder} --data {corpus} --output run --from-scratch {STEPS}"
    check_unshared_save(f"{words} --engine megatron {flags}", tmp_path)

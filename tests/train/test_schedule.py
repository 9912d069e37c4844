"""The learning rate and the batch size over the steps of a run, and validation data of their own."""

from __future__ import annotations

import itertools
import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from rich.console import Console

from dlm_bridge.data.indexed import TokenLimits
from dlm_bridge.data.sources import ReaderSettings, find_run_data
from dlm_bridge.errors import LayoutError, SettingError
from dlm_bridge.train.checkpoints import load_state
from dlm_bridge.train.config import TrainConfig
from dlm_bridge.train.config.files import load_config
from dlm_bridge.train.schedule import batch_sampler, learning_rate, learning_rate_jump, with_steps
from tests.data.chats import chatty, conversation, write_rows
from tests.refusals import refused
from tests.train.conftest import Run, without_speed

STEPS, WARMUP, DECAY = 40, 5, 12
RAMP = {"global_batch_size": 8, "batch_ramp_up": "2,2,12"}


@pytest.mark.parametrize("style", ["exponential", "linear", "cosine", "minus-sqrt"])
def test_wsd_is_megatron_cores(style: str) -> None:
    options = {"lr_schedule": "wsd", "wsd_decay_style": style, "wsd_decay_steps": DECAY}
    assert rates(options) == pytest.approx(reference("WSD", style.replace("-", "_")), abs=1e-9)
    assert rates(options)[-1] == pytest.approx(0.1)
    assert set(rates(options)[WARMUP - 1 : STEPS - DECAY]) == {1.0}


def test_inverse_square_root_is_megatron_cores() -> None:
    found = rates({"lr_schedule": "inverse-square-root"})
    assert found == pytest.approx(reference("inverse-square-root"))
    assert found[4 * WARMUP - 1] == pytest.approx(0.5)


def test_wsd_decays_in_a_tenth_of_the_steps_by_default() -> None:
    found = rates({"lr_schedule": "wsd"})
    assert found[STEPS - 5] == 1.0
    assert found[STEPS - 4] < 1.0


@pytest.mark.parametrize("style", ["cosine", "linear", "wsd"])
@pytest.mark.parametrize("end", [20, 60])
def test_a_decay_with_an_end_of_its_own_is_megatron_cores(style: str, end: int) -> None:
    options = {"lr_schedule": style, "lr_decay_steps": end}
    if style == "wsd":
        options["wsd_decay_steps"] = DECAY
    assert rates(options) == pytest.approx(reference("WSD" if style == "wsd" else style, end=end), abs=1e-9)
    assert (rates(options)[-1] == pytest.approx(0.1)) == (end == 20)


def test_a_run_that_only_warmed_up_ends_at_its_least() -> None:
    before = config(steps=WARMUP, warmup_steps=WARMUP, lr=1.0, min_lr=0.1)
    assert learning_rate(before, WARMUP + 1) == pytest.approx(0.1)
    assert "jumps from 0.1 to " in str(learning_rate_jump(before, before.replace(steps=STEPS), WARMUP))
    assert learning_rate_jump(before, before, WARMUP) is None


def rates(options: dict[str, Any]) -> list[float]:
    """The learning rates of all steps."""
    flags = {"model": "m", "data": ["d"], "output": "o", "steps": STEPS, "warmup_steps": WARMUP}
    config = TrainConfig.from_flags(**flags, lr=1.0, min_lr=0.1, **options)
    return [learning_rate(config, step) for step in range(1, STEPS + 1)]


def reference(style: str, wsd_style: str = "exponential", end: int = STEPS) -> list[float]:
    """The same by megatron-core."""
    scheduler = OptimizerParamScheduler(
        SimpleNamespace(param_groups=[]),
        init_lr=0.0,
        max_lr=1.0,
        min_lr=0.1,
        lr_warmup_steps=WARMUP,
        lr_decay_steps=end,
        lr_decay_style=style,
        start_wd=0.0,
        end_wd=0.0,
        wd_incr_steps=0,
        wd_incr_style="constant",
        wsd_decay_steps=DECAY,
        lr_wsd_decay_style=wsd_style,
    )
    found = []
    for step in range(1, STEPS + 1):
        scheduler.num_steps = step
        found.append(scheduler.get_lr({"max_lr": 1.0, "min_lr": 0.1}))
    return found


@pytest.mark.parametrize("ramp", ["2,2,12", "4,4,3", "1,1,100", "6,2,1"])
def test_the_batch_grows_as_megatron_lms(ramp: str) -> None:
    """`--rampup-batch-size START INCREMENT SAMPLES`: equal numbers of samples at each batch size below the last."""
    start, increment, samples = map(int, ramp.split(","))
    sampler = batch_sampler(config(batch_ramp_up=ramp, global_batch_size=8, micro_batch_size=1))
    at_each = samples / ((8 - start) // increment)
    read = 0
    for step in range(1, 80):
        assert sampler.samples_before(step) == read
        assert sampler.batch_size(step) == min(8, start + int(read / at_each) * increment if read <= samples else 8)
        read += sampler.batch_size(step)
    assert sampler.batch_size(80) == 8


@pytest.mark.parametrize(("processes", "micro"), [(1, 2), (2, 1)])
def test_a_growing_batch_reads_every_sample_once(processes: int, micro: int) -> None:
    sampler = batch_sampler(config(**RAMP))
    read = [
        [
            g
            for process in range(processes)
            for batch in sampler.samples(step, process, processes, micro)
            for g in batch
        ]
        for step in range(1, 12)
    ]
    assert list(itertools.chain(*read)) == list(range(sampler.samples_before(12)))
    assert [len(samples) for samples in read[:5]] == [2, 2, 4, 6, 8]


def config(**flags: Any) -> TrainConfig:
    return TrainConfig.from_flags(model="m", data=["d"], output="o", **flags)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"batch_ramp_up": "2,2"}, "batch_ramp_up"),
        ({"batch_ramp_up": "2,4,12", "global_batch_size": 8}, "batch_ramp_up"),
        ({"batch_ramp_up": "8,2,12", "global_batch_size": 8}, "batch_ramp_up"),
        ({**RAMP, "engine": "megatron", "moe_aux_loss_coeff": 0.1}, "batch_ramp_up"),
        ({"wsd_decay_steps": 5}, "wsd_decay_steps"),
        ({"wsd_decay_style": "linear"}, "wsd_decay_style"),
        ({"lr_schedule": "wsd", "wsd_decay_steps": 50, "steps": 40}, "wsd_decay_steps"),
        ({"lr_decay_steps": 5, "warmup_steps": 5}, "lr_decay_steps"),
        ({"lr_schedule": "wsd", "wsd_decay_steps": 30, "lr_decay_steps": 20}, "wsd_decay_steps"),
        ({"valid_data": ["v"], "split": "90,10,0"}, "split"),
    ],
)
def test_bad_values_name_the_field(flags: dict[str, Any], named: str) -> None:
    with refused(SettingError, named):
        config(**flags)


def test_a_longer_run_says_that_its_learning_rate_jumps(tmp_path: Path, run: Run) -> None:
    check_jump(run, tmp_path)


def check_jump(train: Run, tmp_path: Path) -> None:
    """And with `--lr-decay-steps` neither jumps nor says so."""
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Console, "print", lambda console, *words, **_: said.extend(map(str, words)))
        options: dict[str, Any] = {"min_lr": 1e-4, "eval_interval": 0, "save_interval": 4}
        first = train(tmp_path / "run", steps=4, **options)
        shutil.copytree(tmp_path / "run", tmp_path / "kept")
        longer = train(tmp_path / "run", resume=True, steps=8, **options)
        jumps = [line for line in said if "learning rate of step 5" in line]
        assert len(jumps) == 1
        assert "`steps=8` (was 4)" in jumps[0]
        assert "`lr_decay_steps=4`" in jumps[0]
        said.clear()
        kept = train(tmp_path / "kept", resume=True, steps=8, lr_decay_steps=4, **options)
        assert not [line for line in said if "learning rate" in line]
    assert longer[4]["lr"] > 2 * first[3]["lr"] == pytest.approx(2e-4)
    assert [row["lr"] for row in kept[4:]] == pytest.approx([1e-4] * 4)


def test_epochs_are_the_steps_that_read_the_data_as_often(tmp_path: Path, run: Run) -> None:
    """Also with a growing batch and after a resume, which keeps the number of steps."""
    options: dict[str, Any] = {"eval_interval": 0, "save_interval": 0}
    found = run(tmp_path / "epochs", steps=None, epochs=2, **options)
    state = load_state(tmp_path / f"epochs/checkpoints/step-{len(found):07d}")
    assert len(found) == math.ceil(2 * state["train_blocks"] / 8) > 10
    wanted = without_speed(run(tmp_path / "steps", **options, steps=len(found)))
    assert without_speed(found) == wanted
    run(tmp_path / "cut", steps=None, epochs=2, **options, exit_duration=0.0)
    assert load_config({"output": str(tmp_path / "cut"), "epochs": 3}, resume=True).schedule.steps == len(found)
    for _ in range(2):  # the second finds it finished
        assert without_speed(run(tmp_path / "cut", resume=True, steps=None, epochs=3, **options)) == wanted
    grown = with_steps(config(**RAMP, epochs=3), blocks=10)
    samples = batch_sampler(grown).samples_before
    assert samples(grown.schedule.last_step) < 30 <= samples(grown.schedule.last_step + 1)
    read = with_steps(config(seq_length=16, global_batch_size=8, tokens=1000))
    assert 8 * 16 * (read.schedule.last_step - 1) < 1000 <= 8 * 16 * read.schedule.last_step


def test_a_batch_that_does_not_divide_is_refused() -> None:
    with refused(LayoutError, "batch_ramp_up", "4 processes"):
        config(**RAMP).check_batch(4)
    with refused(LayoutError, "batch_ramp_up", "`micro_batch_size=2`"):
        config(batch_ramp_up="3,5,12", global_batch_size=8, micro_batch_size=2)


def test_a_run_resumes_while_the_batch_grows(tmp_path: Path, run: Run) -> None:
    options = {**RAMP, "lr_schedule": "wsd", "wsd_decay_steps": 4, "micro_batch_size": 2, "eval_interval": 0}
    whole = run(tmp_path / "whole", steps=6, save_steps="3", save_interval=0, **options)
    assert [row["tokens"] // 16 for row in whole] == [2, 4, 8, 14, 22, 30]
    run(tmp_path / "run", steps=6, save_steps="3", save_interval=0, **options)
    stopped = tmp_path / "run/checkpoints"
    for folder in stopped.iterdir():
        if folder.name != "step-0000003":
            folder.rename(tmp_path / folder.name)
    resumed = run(tmp_path / "run", resume=True, steps=6, save_steps="3", save_interval=0, **options)
    assert without_speed(resumed) == without_speed(whole)


def test_a_growing_batch_has_the_loss_of_the_samples_that_it_reads(tmp_path: Path, run: Run) -> None:
    """Without updates the loss of the first step is that of a run whose batch has that size."""
    frozen = {"lr": 0.0, "eval_interval": 0, "steps": 2, "save_interval": 0}
    grown = run(tmp_path / "grown", **{**frozen, **RAMP})
    small = run(tmp_path / "small", **{**frozen, "global_batch_size": 2})
    assert [row["loss"] for row in grown] == [row["loss"] for row in small]


def test_validation_data_of_their_own(tmp_path: Path, corpus: Path, tokenizer: Any) -> None:
    other = tmp_path / "other.txt"
    other.write_text("".join(f"class C{i}:\n    pass\n\n" for i in range(30)))
    fit = TokenLimits(len(tokenizer), tokenizer.mask_token_id)
    reader = ReaderSettings(seq_length=16, seed=0, shares=(0.99, 0.01, 0.0), fit=fit, with_documents=False)
    train, valid = find_run_data([str(corpus)], [str(other)]).sections(reader, tokenizer)
    alone, none = find_run_data([str(corpus)], []).sections(reader, tokenizer)
    assert len(train) == len(alone) + len(none)  # all of --data
    text = tokenizer.decode(valid.rows(range(len(valid))).input_ids.flatten().tolist())
    assert text.startswith("class C0:\n    pass\n\nclass C1")
    assert "def" not in text


def test_a_blend_of_validation_data(tmp_path: Path, corpus: Path, tokenizer: Any) -> None:
    files = [tmp_path / f"{letter}.txt" for letter in "ab"]
    for number, file in enumerate(files):
        file.write_text(f"x{number} = {number}\n" * 60)
    fit = TokenLimits(len(tokenizer), tokenizer.mask_token_id)
    reader = ReaderSettings(seq_length=16, seed=0, shares=(0.99, 0.01, 0.0), fit=fit, with_documents=False)
    items = ["3", str(files[0]), "1", str(files[1])]
    _, valid = find_run_data([str(corpus)], items).sections(reader, tokenizer)
    texts = [tokenizer.decode(row) for row in valid.rows(range(8)).input_ids.tolist()]
    assert ["x0" in text for text in texts].count(True) == 6


@pytest.mark.parametrize("batches", [1, 8])
def test_an_evaluation_reads_so_many_batches(tmp_path: Path, run: Run, batches: int) -> None:
    """Of the validation data alone: the loss of a model that is not trained is that of a run with other --data."""
    other = tmp_path / "other.txt"
    other.write_text("".join(f"class C{i}:\n    pass\n\n" for i in range(120)))
    options = {"valid_data": [str(other)], "lr": 0.0, "steps": 1, "eval_interval": 1, "eval_batches": batches}
    (row,) = run(tmp_path / "run", **options)
    (again,) = run(tmp_path / "again", **{**options, "data": [str(other)]})
    (fewer,) = run(tmp_path / "fewer", **{**options, "eval_batches": 2})
    assert row["eval_loss"] == again["eval_loss"] != fewer["eval_loss"]


def test_fine_tuning_with_validation_data(tmp_path: Path, run: Run, seed_folder: Path, tokenizer: Any) -> None:
    chatty(tokenizer).save_pretrained(tmp_path / "m")
    raw = json.loads((seed_folder / "config.json").read_text())
    (tmp_path / "m/config.json").write_text(json.dumps(raw | {"max_sequence_length": 128}))
    files = [
        write_rows(tmp_path / f"{first}.jsonl", [conversation(number) for number in range(first, first + 8)])
        for first in (0, 8)
    ]
    options = {
        "task": "sft",
        "model": str(tmp_path / "m"),
        "seq_length": 96,
        "lr": 0.0,
        "steps": 1,
        "eval_interval": 1,
    }
    (row,) = run(tmp_path / "run", **options, data=[str(files[0])], valid_data=[str(files[1])])
    (other,) = run(tmp_path / "other", **options, data=[str(files[1])], valid_data=[str(files[1])])
    (same,) = run(tmp_path / "same", **options, data=[str(files[0])], valid_data=[str(files[0])])
    assert row["eval_loss"] == other["eval_loss"] != same["eval_loss"]

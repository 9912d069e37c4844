"""Options: which source wins, what is refused, and that a run's own config.yaml gives the run again."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.train.config import TrainConfig, load_config, read_yaml

GIVEN = {"model": "m", "data": ["d"], "output": "o"}


def _yaml(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return path


def test_the_command_line_wins_over_the_file_over_the_defaults(tmp_path: Path) -> None:
    file = _yaml(tmp_path, "lr: 1e-3\nsteps: 7\ndata: one.txt\nsplit: 90,5,5\nclip_grad: 2\n")
    config = load_config({"model": "m", "output": "o", "steps": 9}, file)
    assert (config.lr, config.steps, config.data, config.clip_grad) == (1e-3, 9, ["one.txt"], 2.0)
    assert config.shares == (0.9, 0.05, 0.05)
    assert config.beta2 == TrainConfig(**GIVEN).beta2


def test_the_written_configuration_reads_back(tmp_path: Path) -> None:
    config = TrainConfig(**GIVEN, lr=1e-5, micro_batch_size=4, exit_duration=2.5, from_scratch=True)
    assert load_config({}, _yaml(tmp_path, config.to_yaml())) == config


def test_resume_takes_the_runs_own_options_and_keeps_its_data_order(tmp_path: Path) -> None:
    output = {"output": str(tmp_path)}
    (tmp_path / "config.yaml").write_text(TrainConfig(**{**GIVEN, **output}, lr=0.5, seed=3).to_yaml())
    config = load_config({**output, "steps": 5}, resume=True)
    assert (config.model, config.lr, config.seed, config.steps) == ("m", 0.5, 3, 5)
    of_data = ({"seed": 4}, {"seq_length": 8}, {"global_batch_size": 8}, {"split": "9,1,0"})
    for change in (*of_data, {"optimizer": "sgd"}, {"distributed_optimizer": False}):
        flag = "--" + next(iter(change)).replace("_", "-")
        with pytest.raises(DlmBridgeError, match=f"{flag} .* differs from the .* began with"):
            load_config({**output, **change}, resume=True)


def test_a_blend_in_yaml_keeps_its_weights_on_a_resume(tmp_path: Path) -> None:
    file = _yaml(tmp_path, "data: [0.3, a, 7e-1, b]\n")
    output = {"output": str(tmp_path)}
    config = load_config({**GIVEN, **output, "data": read_yaml(file)["data"]})
    (tmp_path / "config.yaml").write_text(config.to_yaml())
    assert load_config(output, resume=True).data == ["0.3", "a", "7e-1", "b"]
    assert load_config({**output, "data": ["0.3", "c", "0.7", "d"]}, resume=True).data[1] == "c"  # moved
    for other in (["0.4", "a", "0.6", "b"], ["a", "b"]):
        with pytest.raises(DlmBridgeError, match="--data: other weights than those that the run"):
            load_config({**output, "data": other}, resume=True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("leanring_rate: 1\n", "unknown key 'leanring_rate', the nearest is '"),
        ("global_batchsize: 1\n", "unknown key 'global_batchsize', the nearest is 'global_batch_size'"),
        ("steps: many\n", "steps must be int, not 'many'"),
        ("steps: 1.5\n", "steps must be int, not 1.5"),
        ("from_scratch: 1\n", "from_scratch must be bool, not 1"),
        ("data: [1]\n", "data must be list of paths, not [1]"),
        ("lr: fast\n", "lr must be float, not 'fast'"),
        ("- 1\n", "a mapping of option names to values is needed"),
        ("a: [\n", "not YAML"),
    ],
)
def test_a_bad_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(DlmBridgeError, match=re.escape(message)) as raised:
        read_yaml(_yaml(tmp_path, text))
    assert "\n" not in str(raised.value)
    assert "run.yaml" in str(raised.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DlmBridgeError, match=r"nowhere\.yaml: no such file"):
        read_yaml(tmp_path / "nowhere.yaml")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": ""}, "--model is missing"),
        ({"data": []}, "--data is missing"),
        ({"steps": 0}, "--steps must be at least 1, not 0"),
        ({"micro_batch_size": 0}, "--micro-batch-size must be at least 1, not 0"),
        ({"warmup_steps": -1}, "--warmup-steps must not be negative"),
        ({"lr": -1.0}, "--lr must be a number that is not negative"),
        ({"lr": float("nan")}, "--lr must be a number that is not negative"),
        ({"min_lr": 1.0}, "--min-lr 1.0 is more than --lr"),
        ({"beta2": 1.0}, "--beta2 must be in [0, 1)"),
        ({"length_variation": 2.0}, "--length-variation must be in [0, 1]"),
        ({"lr_schedule": "wsd"}, "--lr-schedule 'wsd' is unknown: known are cosine, linear, constant"),
        ({"precision": "fp8", "lora_rank": 4, "lora_quantize": "4bit"}, "--lora-quantize with --precision fp8"),
        ({"compile": True, "engine": "megatron"}, "--compile and --no-compile need --engine accelerate"),
        ({"gradient_checkpointing": True, "engine": "megatron"}, "megatron-core's is --recompute full"),
        ({"engine": "deepspeed"}, "--engine 'deepspeed' is unknown"),
        ({"split": "90,10"}, "--split '90,10' must be three shares"),
        ({"split": "0,1,0"}, "--split '0,1,0' must be three shares"),
        ({"micro_batch_size": 5}, "--global-batch-size 32 is not --micro-batch-size 5 x 1"),
    ],
)
def test_bad_values_name_the_flag(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DlmBridgeError, match=re.escape(message)):
        TrainConfig(**{**GIVEN, **changes})


def test_the_global_batch_is_micro_batches_times_processes_times_accumulation() -> None:
    config = TrainConfig(**GIVEN, global_batch_size=24, micro_batch_size=4)
    assert config.accumulation(processes=3) == (4, 2)
    assert TrainConfig(**GIVEN, global_batch_size=24).accumulation(processes=3) == (8, 1)
    with pytest.raises(DlmBridgeError, match="make it a multiple of 16"):
        config.accumulation(processes=4)
    with pytest.raises(DlmBridgeError, match="does not divide over 5 processes"):
        config.accumulation(processes=5)

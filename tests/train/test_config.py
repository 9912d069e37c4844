"""Options: which source wins, what is refused, and that a run's own config.yaml gives the run again."""

from __future__ import annotations

import dataclasses
import typing
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from dlm_bridge.errors import InputFileError, LayoutError, SettingError
from dlm_bridge.settings import GUESSES, options_of
from dlm_bridge.train.config import RLConfig, TrainConfig
from dlm_bridge.train.config.files import load_config, read_yaml
from dlm_bridge.train.setup import with_precision
from tests.refusals import refused

GIVEN = {"model": "m", "data": ["d"], "output": "o"}


def _yaml(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return path


def test_the_command_line_wins_over_the_file_over_the_defaults(tmp_path: Path) -> None:
    file = _yaml(
        tmp_path,
        "schedule: {steps: 7}\ndata: {data: one.txt, split: '90,5,5'}\noptimizer: {lr: 1e-3, clip_grad: 2}\n",
    )
    config = load_config({"model": "m", "output": "o", "steps": 9}, file)
    assert (config.optimizer.lr, config.schedule.steps, config.data.data, config.optimizer.clip_grad) == (
        1e-3,
        9,
        ["one.txt"],
        2.0,
    )
    assert config.data.split_fractions == (0.9, 0.05, 0.05)
    assert config.optimizer.beta2 == TrainConfig.from_flags(**GIVEN).optimizer.beta2


@pytest.mark.parametrize("length", [{"steps": 7}, {"epochs": 2}, {"tokens": 2000}])
def test_the_written_configuration_reads_back(tmp_path: Path, length: dict[str, int]) -> None:
    options = {"lr": 1e-5, "micro_batch_size": 4, "exit_duration": 2.5, "from_scratch": True, **length}
    config = TrainConfig.from_flags(**GIVEN, **options)
    assert load_config({}, _yaml(tmp_path, config.to_yaml())) == config


def test_resume_takes_the_runs_own_options_and_keeps_its_data_order(tmp_path: Path) -> None:
    output = {"output": str(tmp_path)}
    (tmp_path / "config.yaml").write_text(TrainConfig.from_flags(**{**GIVEN, **output}, lr=0.5, seed=3).to_yaml())
    config = load_config({**output, "steps": 5}, resume=True)
    assert (config.model.model, config.optimizer.lr, config.data.seed, config.schedule.steps) == ("m", 0.5, 3, 5)
    of_data = ({"seed": 4}, {"seq_length": 8}, {"global_batch_size": 8}, {"split": "9,1,0"})
    for change in (*of_data, {"optimizer": "sgd"}, {"distributed_optimizer": False}):
        with refused(SettingError, next(iter(change))):
            load_config({**output, **change}, resume=True)


def test_resume_reads_the_flat_file_of_an_earlier_version(tmp_path: Path) -> None:
    began = TrainConfig.from_flags(
        **{**GIVEN, "output": str(tmp_path)}, lr=0.5, lr_schedule="linear", objective="masked"
    )
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(began.as_flags()))
    assert load_config({"output": str(tmp_path)}, resume=True) == began
    with refused(SettingError, "objective", "masked"):
        load_config({"output": str(tmp_path), "objective": "shifted"}, resume=True)


OLD_KEYS = """
model: {path: m}
data: {paths: [a, b], valid_paths: [c]}
objective: {name: masked}
optimizer: {name: muon, cpu_offload: true}
schedule: {name: linear}
precision: {name: bf16}
engine: {name: megatron}
"""


def test_keys_of_earlier_versions_are_read_with_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = _yaml(tmp_path, OLD_KEYS)
    found = {
        "model": "m", "data": ["a", "b"], "valid_data": ["c"], "objective": "masked", "optimizer": "muon",
        "optimizer_cpu_offload": True, "lr_schedule": "linear", "precision": "bf16", "engine": "megatron",
    }  # fmt: skip
    assert read_yaml(file) == read_yaml(file) == found
    (warning,) = caplog.messages
    for section, keys in yaml.safe_load(OLD_KEYS).items():
        assert all(f"{section}.{key} is now {section}." in warning for key in keys)
    with refused(InputFileError, file, "optimizer.name", "optimizer.optimizer"):
        read_yaml(_yaml(tmp_path, "optimizer: {name: muon, optimizer: adamw}\n"))


def test_a_blend_in_yaml_keeps_its_weights_on_a_resume(tmp_path: Path) -> None:
    file = _yaml(tmp_path, "data: {data: [0.3, a, 7e-1, b]}\n")
    output = {"output": str(tmp_path)}
    config = load_config({**GIVEN, **output, "data": read_yaml(file)["data"], "steps": 9})
    (tmp_path / "config.yaml").write_text(config.to_yaml())
    assert load_config(output, resume=True).data.data == ["0.3", "a", "7e-1", "b"]
    assert load_config({**output, "data": ["0.3", "c", "0.7", "d"]}, resume=True).data.data[1] == "c"  # moved
    for other in (["0.4", "a", "0.6", "b"], ["a", "b"]):
        with refused(SettingError, "data"):
            load_config({**output, "data": other}, resume=True)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("optimizer: {leanring_rate: 1}\n", "optimizer.leanring_rate"),
        ("data: {global_batchsize: 1}\n", "data.global_batch_size"),
        ("data: {lr: 1}\n", "optimizer.lr"),  # of another section
        ("optimiser: {lr: 1}\n", "'optimizer'"),
        ("lr: 1\n", "optimizer: {lr: ...}"),  # a flat file, as earlier versions took it
        ("model: m\n", "model: {model: ...}"),
        ("schedule: 3\n", "'schedule'"),
        ("schedule: {steps: many}\n", "schedule.steps"),
        ("schedule: {steps: 1.5}\n", "schedule.steps"),
        ("model: {from_scratch: 1}\n", "model.from_scratch"),
        ("data: {data: [1]}\n", "data.data"),
        ("optimizer: {lr: fast}\n", "optimizer.lr"),
        ("parallel: {cp: auto}\n", "docs/megatron.md"),
        ("- 1\n", "mapping"),
        ("a: [\n", "YAML"),
        (None, "No such file"),
    ],
)
def test_a_bad_file_is_refused(tmp_path: Path, text: str | None, named: str) -> None:
    path = tmp_path / "run.yaml" if text is None else _yaml(tmp_path, text)
    with refused(InputFileError, path, named) as raised:
        read_yaml(path)
    assert "\n" not in str(raised.value)


def test_a_file_that_gives_an_error_when_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").symlink_to("/proc/self/mem")
    with refused(InputFileError, tmp_path / "run.yaml"):
        read_yaml(tmp_path / "run.yaml")


@pytest.mark.parametrize(
    ("values", "steps", "epochs"),
    [
        ("schedule: {steps: 7}", 7, None),
        ("schedule: {epochs: 2}", None, 2),
        ("schedule: {num_train_epochs: 2, epochs: 2}", None, 2),
    ],
)
def test_epochs_replace_steps(tmp_path: Path, values: str, steps: int | None, epochs: int | None) -> None:
    """In one source they exclude each other; the command line overrides either one in the file."""
    file = _yaml(tmp_path, values)
    schedule = load_config(GIVEN, file).schedule
    assert (schedule.steps, schedule.epochs) == (steps, epochs)
    assert load_config({**GIVEN, "steps": 9}, file).schedule == dataclasses.replace(schedule, steps=9, epochs=None)
    assert load_config({**GIVEN, "epochs": 3}, file).schedule.epochs == 3
    both = {"steps": 9, "epochs": 3}
    for flags, path in ((both, file), ({}, _yaml(tmp_path, yaml.safe_dump({"schedule": both})))):
        with refused(SettingError, "epochs", "`steps`"):
            load_config({**GIVEN, **flags}, path)


def test_the_length_of_a_run_by_command(tmp_path: Path) -> None:
    """sft has three epochs, which a number of steps replaces; pretrain needs a length; a run has one."""
    lengths = [load_config({**GIVEN, **length}, task="sft").schedule for length in ({}, {"steps": 5}, {"epochs": 2})]
    assert [(each.steps, each.epochs) for each in lengths] == [(None, 3), (5, None), (None, 2)]
    assert load_config({**GIVEN, "tokens": 5000}).schedule.steps is None
    with refused(SettingError, "steps", "`tokens`"):
        load_config(GIVEN)
    for other in ("epochs", "tokens"):
        with refused(SettingError, other, "`steps`"):
            TrainConfig.from_flags(**GIVEN, steps=5, **{other: 5})
    with refused(SettingError, "tokens"):
        TrainConfig.from_flags("sft", **GIVEN, tokens=5)
    assert TrainConfig.from_flags("sft", **GIVEN).replace(steps=4).schedule.epochs is None


@pytest.mark.parametrize(
    ("task", "options", "lr"),
    [
        ("pretrain", {}, 1e-4),
        ("pretrain", {"from_scratch": True}, 3e-4),
        ("pretrain", {"lora_rank": 4}, 2.5e-4),
        ("sft", {}, 2.5e-5),
        ("sft", {"adapter": "folder"}, 2.5e-4),
        ("sft", {"lora_rank": 4, "lr": 1e-5}, 1e-5),
    ],
)
def test_the_learning_rate_fits_the_command_and_the_adapter(task: str, options: dict[str, Any], lr: float) -> None:
    assert TrainConfig.from_flags(task, **GIVEN, **options).optimizer.lr == lr


def test_a_resumed_run_keeps_what_it_began_with(tmp_path: Path) -> None:
    """Also if its config.yaml is of a version with other defaults, or without the option."""
    output = {"output": str(tmp_path)}
    written = yaml.safe_load(TrainConfig.from_flags(**{**GIVEN, **output}, steps=7, precision="fp32").to_yaml())
    del written["precision"], written["data"]["seq_length"], written["schedule"]["steps"]
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(written))
    found = load_config({**output, "tokens": 5000}, resume=True)
    assert (found.precision.precision, found.data.seq_length, found.schedule.steps) == ("fp32", 1024, 1000)
    assert with_precision(TrainConfig.from_flags(**{**GIVEN, **output}), resume=True).precision.precision == "fp32"


@pytest.mark.parametrize(
    ("gpu", "native", "precision"), [(True, True, "bf16"), (True, False, "fp32"), (False, True, "fp32")]
)
def test_bf16_is_the_default_on_a_gpu_that_has_it(
    gpu: bool, native: bool, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: native or including_emulation)
    config = TrainConfig.from_flags(**GIVEN)
    assert with_precision(config).precision.precision == precision
    assert with_precision(config, gpu=True).precision.precision == "bf16"
    assert with_precision(config.replace(precision="fp16")).precision.precision == "fp16"


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"early_stopping_patience": 2, "eval_interval": 0}, "early_stopping_patience"),
        ({"early_stopping_patience": 2, "split": "1,0,0"}, "early_stopping_patience"),
        ({"early_stopping_patience": 0}, "early_stopping_patience"),
        ({"model": ""}, "model"),
        ({"data": []}, "data"),
        ({"steps": 0}, "steps"),
        ({"micro_batch_size": 0}, "micro_batch_size"),
        ({"warmup_steps": -1}, "warmup_steps"),
        ({"lr": -1.0}, "lr"),
        ({"lr": float("nan")}, "lr"),
        ({"min_lr": 1.0}, "min_lr"),
        ({"beta2": 1.0}, "beta2"),
        ({"length_variation": 2.0}, "length_variation"),
        ({"lr_schedule": "polynomial"}, "lr_schedule"),
        ({"precision": "fp8", "lora_rank": 4, "lora_quantize": "4bit"}, "lora_quantize"),
        ({"lora_alpha": 8.0}, "lora_alpha"),
        ({"lora_rank": 4, "lora_targets": ","}, "lora_targets"),
        ({"cpu_offload": True}, "cpu_offload"),
        ({"compile": True, "engine": "megatron"}, "compile"),
        ({"gradient_checkpointing": True, "engine": "megatron"}, "gradient_checkpointing"),
        ({"tp": 2}, "tp"),
        ({"recompute_layers": 2, "engine": "megatron"}, "recompute_layers"),
        ({"fp8_params": True, "engine": "megatron"}, "fp8_params"),
        ({"fsdp": "optim", "pp": 2, "engine": "megatron"}, "fsdp"),
        ({"packing": True}, "packing"),  # of sft
        ({"engine": "deepspeed"}, "engine"),
        ({"trackers": "paper"}, "trackers"),
        ({"profile_steps": "4"}, "profile_steps"),
        ({"profile_steps": "4:3"}, "profile_steps"),
        ({"profile_steps": "0:3"}, "profile_steps"),
        ({"split": "90,10"}, "split"),
        ({"split": "0,1,0"}, "split"),
        ({"auto_balance": True, "z_loss_coeff": 0.1}, "auto_balance"),
    ],
)
def test_bad_values_name_the_field(changes: dict[str, Any], field: str) -> None:
    with refused(SettingError, field):
        TrainConfig.from_flags(**{**GIVEN, **changes})


def test_each_option_is_declared_once() -> None:
    for config_class, of_rl in ((TrainConfig, False), (RLConfig, True)):
        options = options_of(config_class)
        sections = {field.name for field in dataclasses.fields(config_class)} - {"task"}
        assert {option.section for option in options.values()} == sections
        assert ("method" in options) == of_rl
        assert all(option.help.endswith(".") for option in options.values())
        flags = [flag for option in options.values() for flag in (*option.flags, option.negative)]
        assert len(set(flags)) == len(flags)
        assert {f"--{guess.replace('_', '-')}" for guess in GUESSES}.isdisjoint(flags)
        names = [
            (option.section, key)
            for option in options.values()
            for key in {option.name, *option.aliases, option.formerly or option.name}
        ]
        assert len(set(names)) == len(names)
        of_bools = [option for option in options.values() if bool in (option.type, *typing.get_args(option.type))]
        assert not any(option.aliases for option in of_bools)  # which have a second flag
        defaults = config_class.from_flags(**GIVEN, **({"method": "dpo"} if of_rl else {})).as_flags()
        assert defaults.keys() == {"task", *options}


def test_the_global_batch_is_micro_batches_times_processes_times_accumulation() -> None:
    config = TrainConfig.from_flags(**GIVEN, global_batch_size=24, micro_batch_size=4)
    assert config.data.accumulation(processes=3) == (4, 2)
    assert TrainConfig.from_flags(**GIVEN, global_batch_size=24).data.accumulation(processes=3) == (8, 1)
    for given, processes in (({"micro_batch_size": 4}, 4), ({"micro_batch_size": 4}, 5), ({}, 5)):
        with refused(LayoutError, "global_batch_size", f"{processes} processes"):
            TrainConfig.from_flags(**GIVEN, global_batch_size=24, **given).data.accumulation(processes)

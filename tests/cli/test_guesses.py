"""What newcomers type: names of other trainers, overrides, models in either place. Each is taken or answered with the
option that they mean."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
import typer.main

from dlm_bridge.cli import train
from dlm_bridge.cli.app import app
from dlm_bridge.errors import InputFileError, SettingError
from dlm_bridge.generation.config import check_values
from dlm_bridge.mapping.dtypes import CAST_DTYPES
from dlm_bridge.models.families import family_by_name
from dlm_bridge.objectives.registry import find_objective
from dlm_bridge.settings import check_choice
from dlm_bridge.train.config import TrainConfig
from dlm_bridge.train.config.files import load_config, read_overrides
from tests.cli.test_app import run
from tests.refusals import refused

COMMANDS: Any = typer.main.get_command(app).commands  # type: ignore[attr-defined]
RL = pytest.mark.extension("train.rl")
PLAN = pytest.mark.extension("plan")
SERVING = pytest.mark.extension("serving")
GIVEN = "sft m --data d --output o"
OF_RL = "rl m --data d --output o --method grpo --reward maths"


@pytest.fixture
def configs(monkeypatch: pytest.MonkeyPatch) -> list[TrainConfig]:
    """The configurations that training commands resolve; none is trained."""
    found: list[TrainConfig] = []

    def ends_after(load: Any) -> Any:
        def loaded(*arguments: Any) -> None:
            found.append(load(*arguments))
            raise typer.Exit

        return loaded

    monkeypatch.setattr(train, "load_config", ends_after(load_config))
    if "rl" in COMMANDS:
        command = pytest.importorskip("dlm_bridge.train.rl.command")
        monkeypatch.setattr(command, "load_rl_config", ends_after(command.load_rl_config))
    return found


@pytest.mark.parametrize(
    ("words", "taken"),
    [
        (f"{GIVEN} --learning-rate 1e-4", {"lr": 1e-4}),
        (f"{GIVEN} --learning_rate=1e-4", {"lr": 1e-4}),
        (f"{GIVEN} --max-steps 7", {"steps": 7}),
        (f"{GIVEN} --epochs 3", {"epochs": 3}),
        (f"{GIVEN} --num-train-epochs 3", {"epochs": 3}),
        (f"{GIVEN} epochs=2", {"epochs": 2}),
        ("sft --model_name_or_path m --dataset d --output-dir o", {"model": "m", "data": ["d"], "output": "o"}),
        (f"{GIVEN} --per-device-train-batch-size 4", {"micro_batch_size": 4, "global_batch_size": 32}),
        (f"{GIVEN} --lora-r 8 --lora-target-modules q_proj", {"lora_rank": 8, "lora_targets": "q_proj"}),
        (f"{GIVEN} --report-to wandb", {"trackers": "wandb"}),
        (f"{GIVEN} --report-to none", {"trackers": "none"}),
        (f"{GIVEN} --weight-decay 0.01 --warmup-steps 3", {"weight_decay": 0.01, "warmup_steps": 3}),
        (f"{GIVEN} --max-seq-length 64 --max-grad-norm 0.5", {"seq_length": 64, "clip_grad": 0.5}),
        (f"{GIVEN} --lr-scheduler-type linear --adam-beta2 0.9", {"lr_schedule": "linear", "beta2": 0.9}),
        (f"{GIVEN} --save-total-limit 2 --eval-steps 5", {"keep_last": 2, "eval_interval": 5}),
        (f"{GIVEN} --lr 1e-4 --learning-rate 1e-4", {"lr": 1e-4}),
        (f"{GIVEN} --engine megatron --tensor-model-parallel-size 2", {"tp": 2}),
        # An unquoted glob.
        ("pretrain m --data a b 0.5 --output o --steps 9", {"model": "m", "data": ["a", "b", "0.5"]}),
        ("pretrain --data=a b --output o --model m --steps 9", {"model": "m", "data": ["a", "b"]}),
        ("pretrain --data a b schedule.steps=3 --output o --model m", {"data": ["a", "b"], "steps": 3}),
        ("pretrain --model m --data d --output o --train-iters 7", {"model": "m", "steps": 7}),
        (f"{GIVEN} schedule.steps=200 optimizer.learning_rate=1e-3", {"steps": 200, "lr": 1e-3}),
        (f"{GIVEN} lr=1e-3 warmup-steps=2", {"lr": 1e-3, "warmup_steps": 2}),
        (f"{GIVEN} --steps 3 schedule.steps=3 logging.sample_prompt=[a,b] logging.sample_interval=1",
         {"steps": 3, "sample_prompt": ["a", "b"]}),
        pytest.param(f"{OF_RL} --num-generations 4 --max-completion-length 9",
                     {"group_size": 4, "gen_length": 9}, marks=RL),
        pytest.param("rl --model m --data d --output-dir o --method grpo --reward-funcs maths --max-steps 3",
                     {"model": "m", "output": "o", "steps": 3, "reward": ["maths"]}, marks=RL),
        pytest.param(f"{OF_RL} rl.beta=0.2", {"beta": 0.2}, marks=RL),
    ],
)  # fmt: skip
def test_other_trainers_names_are_taken(
    words: str, taken: dict[str, Any], configs: list[TrainConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(monkeypatch, *words.split()) == 0
    (config,) = configs
    flags = config.as_flags()
    assert {key: flags[key] for key in taken} == taken


def test_a_file_is_the_first_word(configs: list[TrainConfig], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The file's own keys may be aliases; overrides and flags win over it."""
    file = tmp_path / "run.yml"
    file.write_text(
        "model: {model: m}\noptimizer: {learning_rate: 0.5, beta1: 0.5}\nschedule: {max_steps: 3, warmup_steps: 1}\n"
    )
    for given in ([str(file)], ["--config", str(file)], [str(file), "--config", str(file)]):
        words = ["sft", *given, "optimizer.beta1=0.6", "--max-steps", "4", "--data", "d", "--output", "o"]
        assert run(monkeypatch, *words) == 0
        config = configs.pop()
        assert (config.model.model, config.optimizer.lr, config.optimizer.beta1) == ("m", 0.5, 0.6)
        assert (config.schedule.steps, config.schedule.warmup_steps) == (4, 1)
    file.write_text("optimizer: {learning_rate: 0.5, lr: 0.4}\n")
    with refused(InputFileError, file, "optimizer.learning_rate", "optimizer.lr"):
        load_config({}, file)


def test_a_data_file_with_an_equals_sign_is_no_override(
    configs: list[TrainConfig], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("part=1.txt", "part=2.txt"):
        (tmp_path / name).write_text("text")
    assert (
        run(monkeypatch, *["pretrain", "m", "--steps", "9", "--output", "o", "--data", "part=1.txt", "part=2.txt"])
        == 0
    )
    assert configs[0].data.data == ["part=1.txt", "part=2.txt"]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("sft --learing-rate 1", ["--learning-rate"]),
        ("sft --batch-size 8", ["--global-batch-size", "--micro-batch-size"]),
        ("sft --gradient-accumulation-steps 8", ["--global-batch-size"]),
        ("sft --num-train-epoch 3", ["--num-train-epochs"]),
        (f"{GIVEN} --epochs 3 --max-steps 4", ["--epochs", "--steps"]),
        (f"{GIVEN} --epochs 3 schedule.steps=4", ["--epochs", "--steps"]),
        ("sft --bf16", ["--precision"]),
        ("sft --load-in-4bit", ["--lora-quantize"]),
        ("sft --warmup-ratio 0.1", ["--warmup-steps"]),
        ("sft --certainty-wieght 1", ["--certainty-weight"]),  # an option that --help-all shows
        ("sft --cuda-graphs", ["dlm-bridge pretrain", "--engine megatron"]),
        ("sft --reward maths", ["dlm-bridge rl"]),
        ("pretrain --packing", ["dlm-bridge sft"]),
        ("sft --recompute-layer 1", ["--recompute-layers", "--engine megatron"]),
        (f"{GIVEN} --tp 2", ["--tp", "--engine megatron"]),
        (f"{GIVEN} --engine megatron --sharding fsdp", ["--sharding", "--engine accelerate"]),
        (f"{GIVEN} --lr 1 --learning-rate 2", ["--lr", "--learning-rate"]),
        (f"{GIVEN} --max-steps=1 --train-iters 2", ["--max-steps", "--train-iters"]),
        (f"{GIVEN} --lr 1 optimizer.lr=2", ["--lr", "optimizer.lr"]),
        (f"{GIVEN} schedule.stepz=2", ["schedule.stepz", "'schedule.steps'"]),
        (f"{GIVEN} schedule.lr=2", ["schedule.lr", "'optimizer.lr'"]),
        (f"{GIVEN} scheduel.steps=2", ["scheduel", "'schedule'"]),
        (f"{GIVEN} data.batch_size=2", ["data.batch_size", "'data.global_batch_size'"]),
        (f"{GIVEN} schedule.steps=many", ["schedule.steps", "many"]),
        (f"{GIVEN} schedule.steps=[", ["schedule.steps"]),
        (f"{GIVEN} task=rl", ["task"]),
        ("sft m n --data d", ["--model", "m", "n"]),
        ("sft m --model n --data d", ["--model", "m", "n"]),
        ("sft a.yaml b.yaml", ["--config", "a.yaml", "b.yaml"]),
        ("sft a.yaml --config b.yaml", ["--config", "a.yaml", "b.yaml"]),
        ("sft nowhere.yaml", ["nowhere.yaml"]),
        ("generate --model a b --prompt x", ["--model", "a", "b"]),
        ("generate --model a --model b --prompt x", ["--model", "a", "b"]),
        ("generate a --prompt x --model", ["--model"]),
        ("generate a --promt x", ["--prompt"]),
        ("generate a --modle b", ["--model"]),
        ("generate a --prompt x --gen-length 3 --max-new-tokens 4", ["--gen-length", "--max-new-tokens"]),
        ("import a b --model c", ["--model", "a", "c"]),
        ("import --model a", ["OUT"]),
        ("verify a b --model c", ["--model", "a", "c"]),
        pytest.param("plan a --batch-size 8", ["--global-batch-size", "--micro-batch-size"], marks=PLAN),
        pytest.param("plan a --tensor-parallel 8 --gpus 8", ["--tensor-model-parallel-size"], marks=PLAN),
        pytest.param("plan a --lr 1", ["dlm-bridge pretrain, sft, rl"], marks=PLAN),
        pytest.param("plan a --model b --gpus 8 --seq-length 8", ["--model", "a", "b"], marks=PLAN),
        pytest.param(f"{OF_RL} --objective masked", ["dlm-bridge pretrain, sft"], marks=RL),
    ],
)  # fmt: skip
def test_a_guess_is_answered_with_what_it_means(
    words: str,
    named: list[str],
    configs: list[TrainConfig],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(monkeypatch, *words.split()) == 2
    assert not configs
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert all(name in err.replace("(see dlm-bridge", "") for name in named), err


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("generate", "--prompt x"),
        ("eval", "--tasks sums"),
        ("import", "OUT"),
        ("export", "OUT --dtype bf16"),
        ("reshard", "OUT --tp 2"),
        ("convert-to-dlm", "OUT"),
        ("upcycle", "OUT --experts 4"),
        ("inspect", "--json"),
        ("verify", "B"),
        pytest.param("serve", "--port 1", marks=SERVING),
        pytest.param("app", "--port 1", marks=SERVING),
        pytest.param("plan", "--gpus 8 --max-seq-length 64", marks=PLAN),
    ],
)
def test_the_model_is_an_argument_or_an_option(command: str, words: str) -> None:
    found = COMMANDS[command]
    rest = words.split()
    expected = found.make_context(command, ["a/b", *rest]).params
    assert expected[found.model.name] == "a/b"
    for given in (["--model", "a/b", *rest], [*rest, "--model=a/b"], ["a/b", *rest, "--model", "a/b"]):
        if (command, given[0]) != ("verify", "a/b"):  # which compares two
            assert found.make_context(command, given).params == expected


@pytest.mark.parametrize(
    "command",
    ["pretrain", "sft", pytest.param("rl", marks=RL), pytest.param("plan", marks=PLAN)],
)
def test_help_shows_the_common_options_and_help_all_every_one(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [each for each in COMMANDS[command].params if each.param_type_name == "option"]
    names = {option: next(name for name in option.opts if name.startswith("--")) for option in options}
    shown = {}
    for flag in ("--help", "--help-all", "--help"):  # the second changes nothing for the third
        assert run(monkeypatch, command, flag) == 0
        page = capsys.readouterr().out
        shown[flag] = [name for name in names.values() if re.search(rf"│ {name}[ ,]", page)]
    assert 25 <= len(shown["--help"]) <= 42  # with -v and -q, which every command has
    assert shown["--help"] == [names[option] for option in options if not option.hidden]
    assert shown["--help-all"] == [*names.values()]


def test_an_override_of_the_wrong_type_names_value_and_type(tmp_path: Path) -> None:
    with refused(SettingError, "schedule.steps", "a whole number", "'three'"):
        read_overrides(["schedule.steps=three"])
    file = tmp_path / "run.yml"
    file.write_text("optimizer: {lr: fast}\n")
    with refused(InputFileError, file, "optimizer.lr", "a number", "'fast'"):
        load_config({}, file)


@pytest.mark.parametrize(
    ("field", "value", "nearest", "check"),
    [
        ("objective", "maskd", "masked", find_objective),
        ("family", "lada", "llada", family_by_name),
        ("algorithm", "lada", "llada", lambda name: check_values({"algorithm": name})),
        ("dtype", "bf17", "bf16", lambda name: check_choice("dtype", name, CAST_DTYPES)),
    ],
)
def test_a_mistyped_value_is_answered_with_the_nearest(
    field: str, value: str, nearest: str, check: Callable[[str], Any]
) -> None:
    with refused(SettingError, field, repr(value), f"the nearest is {nearest};"):
        check(value)
    with refused(SettingError, field, "'???' is unknown: choose one of"):
        check("???")

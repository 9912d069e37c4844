"""docs/megatron_flags.md says what is so: all of Megatron-LM's flags are there, our options exist, passed keys pass,
refused keys are refused."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from dlm_bridge.errors import SettingError
from dlm_bridge.parallel.train.settings import CLASSES, OURS, REFUSED, check_settings, passed_on
from dlm_bridge.settings import options_of
from dlm_bridge.train.config import TrainConfig
from tests.refusals import refused

PAGE = Path(__file__).parents[2] / "docs/megatron_flags.md"
MEGATRON_LM = Path(__file__).parent / "megatron_lm_flags.txt"  # what its argument parser has
COMMAND = {"--resume", "--dry-run", "--gpus", "--json", "--config"}
OPTIONS = {option.flag for option in options_of(TrainConfig).values()} | COMMAND
FIELDS = {group: {field.name for field in dataclasses.fields(kind)} for group, kind in CLASSES.items()}
# On the page too: in groups of inference and of experiments.
ELSEWHERE = (
    "--cuda-graph-scope",
    "--use-precision-aware-optimizer",
    "--main-grads-dtype",
    "--main-params-dtype",
    "--exp-avg-dtype",
    "--exp-avg-sq-dtype",
)


def rows() -> list[tuple[list[str], str, str]]:
    """(Megatron-LM's flags, what is here, why) of each line of the page's tables."""
    found = []
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) == 3 and cells[0].startswith("`--"):
            found.append((re.findall(r"`(--[\w-]+)`", cells[0]), cells[1], cells[2]))
    return found


def settings(*values: str) -> TrainConfig:
    return TrainConfig.from_flags(model="m", data=["mock"], output="o", engine="megatron", megatron=list(values))


def test_every_flag_has_one_line() -> None:
    flags = [name for names, _, _ in rows() for name in names]
    assert len(flags) > 200
    assert len(flags) == len(set(flags)), sorted(name for name in flags if flags.count(name) > 1)
    assert all(here for _, here, _ in rows())


def test_every_flag_of_megatron_lm_is_there_and_no_other() -> None:
    flags = {name for names, _, _ in rows() for name in names}
    theirs = [set(line.split()) for line in MEGATRON_LM.read_text().splitlines() if line.startswith("--")]
    assert len(theirs) > 400
    assert [sorted(names) for names in theirs if not names & flags] == []
    assert flags - set().union(*theirs) == set(ELSEWHERE)


def test_our_options_exist() -> None:
    for _, here, why in rows():
        for name in re.findall(r"(--[a-z][\w-]*)", re.sub(r"--megatron \w+\.\w+", "", here)):
            assert name in OPTIONS or name.replace("--no-", "--") in OPTIONS, name
        for name in re.findall(r"`(--[a-z][\w-]*)", why):
            assert name in OPTIONS or name.replace("--no-", "--") in OPTIONS, name


def test_passed_keys_are_fields_that_pass() -> None:
    passed = [key for _, here, _ in rows() for key in re.findall(r"--megatron (\w+\.\w+)", here)]
    assert len(passed) > 60
    for setting in passed:
        group, _, key = setting.partition(".")
        assert key in FIELDS[group], setting
        assert key not in OURS[group] | REFUSED[group], setting


def test_refused_flags_are_refused() -> None:
    keys = {name: _key(name) for names, here, _ in rows() if here == "refused" for name in names}
    assert len(keys) > 25
    for name, setting in keys.items():
        assert setting is not None, name
        with refused(SettingError, "megatron", setting):
            check_settings(settings(f"{setting}=1"))


def test_what_is_not_there_does_not_pass_either() -> None:
    for names, here, _ in rows():
        for name in names if here == "not there" else ():
            key = re.sub(r"^--(no-)?", "", name).replace("-", "_")
            for group in FIELDS:
                assert key not in FIELDS[group] or key in OURS[group] | REFUSED[group], name


def test_what_is_ours_or_refused_is_a_field() -> None:
    for group, names in FIELDS.items():
        assert OURS[group].keys() | REFUSED[group].keys() <= names
        assert not OURS[group].keys() & REFUSED[group].keys()
        assert set(OURS[group].values()) <= options_of(TrainConfig).keys()


def test_what_is_always_so_may_be_said() -> None:
    assert passed_on(settings("transformer.calculate_per_token_loss=true"), "transformer") == {
        "calculate_per_token_loss": True
    }


def test_values_get_their_fields_types() -> None:
    import torch

    given = settings(
        "optimizer.exp_avg_dtype=bfloat16", "optimizer.loss_scale=1e3", "ddp.bucket_size=40", "ddp.nccl_ub=true"
    )
    assert passed_on(given, "optimizer") == {"exp_avg_dtype": torch.bfloat16, "loss_scale": 1000.0}
    assert passed_on(given, "ddp") == {"bucket_size": 40, "nccl_ub": True}


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ("transformer.tensor_model_parallel_size=2", "`tp`"),
        ("ddp.use_distributed_optimizer=true", "`distributed_optimizer`"),
        ("optimizer.lr=1", "`lr`"),
        ("transformer.fp4=e2m1", "`precision`"),
        ("transformer.num_layers=2", "config.json"),
        ("transformer.moe_ruter_dtype=fp32", "moe_router_dtype"),
        ("ddp.bucket_size=big", "int"),
        ("ddp.nccl_ub=1", "bool"),
        ("ddp.average_in_collective=true", ""),
        ("transformer.calculate_per_token_loss=false", "`loss_normalisation`"),
        ("transformer.hidden_dropout=-1", "-1"),
        ("transformer.attention_dropout=1.0", "1"),
        ("transformer.cuda_graph_impl=local", "`cuda_graphs`"),
        ("transformer.delay_wgrad_compute=true", ""),
        ("transformer.hybrid_context_parallel=true", ""),
        ("transformer.timers=1", ""),
    ],
)
def test_refuses(setting: str, named: str) -> None:
    with refused(SettingError, "megatron", setting.partition("=")[0], named) as raised:
        check_settings(settings(setting))
    assert "\n" not in str(raised.value)


def test_other_settings_pass_and_are_named_as_untested() -> None:
    given = settings("transformer.use_kitchen=true", "optimizer.log_num_zeros_in_grad=true")
    assert passed_on(given, "transformer") == {"use_kitchen": True}
    assert [line.split(":")[0] for line in check_settings(given)] == [
        f"`megatron={value}`" for value in given.engine.megatron
    ]


def _key(name: str) -> str | None:
    """The refused setting that a flag of Megatron-LM sets."""
    renamed = {
        "num_experts": "num_moe_experts",
        "ddp_average_in_collective": "average_in_collective",
        "muon_no_split_qkv": "muon_split_qkv",
        "norm_epsilon": "layernorm_epsilon",
        "apply_layernorm_1p": "layernorm_zero_centered_gamma",
        "disable_bias_linear": "add_bias_linear",
        "no_initialization": "perform_initialization",
        "te_rng_tracker": "use_te_rng_tracker",
        "disable_mamba_mem_eff_path": "use_mamba_mem_eff_path",
    }
    key = name.removeprefix("--").replace("-", "_")
    keys = (renamed.get(key, key), key.removeprefix("no_"))
    return next((f"{group}.{key}" for group, names in REFUSED.items() for key in keys if key in names), None)

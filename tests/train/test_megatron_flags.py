"""docs/megatron_flags.md says what is so: all of Megatron-LM's flags are there, our options exist, passed keys pass,
refused keys are refused."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.train.config import TrainConfig
from dlm_bridge.train.config.options import options_of
from dlm_bridge.train.megatron.settings import CLASSES, NEEDS, OURS, REFUSED, check_settings, default_values, passed_on

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
# Settings of megatron-core: each must be found on the page, by its own name or by the key's, or be known.
PARTS = (
    "moe_",
    "recompute_",
    "cp_comm_type",
    "expert_",
    "tp_comm_overlap",
    "optimizer_",
    "fp8_recipe",
    "adam_",
    "sgd_",
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


def test_refused_flags_are_refused_with_their_reason() -> None:
    refused = [name for names, here, _ in rows() if here == "refused" for name in names]
    keys = {name: _key(name) for name in refused}
    assert len(refused) > 25
    for name, setting in keys.items():
        assert setting is not None, name
        with pytest.raises(DlmBridgeError, match=f"--megatron {setting} cannot be set: "):
            check_settings(settings(f"{setting}=1"))


def test_what_is_not_there_does_not_pass_either() -> None:
    for names, here, _ in rows():
        for name in names if here == "not there" else ():
            key = re.sub(r"^--(no-)?", "", name).replace("-", "_")
            for group in FIELDS:
                assert key not in FIELDS[group] or key in OURS[group] | REFUSED[group], name


def test_all_moe_recompute_and_parallel_settings_are_there() -> None:
    text = PAGE.read_text()
    for group, names in FIELDS.items():
        for key in names:
            if key.startswith(PARTS):
                shown = f"{group}.{key}" in text or f"`--{key.replace('_', '-')}`" in text
                shown = shown or key in OURS[group] | REFUSED[group]
                assert shown, f"{group}.{key}"


def test_what_is_ours_or_refused_is_a_field() -> None:
    for group, names in FIELDS.items():
        assert OURS[group].keys() | REFUSED[group].keys() <= names
        assert not OURS[group].keys() & REFUSED[group].keys()
        for option in OURS[group].values():
            assert set(re.findall(r"--[\w-]+", option)) <= OPTIONS


def test_what_is_always_so_may_be_said() -> None:
    assert passed_on(settings("transformer.calculate_per_token_loss=true"), "transformer") == {
        "calculate_per_token_loss": True
    }


def test_what_something_else_turns_on_is_refused_alone() -> None:
    for group, needs in NEEDS.items():
        defaults = default_values(group)
        for key, need in needs.items():
            assert key in FIELDS[group] - OURS[group].keys() - REFUSED[group].keys(), key
            if defaults[key] is not None:
                check_settings(settings(f"{group}.{key}={_written(defaults[key])}"))
            if need.met(settings(), {}):
                continue
            with pytest.raises(DlmBridgeError, match=f"--megatron {group}.{key} does nothing without "):
                check_settings(settings(f"{group}.{key}={OTHER.get(key, _other(defaults[key]))}"))


@pytest.mark.parametrize(
    ("values", "options"),
    [
        (["transformer.fp8_margin=1"], {"precision": "fp8"}),
        (["transformer.fp8_dot_product_attention=true"], {"precision": "fp8", "fp8_recipe": "tensorwise"}),
        (
            ["transformer.num_layers_at_start_in_bf16=2", "transformer.first_last_layers_bf16=true"],
            {"precision": "fp8"},
        ),
        (["transformer.first_last_layers_bf16=true", "transformer.fp4=e2m1"], {"precision": "bf16"}),
        (["transformer.cpu_offloading=true", "transformer.cpu_offloading_num_layers=1"], {}),
        (["transformer.fine_grained_activation_offloading=true", "transformer.offload_modules=[core_attn]"], {}),
        (["transformer.microbatch_group_size_per_vp_stage=4"], {"pp": 2, "vp": 2}),
        (["transformer.distribute_saved_activations=true"], {"recompute": "full", "tp": 2}),
        (["transformer.moe_enable_deepep=true"], {"moe_dispatcher": "flex"}),
        (["transformer.moe_token_drop_policy=position", "transformer.moe_expert_capacity_factor=1.0"], {}),
        (["ddp.fsdp_double_buffer=true"], {"fsdp": "optim"}),
        (["ddp.reduce_scatter_with_fp32_accumulation=true"], {}),
        (["optimizer.sgd_momentum=0.5"], {"optimizer": "sgd"}),
        (["optimizer.pin_cpu_grads=false"], {"optimizer_cpu_offload": True, "precision": "bf16"}),
        (["optimizer.store_param_remainders=false"], {"optimizer_cpu_offload": True, "precision": "bf16"}),
        (["optimizer.hysteresis=3"], {"precision": "fp16"}),
    ],
)
def test_what_is_turned_on_may_be_set(values: list[str], options: dict[str, Any]) -> None:
    given = settings(*values)
    check_settings(given.replace(**options))
    for value in values:
        passed_on(given, value.partition(".")[0])


@pytest.mark.parametrize(
    ("setting", "options"),
    [
        ("transformer.fp8_margin=1", {"precision": "fp8", "fp8_recipe": "blockwise"}),
        ("transformer.distribute_saved_activations=true", {"recompute": "full"}),
        ("ddp.pad_buckets_for_high_nccl_busbw=true", {"fsdp": "optim"}),
        ("ddp.pad_buckets_for_high_nccl_busbw=true", {"optimizer": "sgd"}),
        ("optimizer.decoupled_weight_decay=false", {"optimizer": "sgd"}),
    ],
)
def test_what_is_turned_off_may_not(setting: str, options: dict[str, Any]) -> None:
    check_settings(settings())
    with pytest.raises(DlmBridgeError, match="does nothing without"):
        check_settings(dataclasses.replace(settings(setting), **options))


def test_values_get_their_fields_types() -> None:
    import torch

    given = settings(
        "optimizer.exp_avg_dtype=bfloat16", "optimizer.loss_scale=1e3", "ddp.bucket_size=40", "ddp.nccl_ub=true"
    )
    assert passed_on(given, "optimizer") == {"exp_avg_dtype": torch.bfloat16, "loss_scale": 1000.0}
    assert passed_on(given, "ddp") == {"bucket_size": 40, "nccl_ub": True}


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("transformer.tensor_model_parallel_size=2", "use --tp"),
        ("ddp.use_distributed_optimizer=true", "use --distributed-optimizer"),
        ("optimizer.lr=1", "use --lr"),
        ("transformer.moe_ruter_dtype=fp32", "has no such field, the nearest is moe_router_dtype"),
        ("ddp.bucket_size=big", "'big' is not int"),
        ("ddp.nccl_ub=1", "1 is not bool"),
        ("transformer.calculate_per_token_loss=false", "cannot be false: it is always on"),
        ("transformer.offload_modules=[core_attn", r"\[core_attn is no value in YAML"),
        ("transformer.hidden_dropout=-1", r"must be in \[0, 1\), not -1"),
        ("transformer.attention_dropout=1.0", r"must be in \[0, 1\), not 1"),
        ("transformer.use_kitchen=true", "none of nvidia-kitchen's"),
        ("transformer.cuda_graph_impl=local", "records no CUDA graphs"),
        ("transformer.hybrid_context_parallel=true", "no dynamic .hybrid. context parallelism"),
    ],
)
def test_refuses(setting: str, message: str) -> None:
    with pytest.raises(DlmBridgeError, match=message) as raised:
        check_settings(settings(setting))
    assert "\n" not in str(raised.value)


OTHER = {  # values that fields of few values may have, and are not their defaults
    "fp8_amax_compute_algo": "max",
    "fp4_recipe": "custom",
    "fp4_quantizer_factory": "a.b",
    "offload_modules": "[core_attn]",
    "moe_flex_dispatcher_backend": "hybridep",
    "moe_token_drop_policy": "position",
}


def _other(default: Any) -> str:
    """A value that is not the default."""
    return _written(not default) if isinstance(default, bool) else "7"


def _written(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


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

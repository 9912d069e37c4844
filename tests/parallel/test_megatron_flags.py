"""docs/megatron_flags.md says what is so: all of Megatron-LM's flags are there, our options exist, passed keys pass,
refused keys are refused."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from dlm_bridge.errors import SettingError
from dlm_bridge.parallel.mcore_compat import IS_0_16
from dlm_bridge.parallel.train.settings import CLASSES, OURS, REFUSED, check_settings, passed_on
from dlm_bridge.settings import options_of
from dlm_bridge.train.config import TrainConfig
from tests.refusals import refused

PAGE = Path(__file__).parents[2] / "docs/megatron_flags.md"
MEGATRON_LM = Path(__file__).parent / "megatron_lm_flags.txt"  # what its argument parser has
COMMAND = {"--resume", "--dry-run", "--gpus", "--json", "--config"}
OPTIONS = {option.flag for option in options_of(TrainConfig).values()} | COMMAND
FIELDS = {group: {field.name for field in dataclasses.fields(kind)} for group, kind in CLASSES.items()}
NEW = PAGE.read_text().partition("## Fields that only megatron-core 0.19 has")[2]
NEW_PASSED, NEW_REFUSED = (
    [field for line in NEW.splitlines() if f"| {what} |" in line for field in re.findall(r"`(\w+\.\w+)`", line)]
    for what in ("passed", "refused")
)
# Fields that are ours or refused in only one of the supported versions of megatron-core.
ONE_VERSION = {
    "transformer": {
        "moe_extended_tp",
        "cuda_graph_modules",
        "experimental_attention_variant_loss_scale_func",
        "expert_gtp_weight_remat_size",
        "expert_tensor_parallel_num_weight_shards",
        "fp8_output_proj",
        "gtp_weight_remat_size",
        "moe_grad_scale_func",
        "moe_mlp_glu_interleave_size",
        "moe_shared_expert_glu_interleave_size",
        "moe_single_grouped_bias",
        "moe_single_grouped_weight",
        "mtp_detach_heads",
        "mtp_grad_scale_func",
        "mtp_hybrid_override_pattern",
        "mtp_use_repeated_layer",
        "mup_attn_scale_power",
        "mup_base_head_dim",
        "mup_base_hidden_size",
        "mup_embedding_mult",
        "mup_output_mult",
        "mup_width_mult",
        "tensor_parallel_num_weight_shards",
        "use_grouped_gemm_for_dense_mlp",
        "moe_pad_experts_for_cuda_graph_inference",
        "use_mup",
    },
    "ddp": {"fp4_param_gather"},
    "optimizer": {
        "muon_use_nesterov",
        "adaptive_muon_beta2",
        "adaptive_muon_eps",
        "adaptive_muon_moment2_method",
        "grad_norm_skip_threshold",
        "lion_beta1",
        "lion_beta2",
        "muon_coefficient_type",
        "muon_nesterov",
        "muon_scalar_optimizer",
        "optimizer_cuda_graph",
        "soap_precondition_frequency",
        "soap_shampoo_beta",
        "soap_use_kl_shampoo",
        "use_layer_wise_distributed_optimizer",
    },
}
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
    absent = "0.19" if IS_0_16 else "0.16"  # rows say so of keys that one version lacks
    passed = [
        key
        for _, here, why in rows()
        for key in re.findall(r"--megatron (\w+\.\w+)", here)
        if f"only megatron-core {absent}" not in why
    ]
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


@pytest.mark.skipif(IS_0_16, reason="fields of megatron-core 0.19")
@pytest.mark.parametrize("setting", NEW_REFUSED)
def test_new_fields_that_would_be_wrong_are_refused(setting: str) -> None:
    with refused(SettingError, "megatron", setting):
        check_settings(settings(f"{setting}=1"))


@pytest.mark.skipif(IS_0_16, reason="fields of megatron-core 0.19")
def test_new_fields_pass() -> None:
    assert len(NEW_PASSED) > 10
    for group, _, key in (setting.partition(".") for setting in NEW_PASSED):
        assert key in FIELDS[group]
        assert key not in OURS[group] | REFUSED[group]


def test_what_is_ours_or_refused_is_a_field() -> None:
    for group, names in FIELDS.items():
        assert OURS[group].keys() | REFUSED[group].keys() <= names | ONE_VERSION[group]
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

"""The plan of a training configuration is the plan of the same settings."""

from __future__ import annotations

from typing import Any

import pytest

from dlm_bridge import DlmBridgeError, Layout
from dlm_bridge.errors import LayoutError, SettingError
from dlm_bridge.plan.memory import MemoryPlan, memory_plan
from dlm_bridge.plan.model import model_of
from dlm_bridge.plan.run import PlannedRun, objective_settings, run_of
from dlm_bridge.train.config import TrainConfig
from tests.plan import configs
from tests.refusals import refused


def training_plan(config: TrainConfig, hub_config: dict[str, Any], gpus: int) -> MemoryPlan:
    model = model_of(hub_config, config.model.model, config.model.family)
    return memory_plan(model, run_of(config, config.objective.objective or model.family.objective, gpus))


def settings(**changes: Any) -> TrainConfig:
    values: dict[str, Any] = {
        "model": "llada",
        "data": ["mock"],
        "output": "run",
        "engine": "megatron",
        "precision": "bf16",
        "tp": 2,
        "pp": 2,
        "global_batch_size": 16,
        "micro_batch_size": 2,
        "seq_length": 4096,
    }
    return TrainConfig.from_flags(**{**values, **changes})


def test_is_the_plan_of_the_same_settings() -> None:
    config = settings(recompute="selective", recompute_modules="mlp,layernorm", pipeline_split="15,17")
    plan = training_plan(config, configs.LLADA_8B, 8)
    run = PlannedRun(
        layout=Layout(tp=2, pp=2, first_stage=15, last_stage=17),
        gpus=8,
        seq_length=4096,
        micro_batch_size=2,
        global_batch_size=16,
        recompute="selective",
        recompute_modules=("mlp", "layernorm"),
        loss_share=0.5,
    )
    assert plan.stages == memory_plan(model_of(configs.LLADA_8B, "llada"), run).stages
    assert [stage.layers for stage in plan.stages] == [15, 17]


def test_without_a_micro_batch_size_a_rank_takes_its_share_at_once() -> None:
    plan = training_plan(settings(pp=1, micro_batch_size=None), configs.LLADA_8B, 8)
    assert (plan.run.micro_batch_size, plan.run.micro_batches) == (4, 1)


def test_an_offloaded_optimizer_takes_nothing_of_the_devices() -> None:
    kept, offloaded = (
        training_plan(settings(optimizer_cpu_offload=offload), configs.LLADA_8B, 8).stages for offload in (False, True)
    )
    for stage, other in zip(kept, offloaded, strict=True):
        assert (other.weights, other.gradients, other.optimizer) == (stage.weights, stage.gradients, 0)
        assert stage.optimizer > 0


def test_objectives_read_one_stream_or_two() -> None:
    assert objective_settings("masked") == {"streams": 1, "loss_share": 0.5}
    assert objective_settings("causal") == {"streams": 1, "loss_share": 1.0}
    assert objective_settings("block")["streams"] == 2
    assert objective_settings("nemotron") == {"streams": 2, "loss_share": 1.5}
    with pytest.raises(DlmBridgeError, match=r"objective.*guess"):
        objective_settings("guess")


def test_a_layout_that_the_gpus_cannot_have_is_refused() -> None:
    with refused(LayoutError, "gpus", "6"):
        training_plan(settings(), configs.LLADA_8B, 6)


def test_muon_keeps_one_moment_of_matrices_and_is_not_sharded() -> None:
    with refused(SettingError, "optimizer"):
        PlannedRun(layout=Layout(), gpus=1, seq_length=64, optimizer="muon").check_values()
    muon, adamw = (
        training_plan(settings(optimizer=name, distributed_optimizer=False), configs.LLADA_8B, 8).peak
        for name in ("muon", "adamw")
    )
    assert 0.65 < muon.optimizer / adamw.optimizer < 0.75  # 8 bytes a parameter in place of 12, but for the embedding

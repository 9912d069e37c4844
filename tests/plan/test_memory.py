"""The memory model: measured peaks, the sharding strategies, pipelines in flight, recomputation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dlm_bridge import DlmBridgeError, Layout
from dlm_bridge.plan.dry_run import memory_of
from dlm_bridge.plan.memory import MemoryPlan, in_flight, largest_parameter, memory_plan
from dlm_bridge.plan.model import model_of
from dlm_bridge.plan.run import PlannedRun, run_of
from dlm_bridge.train.config import TrainConfig
from tests.plan import configs
from tests.plan.recipes import GIB, MEASURED, OURS, RECIPES, Recipe

ROOT = Path(__file__).parents[2]
LLAMA = model_of(configs.LLAMA_3_8B, "llama")
MOE = model_of(configs.LLADA_MOE, "moe")
RUN = PlannedRun(layout=Layout(), gpus=8, seq_length=4096)


def plan(**changes: Any) -> MemoryPlan:
    return memory_plan(LLAMA, replace(RUN, **changes))


@pytest.mark.parametrize("recipe", [*MEASURED, *OURS], ids=lambda recipe: recipe.name)
def test_peaks_are_within_ten_percent_of_measured_ones(recipe: Recipe) -> None:
    found = memory_plan(model_of(recipe.config, recipe.name), recipe.settings()).peak.allocated / GIB
    assert abs(found / recipe.measured - 1) < 0.1, found


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_published_recipes_fit_the_gpus_that_they_are_for(recipe: Recipe) -> None:
    peak = memory_plan(model_of(recipe.config, recipe.name), recipe.settings()).peak
    assert 30 * GIB < peak.total < 80e9, peak.total / GIB


def test_states_follow_the_sharding_strategy() -> None:
    n = LLAMA.parameters
    plain = plan(distributed_optimizer=False).peak
    assert (plain.weights, plain.gradients, plain.optimizer) == (2 * n, 4 * n, 12 * n)
    assert plan().peak.optimizer == round(12 * n / 8)
    assert plan(fsdp="optim").peak.gradients == 4 * n
    grads = plan(fsdp="optim_grads").peak
    assert grads.weights == 2 * n
    unit = 128256 * 4096  # of the embedding; whole until they are summed
    assert grads.gradients == round(4 * n / 8 + 4 * unit)
    few = plan(fsdp="optim_grads", seq_length=8).peak  # no activations: gradients that wait to be freed are the peak
    assert plan(fsdp="optim_grads_params", seq_length=8, own_shards=True).peak.transient < few.transient / 4
    assert few.activations + few.transient == pytest.approx(4 * (10**9 + unit / 8) + 2 * unit, rel=1e-6)
    everything = plan(fsdp="optim_grads_params").peak
    assert everything.weights < 0.5 * n * 2
    assert plan(precision="fp32", distributed_optimizer=False).peak.optimizer == 8 * n
    assert plan(optimizer="sgd", distributed_optimizer=False).peak.optimizer == 8 * n


def test_each_instance_of_the_optimizer_holds_a_whole_state() -> None:
    n, two = LLAMA.parameters, {"optimizer_instances": 2}
    assert plan(**two).peak.optimizer == round(12 * n / 4)
    assert plan(**two).peak.gradients == plan().peak.gradients
    assert plan(**two, layout=Layout(tp=2)).peak.optimizer == 2 * plan(layout=Layout(tp=2)).peak.optimizer
    sharded = plan(**two, gpus=16, fsdp="optim_grads_params").peak
    assert sharded == plan(fsdp="optim_grads_params").peak
    experts = memory_plan(MOE, PlannedRun(layout=Layout(ep=2), gpus=8, seq_length=1024, **two)).stages[0]
    own = experts.parameters["experts"]
    assert experts.optimizer == round(12 * ((experts.held - own) / 4 + own / 2))


@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer_instances": 3},
        {"distributed_optimizer": False},
        {"optimizer": "sgd"},
        {"fsdp": "optim"},
        {"fsdp": "optim_grads", "optimizer_instances": 8},
    ],
)
def test_instances_that_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(DlmBridgeError, match="optimizer_instances"):
        plan(**{"optimizer_instances": 2, **changes})


def test_a_model_that_is_built_whole_needs_room_for_it() -> None:
    """Megatron FSDP has the whole weights, or where it cuts them too a layer; the Accelerate engine a parameter."""
    n, run = LLAMA.parameters, {"fsdp": "optim_grads_params", "gpus": 64, "recompute": "full"}
    whole, cut = plan(**{**run, "fsdp": "optim_grads"}).peak, plan(**run).peak
    assert whole.building > 2 * n
    assert plan(**{**run, "fsdp": "optim_grads"}, layout=Layout(tp=2)).peak.building < 0.6 * whole.building
    outer = 2 * 128256 * 4096  # embedding and head, of which one is copied
    assert cut.building == pytest.approx(2 * outer * 3 / 2, rel=1e-5)
    layer = (n - outer) / 32
    assert plan(**{**run, "gpus": 8}).peak.building == pytest.approx(10 * n / 8, rel=1e-5)  # gradients come last
    narrow = plan(**{**run, "gpus": 8}, gradient_bytes=0).peak
    assert narrow.building == pytest.approx(4 * layer + 6 * n / 8, rel=1e-5)
    assert cut.total == cut.allocated + cut.overhead > cut.building + cut.overhead
    (recipe,) = [recipe for recipe in OURS if recipe.name == "8B of 24 layers, FSDP"]
    measured = 29.23 * GIB  # benchmarks/fsdp_building.py on two H100s
    found = memory_plan(model_of(recipe.config, recipe.name), recipe.settings()).peak.building
    assert found == pytest.approx(measured, rel=2e-3)
    parts = plan(**run, own_shards=True).peak
    assert parts.building == round(4 * (n + largest_parameter(LLAMA)) / 64)
    assert parts.total == parts.allocated + parts.overhead > parts.building + parts.overhead
    assert plan().peak.building == plan().peak.weights
    assert [note for note in plan(**run).as_dict()["notes"] if "Megatron FSDP" in note]


@pytest.mark.parametrize(
    ("model", "gpus", "building", "steps"),
    [("llada2-mini-16b-a1.4b", 2, 31.78, 132.08), ("sdar-30b-a3b", 4, 29.00, 126.85)],
)
def test_fsdp2_of_models_that_fit_no_gpu_as_measured(model: str, gpus: int, building: float, steps: float) -> None:
    """benchmarks/fsdp_building.py --strategies fsdp2, on H200s."""
    config = TrainConfig.from_flags(
        model=str(ROOT / "configs" / model), from_scratch=True, data=["mock"], output="run", sharding="fsdp",
        precision="bf16", steps=2, seq_length=512, micro_batch_size=1, global_batch_size=64,
    )  # fmt: skip
    found, _ = memory_of(config, run_of(config, "block", gpus), None)
    assert found is not None
    assert found.peak.building == pytest.approx(building * GIB, rel=0.02)
    assert found.peak.allocated == pytest.approx(steps * GIB, rel=0.02)


def test_experts_are_sharded_over_their_own_replicas() -> None:
    run = PlannedRun(layout=Layout(ep=4), gpus=8, seq_length=1024)
    stage = memory_plan(MOE, run).stages[0]
    experts = stage.parameters["experts"]
    assert run.expert_dp == 2
    assert stage.optimizer == round(12 * ((stage.held - experts) / 8 + experts / 2))


def test_activations_divide_over_sequence_and_context_parallel_ranks() -> None:
    whole = plan().peak.activations
    assert plan(cp=2).peak.activations == pytest.approx(whole / 2)
    assert plan(layout=Layout(tp=2)).peak.activations == pytest.approx(whole / 2)
    assert plan(layout=Layout(tp=2), sequence_parallel=False).peak.activations > 0.55 * whole
    assert plan(micro_batch_size=2).peak.activations == 2 * whole
    assert plan(streams=2).peak.activations == pytest.approx(2 * whole)


def test_one_forward_one_backward_keeps_a_micro_batch_for_each_stage_to_come() -> None:
    assert [in_flight(stage, 4, 1, 16) for stage in range(4)] == [(4,), (3,), (2,), (1,)]
    assert in_flight(0, 4, 1, 2) == (2,)
    # Interleaved: 2 (4 - 1) + (2 - 1) 4 + 1 = 11 passes, four through each chunk in turn.
    assert in_flight(0, 4, 2, 16) == (7, 4)
    assert in_flight(3, 4, 2, 16) == (4, 1)
    assert sum(in_flight(0, 4, 2, 4)) == 8  # no more than there are


def test_an_interleaved_first_stage_keeps_what_the_paper_says() -> None:
    """Korthikanti et al.: 1 + (p - 1) / (p m) times all layers' activations, m chunks a stage."""
    layers = plan().peak.activations - 4 * 4096 * 4096  # without the final norm
    for chunks in (2, 4):
        run = {"layout": Layout(pp=4, vp=chunks), "global_batch_size": 32}
        first = plan(**run).stages[0].activations
        assert first == pytest.approx(layers * (1 + 3 / (4 * chunks)))


def test_recomputation_keeps_less_the_more_of_it_there_is() -> None:
    none = plan().peak
    mlp = plan(recompute="selective", recompute_modules=("mlp",)).peak
    half = plan(recompute="full", recompute_layers=16).peak
    full = plan(recompute="full").peak
    assert none.activations > mlp.activations > full.activations
    assert none.activations > half.activations > full.activations
    inputs = 32 * 2 * 4096 * 4096
    assert full.activations == inputs + 4 * 4096 * 4096
    first = plan(layout=Layout(pp=2), recompute="full").stages[0]
    assert plan(layout=Layout(pp=2)).stages[0].transient == 0
    assert first.transient == pytest.approx(
        (none.activations - 4 * 4096 * 4096) / 32
    )  # one layer at a time comes back
    moe = PlannedRun(layout=Layout(ep=2), gpus=2, seq_length=1024)
    acts = [
        memory_plan(MOE, replace(moe, recompute="selective", recompute_modules=modules)).peak.activations
        for modules in ((), ("moe_act",), ("moe",))
    ]
    assert acts[0] > acts[1] > acts[2]


def test_logits_in_chunks_cost_less_than_all_of_them() -> None:
    assert plan(all_logits=True, micro_batch_size=4).peak.transient > 3 * plan(micro_batch_size=4).peak.transient


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"gpus": 12, "layout": Layout(tp=8)}, "gpus"),
        ({"layout": Layout(tp=3)}, "tp"),
        ({"layout": Layout(pp=5), "gpus": 10}, "32 layers do not divide"),
        ({"layout": Layout(ep=2)}, "ep"),
        ({"seq_length": 4098, "cp": 4}, "seq_length"),
        ({"global_batch_size": 12}, "global_batch_size"),
        (
            {"layout": Layout(pp=4, vp=2), "global_batch_size": 10},
            "vp",
        ),
        ({"layout": Layout(pp=2), "fsdp": "optim"}, "fsdp"),
        ({"recompute": "some"}, "recompute"),
        ({"recompute_modules": ("mlps",)}, "recompute_modules"),
        ({"micro_batch_size": 0}, "micro_batch_size"),
    ],
)
def test_what_megatron_refuses_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(DlmBridgeError, match=said):
        plan(**changes)


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(tp=2, ep=2)], ids=str)
def test_experts_under_tensor_parallelism_need_sequence_parallelism(layout: Layout) -> None:
    run = PlannedRun(layout=layout, gpus=4, seq_length=1024, sequence_parallel=False)
    with pytest.raises(DlmBridgeError, match="sequence_parallel"):
        memory_plan(MOE, run)

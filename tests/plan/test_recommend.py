"""Recommendations: never slower than what is published, never a layout that Megatron refuses, reasons that hold."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dlm_bridge import DlmBridgeError, Layout
from dlm_bridge.plan import Run, memory_plan
from dlm_bridge.plan.cost import step_time
from dlm_bridge.plan.hardware import Hardware
from dlm_bridge.plan.model import model_of
from dlm_bridge.plan.recommend import recommend, value_of
from tests.plan import configs
from tests.plan.recipes import RECIPES, Recipe

H100 = Hardware()
QUICK = [recipe for recipe in RECIPES if recipe.run["gpus"] <= 64]


@pytest.mark.parametrize("recipe", QUICK, ids=lambda recipe: recipe.name)
def test_is_no_slower_than_the_published_recipe_and_fits(recipe: Recipe) -> None:
    model, given = model_of(recipe.config, recipe.name), recipe.settings()
    alone = recommend(model, given, H100)  # the recipe is not among what it chooses from
    best = alone.best
    assert best.time.total <= 1.005 * step_time(model, given, H100).total
    best.run.check(model)
    assert memory_plan(model, best.run).peak.total <= H100.memory
    assert best.run.batch == given.batch
    compared = recommend(model, given, H100, given=given)
    assert "the given layout fits" in compared.comparison[0]


def test_recommends_for_405b_on_1024_gpus() -> None:
    """The largest dense search: tensor parallelism inside the node, a pipeline over nodes."""
    recipe = RECIPES[2]
    model = model_of(recipe.config, recipe.name)
    found = recommend(model, recipe.settings(), H100, given=recipe.settings())
    assert found.best.time.total <= step_time(model, recipe.settings(), H100).total
    assert found.best.run.layout.tp <= 8
    assert found.best.run.layout.pp > 1


def test_reasons_name_what_the_neighbours_cost() -> None:
    model = model_of(configs.LLAMA_3_70B, "70B")
    wanted = Run(layout=Layout(), gpus=64, seq_length=8192, global_batch_size=128, gradient_bytes=2)
    found = recommend(model, wanted, H100)
    text = "\n".join(found.reasons)
    assert f"tensor parallelism {found.best.run.layout.tp}: with" in text
    assert "data parallelism" in text
    # The claim "nothing fits" or "slower" is the search's own: one of them is checked here by hand.
    other = replace(found.best.run, layout=Layout(tp=1, pp=1), cp=1, recompute="full")
    assert memory_plan(model, other).peak.total > H100.memory


def test_less_memory_means_more_model_parallelism_or_recomputation() -> None:
    model = model_of(configs.LLAMA_3_8B, "8B")
    wanted = Run(layout=Layout(), gpus=8, seq_length=8192, global_batch_size=64)
    large = recommend(model, wanted, replace(H100, memory=141 * 10**9)).best
    small = recommend(model, wanted, replace(H100, memory=40 * 10**9)).best
    assert small.memory.peak.total <= 40e9
    assert small.time.total >= large.time.total
    assert value_of(small.run, "tp") * value_of(small.run, "pp") * small.run.cp >= large.run.model_ranks


def test_slow_links_between_gpus_mean_less_tensor_parallelism() -> None:
    model = model_of(configs.LLAMA_3_70B, "70B")
    wanted = Run(layout=Layout(), gpus=64, seq_length=8192, global_batch_size=128, gradient_bytes=2)
    slow = recommend(model, wanted, replace(H100, nvlink=25e9)).best
    fast = recommend(model, wanted, H100).best
    assert slow.run.layout.tp <= fast.run.layout.tp
    assert slow.time.total > fast.time.total


def test_says_what_is_missing_where_nothing_fits() -> None:
    model = model_of(configs.LLAMA_31_405B, "405B")
    wanted = Run(layout=Layout(), gpus=8, seq_length=4096, global_batch_size=8)
    said = r"does not fit 8 GPUs of 75 GiB in any of \d+ layouts: the smallest needs"
    with pytest.raises(DlmBridgeError, match=said):
        recommend(model, wanted, H100)
    with pytest.raises(DlmBridgeError, match="--recommend needs --global-batch-size"):
        recommend(model, replace(wanted, global_batch_size=None), H100)
    with pytest.raises(DlmBridgeError, match="no layout of 405B takes 131 GPUs with --global-batch-size 7"):
        recommend(model, replace(wanted, gpus=131, global_batch_size=7), H100)

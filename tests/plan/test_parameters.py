"""Parameter counts: those that the model cards state, and those that a torch_dist checkpoint's ranks really hold."""

from __future__ import annotations

from math import prod
from pathlib import Path

import pytest
import torch

from dlm_bridge import Bridge, Layout
from dlm_bridge.convert.checkpoints.torch_dist import TorchDistReader
from dlm_bridge.models.families import families
from dlm_bridge.plan.memory import memory_plan
from dlm_bridge.plan.model import model_of, open_model
from dlm_bridge.plan.published import find_model, published_models
from dlm_bridge.plan.run import PlannedRun
from tests.checkpoints import standard_tensors, write_hub_folder, write_llada
from tests.plan import configs

PUBLISHED = {
    "LLADA_8B": 8_015_581_184,
    "LLAMA_3_8B": 8_030_261_248,
    "LLAMA_3_70B": 70_553_706_496,
    "LLAMA_31_405B": 405_853_388_800,
    "MIXTRAL_8X7B": 46_702_792_704,
    "MIXTRAL_8X22B": 140_630_071_296,
    "DEEPSEEK_V3": 671_026_419_200,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_counts_are_the_published_ones(name: str) -> None:
    assert model_of(getattr(configs, name), name).parameters == PUBLISHED[name]


@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        ("LLaDA-8B-Instruct", "llada-8b"),
        ("LLaDA-MoE-7B-A1B-Base", "llada-moe-7b-a1b"),
        ("LLaDA2.0-mini", "llada2-mini-16b-a1.4b"),
        ("SDAR-30B-A3B-Chat", "sdar-30b-a3b"),
    ],
)
def test_the_table_of_published_models_agrees_with_the_recipes_configs(name: str, recipe: str) -> None:
    table, whole = find_model(name), open_model(Path(__file__).parents[2] / "configs" / recipe)
    assert table.family is whole.family
    assert table.dims == whole.dims
    assert table.settings == whole.settings


# As the cards, papers and configs state them, in billions.
STATED = {
    "LLaDA2.0-flash": (102.9, 6.15), "LLaDA-MoE-7B-A1B-Base": (7.36, 1.72), "LLaDA2.0-mini": (16.26, 1.43),
    "iLLaDA-8B-Base": (7.62, 7.62), "Dream-v0-Base-7B": (7.62, 7.62), "RND1-Base-0910": (30.5, 3.35),
    "Fast_dLLM_v2_1.5B": (1.54, 1.54), "I-DLM-32B": (32.76, 32.76),
    "WeDLM-8B-Instruct": (8.19, 8.19),
    "Qwen3-0.6B-diffusion-mdlm-v0.1": (0.596, 0.596), "Stable-DiffCoder-8B-Base": (8.25, 8.25),
    "Llama-3.1-70B": (70.55, 70.55), "DeepSeek-V3": (671.03, 37.5),
}  # fmt: skip


@pytest.mark.parametrize("name", STATED)
def test_published_models_have_the_stated_sizes(name: str) -> None:
    model = find_model(name)
    assert (model.parameters / 1e9, model.active_parameters / 1e9) == pytest.approx(STATED[name], rel=5e-3)


def test_every_published_model_can_be_planned() -> None:
    known = {hub_id for spec in families() for hub_id in spec.hub_ids}
    for hub_id, entry in published_models().items():
        model = find_model(hub_id)
        assert memory_plan(model, PlannedRun(Layout(), 1, 2048)).peak.held == model.parameters
        own = hub_id in known or hub_id.startswith("meta-llama/Llama-3.1")
        assert own, f"{hub_id} is not in its family's hub_ids"
        assert set(entry) <= {"names", "config", "family"}


def test_active_parameters_of_an_expert_model() -> None:
    model = model_of(configs.MIXTRAL_8X7B, "mixtral")
    experts = 32 * 3 * 4096 * 14336
    assert model.active_parameters == PUBLISHED["MIXTRAL_8X7B"] - 6 * experts


@pytest.mark.parametrize(
    "layout",
    [Layout(tp=2, pp=2), Layout(pp=2, vp=2), Layout(tp=4), Layout(pp=3, pipeline="Ett|t|tL")],
    ids=["tp2-pp2", "pp2-vp2", "tp4", "uneven"],
)
def test_ranks_of_a_dense_checkpoint_hold_what_the_plan_says(tmp_path: Path, layout: Layout) -> None:
    folder = write_llada(tmp_path / "hub", n_kv_heads=4)
    _check_ranks(folder, layout, tmp_path / "out")


@pytest.mark.parametrize("layout", [Layout(ep=4), Layout(tp=2, pp=2, ep=2, etp=1)], ids=["ep4", "tp2-pp2-ep2"])
def test_ranks_of_an_expert_checkpoint_hold_what_the_plan_says(tmp_path: Path, layout: Layout) -> None:
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 32,
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "vocab_size": 64,
        "tie_word_embeddings": False,
    }
    folder = write_hub_folder(tmp_path / "hub", config, standard_tensors(config, qk_norm=True))
    _check_ranks(folder, layout, tmp_path / "out")


def _check_ranks(folder: Path, layout: Layout, output: Path) -> None:
    """Sum the elements in the files of each stage's ranks. A tensor that tensor parallel ranks hold each whole is in
    one file only, and counts for all of them."""
    Bridge.from_hf(folder).to_megatron(output, layout)
    reader = TorchDistReader(output / "iter_0000000")
    inner = layout.world_size // layout.pp
    held = [0] * layout.pp
    for key, tensor in reader.contents.tensors.items():
        replicated = any(word in key for word in ("layernorm", "layer_norm", "router"))
        for chunk in tensor.chunks:
            rank = int(chunk.place.file.split("_")[2])
            held[rank // inner] += prod(chunk.sizes) * (layout.tp if replicated else 1)
    plan = memory_plan(open_model(folder), PlannedRun(layout=layout, gpus=layout.world_size, seq_length=64))
    for stage, found in zip(plan.stages, held, strict=True):
        experts = stage.parameters.get("experts", 0)
        assert (stage.held - experts) * layout.tp + experts * layout.ep * layout.expert_tp == found


def test_multi_token_prediction_is_left_out_and_said() -> None:
    model = model_of(configs.DEEPSEEK_V3, "v3")
    plan = memory_plan(model, PlannedRun(layout=Layout(tp=8, pp=61), gpus=488, seq_length=4096))
    assert any("multi-token prediction" in note for note in plan.as_dict()["notes"])


def test_a_tied_output_layer_stands_twice_in_a_pipeline() -> None:
    config = {**configs.LLAMA_3_8B, "tie_word_embeddings": True}
    model = model_of(config, "tied")
    plan = memory_plan(model, PlannedRun(layout=Layout(pp=2), gpus=2, seq_length=128))
    assert plan.stages[1].parameters["head"] == plan.stages[0].parameters["embedding"] == 128256 * 4096
    alone = memory_plan(model, PlannedRun(layout=Layout(), gpus=1, seq_length=128))
    assert alone.stages[0].held == model.parameters


def test_a_megatron_checkpoint_is_planned_from_its_manifest(tmp_path: Path) -> None:
    folder = write_llada(tmp_path / "hub", dtype=torch.bfloat16)
    Bridge.from_hf(folder).to_megatron(tmp_path / "out", Layout())
    assert open_model(tmp_path / "out").parameters == open_model(folder).parameters

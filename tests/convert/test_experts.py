"""Experts in `torch_dist`: keys, shapes and objects as megatron-core names them, and which rank's file holds what."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dlm_bridge import Bridge, Layout, LayoutError
from dlm_bridge.convert.checkpoints.torch_dist import TorchDistReader
from dlm_bridge.mapping.fused import FusedQKV
from dlm_bridge.mapping.rules import Dims
from tests.checkpoints import write_hub_folder
from tests.convert.helpers import dcp_tensors, hub_tensors
from tests.families import llada2_moe, rnd1
from tests.families.case import config_of
from tests.refusals import refused

RND1, LLADA2 = rnd1.CASE, llada2_moe.CASE
FC1, FC2 = "mlp.experts.experts.linear_fc1", "mlp.experts.experts.linear_fc2"


def imported(case: rnd1.FamilyCase, folder: Path, layout: Layout) -> Path:
    Bridge.from_hf(case.write(folder / "hub")).to_megatron(folder / "megatron", layout)
    return folder / "megatron" / "iter_0000000"


def test_equal_layers_are_stacked_by_layer_and_expert(tmp_path: Path) -> None:
    iteration = imported(RND1, tmp_path, Layout(tp=2, ep=2, etp=1))
    stored, hub = dcp_tensors(iteration), RND1.tensors(RND1.config, 0, torch.float32)
    assert stored[f"decoder.layers.{FC1}.weight"].shape == (4, 8, 64, 64)
    assert stored[f"decoder.layers.{FC2}.weight"].shape == (4, 8, 64, 32)
    for layer in range(4):
        prefix = f"model.layers.{layer}.mlp."
        assert torch.equal(stored["decoder.layers.mlp.router.weight"][layer], hub[prefix + "gate.weight"])
        for expert in range(8):
            gate, up, down = (hub[f"{prefix}experts.{expert}.{part}_proj.weight"] for part in ("gate", "up", "down"))
            assert torch.equal(stored[f"decoder.layers.{FC1}.weight"][layer, expert], torch.cat((gate, up)))
            assert torch.equal(stored[f"decoder.layers.{FC2}.weight"][layer, expert], down)
    objects = TorchDistReader(iteration).contents.objects
    for name in (FC1, FC2):
        shards = {key.rpartition("/shard_")[2] for key in objects if key.startswith(f"decoder.layers.{name}._extra")}
        assert shards == {f"{layer}.{expert}_4.8" for layer in range(4) for expert in range(8)}
    assert "decoder.layers.pre_mlp_layernorm._extra_state/shard_3_4" in objects
    assert "decoder.layers.self_attention.q_layernorm._extra_state/shard_0_4" in objects


def test_unequal_layers_have_keys_of_their_own(tmp_path: Path) -> None:
    iteration = imported(LLADA2, tmp_path, Layout(tp=2, pp=2))
    stored, hub = dcp_tensors(iteration), LLADA2.tensors(LLADA2.config, 0, torch.float32)
    dense, sparse = "decoder.layers.0.", "decoder.layers.3."
    assert stored[dense + "mlp.linear_fc1.weight"].shape == (192, 64)
    assert stored[dense + "mlp.linear_fc1.layer_norm_weight"].shape == (64,)
    assert stored[sparse + "pre_mlp_layernorm.weight"].shape == (64,)
    assert stored[sparse + FC1 + ".weight"].shape == (16, 64, 64)
    assert stored[sparse + "mlp.shared_experts.linear_fc1.weight"].shape == (64, 64)
    assert stored[sparse + "mlp.router.expert_bias"].dtype == torch.float32
    assert torch.equal(stored[sparse + "mlp.router.expert_bias"], hub["model.layers.3.mlp.gate.expert_bias"])
    assert not [key for key in stored if key.startswith(dense + "mlp.router")]
    objects = TorchDistReader(iteration).contents.objects
    assert f"{sparse}{FC2}._extra_state/shard_15_16" in objects
    assert sparse + "mlp.shared_experts.linear_fc2._extra_state/shard_0_1" in objects
    assert dense + "mlp.linear_fc1._extra_state/shard_0_1" in objects


@pytest.mark.parametrize(
    ("layout", "ranks"),
    [
        (Layout(ep=4), {0: [0, 1], 1: [2, 3], 2: [4, 5], 3: [6, 7]}),
        (Layout(tp=2, ep=2, etp=1), {0: [0, 1, 2, 3], 1: [4, 5, 6, 7]}),
        (Layout(tp=2, ep=2), {0: [0, 1, 2, 3], 1: [0, 1, 2, 3], 2: [4, 5, 6, 7], 3: [4, 5, 6, 7]}),
    ],
    ids=["ep4", "tp2-ep2-etp1", "tp2-ep2"],
)
def test_experts_lie_with_the_rank_that_holds_them(
    tmp_path: Path, layout: Layout, ranks: dict[int, list[int]]
) -> None:
    """Expert tensor parallel ranks count first, then expert parallel ones; the rest goes by tensor parallelism."""
    contents = TorchDistReader(imported(RND1, tmp_path, layout)).contents
    found: dict[int, set[int]] = {}
    for chunk in contents.tensors[f"decoder.layers.{FC2}.weight"].chunks:
        found.setdefault(_rank(chunk.place.file), set()).add(chunk.offsets[1])
        assert chunk.sizes == (1, 1, 64, 32 // layout.expert_tp)
    assert {rank: sorted(experts) for rank, experts in found.items()} == ranks
    router = contents.tensors["decoder.layers.mlp.router.weight"].chunks
    assert {_rank(chunk.place.file) for chunk in router} == {0}
    projections = contents.tensors["decoder.layers.self_attention.linear_proj.weight"].chunks
    assert {_rank(chunk.place.file) for chunk in projections} == set(range(layout.tp))


@pytest.mark.parametrize(
    ("case", "layout", "field", "named"),
    [
        (RND1, Layout(ep=3), "ep", "1, 2, 4, 8"),
        (RND1, Layout(tp=4), "tp", "2 query groups"),
        (RND1, Layout(etp=3), "etp", "32"),
        (LLADA2, Layout(tp=4), "tp", "2 query groups"),
    ],
    ids=["ep", "tp", "etp", "fused"],
)
def test_layouts_that_the_model_cannot_take(
    tmp_path: Path, case: rnd1.FamilyCase, layout: Layout, field: str, named: str
) -> None:
    bridge = Bridge.from_hf(case.write(tmp_path / "hub"))
    with refused(LayoutError, field, named):
        bridge.to_megatron(tmp_path / "out", layout)
    assert not (tmp_path / "out").exists()


def test_resharding_experts(tmp_path: Path) -> None:
    """Through three layouts to the bits of a direct import."""
    imported(LLADA2, tmp_path, Layout(pp=2, ep=4))
    bridge = Bridge.from_megatron(tmp_path / "megatron")
    bridge.to_megatron(tmp_path / "second", Layout(tp=2, ep=2, etp=1))
    Bridge.from_megatron(tmp_path / "second").to_megatron(tmp_path / "third", Layout())
    Bridge.from_hf(tmp_path / "hub").to_megatron(tmp_path / "direct", Layout())
    third, direct = (dcp_tensors(tmp_path / name / "iter_0000000") for name in ("third", "direct"))
    assert third.keys() == direct.keys()
    for key, tensor in direct.items():
        assert third[key].dtype == tensor.dtype, key
        assert torch.equal(third[key], tensor), key


def test_fused_qkv_is_interleaved_per_query_group() -> None:
    """By hand: two groups of two query heads, heads of one row; rows are numbered q0..q3, k0, k1, v0, v1."""
    dims = Dims(layers=1, hidden=1, heads=4, groups=2, head_dim=1, ffn=1, vocab=1)
    rule = FusedQKV("", name="qkv")
    fused = torch.arange(8.0)[:, None]
    interleaved = rule.to_megatron([fused], dims)
    assert interleaved.flatten().tolist() == [0, 1, 4, 6, 2, 3, 5, 7]
    assert torch.equal(rule.to_hub(interleaved, dims)[0], fused)


def _rank(file: str) -> int:
    return int(file.strip("_").partition("_")[0])


def merged(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """dFactory's layout (scripts/moe_convertor.py, 92b6890): stacks of experts, without ".weight"."""
    stacks: dict[str, list[torch.Tensor]] = {}
    kept = {}
    for name, tensor in tensors.items():
        layer, _, rest = name.partition(".experts.")
        if rest:
            stacks.setdefault(f"{layer}.experts.{rest.split('.')[1]}", []).append(tensor)
        else:
            kept[name] = tensor
    return kept | {name: torch.stack(experts) for name, experts in stacks.items()}


@pytest.mark.parametrize(
    ("case", "layout"),
    zip(llada2_moe.CASES, (Layout(tp=2, pp=2, ep=2, etp=1), Layout()), strict=True),
    ids=["2.0-cut", "2.2-whole"],
)
@pytest.mark.fast("2.2-whole")
def test_merged_experts_and_single_ones_become_each_other(
    tmp_path: Path, case: rnd1.FamilyCase, layout: Layout
) -> None:
    apart = case.tensors(case.config, 0, torch.bfloat16)
    config = {**case.config, "model_type": "llada2_moe_veomni"}
    source = write_hub_folder(tmp_path / "dfactory", config, merged(apart))
    assert "model.layers.1.mlp.experts.gate_proj" in hub_tensors(source)
    Bridge.from_hf(source).to_megatron(tmp_path / "megatron", layout)
    Bridge.from_hf(case.write(tmp_path / "hub", torch.bfloat16)).to_megatron(tmp_path / "same", layout)
    same, found = (dcp_tensors(tmp_path / name / "iter_0000000") for name in ("same", "megatron"))
    assert same.keys() == found.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in same.items())
    for checkpoint, other in (("megatron", "hub"), ("same", "dfactory")):
        Bridge.from_megatron(tmp_path / checkpoint).to_hf(tmp_path / f"{checkpoint}-back")
        changed = Bridge.from_megatron(tmp_path / checkpoint, hf_config=tmp_path / other / "config.json")
        changed.to_hf(tmp_path / f"{checkpoint}-as-{other}")
    for name in ("megatron-back", "same-as-dfactory"):
        found = hub_tensors(tmp_path / name)
        assert found.keys() == merged(apart).keys()
        assert all(torch.equal(found[key], tensor) for key, tensor in merged(apart).items())
        assert config_of(tmp_path / name)["model_type"] == "llada2_moe_veomni"
    for name in ("same-back", "megatron-as-hub"):
        found = hub_tensors(tmp_path / name)
        assert found.keys() == apart.keys()
        assert all(torch.equal(found[key], tensor) for key, tensor in apart.items())
        assert config_of(tmp_path / name)["model_type"] == "llada2_moe"

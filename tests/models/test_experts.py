"""Experts and routers on the Hub side: loading, dtypes, kernels, and configurations that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dlm_bridge import Bridge
from dlm_bridge.errors import CheckpointError, DlmBridgeError
from dlm_bridge.models.modeling_llada2_moe import routing_blocks
from dlm_bridge.objectives.noise import Uniforms
from dlm_bridge.objectives.two_streams import BlockDiffusion
from tests.families import llada2_moe, llada_moe, rnd1
from tests.families.case import FamilyCase, config_of
from tests.refusals import refused

RND1, LLADA_MOE = rnd1.CASE, llada_moe.CASE
LLADA2, BLOCK_ROUTED = llada2_moe.CASES
DOWN = "model.layers.1.mlp.experts.3.down_proj.weight"
ROUTER = ("mlp.gate.weight", "mlp.gate.e_score_correction_bias")


def write(case: FamilyCase, folder: Path, tensors: dict[str, torch.Tensor], **overrides: Any) -> Path:
    """The case's folder with these tensors in one file."""
    case.write(folder, **overrides)
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


# ------------------------------------------------------------------------------------------------- loading


def test_dllms_model_type_is_llada_moes(tmp_path: Path) -> None:
    """dLLM's examples tell users to write `lladamoe` into the Hub's config.json; saving keeps it."""
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    folder = LLADA_MOE.write(tmp_path / "hub", model_type="lladamoe")
    assert type(AutoConfig.from_pretrained(folder)) is LLADA_MOE.spec.load("config_class")
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert type(model) is type(AutoModel.from_pretrained(folder)) is LLADA_MOE.spec.load("model_class")
    model.save_pretrained(tmp_path / "out")
    assert config_of(tmp_path / "out") == config_of(folder)
    Bridge.from_hf(folder).to_megatron(tmp_path / "megatron")
    Bridge.from_megatron(tmp_path / "megatron").to_hf(tmp_path / "back")
    assert config_of(tmp_path / "back") == config_of(folder)


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    tensors = RND1.tensors(RND1.config, 0, torch.float32)
    del tensors[DOWN]
    with refused(CheckpointError, tmp_path / "hub", f"lacks {DOWN}"):
        RND1.load(write(RND1, tmp_path / "hub", tensors))


def test_a_superfluous_expert_does_not_stand_in_for_a_missing_one(tmp_path: Path) -> None:
    """transformers would stack the eight that are there."""
    tensors = RND1.tensors(RND1.config, 0, torch.float32)
    tensors[DOWN.replace("3.down", "8.down")] = tensors.pop(DOWN)
    with refused(CheckpointError, tmp_path / "hub", f"lacks {DOWN}"):
        RND1.load(write(RND1, tmp_path / "hub", tensors))


def test_an_expert_too_many_is_named(tmp_path: Path) -> None:
    tensors = RND1.tensors(RND1.config, 0, torch.float32)
    tensors[DOWN.replace("3.down", "8.down")] = tensors[DOWN].clone()
    with refused(CheckpointError, tmp_path / "hub", "layers.1.mlp.experts.8.down_proj.weight", "8 experts"):
        RND1.load(write(RND1, tmp_path / "hub", tensors))


@pytest.mark.parametrize("part", ["gate_proj", "up_proj"])
def test_half_of_the_experts_tensors_missing(tmp_path: Path, part: str) -> None:
    tensors = RND1.tensors(RND1.config, 0, torch.float32)
    kept = {name: tensor for name, tensor in tensors.items() if not ("layers.1.mlp.experts." in name and part in name)}
    with refused(CheckpointError, tmp_path / "hub", f"lacks model.layers.1.mlp.experts.0.{part}.weight"):
        RND1.load(write(RND1, tmp_path / "hub", kept))


def test_a_mis_shaped_expert_is_named(tmp_path: Path) -> None:
    tensors = RND1.tensors(RND1.config, 0, torch.float32)
    tensors[DOWN] = tensors[DOWN].T.contiguous()
    with refused(CheckpointError, tmp_path / "hub", DOWN, "(32, 64)", "(64, 32)"):
        RND1.load(write(RND1, tmp_path / "hub", tensors))


@pytest.mark.parametrize("case", [RND1, LLADA_MOE], ids=lambda case: case.name)
def test_the_second_name_of_an_architecture_is_kept(case: FamilyCase, tmp_path: Path) -> None:
    second = case.spec.architectures[1]
    model = case.load(case.write(tmp_path / "hub", architectures=[second]))
    model.save_pretrained(tmp_path / "saved")
    assert config_of(tmp_path / "saved")["architectures"] == [second]


@pytest.mark.parametrize("case", [RND1, LLADA2], ids=lambda case: case.name)
def test_experts_run_in_one_kernel(case: FamilyCase, tmp_path: Path) -> None:
    """Not in transformers' loop over experts, which remains as a choice and computes the same."""
    folder = case.write(tmp_path / "hub")
    ids = torch.arange(40)[None]
    model, loop = case.load(folder), case.load(folder, experts_implementation="eager")
    assert model.config._experts_implementation == "grouped_mm"
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, loop(ids).logits, atol=1e-5, rtol=0)


# ------------------------------------------------------------------------------------------------- routing by blocks


def test_routing_blocks_end_with_documents_streams_and_padding() -> None:
    positions = torch.tensor([[0, 1, 2, 3, 4, 5, 0, 1, 0], [0, 1, 2, 0, 1, 2, 0, 0, 0], [0, 0, 0, 1, 2, 3, 4, 4, 4]])
    blocks = routing_blocks(positions, 4).view(3, 9)
    packed, streams, padded = (row - row[0] for row in blocks)
    assert packed.tolist() == [0, 0, 0, 0, 1, 1, 2, 2, 3]  # positions start again: another document
    assert streams.tolist() == [0, 0, 0, 1, 1, 1, 2, 3, 4]  # the second stream's block, then padding
    assert padded.tolist() == [0, 1, 2, 2, 2, 2, 3, 4, 5]  # on both sides: every padding token is alone
    assert (blocks[:, 0].diff() > 0).all()


def test_a_noisy_block_is_trained_with_the_experts_that_it_is_sampled_with(tmp_path: Path) -> None:
    """Logits of a noisy block between two streams and of the same block behind its clean text."""
    model = BLOCK_ROUTED.load(BLOCK_ROUTED.write(tmp_path / "hub", block_size=8, expert_capacity=4))
    ids = torch.arange(40).view(2, 20) * 7 % 100
    labels = ids.masked_fill(torch.arange(20) < 3, -100)
    noisy = BlockDiffusion(mask_token_id=99, block_size=8).noise(ids, Uniforms.keyed(1, 0, [0, 1], 20), labels)
    with torch.no_grad():
        found = noisy.logits(model).split(noisy.mask.sum(dim=1).tolist())
        for row in range(2):
            alone = []
            for begin in range(0, 20, 8):
                block = slice(begin, min(begin + 8, 20))
                text = torch.cat([ids[row, :begin], noisy.input_ids[row, block]])[None]
                alone.append(model(text).logits[0, begin:][noisy.mask[row, block]])
            torch.testing.assert_close(found[row], torch.cat(alone), atol=1e-5, rtol=1e-5)


# ------------------------------------------------------------------------------------------------- dtypes


@pytest.mark.parametrize("asked", [None, torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_routers_keep_the_stored_dtype_in_half_precision(
    tmp_path: Path, asked: torch.dtype | None, stored: torch.dtype
) -> None:
    tensors = LLADA2.tensors(LLADA2.config, 0, torch.bfloat16)
    router = {name: tensor.to(stored) for name, tensor in tensors.items() if "mlp.gate." in name}
    folder = write(LLADA2, tmp_path / "hub", tensors | router, dtype=torch.bfloat16)
    model = LLADA2.load(folder, **({} if asked is None else {"dtype": asked}))
    wanted = asked or torch.bfloat16
    for name, tensor in model.state_dict().items():
        is_router = name.endswith(ROUTER)
        assert tensor.dtype == (stored if is_router and wanted != torch.float32 else wanted), name
    assert model(torch.arange(20)[None]).logits.isfinite().all()
    assert model.dtype == wanted


@pytest.mark.parametrize(("asked", "others"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
@pytest.mark.fast("bf16-*")
def test_casting_leaves_routers_alone(tmp_path: Path, asked: str, others: torch.dtype) -> None:
    source = LLADA2.write(tmp_path / "hub")
    Bridge.from_hf(source).to_megatron(tmp_path / "megatron", dtype=asked)
    Bridge.from_megatron(tmp_path / "megatron").to_hf(tmp_path / "back")
    stored = LLADA2.tensors(LLADA2.config, 0, torch.float32)
    found = {name: t for file in (tmp_path / "back").glob("*.safetensors") for name, t in load_file(file).items()}
    assert found.keys() == stored.keys()
    for name, tensor in found.items():
        expected = stored[name] if "mlp.gate." in name else stored[name].to(others)
        assert tensor.dtype == expected.dtype, name
        assert torch.equal(tensor, expected), name
    assert config_of(tmp_path / "back")["torch_dtype"] == str(others).removeprefix("torch.")
    assert Bridge.from_megatron(tmp_path / "megatron").build_hf_model().dtype == others


def test_casting_to_fp32_takes_routers_along(tmp_path: Path) -> None:
    tensors = {name: t.bfloat16() for name, t in LLADA2.tensors(LLADA2.config, 0, torch.float32).items()}
    source = write(LLADA2, tmp_path / "hub", tensors)
    Bridge.from_hf(source).to_hf(tmp_path / "out", dtype="fp32")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert {tensor.dtype for tensor in found.values()} == {torch.float32}


# ------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("case", "overrides", "message"),
    [
        (LLADA_MOE, {"shared_expert_intermediate_size": 64}, "shared expert"),
        (LLADA_MOE, {"moe_layer_freq": [0, 1, 1, 1]}, "layers without experts"),
        (LLADA_MOE, {"moe_router_enable_expert_bias": True}, "moe_router_enable_expert_bias = True"),
        (LLADA_MOE, {"norm_topk_prob": True}, "norm_topk_prob = True"),
        (LLADA_MOE, {"qk_layernorm": False}, "qk_layernorm = False"),
        (LLADA_MOE, {"clip_qkv": 8.0}, "clip_qkv"),
        (LLADA2, {"use_qkv_bias": True}, "use_qkv_bias = True"),
        (LLADA2, {"score_function": "softmax"}, "score_function = 'softmax'"),
        (LLADA2, {"norm_topk_prob": False}, "norm_topk_prob = False"),
        (LLADA2, {"num_shared_experts": 0}, "num_shared_experts 0"),
        (LLADA2, {"rope_theta": 3000000, "max_position_embeddings": 131072}, "expert_capacity"),
        (BLOCK_ROUTED, {"expert_capacity": 3}, "expert_capacity 3|num_experts_per_tok 4"),
        (BLOCK_ROUTED, {"expert_capacity": 17}, "expert_capacity 17|num_experts 16"),
        (BLOCK_ROUTED, {"block_size": 0}, "block_size"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_what_the_body_cannot_do_is_refused_by_name(
    case: FamilyCase, overrides: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder, named = case.write(tmp_path / "hub", **overrides), message.split("|")
    with refused(CheckpointError, "config.json", *named):
        case.load(folder)
    with pytest.raises(DlmBridgeError, match=named[0]):
        Bridge.from_hf(folder)


def test_merged_experts_are_converted_but_not_loaded(tmp_path: Path) -> None:
    folder = LLADA2.write(tmp_path / "hub", model_type="llada2_moe_veomni")
    with refused(CheckpointError, "config.json", "`hf_config`"):
        LLADA2.spec.load("model_class").from_pretrained(folder)
    with pytest.raises(DlmBridgeError, match=r"experts\.down_proj"):  # the experts are separate here
        Bridge.from_hf(folder).to_megatron(tmp_path / "megatron")


@pytest.mark.parametrize(
    ("case", "overrides", "message"),
    [
        (RND1, {"num_experts_per_tok": 9}, "num_experts_per_tok 9"),
        (RND1, {"num_experts": None}, "num_experts None"),
        (LLADA2, {"n_group": 5}, "n_group 5"),
        (LLADA2, {"topk_group": 9}, "topk_group 9"),
    ],
)
def test_impossible_numbers_of_experts(
    case: FamilyCase, overrides: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = case.write(tmp_path / "hub")
    (folder / "config.json").write_text(json.dumps({**config_of(folder), **overrides}))
    with pytest.raises(DlmBridgeError, match=message):
        Bridge.from_hf(folder)

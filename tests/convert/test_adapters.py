"""Adapters, LoRA and DoRA: PEFT's folder, Megatron's layout and merged weights are the same change of a model."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dlm_bridge import Bridge, Layout
from dlm_bridge.convert.checkpoints import open_checkpoint
from dlm_bridge.convert.lora import MergedCheckpoint, open_adapter
from dlm_bridge.convert.lora.megatron import ADAPTER_MANIFEST
from dlm_bridge.convert.lora.peft import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from dlm_bridge.convert.settings import HubSettings
from dlm_bridge.convert.transfer import write_hub
from dlm_bridge.errors import CheckpointError, SettingError
from tests.checkpoints import standard_tensors, write_hub_folder, write_llada
from tests.convert.adapters import (
    ALPHA,
    LINEAR,
    LLAMA,
    RANK,
    back,
    same_factors,
    to_megatron,
    written_adapter,
)
from tests.convert.helpers import dcp_tensors, hub_tensors, run_cli, same, tree
from tests.refusals import refused


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return write_hub_folder(tmp_path / "llama", LLAMA, standard_tensors(LLAMA))


def live(folder: Path) -> Any:
    return Bridge.from_hf(folder).build_hf_model(torch.float32)


def peft_folder(base: Path, output: Path, targets: tuple[str, ...] = LINEAR, seed: int = 1, **config: Any) -> Path:
    """An adapter that PEFT itself made and saved, with random factors."""
    from peft import LoraConfig, get_peft_model

    settings = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=list(targets), task_type="CAUSAL_LM", **config)
    model = get_peft_model(live(base), settings)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    model.save_pretrained(output)
    return output


def share_a(folder: Path) -> None:
    """Give query, key and value one A, and gate and up."""
    tensors = load_file(folder / ADAPTER_WEIGHTS)
    for name in tensors:
        for first, others in (("q_proj", ("k_proj", "v_proj")), ("gate_proj", ("up_proj",))):
            if f"{first}.lora_A" in name:
                for other in others:
                    tensors[name.replace(first, other)] = tensors[name].clone()
    save_file(tensors, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})


def logits(model: Any) -> torch.Tensor:
    tokens = torch.arange(24).view(2, 12) % 60
    with torch.no_grad():
        return model(input_ids=tokens).logits


@pytest.mark.parametrize("dora", [False, True])
def test_peft_merged_and_megatron_are_one_change(dora: bool, llama: Path, tmp_path: Path) -> None:
    from peft import PeftModel

    adapter = peft_folder(llama, tmp_path / "lora", use_dora=dora)
    tuned = PeftModel.from_pretrained(live(llama), adapter)
    expected = logits(tuned)
    assert (expected - logits(live(llama))).abs().max() > 0.1  # the adapter does something
    base = open_checkpoint(llama)
    write_hub(MergedCheckpoint(base, open_adapter(adapter, base)), tmp_path / "merged", HubSettings())
    torch.testing.assert_close(logits(live(tmp_path / "merged")), expected, rtol=1e-4, atol=1e-4)
    by_peft = {f"{name}": value for name, value in tuned.merge_and_unload().state_dict().items()}
    for name, tensor in hub_tensors(tmp_path / "merged").items():
        torch.testing.assert_close(tensor, by_peft[name], rtol=1e-6, atol=1e-6)
    # From the Megatron layout, and into a base in the Megatron layout.
    megatron = to_megatron(llama, adapter, tmp_path / "megatron", Layout(tp=2, pp=2))
    Bridge.from_hf(llama).to_megatron(tmp_path / "base", Layout(tp=2))
    other = open_checkpoint(tmp_path / "base")
    write_hub(MergedCheckpoint(other, open_adapter(megatron, other)), tmp_path / "merged2", HubSettings())
    ours, again = hub_tensors(tmp_path / "merged"), hub_tensors(tmp_path / "merged2")
    assert ours.keys() == again.keys()
    assert all(same(ours[name], again[name]) for name in ours)


@pytest.mark.parametrize("style", ["canonical", "fused"])
def test_megatron_factors_multiply_to_the_change_of_the_fused_weight(llama: Path, tmp_path: Path, style: str) -> None:
    adapter = peft_folder(llama, tmp_path / "lora")
    if style == "fused":
        share_a(adapter)
    out = to_megatron(llama, adapter, tmp_path / "out", Layout(tp=2), style)
    stored = dcp_tensors(out / "iter_0000000")
    base = open_checkpoint(llama)
    opened = open_adapter(adapter, base)
    qkv = "decoder.layers.self_attention.linear_qkv.adapter."
    fc1 = "decoder.layers.mlp.linear_fc1.adapter."

    def product(prefix: str, layer: int) -> torch.Tensor:
        return (
            stored[f"{prefix}linear_out.weight"][layer] @ stored[f"{prefix}linear_in.weight"][layer] * (ALPHA / RANK)
        )

    for param in base.params:
        if param.layer is None or len(param.hub_shapes[0]) != 2:
            continue
        wanted = param.to_megatron([opened.delta(name) for name in param.hub_names])
        module = param.rule.megatron.removesuffix(".weight").replace("{layer}.", "")
        prefixes = [f"{module}.adapter."]
        if style == "canonical" and module.endswith("linear_qkv"):
            prefixes = [f"{qkv}adapter_{letter}." for letter in "qkv"]
        elif style == "canonical" and module.endswith("linear_fc1"):
            prefixes = [f"{fc1}adapter_{which}." for which in ("gate", "up")]
        parts = [product(prefix, param.layer) for prefix in prefixes]
        found = parts[0] if len(parts) == 1 else param.to_megatron(parts)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def test_ranks_hold_the_rows_and_columns_of_their_weight(llama: Path, tmp_path: Path) -> None:
    """B is cut by rows as the weight is; A by its rank, but behind a row parallel layer by columns; magnitudes are cut
    where the weight's rows are."""
    from dlm_bridge.convert.checkpoints.torch_dist import TorchDistReader

    out = to_megatron(llama, peft_folder(llama, tmp_path / "lora", use_dora=True), tmp_path / "out", Layout(tp=2))
    tensors = TorchDistReader(out / "iter_0000000").contents.tensors
    sizes = {
        key.removeprefix("decoder.layers.").replace(".adapter.", " "): {chunk.sizes[1:] for chunk in tensor.chunks}
        for key, tensor in tensors.items()
    }
    assert sizes["self_attention.linear_qkv adapter_q.linear_in.weight"] == {(RANK // 2, 32)}
    assert sizes["self_attention.linear_qkv adapter_q.linear_out.weight"] == {(16, RANK)}
    assert sizes["self_attention.linear_proj linear_in.weight"] == {(RANK, 16)}
    assert sizes["self_attention.linear_proj linear_out.weight"] == {(16, RANK)}
    assert sizes["mlp.linear_fc2 linear_in.weight"] == {(RANK, 24)}
    assert sizes["mlp.linear_fc1 adapter_up.linear_out.weight"] == {(24, RANK)}
    assert sizes["self_attention.linear_qkv adapter_q.weight_magnitude"] == {(16,)}
    assert sizes["mlp.linear_fc1 adapter_up.weight_magnitude"] == {(24,)}
    assert sizes["mlp.linear_fc2 weight_magnitude"] == {(32,)}
    files = {chunk.place.file for tensor in tensors.values() for chunk in tensor.chunks}
    assert files == {"__0_0.distcp", "__1_0.distcp"}


@pytest.mark.parametrize(
    ("targets", "layout", "shared", "dora"),
    [
        (LINEAR, Layout(tp=2, pp=2), False, False),
        (LINEAR, Layout(pp=2), True, False),
        (("q_proj", "v_proj"), Layout(), False, False),
        (("o_proj", "down_proj"), Layout(tp=2), False, False),
        (LINEAR, Layout(tp=2, pp=2), False, True),
        (LINEAR, Layout(tp=2), True, True),
        (("q_proj", "v_proj", "o_proj"), Layout(), False, True),
    ],
    ids=["all", "shared", "q-and-v", "row-parallel", "dora", "dora-shared", "dora-q-v-o"],
)
def test_round_trip_is_exact(
    llama: Path, tmp_path: Path, targets: tuple[str, ...], layout: Layout, shared: bool, dora: bool
) -> None:
    adapter = peft_folder(llama, tmp_path / "lora", targets, use_rslora=shared, use_dora=dora)
    if shared:
        share_a(adapter)
    out = to_megatron(llama, adapter, tmp_path / "out", layout)
    assert json.loads((out / ADAPTER_MANIFEST).read_text())["style"] == (
        "canonical" if not shared and "q_proj" in targets else "fused"
    )
    again = back(llama, out, tmp_path / "again")
    assert same_factors(adapter, again)
    assert {k: v for k, v in tree(adapter).items() if k != ADAPTER_WEIGHTS} == {
        k: v for k, v in tree(again).items() if k != ADAPTER_WEIGHTS
    }
    scale = ALPHA / (math.sqrt(RANK) if shared else RANK)
    for folder in (out, adapter):
        assert open_adapter(folder, open_checkpoint(llama)).facts.scale == scale


def test_a_family_of_other_module_names(tmp_path: Path) -> None:
    """LLaDA's tensors on the Hub are named otherwise than its modules, which PEFT sees; both names are taken."""
    base = write_llada(tmp_path / "llada", n_kv_heads=2)
    adapter = peft_folder(base, tmp_path / "lora")
    assert any(".self_attn.q_proj." in name for name in load_file(adapter / ADAPTER_WEIGHTS))
    out = to_megatron(base, adapter, tmp_path / "out", Layout(tp=2))
    assert same_factors(adapter, back(base, out, tmp_path / "again"))
    # The same adapter as the Hub's own code would have saved it.
    hub = tmp_path / "hub-names"
    shutil.copytree(adapter, hub)
    opened = open_adapter(adapter, open_checkpoint(base))
    renamed = {
        f"base_model.model.{weight.removesuffix('.weight')}.lora_{part}.weight": opened.tensor(weight, part)  # type: ignore[arg-type]
        for weight in opened.facts.modules
        for part in "AB"
    }
    save_file(renamed, hub / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    other = dcp_tensors(to_megatron(base, hub, tmp_path / "out2", Layout(tp=2)) / "iter_0000000")
    first = dcp_tensors(out / "iter_0000000")
    assert first.keys() == other.keys()
    assert all(same(first[key], other[key]) for key in first)


def test_bridges_own_checkpoint_is_read_with_its_run_config(llama: Path, tmp_path: Path) -> None:
    adapter = peft_folder(llama, tmp_path / "lora")
    out = to_megatron(llama, adapter, tmp_path / "out")
    (out / ADAPTER_MANIFEST).unlink()
    shutil.rmtree(out / "hf")
    with refused(CheckpointError, out, "dlm_bridge_adapter.json", "run_config.yaml"):
        open_adapter(out, open_checkpoint(llama))
    target = "megatron.bridge.peft.canonical_lora.CanonicalLoRA"
    (out / "iter_0000000" / "run_config.yaml").write_text(f"peft:\n  _target_: {target}\n  dim: 4\n  alpha: 16\n")
    again = back(llama, out, tmp_path / "again")
    config = json.loads((again / ADAPTER_CONFIG).read_text())
    assert (config["lora_alpha"], config["r"]) == (16, RANK)
    assert config["target_modules"] == sorted(LINEAR)
    assert same_factors(adapter, again)
    from peft import PeftModel

    PeftModel.from_pretrained(live(llama), again)  # PEFT takes what was written


def test_bfloat16_is_rounded_once(tmp_path: Path) -> None:
    config = {**LLAMA, "torch_dtype": "bfloat16"}
    base = write_hub_folder(tmp_path / "llama", config, standard_tensors(config, dtype=torch.bfloat16))
    adapter = written_adapter(base, tmp_path)
    opened = open_checkpoint(base)
    write_hub(MergedCheckpoint(opened, open_adapter(adapter, opened)), tmp_path / "merged", HubSettings())
    before, merged, factors = hub_tensors(base), hub_tensors(tmp_path / "merged"), load_file(adapter / ADAPTER_WEIGHTS)
    name = "model.layers.1.mlp.down_proj"
    a, b = (factors[f"base_model.model.{name}.lora_{part}.weight"] for part in "AB")
    exact = before[f"{name}.weight"].double() + ALPHA / RANK * (b.double() @ a.double())
    error = (merged[f"{name}.weight"].double() - exact).abs()
    assert (error <= exact.abs() * 2**-8).all()  # half a unit in the last place of bfloat16
    assert same(merged["model.norm.weight"], before["model.norm.weight"])


def test_command_line(llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    adapter = written_adapter(llama, tmp_path)
    code, out, _ = run_cli(capsys, "adapter", "import", adapter, tmp_path / "m", "--base", llama, "--tp", 2, "--json")
    assert code == 0
    report = json.loads(out)
    assert (report["style"], report["rank"], report["layout"]["tp"]) == ("canonical", RANK, 2)
    code, out, _ = run_cli(capsys, "adapter", "export", tmp_path / "m", tmp_path / "p", "--base", llama)
    assert code == 0
    assert "rank 4, alpha 8" in out
    for source, output in ((tmp_path / "m", "a"), (adapter, "b")):
        merge = ("--base", llama, "--merge", "--json")
        code, out, _ = run_cli(capsys, "adapter", "export", source, tmp_path / output, *merge)
        assert code == 0
        assert f"the adapter {source} is merged into 14 weights" in json.loads(out)["notes"]
    assert tree(tmp_path / "a") == tree(tmp_path / "b")
    code, _, err = run_cli(capsys, "adapter", "export", adapter, tmp_path / "c", "--base", llama, "--dtype", "bf16")
    assert code == 2
    assert "--dtype" in err
    assert "--merge" in err
    code, _, err = run_cli(capsys, "adapter", "import", adapter, tmp_path / "m", "--base", llama)
    assert code == 2
    assert "exists" in err


def test_latent_attention_and_leading_dense_layers(tmp_path: Path) -> None:
    """DeepSeek-V3: its down-projections are whole on every rank, and its layers stand under keys of their own, so that
    an adapter of the dense ones alone converts too."""
    config = {
        **LLAMA,
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "num_hidden_layers": 2,
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "num_nextn_predict_layers": 0,
    }
    from dlm_bridge.models.deepseek_v3 import MAPPING

    dims = MAPPING.dims(config)
    params = list(MAPPING.params(dims))
    shapes = {name: shape for param in params for name, shape in zip(param.hub_names, param.hub_shapes, strict=True)}
    base = write_hub_folder(tmp_path / "v3", config, {name: torch.randn(shape) for name, shape in shapes.items()})
    latent = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
    adapter = written_adapter(base, tmp_path, (*latent, *LINEAR))
    out = to_megatron(base, adapter, tmp_path / "out", Layout(tp=2, pp=2, ep=2, etp=1))
    stored = dcp_tensors(out / "iter_0000000")
    assert "decoder.layers.0.self_attention.linear_q_down_proj.adapter.linear_in.weight" in stored
    assert "decoder.layers.1.mlp.shared_experts.linear_fc1.adapter.adapter_up.linear_out.weight" in stored
    assert same_factors(adapter, back(base, out, tmp_path / "again"))


def test_one_fused_tensor_on_the_hub(tmp_path: Path) -> None:
    """LLaDA2 has query, key and value in one tensor, whose rows Megatron orders by query groups."""
    from tests.families.llada2_moe import CONFIG as LLADA2
    from tests.families.llada2_moe import tensors

    base = write_hub_folder(tmp_path / "llada2", LLADA2, tensors(LLADA2, dtype=torch.bfloat16))
    fused = [name for name in hub_tensors(base) if name.endswith("query_key_value.weight")]
    adapter = written_adapter(base, tmp_path, ["query_key_value"])
    out = to_megatron(base, adapter, tmp_path / "out", Layout(tp=2))
    assert same_factors(adapter, back(base, out, tmp_path / "again"))
    opened = open_checkpoint(base)
    delta = open_adapter(adapter, opened).delta(fused[0])
    param = opened.param_of[fused[0]]
    stored = dcp_tensors(out / "iter_0000000")
    key = param.megatron_key.removesuffix("weight") + "adapter."
    product = stored[f"{key}linear_out.weight"] @ stored[f"{key}linear_in.weight"] * (ALPHA / RANK)
    torch.testing.assert_close(product, param.to_megatron([delta]), rtol=1e-5, atol=1e-5)
    with refused(SettingError, "style", "style=fused"):
        to_megatron(base, adapter, tmp_path / "out2", style="canonical")

"""LoRA over routed experts, as PEFT keeps it, merged into the weights of each expert."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dlm_bridge import Bridge, DlmBridgeError, Layout
from dlm_bridge.convert.checkpoints import open_checkpoint
from dlm_bridge.convert.checkpoints.megatron import iteration_folder
from dlm_bridge.convert.checkpoints.torch_dist import TorchDistReader
from dlm_bridge.convert.lora import MergedCheckpoint, export_adapter, open_adapter
from dlm_bridge.convert.lora.megatron import write_megatron_adapter
from dlm_bridge.convert.lora.peft import ADAPTER_WEIGHTS
from dlm_bridge.convert.settings import HubSettings
from dlm_bridge.convert.transfer import write_hub
from dlm_bridge.errors import CheckpointError
from dlm_bridge.hub import ADAPTER_CONFIG
from tests.autoregressive.cases import CASES
from tests.canvas_models import canvas_model, has_class, write_canvas_model
from tests.convert.adapters import ALPHA, RANK, set_config, set_weights
from tests.convert.helpers import hub_tensors, run_cli
from tests.families import llada2_moe, llada_moe, sdar_moe
from tests.refusals import refused

STACKS = ("experts.down_proj", "experts.gate_up_proj")
ENCODER, DECODER = ".encoder.language_model.", ".decoder."


def adapter_of(model: Any, output: Path, stacks: tuple[str, ...] = STACKS, modules: Any = ()) -> Any:
    """PEFT's model with random factors, which it saves to `output`."""
    from peft import LoraConfig, get_peft_model

    settings = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=modules or [], target_parameters=list(stacks))
    tuned = get_peft_model(model, settings)
    generator = torch.Generator().manual_seed(1)
    factors = {name: parameter for name, parameter in tuned.named_parameters() if "lora_" in name}
    with torch.no_grad():
        for name, factor in factors.items():
            twin = factors.get(name.replace(ENCODER, DECODER)) if ENCODER in name else None
            factor.copy_(torch.randn(factor.shape, generator=generator) * 0.2 if twin is None else twin)
        for name, factor in factors.items():
            factor.copy_(factors[name.replace(ENCODER, DECODER)])
    tuned.save_pretrained(output)
    return tuned.eval()


def merged(base: Path, adapter: Path, output: Path) -> Path:
    opened = open_checkpoint(base)
    write_hub(MergedCheckpoint(opened, open_adapter(adapter, opened)), output, HubSettings())
    return output


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.arange(3, 27).view(2, 12)).logits


MIXTRAL = next(case for case in CASES if case.label == "mixtral")


@pytest.mark.parametrize("stacks", [STACKS, STACKS[:1], STACKS[1:]], ids=["both", "down", "gate-up"])
@pytest.mark.parametrize(
    "case",
    [MIXTRAL, llada_moe.CASE, llada2_moe.CASE, sdar_moe.CASE],
    ids=["mixtral", "llada_moe", "llada2_moe", "sdar_moe"],
)
@pytest.mark.fast("*-both")
def test_a_merged_model_computes_what_peft_s_does(case: Any, stacks: tuple[str, ...], tmp_path: Path) -> None:
    base = case.write(tmp_path / "base")
    model = Bridge.from_hf(base).build_hf_model(torch.float32).eval()
    before = logits(model)
    expected = logits(adapter_of(model, tmp_path / "lora", stacks, ["o_proj", "dense"]))
    assert (expected - before).abs().max() > 0.01
    merged(base, tmp_path / "lora", tmp_path / "merged")
    found = Bridge.from_hf(tmp_path / "merged").build_hf_model(torch.float32).eval()
    torch.testing.assert_close(logits(found), expected, rtol=1e-4, atol=1e-4)


def test_megatron_s_layout_and_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """PEFT's tensors bit for bit; each expert has an adapter of its own, cut over expert and tensor parallel ranks."""
    case = llada2_moe.CASE
    base = case.write(tmp_path / "base")
    model = Bridge.from_hf(base).build_hf_model(torch.float32)
    adapter_of(model, tmp_path / "lora", STACKS, ["query_key_value", "dense"])
    for tp in (1, 2):
        there = ("adapter", "import", tmp_path / "lora", tmp_path / f"tp{tp}", "--base", base, "--tp", tp)
        back = ("adapter", "export", tmp_path / f"tp{tp}", tmp_path / f"back{tp}", "--base", base)
        for arguments in (there, back):
            code, _, err = run_cli(capsys, *arguments)
            assert code == 0, err
        given, found = (load_file(tmp_path / name / ADAPTER_WEIGHTS) for name in ("lora", f"back{tp}"))
        assert given.keys() == found.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in given.items())
        settings = json.loads((tmp_path / f"back{tp}" / ADAPTER_CONFIG).read_text())
        assert sorted(settings["target_parameters"]) == sorted(STACKS)
    stored = TorchDistReader(iteration_folder(tmp_path / "tp2")).contents.tensors
    shape = stored["decoder.layers.2.mlp.experts.experts.linear_fc1.adapter.linear_in.weight"].shape
    assert shape == (case.config["num_experts"], RANK, case.config["hidden_size"])
    merging = ("adapter", "export", tmp_path / "tp2", tmp_path / "merged", "--base", base, "--merge")
    assert run_cli(capsys, *merging)[0] == 0
    merged(base, tmp_path / "lora", tmp_path / "wanted")
    wanted, found = (hub_tensors(tmp_path / name) for name in ("wanted", "merged"))
    assert wanted.keys() == found.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


@has_class
def test_both_towers_of_a_canvas_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They share their experts, which are stacks on the Hub too."""
    base = write_canvas_model(tmp_path / "base")
    ids = {"input_ids": torch.arange(3, 15)[None], "decoder_input_ids": torch.arange(30, 38)[None]}
    tuned = adapter_of(canvas_model(), tmp_path / "lora")
    with torch.no_grad():
        expected, before = tuned(**ids).logits, canvas_model()(**ids).logits
    assert (expected - before).abs().max() > 0.01
    merging = ("adapter", "export", tmp_path / "lora", tmp_path / "merged", "--base", base, "--merge")
    assert run_cli(capsys, *merging)[0] == 0
    with torch.no_grad():
        found = type(canvas_model()).from_pretrained(tmp_path / "merged").eval()(**ids).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)

    def apart(tensors: dict[str, torch.Tensor]) -> None:
        tensors[next(name for name in tensors if ENCODER in name)] += 1

    set_weights(tmp_path / "lora", apart)
    with pytest.raises(DlmBridgeError, match=r"encoder\.language_model\.layers\.0\.experts.*: train both as one"):
        merged(base, tmp_path / "lora", tmp_path / "other")


def test_dfactory_s_layout(tmp_path: Path) -> None:
    """Gate and up projections of all experts in one tensor each."""
    case = llada2_moe.CASE
    base = case.write(tmp_path / "base")
    adapter_of(Bridge.from_hf(base).build_hf_model(torch.float32), tmp_path / "lora")
    single = hub_tensors(merged(base, tmp_path / "lora", tmp_path / "single"))
    config = {**case.config, "model_type": "llada2_moe_veomni"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    Bridge.from_hf(base).to_megatron(tmp_path / "megatron")
    Bridge.from_megatron(tmp_path / "megatron", hf_config=tmp_path / "config.json").to_hf(tmp_path / "stacked")
    stacked = hub_tensors(merged(tmp_path / "stacked", tmp_path / "lora", tmp_path / "all"))
    opened = open_checkpoint(tmp_path / "stacked")
    adapter = open_adapter(tmp_path / "lora", opened)
    with refused(CheckpointError, adapter.facts.where, "`merge`"):
        write_megatron_adapter(adapter, opened, tmp_path / "cut", Layout())
    with refused(CheckpointError, adapter.facts.where, "`merge`"):
        export_adapter(adapter, opened, tmp_path / "exported")
    for projection in ("gate", "up", "down"):
        prefix = "model.layers.2.mlp.experts."
        experts = [
            single[f"{prefix}{number}.{projection}_proj.weight"] for number in range(case.config["num_experts"])
        ]
        torch.testing.assert_close(stacked[f"{prefix}{projection}_proj"], torch.stack(experts))


def test_bad_adapters(tmp_path: Path) -> None:
    base = sdar_moe.CASE.write(tmp_path / "base")
    lora = tmp_path / "lora"
    adapter_of(Bridge.from_hf(base).build_hf_model(torch.float32), lora)
    good = load_file(lora / ADAPTER_WEIGHTS)
    first = min(good)

    def check(change: Any, *named: str) -> None:
        set_weights(lora, lambda tensors: (tensors.clear(), tensors.update(good), change(tensors)))
        with refused(CheckpointError, lora, *named):
            open_adapter(lora, open_checkpoint(base))

    check(lambda tensors: tensors.update({first: tensors[first][:-1].clone()}), "layers.0", str(good[first].shape[1]))
    check(lambda tensors: tensors.pop(first), "lora_A", "layers.0")
    others = {name.replace("layers.0", "layers.9"): good[name].clone() for name in sorted(good)[:2]}
    check(lambda tensors: tensors.update(others), "model.layers.9")
    set_config(lora, target_parameters=["gate.weight"])
    check(lambda tensors: None, "target_parameters")

"""Adapters that are refused: no plain LoRA, another model's, what Megatron's adapters cannot change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dlm_bridge import Bridge, DlmBridgeError, Layout
from dlm_bridge.convert.checkpoints import open_checkpoint
from dlm_bridge.convert.lora import open_adapter
from dlm_bridge.convert.lora.peft import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from dlm_bridge.errors import CheckpointError, LayoutError, SettingError
from tests.checkpoints import standard_tensors, write_hub_folder
from tests.convert.adapters import (
    LLAMA,
    RANK,
    back,
    same_factors,
    set_config,
    set_weights,
    to_megatron,
    written_adapter,
)
from tests.convert.helpers import no_leftovers, run_cli
from tests.refusals import refused


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return write_hub_folder(tmp_path / "llama", LLAMA, standard_tensors(LLAMA))


def with_magnitudes(tensors: dict[str, torch.Tensor], more: int = 0) -> None:
    """Give each module a magnitude of every row, and `more` of them."""
    for name in [name for name in tensors if "lora_B" in name]:
        magnitude = torch.ones(len(tensors[name]) + more)
        tensors[name.replace("lora_B.weight", "lora_magnitude_vector")] = magnitude


Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
HEAD = {f"base_model.model.lm_head.lora_{p}.weight": torch.ones(s) for p, s in (("A", (4, 32)), ("B", (64, 4)))}
SETTINGS = {
    "modules_to_save": ["lm_head"],
    "rank_pattern": {"q_proj": 2},
    "alpha_pattern": {"q_proj": 2},
    "bias": "all",
    "peft_type": "IA3",
    "init_lora_weights": "pissa_niter_4",
    "r": 0,
    "lora_alpha": "x",
}
Z = Q.replace("q_proj", "z_proj")
# (changes of adapter_config.json, change of the tensors, what the error names)
REFUSALS: dict[str, tuple[dict[str, Any], Any, str]] = {
    **{key: ({key: value}, None, key) for key, value in SETTINGS.items()},
    "dora without magnitudes": ({"use_dora": True}, None, "lora_magnitude_vector of model.layers.0.mlp.down_proj"),
    "dora of experts": ({"use_dora": True, "target_parameters": ["experts.down_proj"]}, None, "use_dora"),
    "magnitudes without dora": ({}, with_magnitudes, "use_dora"),
    "magnitudes of another size": ({"use_dora": True}, lambda t: with_magnitudes(t, more=1), "(33,)"),
    "other rank": ({"r": 2}, None, "(2, 48)"),
    "lost": ({}, lambda t: t.pop(Q + "B.weight"), "lora_B of model.layers.0.self_attn.q_proj"),
    "extra": ({}, lambda t: t.update(x=torch.ones(1)), "tensor x"),
    "unknown": ({}, lambda t: t.update({Z + "A.weight": torch.ones(4, 32)}), "model.layers.0.self_attn.z_proj"),
    "shape": ({}, lambda t: t.update({Q + "A.weight": torch.ones(4, 64)}), "(4, 64)"),
    "dtypes": ({}, lambda t: t.update({Q + "A.weight": torch.ones(4, 32).half()}), "float16 and float32"),
    "embedding": ({}, lambda t: t.update(HEAD), "lm_head.weight"),
}


@pytest.mark.parametrize(("settings", "change", "named"), REFUSALS.values(), ids=REFUSALS)
def test_what_is_no_adapter_of_the_base_is_refused(
    llama: Path, tmp_path: Path, settings: dict[str, Any], change: Any, named: str
) -> None:
    adapter = written_adapter(llama, tmp_path)
    set_config(adapter, **settings)
    if change is not None:
        set_weights(adapter, change)
    with refused(CheckpointError, None, named) as raised:
        to_megatron(llama, adapter, tmp_path / "out")
    assert raised.value.field in (str(adapter), str(adapter / ADAPTER_CONFIG))
    assert not (tmp_path / "out").exists()


def test_an_adapter_without_weights_is_refused(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = written_adapter(llama, tmp_path)
    (adapter / ADAPTER_WEIGHTS).unlink()
    code, _, err = run_cli(capsys, "adapter", "import", adapter, tmp_path / "out", "--base", llama)
    assert (code, err.count("\n")) == (2, 1)
    assert str(adapter) in err
    assert not (tmp_path / "out").exists()


def test_layouts_and_styles_that_cannot_be_are_refused(llama: Path, tmp_path: Path) -> None:
    adapter = written_adapter(llama, tmp_path)
    with refused(SettingError, "style", "style=canonical"):
        to_megatron(llama, adapter, tmp_path / "out", style="fused")
    with refused(SettingError, "style", "mixed"):
        to_megatron(llama, adapter, tmp_path / "out", style="mixed")
    with refused(LayoutError, "tp", "4"):
        to_megatron(llama, adapter, tmp_path / "out", Layout(tp=4))
    set_weights(adapter, lambda t: [t.pop(name) for name in list(t) if "layers.1." in name and "o_proj" in name])
    with refused(CheckpointError, adapter, "model.layers.1.self_attn.o_proj.weight"):
        to_megatron(llama, adapter, tmp_path / "out")
    assert no_leftovers(tmp_path)


def test_a_rank_that_tensor_parallelism_cannot_split_is_refused(llama: Path, tmp_path: Path) -> None:
    adapter = written_adapter(llama, tmp_path)
    set_config(adapter, r=3)

    def cut(tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            tensors[name] = (tensor[:3] if "lora_A" in name else tensor[:, :3]).contiguous()

    set_weights(adapter, cut)
    with refused(LayoutError, "tp", "2"):
        to_megatron(llama, adapter, tmp_path / "out", Layout(tp=2))


def test_experts_are_refused_and_attention_beside_them_converts(tmp_path: Path) -> None:
    config = {
        **LLAMA,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "norm_topk_prob": True,
    }
    base = write_hub_folder(tmp_path / "moe", config, standard_tensors(config, qk_norm=True))
    adapter = written_adapter(base, tmp_path)
    out = to_megatron(base, adapter, tmp_path / "out", Layout(tp=2, ep=2))
    assert same_factors(adapter, back(base, out, tmp_path / "again"))
    expert = "base_model.model.model.layers.0.mlp.experts.0.gate_proj.lora_"
    set_weights(
        adapter, lambda t: t.update({expert + "A.weight": torch.ones(4, 32), expert + "B.weight": torch.ones(16, 4)})
    )
    with refused(CheckpointError, adapter, "model.layers.0.mlp.experts.0.gate_proj.weight"):
        to_megatron(base, adapter, tmp_path / "out2")
    gate = "base_model.model.model.layers.0.mlp.gate.lora_"
    set_weights(adapter, lambda t: (t.pop(expert + "A.weight"), t.pop(expert + "B.weight")))
    set_weights(
        adapter, lambda t: t.update({gate + "A.weight": torch.ones(4, 32), gate + "B.weight": torch.ones(4, 4)})
    )
    with refused(CheckpointError, adapter, "model.layers.0.mlp.gate.weight"):
        to_megatron(base, adapter, tmp_path / "out2")


def test_another_models_adapter_is_refused_by_name(llama: Path, tmp_path: Path) -> None:
    adapter = written_adapter(llama, tmp_path)
    base = open_checkpoint(llama)
    base.hub.source = {"name": "owner/other", "revision": None}
    with pytest.raises(DlmBridgeError, match=r"owner/base.*owner/other"):
        open_adapter(adapter, base)
    base.hub.source = {"name": "owner/base", "revision": None}
    assert open_adapter(adapter, base).facts.rank == RANK


def test_a_megatron_adapter_of_another_model_is_refused(llama: Path, tmp_path: Path) -> None:
    out = to_megatron(llama, written_adapter(llama, tmp_path), tmp_path / "out")
    wider = {**LLAMA, "intermediate_size": 64}
    other = write_hub_folder(tmp_path / "other", wider, standard_tensors(wider))
    with refused(CheckpointError, out, "linear_fc1.adapter.adapter_gate.linear_out.weight"):
        open_adapter(out, open_checkpoint(other))
    whole = tmp_path / "whole"
    Bridge.from_hf(llama).to_megatron(whole, Layout())
    with refused(CheckpointError, whole):
        open_adapter(whole, open_checkpoint(llama))
    with refused(CheckpointError, llama):
        open_adapter(llama, open_checkpoint(llama))

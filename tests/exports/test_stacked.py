"""Quantised experts that the Hub stacks in one tensor: DiffusionGemma and gpt-oss."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dlm_bridge import Bridge, Layout
from dlm_bridge.errors import CheckpointError, SettingError
from dlm_bridge.evaluation.logits import canvas_length, model_logits
from dlm_bridge.exports.bounds import KL_LIMIT, verify_quantized
from dlm_bridge.exports.compressed import QuantizedCheckpoint
from dlm_bridge.exports.layers import QuantizedExperts, QuantizedLinear
from dlm_bridge.exports.loading import load_quantized
from tests.checkpoints import write_hub_folder
from tests.diffusion_gemma.checkpoint import config_with, write_checkpoint
from tests.exports.folders import export, stored, write
from tests.refusals import refused

# All experts process every token: with random weights, rounding would change which ones do.
TEXT = {
    "hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 128, "head_dim": 32, "global_head_dim": 32,
    "top_k_experts": 4, "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip
LAYERS = {
    "diffusion_gemma": "model.decoder.layers.{}.experts.",
    "gpt-oss": "model.layers.{}.mlp.experts.",
}


def source_of(folder: Path, name: str, **text: Any) -> Path:
    if name == "gpt-oss":
        return write(folder, name, num_experts_per_tok=4, **text)
    return write_checkpoint(folder, torch.bfloat16, config=config_with({**TEXT, **text}))


@pytest.mark.parametrize(("name", "scheme"), [("diffusion_gemma", "int8"), ("gpt-oss", "fp8"), ("gpt-oss", "int4")])
@pytest.mark.fast("diffusion_gemma-int8", "gpt-oss-int4")
def test_round_trip(name: str, scheme: str, tmp_path: Path) -> None:
    """Each expert has matrices of its own, in the order of the Hub tensor's columns or rows; every other tensor is
    the source's; logits are those of the dequantised weights, also without a folder."""
    source = source_of(tmp_path / "source", name)
    folder = export(source, tmp_path / "out", scheme)
    found, before = stored(folder), stored(source)
    end = "_packed" if scheme == "int4" else ""
    layers = 2 if name == "diffusion_gemma" else 4
    for layer in range(layers):
        prefix = LAYERS[name].format(layer)
        both = before.pop(prefix + "gate_up_proj")
        gate, up = (both[..., 0::2].mT, both[..., 1::2].mT) if name == "gpt-oss" else both.chunk(2, dim=1)
        down = before.pop(prefix + "down_proj")
        parts = {"gate_proj": gate, "up_proj": up, "down_proj": down.mT if name == "gpt-oss" else down}
        for expert in range(4):
            for part, weight in parts.items():
                made = found.pop(f"{prefix}{expert}.{part}.weight{end}")
                assert made.shape[0] == weight.shape[1]
                scale = found.pop(f"{prefix}{expert}.{part}.weight_scale")
                shape = found.pop(f"{prefix}{expert}.{part}.weight_shape", None)
                if scheme == "int4":
                    assert shape is not None
                    assert shape.tolist() == list(weight[expert].shape)
                    continue
                assert shape is None
                error = (made.float() * scale.float() - weight[expert].float()).abs()
                assert bool((error <= weight[expert].float().abs() / 16 + scale.float() / 2).all())
    rest = {key: value for key, value in found.items() if "weight_" not in key}
    assert all(torch.equal(before[key], value) for key, value in rest.items() if value.dtype == before[key].dtype)
    whole = {key for key, value in rest.items() if value.dtype == torch.bfloat16}
    assert not any("self_attn" in key and "decoder" in key and "proj" in key for key in whole)
    assert all(key in whole for key in before if "router" in key or "vision" in key or "self_conditioning" in key)
    verdict = verify_quantized(folder, source, logits=True)
    assert verdict.differences == []
    assert verdict.error <= 1
    assert verdict.kl is not None
    assert 0 < verdict.kl <= KL_LIMIT or scheme == "int4"
    one, _ = load_quantized(folder, "one", None, torch.float32, None)
    other, _ = load_quantized(source, "other", None, torch.float32, scheme)
    canvas = canvas_length(Bridge.from_hf(source))
    tokens = torch.randint(0, 90, (1, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert torch.equal(*(model_logits(model.eval(), tokens, canvas) for model in (one, other)))
    experts = [module for module in one.modules() if isinstance(module, QuantizedExperts)]
    assert len(experts) == layers  # the encoder's are the decoder's
    assert any(isinstance(module, QuantizedLinear) for module in one.modules())


def test_a_megatron_checkpoint_gives_the_same_bytes(tmp_path: Path) -> None:
    source = source_of(tmp_path / "source", "gpt-oss")
    Bridge.from_hf(source).to_megatron(tmp_path / "ckpt", Layout(ep=2))
    Bridge.from_megatron(tmp_path / "ckpt").to_hf(tmp_path / "a", quantize="int8")
    first, second = stored(tmp_path / "a"), stored(export(source, tmp_path / "b", "int8"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def changed(folder: Path, target: Path, changes: dict[str, torch.Tensor | None]) -> Path:
    shutil.copytree(folder, target)
    tensors: dict[str, torch.Tensor | None] = {**load_file(target / "model.safetensors"), **changes}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, target / "model.safetensors", metadata={"format": "pt"})
    return target


def test_damaged_experts_are_named(tmp_path: Path) -> None:
    folder = export(source_of(tmp_path / "source", "gpt-oss"), tmp_path / "out", "int8")
    prefix = LAYERS["gpt-oss"].format(1)
    name, scale = prefix + "2.up_proj.weight", prefix + "2.up_proj.weight_scale"
    half = stored(folder)[name][:128].clone(), stored(folder)[scale][:128].clone()
    for number, (changes, named) in enumerate(
        [
            ({name: None, scale: None}, name),
            ({name: None}, scale),
            ({name: half[0], scale: half[1]}, name),
            ({prefix + "gate_up_proj": torch.zeros(4, 128, 512)}, prefix + "gate_up_proj"),
        ]
    ):
        with refused(CheckpointError, None, named):
            QuantizedCheckpoint(changed(folder, tmp_path / f"damaged{number}", changes))


def test_what_cannot_be_quantised_is_refused(tmp_path: Path) -> None:
    source = source_of(tmp_path / "small", "diffusion_gemma", moe_intermediate_size=64)
    with refused(CheckpointError, "model.decoder.layers.0.experts.0.down_proj.weight", "64"):
        export(source, tmp_path / "out", "int4")
    tensors, name = stored(source), "layers.0.experts.down_proj"
    tensors[f"model.encoder.language_model.{name}"] = tensors[f"model.decoder.{name}"].clone()
    twice = write_hub_folder(tmp_path / "twice", json.loads((source / "config.json").read_text()), tensors)
    with refused(SettingError, "quantize", name):
        export(twice, tmp_path / "out", "fp8")
    model, _ = load_quantized(twice, "twice", None, torch.float32, "fp8")
    assert sum(isinstance(module, QuantizedExperts) for module in model.modules()) == 2

"""Quantised weights in sampling: folders written here and published ones, weights quantised as they are read, and what
does not load."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from dlm_bridge import Bridge
from dlm_bridge.errors import CheckpointError, LayoutError, SettingError
from dlm_bridge.exports.compressed import QuantizedCheckpoint
from dlm_bridge.exports.layers import QuantizedExperts, QuantizedLinear, gated, is_gated_experts
from dlm_bridge.exports.loading import load_quantized
from dlm_bridge.exports.schemes import SCHEMES, QuantizedWeight
from dlm_bridge.loading import Placement, load_model
from dlm_bridge.loading.source import ModelSource
from tests.checkpoints import write_hub_folder, write_llada, write_tokenizer
from tests.convert.helpers import run_cli
from tests.exports.folders import export, stored, write
from tests.refusals import refused

TOKENS = torch.randint(0, 90, (2, 24), generator=torch.Generator().manual_seed(1))
QUANTIZED = (QuantizedLinear, QuantizedExperts)


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    found: torch.Tensor = model.eval()(input_ids=TOKENS).logits
    return found


@pytest.mark.parametrize(
    ("name", "scheme"), [("llada2_moe", "int8"), ("sdar_moe", "fp8"), ("llada_moe", "fp8"), ("qwen3-moe", "int4")]
)
def test_quantised_as_read_as_from_a_folder(name: str, scheme: str, tmp_path: Path) -> None:
    """Both ways give the same layers; every linear layer but the head is one, and experts are."""
    sizes = {"expert_intermediate_size": 128, "dense_intermediate_size": 256} if name == "llada_moe" else {}
    source = write(tmp_path / "source", name, num_hidden_layers=2, **sizes)
    folder = export(source, tmp_path / "out", scheme)
    one, spec = load_quantized(folder, "one", None, torch.float32, None)
    other, _ = load_quantized(source, "other", None, torch.float32, scheme)
    assert torch.equal(logits(one), logits(other))
    assert spec is not None
    left = {path for path, module in one.named_modules() if type(module) is nn.Linear}
    assert left == {"lm_head"}
    assert any(isinstance(module, QuantizedExperts) for module in one.modules())
    assert not any(is_gated_experts(module) for module in one.modules())
    small = sum(each.nbytes for each in one.buffers()) + sum(each.nbytes for each in one.parameters())
    whole = Bridge.from_hf(source).build_hf_model(torch.float32)
    assert small < 0.5 * sum(each.nbytes for each in whole.parameters())


def test_experts_are_transformers_own(tmp_path: Path) -> None:
    """With dequantised weights, transformers' experts return the same for tokens of any number of experts."""
    source = write(tmp_path / "source", "sdar_moe", torch.float32, num_hidden_layers=1)
    whole = Bridge.from_hf(source).build_hf_model(torch.float32)
    (experts,) = (module for module in whole.modules() if is_gated_experts(module))
    made = []
    for weight in (experts.gate_up_proj, experts.down_proj):
        each = [SCHEMES["int8"].quantize(matrix.detach(), "x") for matrix in weight]
        made.append(QuantizedWeight(torch.stack([w.values for w in each]), torch.stack([w.scale for w in each]), 8))
    own = QuantizedExperts(*made, gated(experts.act_fn), torch.float32)
    experts.gate_up_proj.data, experts.down_proj.data = (weight.dequantize(torch.float32) for weight in made)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(7, experts.gate_up_proj.shape[2], generator=generator)
    chosen = torch.stack([torch.randperm(4, generator=generator)[:2] for _ in range(7)])
    chosen[:, 0] = torch.tensor([0, 0, 0, 1, 1, 0, 0])
    chosen[:, 1] = 3  # one expert has no token
    weights = torch.rand(7, 2, generator=generator)
    with torch.no_grad():
        assert torch.allclose(own(hidden, chosen, weights), experts(hidden, chosen, weights), rtol=1e-5, atol=1e-6)


def test_generate_samples_the_same_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_llada(tmp_path / "source", d_model=128, mlp_hidden_size=256, vocab_size=320, embedding_size=320)
    write_tokenizer(source, {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"})
    folder = export(source, tmp_path / "out", "int4")
    words = ("--prompt", "the", "--gen-length", 16, "--block-length", 8, "--dtype", "fp32", "--json")
    texts = []
    for place in ((folder,), (source, "--quantize", "int4")):
        code, out, err = run_cli(capsys, "generate", *place, *words)
        assert code == 0, err
        texts.append(json.loads(out))
    assert len({json.dumps(text.get("rows") or text.get("samples") or text["results"]) for text in texts}) == 1


def published(folder: Path, scale: str) -> tuple[Path, dict[str, torch.Tensor]]:
    """LLaDA in FP8 as published folders have it, and the values that it means. `scale`: one per "block", "channel" or
    "tensor"."""
    source = write_llada(folder / "source", d_model=192, mlp_hidden_size=160, n_heads=4, n_kv_heads=4)
    config = json.loads((source / "config.json").read_text())
    tensors, meant = {}, {}
    for name, tensor in stored(source).items():
        if tensor.dim() != 2 or "blocks" not in name:
            tensors[name] = meant[name] = tensor
            continue
        rows, columns = tensor.shape
        block = {"block": (128, 128), "channel": (1, columns), "tensor": (rows, columns)}[scale]
        shape = (-(-rows // block[0]), -(-columns // block[1]))
        scales = torch.empty(shape)
        values, value = torch.empty_like(tensor, dtype=torch.float8_e4m3fn), torch.empty_like(tensor)
        for i in range(shape[0]):
            for j in range(shape[1]):
                part = (slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1]))
                scales[i, j] = tensor[part].abs().max() / 448
                values[part] = (tensor[part] / scales[i, j]).to(torch.float8_e4m3fn)
                value[part] = values[part].float() * scales[i, j]
        end = "_scale_inv" if scale == "block" else "_scale"
        tensors |= {name: values, name + end: scales.squeeze() if scale == "tensor" else scales}
        meant[name] = value
    quantised: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic", "modules_to_not_convert": None}
    if scale == "block":
        quantised["weight_block_size"] = [128, 128]
    config["quantization_config"] = quantised
    return write_hub_folder(folder / "fp8", config, tensors), meant


@pytest.mark.parametrize("scale", ["block", "channel", "tensor"])
def test_published_fp8_folders_load(scale: str, tmp_path: Path) -> None:
    """192 columns are not a multiple of the block's 128."""
    folder, meant = published(tmp_path, scale)
    checkpoint = QuantizedCheckpoint(folder)
    assert all(torch.equal(checkpoint.read(name), tensor) for name, tensor in meant.items())
    model, _ = load_quantized(folder, "m", None, None, None)
    assert model.dtype == torch.float32
    expected = logits(Bridge(checkpoint).build_hf_model(torch.float32))
    assert torch.allclose(logits(model), expected, rtol=1e-5, atol=1e-5)


def test_compressed_tensors_with_blocks_and_static_activations_load(tmp_path: Path) -> None:
    folder, meant = published(tmp_path, "block")
    config = json.loads((folder / "config.json").read_text())
    weights = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128], "symmetric": True}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"g": {"weights": weights}}
    }  # fmt: skip
    tensors = {name.replace("_scale_inv", "_scale"): tensor for name, tensor in stored(folder).items()}
    scales = [name for name in tensors if name.endswith("_scale")]
    tensors |= {name.replace("weight_scale", "input_scale"): torch.ones(1) for name in scales}
    checkpoint = QuantizedCheckpoint(write_hub_folder(tmp_path / "other", config, tensors))
    assert checkpoint.check() == []
    assert all(torch.equal(checkpoint.read(name), tensor) for name, tensor in meant.items())


def test_what_does_not_load_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write(tmp_path / "source", "llada")
    folder = export(source, tmp_path / "out", "int8")
    with refused(SettingError, "quantize", str(folder)):
        load_model(folder, quantize="fp8")
    for load in (ModelSource(str(folder)).load, lambda: ModelSource(str(folder)).in_parts(True)):
        with refused(CheckpointError, folder, "quantised"):
            load()
    with refused(SettingError, "quantize", "nf4"):
        load_model(source, quantize="nf4")
    with refused(CheckpointError, "model.transformer.blocks.0.q_proj.weight", "128"):
        load_quantized(write(tmp_path / "small", "llada", d_model=64), "small", None, None, "int4")
    with refused(LayoutError, "device_map"):
        load_model(folder, Placement(device_map="auto"))
    config = json.loads((folder / "config.json").read_text())
    group = config["quantization_config"]["config_groups"]["group_0"]["weights"]
    where = folder / "config.json"
    for changes, named in (
        ({"num_bits": 4, "type": "float"}, "4-bit"),
        ({"symmetric": False}, "symmetric"),
        ({"num_bits": 2}, "2-bit"),
        ({"group_size": ["x"], "block_structure": 7}, "quantization_config"),
    ):
        changed = json.loads(json.dumps(config))
        changed["quantization_config"]["config_groups"]["group_0"]["weights"] = {**group, **changes}
        where.write_text(json.dumps(changed))
        with refused(CheckpointError, where, named):
            load_model(folder)
    where.write_text(json.dumps({**config, "quantization_config": {"quant_method": "compressed-tensors"}}))
    code, _, err = run_cli(capsys, "generate", folder, "--prompt", "x")
    assert (code, err.count("\n")) == (2, 1)


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", SCHEMES)
def test_products_of_a_gpu(scheme: str) -> None:
    """Products and experts of the device are near those of the dequantised weights, for few rows and many."""
    generator = torch.Generator(device="cuda").manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cuda", dtype=torch.bfloat16)

    made = SCHEMES[scheme].quantize(random(384, 256) * 0.02, "x")
    layer = QuantizedLinear(made, random(384), torch.bfloat16)
    assert layer.product is not None
    exact = QuantizedLinear(made, layer.bias, torch.float32)
    for rows in (1, 17, 300):
        x = random(rows, 256)
        expected = nn.functional.linear(x.float(), exact.weight(torch.float32), exact.bias.float())  # type: ignore
        assert (layer(x).float() - expected).norm() < 0.05 * expected.norm()
    stacks = []
    for shape in ((8, 256, 128), (8, 128, 128)):
        each = [SCHEMES[scheme].quantize(random(*shape[1:]) * 0.05, "x") for _ in range(shape[0])]
        values, scale = (torch.stack([getattr(one, name) for one in each]) for name in ("values", "scale"))
        stacks.append(QuantizedWeight(values, scale, made.bits))
    experts = QuantizedExperts(*stacks, gated(nn.functional.silu), torch.bfloat16)
    plain = QuantizedExperts(
        *(QuantizedWeight(one.values.cpu(), one.scale.cpu(), one.bits) for one in stacks),
        gated(nn.functional.silu), torch.float32,
    )  # fmt: skip
    for rows in (1, 40):
        hidden = random(rows, 128)
        chosen = torch.rand(rows, 8, generator=generator, device="cuda").topk(2).indices
        weights = torch.rand(rows, 2, generator=generator, device="cuda")
        expected = plain(hidden.float().cpu(), chosen.cpu(), weights.cpu())
        assert (experts(hidden, chosen, weights).float().cpu() - expected).norm() < 0.1 * expected.norm()


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every key of a JSON value, as the keys that lead to it."""
    for key, inner in value.items() if isinstance(value, dict) else ():
        yield (*path, key)
        yield from _paths(inner, (*path, key))


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_every_field_of_the_config_may_be_damaged(scheme: str, tmp_path: Path) -> None:
    """A folder with a field that is missing or has another value loads as it was, or is refused."""
    sizes = {"d_model": 128, "mlp_hidden_size": 128, "n_layers": 1}
    folder = export(write_llada(tmp_path / "source", **sizes), tmp_path / "out", scheme)
    where, name = folder / "config.json", "model.transformer.blocks.0.attn_out.weight"
    text, expected = where.read_text(), QuantizedCheckpoint(folder).read(name)
    refusals = []
    for path in _paths(json.loads(text)["quantization_config"]):
        for value in (..., None, [], {}, "x", -1, 0, 7, 64, True):
            changed = json.loads(text)
            inner = changed["quantization_config"]
            for key in path[:-1]:
                inner = inner[key]
            inner.pop(path[-1])
            if value is not ...:
                inner[path[-1]] = value
            where.write_text(json.dumps(changed))
            try:
                found = QuantizedCheckpoint(folder).read(name)
            except (CheckpointError, SettingError) as error:
                refusals.append(str(error))
            else:
                assert torch.equal(found, expected), (path, value)
    assert len(refusals) > 20
    assert not any("\n" in refusal for refusal in refusals)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_damaged_scales_are_named(value: float, tmp_path: Path) -> None:
    source = write_llada(tmp_path / "source", d_model=128, mlp_hidden_size=128)
    folder = export(source, tmp_path / "out", "fp8")
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    name = "model.transformer.blocks.1.ff_proj.weight_scale"
    tensors[name][3] = value
    save_file(tensors, file, metadata={"format": "pt"})
    with refused(CheckpointError, folder, name):
        load_quantized(folder, str(folder), None, None, None)

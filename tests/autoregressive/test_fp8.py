"""DeepSeek-V3's published form: FP8 weights with a scale for each block, dequantised on request."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dlm_bridge import Bridge, Layout
from dlm_bridge.convert.checkpoints.dequantised import dequantise
from dlm_bridge.convert.verify import verify_manifest
from dlm_bridge.errors import CheckpointError, SettingError
from tests.autoregressive.cases import CASES
from tests.autoregressive.test_families import assert_same_bits, tensors_of
from tests.checkpoints import write_hub_folder
from tests.convert.helpers import run_cli, tree
from tests.refusals import refused

CASE = next(case for case in CASES if case.label == "deepseek-v3")
BLOCK = (16, 20)  # of which no matrix here is a whole multiple in both directions
QUANTISED = {
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": list(BLOCK),
    }
}
NAME = "model.layers.2.mlp.experts.1.up_proj.weight"
SCALES = f"{NAME}_scale_inv"


def quantised(tensors: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """What is published, and what it means, computed block by block. Norms, embeddings, router and head stay."""
    stored, meant = {}, {}
    for name, tensor in tensors.items():
        if not name.endswith("_proj.weight") and "kv_a_proj" not in name:
            stored[name] = meant[name] = tensor
            continue
        rows, columns = tensor.shape
        scales = torch.empty(-(-rows // BLOCK[0]), -(-columns // BLOCK[1]))
        weight, value = tensor.to(torch.float8_e4m3fn), torch.empty(rows, columns, dtype=torch.bfloat16)
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                block = (slice(i * BLOCK[0], (i + 1) * BLOCK[0]), slice(j * BLOCK[1], (j + 1) * BLOCK[1]))
                scales[i, j] = tensor[block].float().abs().max() / 448
                weight[block] = (tensor[block].float() / scales[i, j]).to(torch.float8_e4m3fn)
                value[block] = (weight[block].float() * scales[i, j]).to(torch.bfloat16)
        stored |= {name: weight, name + "_scale_inv": scales}
        meant[name] = value
    return stored, meant


def write(
    folder: Path, change: dict[str, torch.Tensor | None] | None = None, **config: Any
) -> dict[str, torch.Tensor]:
    stored, meant = quantised(CASE.tensors(torch.bfloat16))
    for name, tensor in (change or {}).items():
        stored.pop(name, None)
        if tensor is not None:
            stored[name] = tensor
    write_hub_folder(folder, {**CASE.config, **QUANTISED, **config}, stored, shards=3)
    return meant


def test_import_dequantises(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    meant = write(tmp_path / "hub")
    before = tree(tmp_path / "hub")
    options = ("--tp", 2, "--pp", 2, "--ep", 2, "--etp", 1, "--json")
    code, out, err = run_cli(capsys, "import", tmp_path / "hub", tmp_path / "m", "--dequantize-fp8", *options)
    assert code == 0, err
    assert any("FP8 tensors are dequantised" in note for note in json.loads(out)["notes"])
    assert tree(tmp_path / "hub") == before
    Bridge.from_megatron(tmp_path / "m").to_hf(tmp_path / "back")
    assert_same_bits(tensors_of(tmp_path / "back"), meant)
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert config == CASE.config
    assert verify_manifest(tmp_path / "back").equal
    for file in ("README.md", "modeling_deepseek.py", "assets/logo.bin"):
        assert (tmp_path / "back" / file).read_bytes() == before[file]
    found = Bridge.from_hf(tmp_path / "hub", dequantize_fp8=True).build_hf_model()
    ids = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.equal(found(ids).logits, Bridge.from_hf(tmp_path / "back").build_hf_model()(ids).logits)


def test_ragged_edges() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(133, 70, generator=generator).to(torch.float8_e4m3fn)
    scale = torch.rand(9, 4, generator=generator)
    wanted = [[float(weight[r, c]) * scale[r // 16, c // 20] for c in range(70)] for r in range(133)]
    assert torch.equal(dequantise(weight, scale, BLOCK), torch.tensor(wanted).bfloat16())


def test_without_the_flag_one_line_names_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "hub")
    code, _, err = run_cli(capsys, "import", tmp_path / "hub", tmp_path / "m", "--tp", 2)
    assert (code, err.count("\n")) == (2, 1)
    assert "is FP8" in err
    assert "--dequantize-fp8" in err
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize(
    ("change", "config", "named"),
    [
        ({SCALES: None}, {}, (SCALES, "missing")),
        ({SCALES: torch.ones(2, 3)}, {}, (SCALES, "[2, 3]")),
        ({SCALES: torch.ones(2, 4).bfloat16()}, {}, (SCALES, "torch.bfloat16")),
        ({NAME: torch.ones(32, 64).bfloat16()}, {}, (SCALES, "no FP8 weight")),
        ({}, {"quantization_config": None}, ("weight_block_size",)),
        ({}, {"quantization_config": {"weight_block_size": [0, 128]}}, ("weight_block_size",)),
    ],
)
def test_bad_scales(tmp_path: Path, change: dict[str, Any], config: dict[str, Any], named: tuple[str, ...]) -> None:
    write(tmp_path / "hub", change, **config)
    with refused(CheckpointError, None, *named) as raised:
        Bridge.from_hf(tmp_path / "hub", dequantize_fp8=True).to_megatron(tmp_path / "m", Layout())
    assert raised.value.field.startswith(str(tmp_path / "hub"))


def test_nothing_to_dequantise(tmp_path: Path) -> None:
    source = CASE.write(tmp_path / "hub", **QUANTISED)
    with refused(SettingError, "dequantize_fp8", str(source)):
        Bridge.from_hf(source, dequantize_fp8=True)

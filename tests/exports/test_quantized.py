"""`export --quantize`: the published layout, bounds of the rounding errors, logits, and what is refused."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dlm_bridge import Bridge, Layout
from dlm_bridge.convert.verify import verify_manifest
from dlm_bridge.errors import CheckpointError, SettingError
from dlm_bridge.exports.bounds import KL_LIMIT, verify_quantized
from dlm_bridge.exports.compressed import QuantizedCheckpoint
from dlm_bridge.exports.quantized import QuantizedTransfer
from dlm_bridge.exports.schemes import SCHEMES, pack, unpack
from tests.convert.helpers import run_cli
from tests.exports.folders import export, stored, write
from tests.refusals import refused

# The published layout (compressed-tensors 0.18): format, weights, activations.
STATIC = {"symmetric": True, "dynamic": False}
LAYOUT: dict[str, tuple[str, dict[str, Any], dict[str, Any] | None]] = {
    "fp8": (
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "channel", "group_size": None, **STATIC},
        {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True},
    ),
    "int8": (
        "int-quantized",
        {"num_bits": 8, "type": "int", "strategy": "channel", "group_size": None, **STATIC},
        {"num_bits": 8, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True},
    ),
    "int4": (
        "pack-quantized",
        {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, **STATIC},
        None,
    ),
}  # fmt: skip
# Layers in high precision: names, and one expression for all decoder layers.
IGNORED = {
    "llada": ["lm_head", "model.transformer.wte", "model.transformer.ff_out"],
    "llada2_moe": ["lm_head", r"re:.*\.mlp\.gate$", "model.word_embeddings"],
    "sdar": ["lm_head", "model.embed_tokens"],
    "dream": ["lm_head", "model.embed_tokens"],
    "qwen3": ["lm_head", "model.embed_tokens"],
}
ROUND_TRIPS = (
    *((name, scheme) for name in ("llada", "llada2_moe") for scheme in SCHEMES),
    ("sdar", "fp8"), ("dream", "int8"), ("qwen3", "int4"),
)  # fmt: skip


def parts(scheme: str, rows: int, columns: int) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    if scheme == "int4":
        return {
            "_packed": (torch.int32, (rows, columns // 8)),
            "_scale": (torch.bfloat16, (rows, columns // 128)),
            "_shape": (torch.int64, (2,)),
        }
    dtype = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}[scheme]
    return {"": (dtype, (rows, columns)), "_scale": (torch.bfloat16, (rows, 1))}


@pytest.mark.parametrize(("name", "scheme"), ROUND_TRIPS)
@pytest.mark.fast("llada2_moe-*", "dream-int8", "llada-fp8", "qwen3-int4")
def test_round_trip(name: str, scheme: str, tmp_path: Path) -> None:
    """Every key of the folder is the published layout's; every weight is within its bound; the logits are those of the
    dequantised weights, and with 8 bits near the source's."""
    source = write(tmp_path / "source", name)
    folder = export(source, tmp_path / "out", scheme)
    found, before = stored(folder), stored(source)
    quantised = {key.removesuffix("_scale") for key in found if key.endswith("_scale")}
    assert all(re.search("proj|ff_out|attn_out|attention", key) for key in quantised)
    assert not any(word in key for key in quantised for word in ("embed", "wte", "lm_head", "norm", "mlp.gate."))
    expected: dict[str, Any] = {}
    for key, tensor in before.items():
        if key in quantised:
            assert tensor.dim() == 2
            expected |= {key + suffix: spec for suffix, spec in parts(scheme, *tensor.shape).items()}
        else:
            assert torch.equal(found[key], tensor)
            expected[key] = (tensor.dtype, tuple(tensor.shape))
    assert {key: (tensor.dtype, tuple(tensor.shape)) for key, tensor in found.items()} == expected
    layout, weights, activations = LAYOUT[scheme]
    config = json.loads((folder / "config.json").read_text())
    written = config.pop("quantization_config")
    assert config == json.loads((source / "config.json").read_text())
    (group,) = written.pop("config_groups").values()
    assert group == {
        "targets": ["Linear"], "weights": weights, "input_activations": activations, "output_activations": None
    }  # fmt: skip
    assert sorted(written.pop("ignore")) == sorted(IGNORED[name])
    assert written == {
        "quant_method": "compressed-tensors", "format": layout, "quantization_status": "compressed",
        "kv_cache_scheme": None,
    }  # fmt: skip
    assert verify_manifest(folder).equal
    verdict = verify_quantized(folder, source, logits=True)
    assert verdict.differences == []
    assert (verdict.weights, verdict.tensors) == (len(quantised), len(before))
    assert 0.4 < verdict.error <= 1  # no scale is larger than it must be
    assert verdict.kl is not None
    assert verdict.kl > 0
    assert verdict.kl <= KL_LIMIT or scheme == "int4"


def test_scales_of_any_dtype_bound_the_error() -> None:
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        weight = torch.randn(40, 256, generator=generator)
        weight *= torch.logspace(-4, 2, 40)[:, None]  # rows of all sizes
        weight[3] = 0
        weight[5, 7] = 60  # an outlier: the others of its row are small codes
        weight[6, :8] = torch.tensor([1e-3, -1e-3, 1e-4, 2e-4, 448, -448, 0, 3])
        for scheme in SCHEMES.values():
            made = scheme.quantize(weight.to(dtype), "weight")
            assert made.scale.dtype == dtype
            error, bound = made.error_bounds(weight.to(dtype))
            assert bool((error <= bound).all()), (scheme.name, dtype)
            assert not made.dequantize(torch.float32)[3].any()
    codes = torch.randint(-8, 8, (3, 64), dtype=torch.int8, generator=generator)
    assert torch.equal(unpack(pack(codes)), codes)


# First 16 digits of the SHA-256 of the bf16 weight that compressed-tensors 0.20.0 decompresses (its compressors of the
# three formats) from `pattern()`, quantised as here.
DECOMPRESSED = {"fp8": "4c1f35f5a85a421b", "int8": "274a8e61bdcc366c", "int4": "4d485da50765c920"}


def pattern() -> torch.Tensor:
    """A weight of exact values."""
    numbers = torch.arange(96 * 256, dtype=torch.int64)
    return ((numbers * 7919 + numbers // 256 * 31) % 2048 - 1024).view(96, 256).float().div(4096).bfloat16()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_values_are_those_that_compressed_tensors_reads(scheme: str) -> None:
    values = SCHEMES[scheme].quantize(pattern(), "weight").dequantize(torch.bfloat16)
    assert hashlib.sha256(values.view(torch.uint8).numpy().tobytes()).hexdigest()[:16] == DECOMPRESSED[scheme]


def test_any_source_gives_the_same_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A Hub folder and a Megatron checkpoint, one task at a time and several; and after an interruption."""
    source = write(tmp_path / "source", "llada2_moe")
    Bridge.from_hf(source).to_megatron(tmp_path / "ckpt", Layout(tp=2, pp=2, ep=2, etp=1))
    code, out, _ = run_cli(capsys, "export", tmp_path / "ckpt", tmp_path / "a", "--quantize", "int4", "--dry-run")
    assert (code, (tmp_path / "a").exists()) == (0, False)
    assert "int4" in out
    for place, name in (("ckpt", "a"), ("source", "b")):
        words = ("--quantize", "int4", "--workers", 1 + (name == "b"), "--shard-size", "300KB")
        assert run_cli(capsys, "export", tmp_path / place, tmp_path / name, *words)[0] == 0
    first, second = stored(tmp_path / "a"), stored(tmp_path / "b")
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert len(list((tmp_path / "a").glob("*.safetensors"))) > 1
    code, _, err = run_cli(capsys, "export", tmp_path / "source", tmp_path / "b", "--quantize", "fp8")
    assert (code, err.count("\n")) == (2, 1)  # without --overwrite
    assert "--overwrite" in err
    assert run_cli(capsys, "verify", tmp_path / "b")[0] == 0
    code, out, _ = run_cli(capsys, "verify", tmp_path / "b", "--against", tmp_path / "ckpt")
    assert (code, out.count("\n")) == (0, 1)


def test_an_interrupted_export_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write(tmp_path / "source", "llada")
    expected = stored(export(source, tmp_path / "whole", "int8"))
    quantize, calls = QuantizedTransfer._quantize, []

    def failing(self: QuantizedTransfer, name: str, tensor: torch.Tensor) -> None:
        calls.append(name)
        if len(calls) == 12:
            raise KeyboardInterrupt
        quantize(self, name, tensor)

    monkeypatch.setattr(QuantizedTransfer, "_quantize", failing)
    with pytest.raises(KeyboardInterrupt):
        export(source, tmp_path / "out", "int8", workers=1)
    assert not (tmp_path / "out").exists()
    export(source, tmp_path / "out", "int8", workers=1, resume=True)
    assert len(calls) < 12 + 28
    assert all(torch.equal(values, expected[name]) for name, values in stored(tmp_path / "out").items())
    assert verify_manifest(tmp_path / "out").equal


def test_a_cast_comes_first_and_a_tied_head_stays(tmp_path: Path) -> None:
    source = write(tmp_path / "source", "llada-tied", torch.float32)
    folder = export(source, tmp_path / "out", "fp8", dtype="bf16")
    config = json.loads((folder / "config.json").read_text())
    assert {"lm_head", "model.transformer.wte"} <= set(config["quantization_config"]["ignore"])
    assert stored(folder)["model.transformer.wte.weight"].dtype == torch.bfloat16
    verdict = verify_quantized(folder, source)
    assert verdict.equal
    assert verdict.notes


def change(folder: Path, target: Path, **changes: torch.Tensor | None) -> Path:
    """The folder with other tensors, by the ends of their names; None: without them."""
    shutil.copytree(folder, target)
    tensors = load_file(target / "model.safetensors")
    for end, value in changes.items():
        name = next(name for name in tensors if name.endswith(end.replace("__", ".")))
        del tensors[name]
        if value is not None:
            tensors[name] = value
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def test_differences_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write(tmp_path / "source", "llada")
    folder = export(source, tmp_path / "out", "int8")
    scale = stored(folder)["model.transformer.blocks.0.attn_out.weight_scale"]
    other = change(folder, tmp_path / "scale", blocks__0__attn_out__weight_scale=scale * 1.01)
    verdict = verify_quantized(other, source)
    assert [(item.name, item.kind) for item in verdict.differences] == [
        ("model.transformer.blocks.0.attn_out.weight", "values")
    ]
    norm = stored(folder)["model.transformer.ln_f.weight"]
    other = change(folder, tmp_path / "norm", ln_f__weight=norm + 0.25)
    code, out, _ = run_cli(capsys, "verify", other, "--against", source)
    assert code == 1
    assert "ln_f" in out
    for place, words in ((source, ("--against", folder)), (folder, (source, "--against", source))):
        code, _, err = run_cli(capsys, "verify", place, *words)
        assert (code, err.count("\n")) == (2, 1)
        assert "--against" in err


def test_damaged_folders_are_refused(tmp_path: Path) -> None:
    folder = export(write(tmp_path / "source", "llada"), tmp_path / "out", "int4")
    scale, shape = "blocks__0__attn_out__weight_scale", "blocks__0__attn_out__weight_shape"
    packed = "blocks__0__attn_out__weight_packed"
    name = "model.transformer.blocks.0.attn_out.weight"
    for number, (changes, named) in enumerate(
        [
            ({scale: None}, "_scale"),
            ({scale: torch.ones(128, 3)}, "_scale"),
            ({packed: None}, "_shape"),
            ({packed: torch.zeros(128, 16)}, "_shape"),
        ]
    ):
        with refused(CheckpointError, None, name + named):
            QuantizedCheckpoint(change(folder, tmp_path / f"damaged{number}", **changes))  # type: ignore[arg-type]
    other = QuantizedCheckpoint(change(folder, tmp_path / "shape", **{shape: torch.tensor([1, 2])}))
    with refused(CheckpointError, None, name + "_shape"):
        other.read(name)


def test_what_cannot_be_quantised_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = write(tmp_path / "small", "llada", d_model=64)
    name = "model.transformer.blocks.0.q_proj.weight"
    with refused(CheckpointError, name, "128"):
        export(small, tmp_path / "out", "int4")
    code, _, err = run_cli(capsys, "export", small, tmp_path / "out", "--quantize", "int4")
    assert (code, err.count("\n")) == (2, 1)
    assert name in err
    with refused(SettingError, "quantize", "int2"):
        export(small, tmp_path / "out", "int2")
    folder = export(small, tmp_path / "fp8", "fp8")
    with refused(SettingError, "quantize", str(folder)):
        export(folder, tmp_path / "out", "int8")
    with refused(CheckpointError, folder, "quantised"):
        Bridge.from_hf(folder).to_megatron(tmp_path / "out")
    tensors = stored(small)
    tensors[name][1, 2] = torch.nan
    bad = tmp_path / "nan"
    shutil.copytree(small, bad)
    for file in bad.glob("*.safetensors"):
        save_file({key: tensors[key] for key in load_file(file)}, file, metadata={"format": "pt"})
    with refused(CheckpointError, name):
        export(bad, tmp_path / "out", "fp8")
    assert not (tmp_path / "out").exists()

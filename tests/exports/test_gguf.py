"""GGUF files: every tensor and key beside the source, digests of llama.cpp's own converter, refusals."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gguf")

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize
from safetensors.torch import load_file

from dlm_bridge import Bridge, Layout
from dlm_bridge.errors import CheckpointError, SettingError
from dlm_bridge.exports import gguf as exported
from tests.convert.helpers import run_cli
from tests.families.case import FamilyCase, all_cases, config_of
from tests.families.llada import TOKENIZER
from tests.refusals import refused

CASES = {case.id: case for case in all_cases() if case.name in ("llada", "llada_moe", "dream", "rnd1")}
SIZES = {"vocab_size": 288, "embedding_size": 288, "mask_token_id": 280, "eos_token_id": 270, "bos_token_id": 271}
TYPES = {"f32": {"dtype": "fp32"}, "f16": {"dtype": "fp16"}, "bf16": {"dtype": "bf16"}, "q8_0": {"quantize": "q8_0"}}
# SHA-256 of what convert_hf_to_gguf.py in the source package llama-cpp-python 0.3.36 wrote for the folders of `write`
# (27 November 2026; its own gguf-py, torch 2.13, transformers 5.24), with one change: it names known pre-tokenizers by
# a hash, which the tokenizer of a test does not have, so it was told that this one is "gpt-2". RND1's architecture is
# RND1 there, the only spelling that the converter knows.
CONVERTED = {
    "dream.f32": "d2198cc8e9426326",
    "dream.f16": "3f2c3630bece7309",
    "dream.bf16": "bb277540a063c6cd",
    "dream.q8_0": "4f5fcc5819ba8a70",
    "llada.f32": "5d5fecaa3125fde9",
    "llada.f16": "5a47336bedd203b8",
    "llada.bf16": "1babe687c2ec6aa1",
    "llada.q8_0": "331f67bd557c99d5",
    "llada-tied.f32": "146970de596f2dcd",
    "llada-tied.f16": "2c921eb80f0afd89",
    "llada-tied.bf16": "c1e51732d14247e1",
    "llada-tied.q8_0": "6b53346fa9a4f3b9",
    "llada_moe.f32": "a235c049cd458a74",
    "llada_moe.f16": "b23188902f872bfe",
    "llada_moe.bf16": "7efd315e94f410a8",
    "llada_moe.q8_0": "499ec5bae959ae1c",
    "rnd1.f32": "62f3fe61c9782576",
    "rnd1.f16": "5ab6c3a14d8e6fe4",
    "rnd1.bf16": "7c8cfcbf46d23833",
    "rnd1.q8_0": "00b94506e5173c3d",
}


def write(folder: Path, name: str, dtype: torch.dtype = torch.float32, **overrides: Any) -> Path:
    """A tiny checkpoint with a tokenizer, and with weights that no random generator decides."""
    case = CASES[name]
    config = {key: SIZES.get(key, value) for key, value in case.config.items()} | {"mask_token_id": 280}
    config |= {"architectures": ["RND1"]} if name == "rnd1" else {}
    own = FamilyCase(case.name, config, _counted(case), case.reference, 280, tokenizer=case.tokenizer or TOKENIZER)
    own.write(folder, dtype, **overrides)
    for code in folder.glob("*.py"):
        code.unlink()  # what auto_map names; the converter would run it
    for file in (folder / "config.json", folder / "tokenizer_config.json"):
        values = json.loads(file.read_text())
        values.pop("auto_map", None)
        file.write_text(json.dumps(values))
    return folder


def _counted(case: FamilyCase) -> Any:
    def tensors(config: dict[str, Any], seed: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        found = {}
        for number, (name, tensor) in enumerate(sorted(case.tensors(config, seed, dtype).items())):
            values = (torch.arange(tensor.numel()) * 7919 + 31 * number) % 1009 - 504
            found[name] = (values.to(torch.float32) / 2048).view(tensor.shape).to(dtype)
        return found

    return tensors


def export(source: Path, file: Path, **settings: Any) -> GGUFReader:
    Bridge.from_hf(source).to_hf(file, to="gguf", **settings)
    return GGUFReader(file)


def fields(reader: GGUFReader) -> dict[str, Any]:
    return {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}


def values(reader: GGUFReader) -> dict[str, np.ndarray]:
    """Tensors in PyTorch's order of dimensions, dequantised."""
    return {
        tensor.name: dequantize(tensor.data, tensor.tensor_type).reshape([int(size) for size in tensor.shape[::-1]])
        for tensor in reader.tensors
    }


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


LLADA_NAMES = {
    "attn_norm": "attn_norm", "ff_norm": "ffn_norm", "q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v",
    "attn_out": "attn_output", "ff_proj": "ffn_gate", "up_proj": "ffn_up", "ff_out": "ffn_down",
}  # fmt: skip
NAMES = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "mlp.gate": "ffn_gate_inp",
}  # fmt: skip
TOP = {"wte": "token_embd", "embed_tokens": "token_embd", "ln_f": "output_norm", "norm": "output_norm"}
TOP |= {"ff_out": "output", "lm_head": "output"}


def expected(folder: Path) -> dict[str, torch.Tensor]:
    """The source's tensors under llama.cpp's names, with experts stacked, and LLaDA's rotary rows in pairs."""
    config, found = config_of(folder), {}
    experts: dict[str, dict[int, torch.Tensor]] = {}
    for name, tensor in weights(folder).items():
        parts = name.removeprefix("model.").removeprefix("transformer.").split(".")
        kind = parts[-1]
        if parts[0] not in ("blocks", "layers"):
            found[f"{TOP[parts[-2]]}.{kind}"] = tensor
            continue
        layer, module = parts[1], ".".join(parts[2:-1])
        if ".experts." in module:
            _, _, expert, projection = module.split(".")
            place = f"blk.{layer}.ffn_{projection.removesuffix('_proj')}_exps.{kind}"
            experts.setdefault(place, {})[int(expert)] = tensor
            continue
        if parts[0] == "blocks" and module in ("q_proj", "k_proj"):
            tensor = paired(tensor, config["d_model"] // config["n_heads"])
        own = (LLADA_NAMES if parts[0] == "blocks" else NAMES)[module]
        found[f"blk.{layer}.{own}.{kind}"] = tensor
    return found | {name: torch.stack([parts[e] for e in sorted(parts)]) for name, parts in experts.items()}


def paired(tensor: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Row 2 j + s of a head is row j + s * D / 2 of the source, row by row."""
    rows = []
    for row in range(len(tensor)):
        head, inside = divmod(row, head_dim)
        pair, second = divmod(inside, 2)
        rows.append(tensor[head * head_dim + pair + second * head_dim // 2])
    return torch.stack(rows)


@pytest.mark.parametrize("name", CASES)
def test_every_tensor_is_the_source_s(tmp_path: Path, name: str) -> None:
    folder = write(tmp_path / "model", name, torch.bfloat16)
    reader = export(folder, tmp_path / "model.gguf")
    found, wanted = values(reader), expected(folder)
    assert found.keys() == wanted.keys()
    for key, tensor in wanted.items():
        assert np.array_equal(found[key], tensor.float().numpy()), key
    stored = {tensor.name: tensor.tensor_type for tensor in reader.tensors}
    for key, type_ in stored.items():
        exact = "norm" in key or "ffn_gate_inp" in key or key.endswith("bias")
        assert type_ == (GGMLQuantizationType.F32 if exact else GGMLQuantizationType.BF16), key


def test_metadata_of_llada(tmp_path: Path) -> None:
    found = fields(export(write(tmp_path / "LLaDA-Tiny", "llada", n_kv_heads=2), tmp_path / "o.gguf"))
    tokens, kinds = found.pop("tokenizer.ggml.tokens"), found.pop("tokenizer.ggml.token_type")
    assert (len(tokens), tokens[287], kinds[287]) == (288, "[PAD287]", 5)
    assert (tokens[257], kinds[257]) == ("the", 1)
    assert (tokens[found["tokenizer.ggml.bos_token_id"]], kinds[found["tokenizer.ggml.bos_token_id"]]) == (
        "<|startoftext|>",
        3,
    )
    assert tokens[found["tokenizer.ggml.eos_token_id"]] == "<|endoftext|>"
    wanted = {
        "general.architecture": "llada",
        "general.type": "model",
        "general.file_type": 0,
        "general.quantization_version": 2,
        "general.license": "mit",
        "llada.block_count": 4,
        "llada.context_length": 256,
        "llada.embedding_length": 64,
        "llada.feed_forward_length": 96,
        "llada.attention.head_count": 4,
        "llada.attention.head_count_kv": 2,
        "llada.attention.layer_norm_rms_epsilon": pytest.approx(1e-5),
        "llada.attention.causal": False,
        "llada.rope.freq_base": 500000.0,
        "llada.rope.dimension_count": 16,
        "llada.vocab_size": 288,
        "diffusion.shift_logits": False,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.merges": ["t h", "th e"],
        "tokenizer.ggml.mask_token_id": 280,
        "tokenizer.ggml.add_bos_token": True,
    }
    assert {key: found[key] for key in wanted} == wanted


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("dream", {"dream.attention.causal": False, "dream.attention.head_count_kv": 2, "dream.rope.freq_base": 1e6}),
        (
            "llada_moe",
            {
                "llada-moe.expert_count": 8,
                "llada-moe.expert_used_count": 3,
                "llada-moe.expert_feed_forward_length": 32,
                "diffusion.shift_logits": False,
            },
        ),
        ("rnd1", {"rnd1.attention.key_length": 32, "rnd1.attention.value_length": 32, "rnd1.expert_count": 8}),
    ],
)
def test_metadata_of_other_families(tmp_path: Path, name: str, wanted: dict[str, Any]) -> None:
    found = fields(export(write(tmp_path / name, name), tmp_path / "o.gguf"))
    assert {key: found[key] for key in wanted} == wanted
    assert found["tokenizer.ggml.mask_token_id"] == 280
    assert ("diffusion.shift_logits" in found) == (name == "llada_moe")  # its default is true


@pytest.mark.parametrize("name", CASES)
def test_bytes_are_those_of_llama_cpp(tmp_path: Path, name: str) -> None:
    folder = write(tmp_path / "Tiny", name, **({"mask_token_id": 260} if name == "dream" else {}))  # its tokenizer's
    found = {}
    for type_, settings in TYPES.items():
        export(folder, tmp_path / "o.gguf", overwrite=True, **settings)
        found[f"{name}.{type_}"] = hashlib.sha256((tmp_path / "o.gguf").read_bytes()).hexdigest()[:16]
    assert found == {key: CONVERTED[key] for key in found}


def test_the_error_of_q8_0_is_half_a_step(tmp_path: Path) -> None:
    """And rows that are not whole blocks of 32 are F16."""
    folder = write(tmp_path / "model", "llada", mlp_hidden_size=80)
    reader = export(folder, tmp_path / "o.gguf", quantize="q8_0")
    found, wanted = values(reader), expected(folder)
    types = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    assert {types[name] for name in types if "ffn_down" in name} == {"F16"}
    assert {types[name] for name in types if "ffn_up" in name or "attn_q" in name or "token" in name} == {"Q8_0"}
    for name in (name for name in types if types[name] == "Q8_0"):
        blocks = wanted[name].double().reshape(-1, 32)
        step = blocks.abs().amax(1, keepdim=True) / 127
        error = (blocks - torch.tensor(found[name]).double().reshape(-1, 32)).abs()
        assert bool((error <= step * (0.5 + 127 * 2**-11)).all()), name  # the scale is a float16


def test_from_megatron_and_from_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A Megatron checkpoint gives the Hub folder's bytes, a run its newest checkpoint's tensors."""
    folder = write(tmp_path / "model", "llada_moe")
    whole = export(folder, tmp_path / "hub.gguf")
    Bridge.from_hf(folder).to_megatron(tmp_path / "megatron", Layout(tp=2, pp=2, ep=2, etp=1))
    code, out, err = run_cli(capsys, "export", tmp_path / "megatron", tmp_path / "m.gguf", "--to", "gguf", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["files"] == {"m.gguf": (tmp_path / "hub.gguf").stat().st_size}
    assert (tmp_path / "m.gguf").read_bytes() == (tmp_path / "hub.gguf").read_bytes()
    shutil.copytree(folder, tmp_path / "run" / "checkpoints" / "step-0000010")
    assert run_cli(capsys, "export", tmp_path / "run", tmp_path / "r.gguf", "--to", "gguf")[0] == 0
    found = values(GGUFReader(tmp_path / "r.gguf"))
    assert all(np.array_equal(found[name], tensor) for name, tensor in values(whole).items())


def test_a_dry_run_and_a_tied_head(tmp_path: Path) -> None:
    """Where llama.cpp needs an output layer, the embedding is written twice."""
    folder = write(tmp_path / "model", "llada_moe", tie_word_embeddings=True)
    report = Bridge.from_hf(folder).to_hf(tmp_path / "o.gguf", to="gguf", dry_run=True)
    assert not (tmp_path / "o.gguf").exists()
    found = values(export(folder, tmp_path / "o.gguf"))
    assert report.files == {"o.gguf": (tmp_path / "o.gguf").stat().st_size}
    assert np.array_equal(found["output.weight"], found["token_embd.weight"])


@pytest.mark.parametrize("stop", [KeyboardInterrupt, OSError(28, "No space left on device"), ValueError])
def test_a_stopped_export_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: Any) -> None:
    folder = write(tmp_path / "model", "dream")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "o.gguf").write_text("old")
    put, done = exported.GgufTransfer._put, []

    def some(self: Any, name: str, tensor: torch.Tensor) -> None:
        if len(done) > 5:
            raise stop
        put(self, name, tensor)
        done.append(name)

    monkeypatch.setattr(exported.GgufTransfer, "_put", some)
    with pytest.raises(BaseException):  # noqa: B017, PT011 (of three kinds)
        export(folder, tmp_path / "out" / "o.gguf", overwrite=True)
    assert {file.name: file.read_text() for file in (tmp_path / "out").iterdir()} == {"o.gguf": "old"}


def test_refused_models(tmp_path: Path) -> None:
    with refused(CheckpointError, tmp_path / "scaled", "rope_scaling"):
        export(write(tmp_path / "scaled", "dream", rope_scaling={"rope_type": "yarn", "factor": 4.0}), tmp_path / "o")
    with refused(CheckpointError, tmp_path / "wide", "head_dim"):
        export(write(tmp_path / "wide", "dream", head_dim=32), tmp_path / "o")
    with refused(CheckpointError, tmp_path / "unmasked", "mask_token_id 300"):
        export(write(tmp_path / "unmasked", "llada", mask_token_id=300), tmp_path / "o")
    with refused(CheckpointError, tmp_path / "raw", "norm_topk_prob"):
        export(write(tmp_path / "raw", "rnd1", norm_topk_prob=False), tmp_path / "o")
    assert not (tmp_path / "o").exists()


def test_refused_tokenizers(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", "llada")
    file = folder / "tokenizer.json"
    text = json.loads(file.read_text())
    file.write_text(json.dumps({**text, "pre_tokenizer": {"type": "Whitespace"}}))
    with refused(CheckpointError, folder, "Whitespace", "qwen2"):
        export(folder, tmp_path / "o")
    with refused(CheckpointError, tmp_path / "short", "token 261"):
        export(
            write(tmp_path / "short", "llada", vocab_size=260, embedding_size=260, mask_token_id=250), tmp_path / "o"
        )
    file.unlink()
    for other in ("vocab.json", "merges.txt"):
        (folder / other).unlink()
    with refused(CheckpointError, folder):
        export(folder, tmp_path / "o")
    assert not (tmp_path / "o").exists()


def test_refused_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write(tmp_path / "model", "llada")
    for settings in ({"quantize": "q8_0"}, {"quantize": "fp8", "to": "gguf"}):
        with refused(SettingError, "quantize"):
            Bridge.from_hf(folder).to_hf(tmp_path / "o", **settings)
    with refused(SettingError, "output"):
        export(folder, folder / "o.gguf")
    (tmp_path / "o.gguf").write_text("")
    with refused(SettingError, "output"):
        export(folder, tmp_path / "o.gguf")
    other = {case.id: case for case in all_cases()}["sdar"].write(tmp_path / "sdar")
    code, _, err = run_cli(capsys, "export", other, tmp_path / "sdar.gguf", "--to", "gguf")
    assert code == 2
    assert err.startswith("dlm-bridge: --to: ")
    assert "sdar" in err
    assert err.count("\n") == 1


def test_values_that_do_not_fit(tmp_path: Path) -> None:
    case = CASES["llada"]
    config = {**case.config, **{key: SIZES[key] for key in ("vocab_size", "embedding_size", "mask_token_id")}}
    large = lambda *arguments: {name: tensor * 1e9 for name, tensor in case.tensors(*arguments).items()}  # noqa: E731
    folder = FamilyCase("llada", config, large, case.reference, 280, tokenizer=TOKENIZER).write(tmp_path / "model")
    for field, settings in (("dtype", TYPES["f16"]), ("quantize", TYPES["q8_0"])):
        with refused(SettingError, field):
            export(folder, tmp_path / "o.gguf", **settings)
    assert not (tmp_path / "o.gguf").exists()

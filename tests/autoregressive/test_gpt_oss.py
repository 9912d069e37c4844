"""gpt-oss: experts in MXFP4, dequantised on request, and the tensors in megatron-core's own GPTModel."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from dlm_bridge import Bridge, Layout
from dlm_bridge.convert.checkpoints.dequantised import dequantise_mxfp4
from dlm_bridge.convert.to_dlm import convert_to_dlm
from dlm_bridge.convert.verify import verify_manifest, verify_pair
from dlm_bridge.errors import CheckpointError, LayoutError, SettingError
from tests.autoregressive.cases import CASES
from tests.autoregressive.published import GPT_OSS
from tests.autoregressive.test_families import assert_same_bits, tensors_of
from tests.checkpoints import write_hub_folder, write_tokenizer
from tests.convert.helpers import run_cli, tree
from tests.refusals import refused

CASE = next(case for case in CASES if case.label == "gpt-oss")
QUANTISED = {
    "quantization_config": {
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
        "quant_method": "mxfp4",
    }
}
NAME = "model.layers.1.mlp.experts.down_proj"


def write(
    folder: Path, change: dict[str, torch.Tensor | None] | None = None, **config: Any
) -> dict[str, torch.Tensor]:
    """A checkpoint as it is published, with random codes; and what it means, by transformers."""
    generator = torch.Generator().manual_seed(0)
    stored, meant = {}, {}
    for name, tensor in CASE.tensors(torch.bfloat16).items():
        meant[name] = stored[name] = tensor
        if name.endswith("_proj") and ".experts." in name:
            experts, columns, rows = stored.pop(name).shape
            shape = (experts, rows, columns // 32)
            blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
            scales = torch.randint(118, 124, shape, generator=generator, dtype=torch.uint8)
            stored |= {name + "_blocks": blocks, name + "_scales": scales}
            meant[name] = convert_moe_packed_tensors(blocks, scales)
    for name, changed in (change or {}).items():
        stored.pop(name, None)
        if changed is not None:
            stored[name] = changed
    write_hub_folder(folder, {**CASE.config, **QUANTISED, **config}, stored, shards=3)
    return meant


def test_every_code_has_the_value_that_transformers_gives_it() -> None:
    """All bytes under all exponents, those that overflow and underflow among them."""
    scales = torch.arange(256, dtype=torch.uint8).view(1, 256, 1).expand(1, 256, 16)
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(1, 256, 16, 16)
    found, wanted = dequantise_mxfp4(blocks, scales), convert_moe_packed_tensors(blocks, scales)
    assert found.shape == (1, 512, 256)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found.view(torch.int16), wanted.view(torch.int16))
    assert found[0, :4, 127].tolist() == [0.0, 0.0, 0.5, 0.0]  # bytes 0x00 and 0x01, the low bits first


def test_import_dequantises(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    meant = write(tmp_path / "hub")
    before = tree(tmp_path / "hub")
    options = ("--tp", 2, "--pp", 2, "--ep", 2, "--etp", 1, "--json")
    code, out, err = run_cli(capsys, "import", tmp_path / "hub", tmp_path / "m", "--dequantize-mxfp4", *options)
    assert code == 0, err
    assert any("8 MXFP4 tensors are dequantised" in note for note in json.loads(out)["notes"])
    assert tree(tmp_path / "hub") == before
    assert verify_manifest(tmp_path / "m").equal
    Bridge.from_megatron(tmp_path / "m").to_hf(tmp_path / "back")
    assert_same_bits(tensors_of(tmp_path / "back"), meant)
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == CASE.config
    assert verify_pair(tmp_path / "back", tmp_path / "m").equal
    found = Bridge.from_hf(tmp_path / "hub", dequantize_mxfp4=True).build_hf_model()
    ids = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.equal(found(ids).logits, AutoModelForCausalLM.from_pretrained(tmp_path / "back")(ids).logits)


def test_without_the_flag_one_line_names_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "hub")
    code, _, err = run_cli(capsys, "import", tmp_path / "hub", tmp_path / "m")
    assert (code, err.count("\n")) == (2, 1)
    assert "is MXFP4" in err
    assert "--dequantize-mxfp4" in err
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({NAME + "_scales": None}, f"{NAME}_blocks"),
        ({NAME + "_blocks": None}, f"{NAME}_scales"),
        ({NAME: torch.ones(4, 32, 64).bfloat16()}, NAME),
        ({"model.norm.weight": torch.ones(64, dtype=torch.uint8)}, "model.norm.weight"),
        ({NAME + "_scales": torch.ones(4, 64, 2, dtype=torch.uint8)}, f"{NAME}_scales"),
        ({NAME + "_scales": torch.ones(4, 64, 1)}, f"{NAME}_scales"),
    ],
)
def test_bad_parts(tmp_path: Path, change: dict[str, Any], named: str) -> None:
    write(tmp_path / "hub", change)
    with refused(CheckpointError, tmp_path / "hub", named):
        Bridge.from_hf(tmp_path / "hub", dequantize_mxfp4=True)


def test_nothing_to_dequantise(tmp_path: Path) -> None:
    source = CASE.write(tmp_path / "hub")
    with refused(SettingError, "dequantize_mxfp4", str(source)):
        Bridge.from_hf(source, dequantize_mxfp4=True)
    with refused(SettingError, "dequantize_fp8", "`dequantize_mxfp4`"):
        Bridge.from_hf(source, dequantize_fp8=True, dequantize_mxfp4=True)


@pytest.mark.extension("parallel")
def test_megatron_cores_own_model_has_the_keys_and_the_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sinks, windows by turns, YaRN, clamped gates, biases of router and experts: with megatron-core's own layers, of
    which `--engine megatron` replaces attention, norms and router."""
    pytest.importorskip("megatron.core")
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
    from megatron.core.fusions.fused_bias_geglu import quick_gelu
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.transformer_config import TransformerConfig

    from dlm_bridge.models.rope import rope_settings, window_settings
    from dlm_bridge.parallel import groups, overrides
    from dlm_bridge.parallel.weights import live_tensors

    monkeypatch.setattr(moe_utils, "te_general_gemm", None, raising=False)  # undefined without Transformer Engine
    source = CASE.write(tmp_path / "hub")
    rope = rope_settings(CASE.config)
    assert rope.pop("position_embedding_type") == "yarn"
    groups.initialize(Layout())
    try:
        config = TransformerConfig(
            num_layers=4, hidden_size=64, num_attention_heads=4, num_query_groups=2, kv_channels=16,
            normalization="RMSNorm", layernorm_epsilon=1e-5, hidden_dropout=0.0, attention_dropout=0.0,
            add_bias_linear=True, add_qkv_bias=True, softmax_type="learnable", **window_settings(CASE.config),
            num_moe_experts=4, moe_router_topk=2, ffn_hidden_size=32, moe_ffn_hidden_size=32,
            moe_router_load_balancing_type="none", moe_token_dispatcher_type="alltoall", gated_linear_unit=True,
            activation_func=inspect.unwrap(quick_gelu), activation_func_clamp_value=7.0, glu_linear_offset=1.0,
            use_cpu_initialization=True, cuda_graph_scope=[],
        )  # fmt: skip
        for name, value in rope.items():
            setattr(config, name, value)
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
        model = GPTModel(
            config, spec, 130, 64, share_embeddings_and_output_weights=False, position_embedding_type="yarn",
            rotary_base=rope["rotary_base"],
        )  # fmt: skip

        def stored(key: str) -> str:  # Transformer Engine's name for the local layers' norm
            return key.replace("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight")

        checkpoint = Bridge.from_hf(source).checkpoint
        live = {stored(name): tensor for name, tensor in live_tensors([model]).items()}
        wanted, unset = {}, set(live)
        with torch.no_grad():
            for param in checkpoint.params:
                rows = param.to_megatron(checkpoint.read_param(param)).split(
                    [piece.megatron_shape[0] for piece in param.pieces]
                )
                for piece, values in zip(param.pieces, rows, strict=True):
                    wanted[piece.megatron_key] = (*(size for _, size in piece.stack), *piece.megatron_shape)
                    unset.remove(piece.megatron_name)
                    live[piece.megatron_name].copy_(values)
        assert not unset
        found = {}
        for entry in model.sharded_state_dict().values():
            if isinstance(entry, ShardedTensorFactory):  # gate and up are two chunks of one tensor
                built = entry.build()
                entry = (built if isinstance(built, list) else list(built.values()))[0]
            if isinstance(entry, ShardedTensor):
                found[stored(entry.key)] = tuple(entry.global_shape)
        assert found == wanted
        ids = torch.randint(0, 130, (2, 24), generator=torch.Generator().manual_seed(0))
        mask = torch.ones(1, 1, 24, 24, dtype=torch.bool).triu(1)
        with torch.no_grad():
            logits = model.eval()(ids, torch.arange(24).expand(2, -1), mask)
            theirs = AutoModelForCausalLM.from_pretrained(source, attn_implementation="eager").eval()(ids).logits
        torch.testing.assert_close(logits, theirs, atol=1e-5, rtol=1e-5)
    finally:
        groups.destroy()
        overrides.uninstall()
        torch.distributed.destroy_process_group()


def test_what_it_becomes_is_made_of_the_dequantised_experts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    meant = write(tmp_path / "hub", vocab_size=130)
    write_tokenizer(tmp_path / "hub", {"tokenizer_class": "PreTrainedTokenizerFast"})
    code, _, err = run_cli(capsys, "convert-to-dlm", tmp_path / "hub", tmp_path / "dlm", "--to", "shifted")
    assert (code, err.count("\n")) == (2, 1)
    assert "--dequantize-mxfp4" in err
    options = ("--to", "shifted", "--dequantize-mxfp4")
    code, _, err = run_cli(capsys, "convert-to-dlm", tmp_path / "hub", tmp_path / "dlm", *options)
    assert code == 0, err
    found = tensors_of(tmp_path / "dlm")
    assert found.keys() == meant.keys()
    for name, tensor in meant.items():
        assert torch.equal(found[name][: len(tensor)], tensor), name
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "dlm")
    assert type(model).__name__ == "GptOssShiftedLM"
    assert "quantization_config" not in json.loads((tmp_path / "dlm" / "config.json").read_text())


def test_sinks_are_in_every_form_s_attention(tmp_path: Path) -> None:
    """With an infinite sink, heads attend to nothing, with and without a KV cache."""
    source = CASE.write(tmp_path / "hub", vocab_size=260, num_hidden_layers=1)
    write_tokenizer(source, {"tokenizer_class": "PreTrainedTokenizerFast"})
    convert_to_dlm(source, tmp_path / "dlm", to="block-causal")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "dlm", dtype=torch.float64).eval()
    model.set_experts_implementation("eager")  # torch._grouped_mm has no float64
    ids = torch.randint(0, 250, (1, 9), generator=torch.Generator().manual_seed(0))
    settings = {"gen_length": 8, "temperature": 0.0, "eos_token_id": None}
    before = model.generate(ids, **settings)
    model.model.layers[0].self_attn.sinks.data.fill_(1e4)
    with torch.no_grad():
        logits = model(ids).logits
        moved = model(ids.roll(1, dims=1)).logits.roll(-1, dims=1)
    torch.testing.assert_close(moved, logits)
    without = [model.generate(ids, cache=cache, **settings) for cache in ("none", "block")]
    assert torch.equal(*without)
    assert not torch.equal(without[0], before)


def test_defaults_of_the_config_class_are_the_published_settings() -> None:
    """Of keys that a config.json leaves out."""
    of_120b = {**GPT_OSS, "num_hidden_layers": 36, "num_local_experts": 128}
    of_120b["layer_types"] = ["sliding_attention", "full_attention"] * 18
    mapping, named = CASE.spec.mapping, {"architectures", "model_type", "vocab_size"}
    wanted = mapping.settings(of_120b)
    assert mapping.settings({key: value for key, value in of_120b.items() if key in named}) == wanted
    assert wanted["window_size"] == (127, 0)
    assert wanted["rotary_base"] == 150_000.0
    assert wanted["yarn_rotary_scaling_factor"] == 32.0


@pytest.mark.extension("parallel")
def test_experts_with_biases_are_not_split() -> None:
    pytest.importorskip("megatron.core")
    from dlm_bridge.parallel.config import model_config

    mapping = CASE.spec.mapping
    arguments = (mapping, CASE.config, mapping.dims(CASE.config), Layout(tp=2), torch.float32)
    with refused(LayoutError, "etp", "2"):
        model_config(*arguments)


def test_run_config_names_the_gate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = CASE.write(tmp_path / "hub")
    code, _, err = run_cli(capsys, "import", source, tmp_path / "m", "--run-config")
    assert code == 0, err
    model = yaml.safe_load(next((tmp_path / "m").rglob("run_config.yaml")).read_text())["model"]
    assert model["activation_func"]["_target_"] == "megatron.core.fusions.fused_bias_geglu.quick_gelu"
    assert model["gated_linear_unit"] is True
    assert (model["softmax_type"], model["glu_linear_offset"], model["window_size"]) == ("learnable", 1.0, [5, 0])
    code, _, err = run_cli(capsys, "import", source, tmp_path / "legacy", "--format", "torch")
    assert code == 0, err
    args = torch.load(next((tmp_path / "legacy").rglob("*.pt")), weights_only=False)["args"]
    assert (args.swiglu, args.quick_geglu, args.activation_func_clamp_value) == (False, True, 7.0)

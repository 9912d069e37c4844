"""DiffusionGemma crosses to Megatron's layouts and back bit for bit; what is not its class's is refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint
import transformers
from safetensors.torch import load_file, save_file

from dlm_bridge import Bridge, DlmBridgeError, Layout, LayoutError
from dlm_bridge.convert.inspect import inspect_checkpoint
from dlm_bridge.convert.verify import verify_pair
from dlm_bridge.evaluation.logits import compare_logits
from dlm_bridge.models.diffusion_gemma import SPEC
from dlm_bridge.models.families import find_family
from tests.autoregressive.test_families import assert_same_bits, assert_same_files, tensors_of
from tests.convert.adapters import written_adapter
from tests.convert.helpers import run_cli
from tests.diffusion_gemma.checkpoint import CONFIG, config_with, tensors, write_checkpoint
from tests.refusals import refused

needs_class = pytest.mark.skipif(
    not hasattr(transformers, "DiffusionGemmaForBlockDiffusion"), reason="this transformers has no DiffusionGemma"
)
CUTS = [Layout(tp=2, pp=2, vp=2), Layout(tp=2, pp=2, ep=2, etp=1), Layout(tp=2, ep=4, etp=2)]
GRID = [
    Layout(tp=tp, pp=pp, ep=ep, etp=etp) for tp, etp in ((1, 1), (2, 1), (2, 2)) for pp in (1, 4) for ep in (1, 2, 4)
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("diffusion_gemma") / "hub")


@pytest.fixture(scope="module")
def megatron(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("diffusion_gemma") / "megatron"
    Bridge.from_hf(folder).to_megatron(path, Layout(tp=2, ep=2, etp=1))
    return path


def rewrite(source: Path, target: Path, change: Any) -> Path:
    """A copy in one file whose tensors went through `change`."""
    target.mkdir()
    (target / "config.json").write_bytes((source / "config.json").read_bytes())
    changed = tensors_of(source)
    change(changed)
    save_file({name: tensor.contiguous() for name, tensor in changed.items()}, target / "model.safetensors")
    return target


def keys_of(path: Path) -> dict[str, tuple[int, ...]]:
    from dlm_bridge.convert.checkpoints import open_checkpoint

    return {name: tensor.shape for name, tensor in open_checkpoint(path).stored_tensors().items()}


def test_the_class_is_found_by_its_name() -> None:
    assert find_family(CONFIG) is SPEC
    assert SPEC.native
    assert not SPEC.auto_classes


@needs_class
def test_the_mapping_s_tensors_are_the_class_s(tmp_path: Path) -> None:
    """Of both spellings of the layers' sizes: the Hub's, and the one that transformers 5.23 saves."""
    model = SPEC.load("model_class")(SPEC.load("config_class").from_dict(config_with(initializer_range=0.5)))
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert "per_layer_config" in saved["text_config"]
    shapes = {name: tuple(tensor.shape) for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    assert {name: tuple(tensor.shape) for name, tensor in tensors().items()} == shapes
    for config in (CONFIG, saved):
        params = SPEC.mapping.params(SPEC.mapping.dims(config))
        assert {n: s for param in params for n, s in zip(param.hub_names, param.hub_shapes, strict=True)} == shapes
    own = load_file(tmp_path / "model.safetensors")
    for name, started in SPEC.initial_weights(config_with(initializer_range=0.5), seed=0):
        drawn = bool(own[name].min() != own[name].max())
        assert (
            torch.allclose(started.std(), own[name].std(), rtol=0.3) if drawn else torch.equal(started, own[name])
        ), name


@needs_class
def test_what_transformers_saves_is_exported_in_the_hub_s_spelling(tmp_path: Path) -> None:
    """vLLM 0.26.0 reads text_config into a plain config, as here."""
    from transformers import AutoConfig, PreTrainedConfig

    model = SPEC.load("model_class")(SPEC.load("config_class").from_dict(CONFIG))
    model.save_pretrained(tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "config.json").read_text())
    with pytest.raises(RuntimeError, match="head_dim"):
        _ = PreTrainedConfig(**saved["text_config"]).head_dim
    Bridge.from_hf(tmp_path / "saved").to_megatron(tmp_path / "megatron", Layout(tp=2))
    report = Bridge.from_megatron(tmp_path / "megatron").to_hf(tmp_path / "exported")
    Bridge.from_model(model).to_hf(tmp_path / "live")
    for name in ("exported", "live"):
        config = json.loads((tmp_path / name / "config.json").read_text())
        text = PreTrainedConfig(**config["text_config"])
        assert (text.head_dim, text.global_head_dim, text.num_key_value_heads) == (8, 16, 4)
        assert text.num_global_key_value_heads == 2
        read = AutoConfig.from_pretrained(tmp_path / name)
        assert read.to_dict() == model.config.to_dict() | {"_name_or_path": read._name_or_path}
    assert not any("Hub's original keys" in note for note in report.notes)  # the import has written them
    report = Bridge.from_hf(tmp_path / "saved").to_hf(tmp_path / "copied")
    assert any("Hub's original keys" in note for note in report.notes)


def round_trip(source: Path, folder: Path, layouts: list[Layout], format_: str = "torch_dist") -> None:
    expected = tensors_of(source)
    for number, layout in enumerate(layouts):
        written, other, back = (folder / f"{name}{number}" for name in ("megatron", "resharded", "back"))
        Bridge.from_hf(source).to_megatron(written, layout, format=format_)
        Bridge.from_megatron(written).to_megatron(other, layouts[number - 1], format=format_)
        Bridge.from_megatron(other).to_hf(back)
        assert_same_bits(tensors_of(back), expected)
        assert_same_files(back, source)


def test_round_trip(tmp_path: Path) -> None:
    round_trip(write_checkpoint(tmp_path / "hub", torch.bfloat16), tmp_path, CUTS)
    assert verify_pair(tmp_path / "hub", tmp_path / "megatron1").equal


@pytest.mark.slow
def test_round_trip_over_the_grid(tmp_path: Path) -> None:
    round_trip(write_checkpoint(tmp_path / "hub"), tmp_path, GRID)


@pytest.mark.slow
def test_round_trip_in_megatrons_legacy_format(tmp_path: Path) -> None:
    layouts = [Layout(tp=2, pp=2), Layout(pp=2, ep=2), Layout(tp=2, ep=2, etp=2)]
    round_trip(write_checkpoint(tmp_path / "hub"), tmp_path, layouts, "torch")


def test_a_plain_distributed_checkpoint_is_not_taken_for_megatrons(folder: Path, tmp_path: Path) -> None:
    """Its keys begin with `model.decoder.layers`, as those of Megatron FSDP do."""
    torch.distributed.checkpoint.save(tensors_of(folder), checkpoint_id=tmp_path / "state", no_dist=True)
    Bridge.from_megatron(tmp_path / "state", like=folder).to_hf(tmp_path / "back")
    assert_same_bits(tensors_of(tmp_path / "back"), tensors_of(folder))


def test_keys_and_shapes_are_megatron_bridge_s(megatron: Path) -> None:
    shapes = keys_of(megatron)
    assert shapes["decoder.layers.0.self_attention.linear_qkv.weight"] == (8 * 8 + 2 * 4 * 8, 32)
    assert shapes["decoder.layers.1.self_attention.linear_qkv.weight"] == (8 * 16 + 2 * 2 * 16, 32)
    assert shapes["decoder.layers.1.mlp.experts.experts.linear_fc1.weight"] == (4, 2 * 16, 32)
    assert shapes["decoder.layers.1.mlp.experts.experts.linear_fc2.weight"] == (4, 32, 16)
    assert shapes["decoder.layers.1.mlp.shared_experts.linear_fc1.weight"] == (2 * 24, 32)
    assert shapes["vision_tower.patch_embedder.position_embedding_table"] == (2, 12, 16)
    layer = {name.removeprefix("decoder.layers.3.") for name in shapes if name.startswith("decoder.layers.3.")}
    assert layer == {
        "self_attention.linear_qkv.layer_norm_weight",
        "self_attention.linear_qkv.weight",
        "self_attention.q_layernorm.weight",
        "self_attention.k_layernorm.weight",
        "self_attention.linear_proj.weight",
        "self_attention.linear_proj.post_layernorm.weight",
        "pre_shared_expert_layernorm.weight",
        "pre_mlp_layernorm.weight",
        "post_ffn_layernorm.weight",
        "mlp.router.weight",
        "mlp.router.scale",
        "mlp.router.per_expert_scale",
        "mlp.experts.experts.linear_fc1.weight",
        "mlp.experts.experts.linear_fc2.weight",
        "mlp.shared_experts.linear_fc1.weight",
        "mlp.shared_experts.linear_fc2.weight",
        "mlp.post_shared_expert_layernorm.weight",
        "mlp.post_moe_layernorm.weight",
        "layer_scalar",
        "encoder_layer_scalar",
    }


def test_values_of_a_full_layer_are_its_keys(megatron: Path, folder: Path) -> None:
    """Megatron's tensor has the rows of a query group's keys twice."""
    from dlm_bridge.convert.checkpoints import open_checkpoint

    key = "decoder.layers.1.self_attention.linear_qkv.weight"
    fused = open_checkpoint(megatron).reader.read(key, (), (8 * 16 + 2 * 2 * 16, 32)).view(2, 6, 16, 32)
    assert torch.equal(fused[:, 4], fused[:, 5])
    keys = tensors_of(folder)["model.decoder.layers.1.self_attn.k_proj.weight"]
    assert torch.equal(fused[:, 4].reshape(-1, 32), keys)
    param = next(p for p in SPEC.mapping.params(SPEC.mapping.dims(CONFIG)) if p.megatron_key == key)
    changed = fused.clone().view(-1, 32)
    changed[-1, -1] += 1
    with pytest.raises(DlmBridgeError, match=key):
        param.to_hub(changed)


def test_second_copies_of_tied_tensors_are_given_back(folder: Path, tmp_path: Path) -> None:
    """The output layer and tensors of the encoder, among them the experts of a layer."""
    decoder, encoder = "model.decoder.", "model.encoder.language_model."
    tied = ["embed_tokens.weight", "layers.1.experts.down_proj", "layers.0.self_attn.v_proj.weight"]

    def repeat(found: dict[str, torch.Tensor]) -> None:
        found |= {encoder + name: found[decoder + name].clone() for name in tied}
        found["lm_head.weight"] = found[decoder + "embed_tokens.weight"].clone()

    source = rewrite(folder, tmp_path / "hub", repeat)
    Bridge.from_hf(source).to_megatron(tmp_path / "megatron", Layout(tp=2, pp=2))
    Bridge.from_megatron(tmp_path / "megatron").to_hf(tmp_path / "back")
    assert_same_bits(tensors_of(tmp_path / "back"), tensors_of(source))

    def differ(found: dict[str, torch.Tensor]) -> None:
        repeat(found)
        found[encoder + tied[1]][0] += 1

    with pytest.raises(DlmBridgeError, match=encoder + tied[1]):
        Bridge.from_hf(rewrite(folder, tmp_path / "odd", differ)).to_megatron(tmp_path / "other")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    "name",
    [
        "model.decoder.layers.2.experts.gate_up_proj",
        "model.decoder.layers.1.self_attn.k_proj.weight",
        "model.decoder.self_conditioning.up_proj.weight",
        "model.encoder.language_model.layers.3.layer_scalar",
        "model.encoder.vision_tower.encoder.layers.1.mlp.up_proj.linear.weight",
    ],
)
def test_a_missing_and_a_misshaped_tensor_is_named(folder: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(DlmBridgeError, match=f"{name} is missing"):
        Bridge.from_hf(rewrite(folder, tmp_path / "short", lambda found: found.pop(name))).to_megatron(
            tmp_path / "out"
        )

    def cut(found: dict[str, torch.Tensor]) -> None:
        found[name] = found[name].repeat(2, *(1 for _ in found[name].shape[1:]))

    with pytest.raises(DlmBridgeError, match=f"{name} has shape"):
        Bridge.from_hf(rewrite(folder, tmp_path / "odd", cut)).to_megatron(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_tensor_that_the_class_does_not_have_is_named(folder: Path, tmp_path: Path) -> None:
    extra = "model.decoder.layers.1.self_attn.v_proj.weight"  # a full layer's

    def add(found: dict[str, torch.Tensor]) -> None:
        found[extra] = found["model.decoder.layers.1.self_attn.k_proj.weight"].clone()

    with pytest.raises(DlmBridgeError, match=extra):
        Bridge.from_hf(rewrite(folder, tmp_path / "hub", add)).to_megatron(tmp_path / "megatron")


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (config_with(text={"num_hidden_layers": 5}), "layer_types"),
        (config_with(text={"layer_types": ["linear_attention"] * 4}), "layer_types"),
        (config_with(text={"num_hidden_layers": "4"}), "num_hidden_layers"),
        (config_with(text={"num_global_key_value_heads": 3}), "layer 1 has 3 key/value heads"),
        (config_with(text={"global_head_dim": 0}), "global_head_dim"),
        (config_with(text={"per_layer_config": {"1": {"head_dim": 0}}}), "layer 1 has 4 key/value heads of size 0"),
        (config_with(text={"head_dim": 8.5}), "head_dim"),
        (config_with(text={"top_k_experts": 5}), "num_experts"),
        (config_with(text={"num_experts": ...}), "num_experts"),
        (config_with(text={"moe_intermediate_size": ...}), "moe_intermediate_size"),
        (config_with(text={"hidden_size": -32}), "hidden_size"),
        (config_with(text={"intermediate_size": 0}), "intermediate_size"),
        (config_with(text={"per_layer_config": {"4": {}}}), "per_layer_config"),
        (config_with(vision={"output_proj_dims": 0}), "output_proj_dims"),
        (config_with(vision={"num_hidden_layers": 10**6}), "vision_config.num_hidden_layers"),
        (config_with(text={"per_layer_config": {"1": {"head_dim": 16}, "3": {"head_dim": 8}}}), "layer 3"),
        (config_with(text={"per_layer_config": {"1": {"intermediate_size": 8}}}), "intermediate_size"),
        (config_with(text={"per_layer_config": [1]}), "per_layer_config"),
        (config_with(text={"attention_bias": True}), "attention_bias"),
        (config_with(vision={"use_clipped_linears": True}), "use_clipped_linears"),
        (config_with(vision={"patch_size": 0}), "patch_size"),
        (config_with(tie_word_embeddings=False), "tie_word_embeddings"),
        (config_with(text_config=[4]), "text_config"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_sizes_that_the_class_does_not_accept_are_refused(
    folder: Path, tmp_path: Path, config: dict[str, Any], named: str
) -> None:
    source = rewrite(folder, tmp_path / "hub", lambda found: None)
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(DlmBridgeError, match=named):
        Bridge.from_hf(source)


def test_the_last_layer_is_full_whatever_the_config_says() -> None:
    """As the class makes it, with a warning."""
    types = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"]
    assert SPEC.mapping.dims(config_with(text={"layer_types": types})).full_layers == {1, 3}
    by_default = config_with(text={"layer_types": ..., "num_hidden_layers": 13})
    assert SPEC.mapping.dims(by_default).full_layers == {5, 11, 12}


def test_layouts_that_cannot_cut_it_are_refused(folder: Path, tmp_path: Path) -> None:
    with refused(LayoutError, "tp", "4", "2"):
        Bridge.from_hf(folder).to_megatron(tmp_path / "out", Layout(tp=4))
    with refused(LayoutError, "ep", "3", "4"):
        Bridge.from_hf(folder).to_megatron(tmp_path / "out", Layout(ep=3))


def test_verify_finds_one_changed_value_of_one_expert(folder: Path, megatron: Path, tmp_path: Path) -> None:
    name = "model.decoder.layers.2.experts.gate_up_proj"

    def change(found: dict[str, torch.Tensor]) -> None:
        found[name][3, 17, 5] += 1

    report = verify_pair(rewrite(folder, tmp_path / "hub", change), megatron)
    assert not report.equal
    assert [difference.name for difference in report.differences] == [name]


def test_inspect_says_both_head_sizes(megatron: Path) -> None:
    info = inspect_checkpoint(megatron)
    assert (info.family, info.sizes["head_dim"], info.sizes["full_head_dim"]) == ("diffusion_gemma", 8, 16)
    assert info.sizes["full_layers"] == [1, 3]
    assert info.parameters == sum(tensor.numel() for tensor in tensors().values())


@needs_class
def test_logits_of_a_canvas_are_compared(folder: Path, megatron: Path, tmp_path: Path) -> None:
    """transformers computes both sides; the step that is conditioned on the last one is compared, too."""
    found = compare_logits(folder, megatron)
    assert (found.a, found.b, found.difference) == ("transformers", "transformers", 0.0)
    assert found.positions == 36
    assert any("vision tower" in note for note in found.notes)

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.decoder.self_conditioning.up_proj.weight"] *= 2

    other = compare_logits(folder, rewrite(folder, tmp_path / "hub", change))
    assert other.difference > other.allowed


@needs_class
def test_live_models_cross_the_bridge(folder: Path, megatron: Path, tmp_path: Path) -> None:
    model = Bridge.from_megatron(megatron).build_hf_model()
    assert type(model) is SPEC.load("model_class")
    Bridge.from_model(model).to_megatron(tmp_path / "megatron", Layout(pp=2, ep=2))
    Bridge.from_megatron(tmp_path / "megatron").to_hf(tmp_path / "back")
    assert_same_bits(tensors_of(tmp_path / "back"), tensors_of(folder))


def test_a_transformers_without_the_class_is_named() -> None:
    """Conversion works all the same: nothing above imports the class."""
    absent = replace(SPEC, model_class="transformers:NoSuchForBlockDiffusion")
    with pytest.raises(DlmBridgeError, match="NoSuchForBlockDiffusion"):
        absent.load("model_class")


@pytest.mark.extension("parallel")
def test_the_megatron_engine_is_refused_with_its_page(
    folder: Path, megatron: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """So is what only the engine could use: a plan of its memory, an adapter in its layout."""
    page = "docs/diffusion_gemma.md"
    assert "Why the Megatron engine does not train it" in (Path(__file__).parents[2] / page).read_text()
    with pytest.raises(DlmBridgeError, match=page):
        Bridge.from_megatron(megatron).build_megatron_model(Layout(), torch.float32)
    adapter = written_adapter(folder, tmp_path)
    tensors = load_file(adapter / "adapter_model.safetensors")
    decoder = {name: tensor for name, tensor in tensors.items() if "model.decoder.layers" in name}
    save_file(decoder, adapter / "adapter_model.safetensors")
    for command in (
        ("plan", folder, "--gpus", 1, "--seq-length", 64),
        ("adapter", "import", adapter, tmp_path / "out", "--base", folder),
    ):
        code, _, error = run_cli(capsys, *command)
        assert (code, error.count("\n")) == (2, 1)
        assert page in error

"""What every family must do, without special cases: load, compute, save, cross to Megatron and back, train."""

from __future__ import annotations

import dataclasses
import filecmp
import fnmatch
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from dlm_bridge import Bridge
from dlm_bridge.errors import CheckpointError, SettingError
from dlm_bridge.generation import SAMPLERS
from dlm_bridge.models import diffusion_lm
from dlm_bridge.models.families import UNSUPPORTED, families, family_by_name, find_family
from dlm_bridge.train.lora import linear_layers
from tests.families.case import CUT, VARIANTS, FamilyCase, all_cases, config_of, few, layouts
from tests.families.tp_worker import sampled
from tests.processes import assert_ok
from tests.refusals import refused

DTYPES = [pytest.param(torch.float32, id="fp32", marks=pytest.mark.slow), pytest.param(torch.bfloat16, id="bf16")]


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def assert_same_bits(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def whole(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """positions and real [B, S] of rows without padding."""
    return torch.arange(ids.shape[1]).expand(ids.shape), torch.ones_like(ids, dtype=torch.bool)


def test_every_diffusion_family_has_a_case() -> None:
    """Those with a class of this package; tests/diffusion_gemma has the other one's, tests/autoregressive the derived
    ones'."""
    own = {spec.name for spec in families() if spec.kind == "diffusion" and not spec.native and not spec.derived_from}
    assert {case.name for case in all_cases()} == own


def test_architectures_lead_to_one_family_each() -> None:
    named = [architecture for spec in families() for architecture in spec.architectures]
    assert len(set(named)) == len(named)
    assert not set(named) & set(UNSUPPORTED)
    for architecture, reason in UNSUPPORTED.items():
        with refused(CheckpointError, "config.json", architecture, reason):
            find_family({"architectures": [architecture]})
        assert "\n" not in reason


@pytest.mark.parametrize(
    ("name", "architecture"),
    [
        ("DiffusionGemma", "DiffusionGemmaForBlockDiffusion"),
        ("LLaDA2", "LLaDA2MoeModelLM"),
        ("Stable-DiffCoder", "StableDiffcoderForCausalLM"),
        ("I-DLM", None),
        ("CoDA", "CoDALanguageModel"),
        ("DreamOn", None),
        ("DFlash", "DFlashDraftModel"),
        ("Nemotron-Labs-TwoTower-30B-A3B", "NemotronHTwoTowerForCausalLM"),
        ("Sumi-7B", "SumiForMaskGeneration"),
        ("openPangu-R-7B-Diffusion", "PanguEmbeddedForCausalLM"),
        ("W1-4B-dLLM", "W1-4B-dLLM"),
    ],
)
def test_families_of_2026_are_listed(name: str, architecture: str | None) -> None:
    """Each is supported or refused with a reason that names it."""
    if reason := UNSUPPORTED.get(architecture or ""):
        assert name in f"{architecture} {reason}"
    elif architecture:
        assert find_family({"architectures": [architecture]}).title.startswith(name)
    else:
        assert any(spec.title.startswith(name) for spec in families())


def test_remote_code_behind_a_stock_class_name_is_not_taken_for_it() -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "auto_map": {"AutoModelForCausalLM": "modeling_seed_diffcoder.StableDiffcoderForCausalLM"},
        "model_type": "llama",
    }
    assert find_family(config).name == "stable_diffcoder"
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_mdlm.MDLM"}
    with refused(CheckpointError, "config.json", "MDLM"):
        find_family(config)
    assert find_family({"architectures": ["LlamaForCausalLM"]}).kind == "autoregressive"


@pytest.mark.parametrize(
    ("name", "other", "key", "value"),
    [("dreamon", "dream", "expand_token_id", 151667), ("idlm", "sdar", "use_regular_causal", True)],
)
def test_a_key_tells_a_family_from_another(name: str, other: str, key: str, value: Any, tmp_path: Path) -> None:
    case = next(case for case in all_cases() if case.name == name)
    plain = {one: given for one, given in case.config.items() if one != key}
    assert find_family(plain).name == other
    assert find_family(case.config).name == name
    assert find_family(case.config, other).name == other
    (tmp_path / "config.json").write_text(json.dumps(plain))
    config_class = family_by_name(other).load("config_class")
    assert type(transformers.AutoConfig.from_pretrained(tmp_path)) is config_class
    # A model of the other family that is to become one says so when it is saved.
    config = family_by_name(name).load("config_class").from_dict(plain)
    assert getattr(config, key) == value
    config.save_pretrained(tmp_path)
    assert config_of(tmp_path) == {**plain, key: value}


def test_families_that_a_config_cannot_tell_are_chosen_by_name() -> None:
    """DiffuLLaMA's config is Llama's; DiffLM's has no model type, so no Auto class can read it; Stable-DiffCoder's has
    Llama's model type and a class of its own."""
    for case in all_cases():
        if case.name == "diffullama":
            assert find_family(case.config).name == "llama"
            assert find_family(case.config, "diffullama").shift
        if case.name == "difflm":
            assert find_family(case.config).name == "difflm"
            assert "model_type" not in case.config
        if case.name == "stable_diffcoder":
            assert find_family(case.config).name == "stable_diffcoder"


# ------------------------------------------------------------------------------------------------- loading


def test_auto_classes_give_the_class_of_the_hub(case: FamilyCase, folder: Path, model: Any) -> None:
    import transformers

    assert type(model) is case.spec.load("model_class")
    for name in case.spec.auto_classes:
        assert type(getattr(transformers, name).from_pretrained(folder)) is type(model), name
    if case.spec.auto_classes:
        assert type(transformers.AutoConfig.from_pretrained(folder)) is case.spec.load("config_class")
        assert find_family(case.config) is case.spec
    assert find_family(case.config, case.name) is case.spec


def test_token_ids_and_blocks_are_the_published_ones(case: FamilyCase, model: Any) -> None:
    assert model.config.mask_token_id == case.mask_token_id
    assert (case.block is not None) == (case.spec.attention_pattern == "block_causal")
    if case.block is not None:
        assert model.config.block_size == case.block


def test_tokenizer_loads_without_remote_code(case: FamilyCase, folder: Path) -> None:
    from transformers import AutoTokenizer

    if not case.tokenizer:
        pytest.skip("the family publishes no tokenizer of its own")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "the other — thé"
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert 257 in ids  # merged, so the vocabulary's own merges were used
    assert tokenizer.decode(ids) == text
    for key, token in case.tokenizer.items():
        if key in ("eos_token", "pad_token", "mask_token"):
            assert getattr(tokenizer, key) == (token["content"] if isinstance(token, dict) else token)


# ------------------------------------------------------------------------------------------------- maths


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.fast("*-sdpa", *few("-eager"))
def test_logits_are_our_own_maths(case: FamilyCase, folder: Path, ids: torch.Tensor, attention: str) -> None:
    model = case.load(folder, attn_implementation=attention)
    positions, real = whole(ids)
    expected = case.reference(tensors_of(folder), case.config, ids, case.allowed(positions, real), positions)
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits.double(), expected, atol=1e-5, rtol=1e-5)
        assert (expected - expected.mean()).abs().max() > 0.1


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.fast(*few("-eager", "-sdpa"))
def test_topology_by_perturbation(case: FamilyCase, folder: Path, ids: torch.Tensor, attention: str) -> None:
    """Exactly the logits of positions that may look at a token move when that token changes."""
    model = case.load(folder, attn_implementation=attention)
    positions, real = whole(ids)
    with torch.no_grad():
        for block in (case.block, *case.sizes_of_blocks):
            if block is not None:
                model.config.block_size = block
            allowed = case.allowed(positions, real, block)[0]
            before = model(ids).logits
            for token in (0, 1, case.length // 2, case.length - 1):
                changed = ids.clone()
                changed[:, token] = (ids[:, token] + 1) % 100
                moved = (model(changed).logits - before).abs().amax(-1)
                assert ((moved > 1e-5) == allowed[:, token]).all(), (block, token)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.fast(*few("-left-sdpa", "-right-eager"))
def test_padding_is_never_seen(case: FamilyCase, folder: Path, ids: torch.Tensor, attention: str, side: str) -> None:
    model = case.load(folder, attn_implementation=attention)
    real = torch.ones_like(ids, dtype=torch.bool)
    if side == "left":
        real[0, :7], real[1, :1] = False, False
    else:
        real[0, -7:], real[1, -1:] = False, False
    positions = (real.cumsum(-1) - 1).clamp(min=0)
    allowed = case.allowed(positions, real)
    expected = case.reference(tensors_of(folder), case.config, ids, allowed, positions)
    garbled = torch.where(real, ids, 5)
    with torch.no_grad():
        logits = model(ids, attention_mask=real.long(), position_ids=positions).logits
        other = model(garbled, attention_mask=real.long(), position_ids=positions).logits
    torch.testing.assert_close(logits[real].double(), expected[real], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(logits[real], other[real], atol=1e-6, rtol=0)


@pytest.mark.fast(*few())
def test_four_dimensional_masks_are_the_callers_topology(
    case: FamilyCase, folder: Path, model: Any, ids: torch.Tensor
) -> None:
    allowed = torch.rand(3, ids.shape[1], ids.shape[1], generator=torch.Generator().manual_seed(2)) < 0.5
    allowed |= torch.eye(ids.shape[1], dtype=torch.bool)
    positions = 3 * torch.arange(ids.shape[1]).expand(ids.shape)
    expected = case.reference(tensors_of(folder), case.config, ids, allowed, positions)
    bias = torch.zeros(3, 1, *allowed.shape[1:]).masked_fill(~allowed[:, None], torch.finfo(torch.float32).min)
    with torch.no_grad():
        for mask in (allowed[:, None], bias):
            logits = model(ids, attention_mask=mask, position_ids=positions).logits
            torch.testing.assert_close(logits.double(), expected, atol=1e-5, rtol=1e-5)


def test_position_ids_that_begin_again_are_documents_of_their_own_or_warn(
    model: Any, ids: torch.Tensor, caplog: pytest.LogCaptureFixture
) -> None:
    half = ids.shape[1] // 2
    positions = torch.cat([torch.arange(half), torch.arange(ids.shape[1] - half)])[None]
    diffusion_lm.logger.warning_once.cache_clear()
    with torch.no_grad():
        packed = model(ids, position_ids=positions).logits
        separates = model.family.attention_pattern == "block_causal"
        assert any("packed documents" in record.message for record in caplog.records) != separates
        if separates:
            torch.testing.assert_close(packed[:, half:], model(ids[:, half:]).logits, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(packed[:, :half], model(ids[:, :half]).logits, atol=1e-4, rtol=1e-4)
        caplog.clear()
        model(ids, position_ids=torch.arange(ids.shape[1])[None])
    assert not caplog.records


def test_logits_to_keep(model: Any, ids: torch.Tensor) -> None:
    kept = torch.rand(ids.shape, generator=torch.Generator().manual_seed(0)) < 0.3
    with torch.no_grad():
        full = model(ids).logits
        torch.testing.assert_close(model(ids, logits_to_keep=kept).logits, full[kept])
        torch.testing.assert_close(model(ids, logits_to_keep=5).logits, full[:, -5:])


# ------------------------------------------------------------------------------------------------- saving


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.fast(but=[f"{name}-bf16" for name in VARIANTS])
def test_saving_gives_back_names_keys_and_bits(case: FamilyCase, tmp_path: Path, dtype: torch.dtype) -> None:
    source = case.write(tmp_path / "hub", dtype)
    case.load(source).save_pretrained(tmp_path / "saved", max_shard_size="50KB")
    case.load(tmp_path / "saved").save_pretrained(tmp_path / "again")
    for saved in (tmp_path / "saved", tmp_path / "again"):
        assert_same_bits(tensors_of(saved), tensors_of(source))
        assert config_of(saved) == config_of(source)
        for file in source.glob("*.py"):
            if any(file.stem in reference for reference in case.config.get("auto_map", {}).values()):
                assert filecmp.cmp(file, saved / file.name, shallow=False)


def test_libraries_find_the_standard_names(case: FamilyCase, folder: Path, model: Any) -> None:
    """In `to_dict`, which is not the published form; nothing of it is saved, not even by way of a copy."""
    view = model.config.to_dict()
    assert view["_name_or_path"] == str(folder)
    for name in (
        "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    ):  # fmt: skip
        assert view[name] == getattr(model.config, name), name
    assert view.items() >= model.config.to_diff_dict().items()
    assert model.config.auto_map == case.config.get("auto_map", {}) == view.get("auto_map", {})
    assert type(model.config).from_dict(view).to_diff_dict() == model.config.to_diff_dict()


def test_windows_that_a_body_would_ignore_are_refused(case: FamilyCase) -> None:
    config_class = case.spec.load("config_class")
    if not any(field.name == "use_sliding_window" for field in dataclasses.fields(config_class)):
        pytest.skip("its body has no such setting")
    windowed = {**case.config, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}
    with refused(CheckpointError, "config.json", "use_sliding_window"):
        config_class.from_dict(windowed)


@pytest.mark.fast(*few())
def test_saving_keeps_keys_that_nobody_knows_and_real_changes(case: FamilyCase, tmp_path: Path) -> None:
    source = case.write(tmp_path / "hub", some_future_key={"a": [1, None]})
    model = case.load(source)
    model.config.mask_token_id = 6
    model.save_pretrained(tmp_path / "saved")
    assert config_of(tmp_path / "saved") == {**config_of(source), "mask_token_id": 6}


@pytest.mark.fast(but=VARIANTS)
def test_no_parameter_is_left_random(case: FamilyCase, tmp_path: Path) -> None:
    tensors = case.tensors(case.config, 0, torch.float32)
    name = next(name for name in reversed(tensors) if "layers.2" in name or "blocks.2" in name)
    folder = case.write(tmp_path / "hub")
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    from safetensors.torch import save_file

    del tensors[name]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with refused(CheckpointError, folder, "lacks "):
        case.load(folder)
    with refused(CheckpointError, None, name):
        Bridge.from_hf(folder, family=case.family_argument).to_megatron(tmp_path / "out")


# ------------------------------------------------------------------------------------------------- conversion


def test_mapping_covers_the_hubs_tensors(case: FamilyCase) -> None:
    """Each tensor exactly once, with its shape, whether mapped or carried; from scratch the same set is made."""
    mapping, dims = case.spec.mapping, case.spec.mapping.dims(case.config)
    tensors = case.tensors(case.config, 0, torch.float32)
    covered = [name for param in mapping.params(dims) for name in param.hub_names]
    assert len(set(covered)) == len(covered)
    assert set(covered) <= set(tensors)
    assert set(tensors) - set(covered) <= set(mapping.passthrough_names(dims))
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    for param in mapping.params(dims):
        for name, shape in zip(param.hub_names, param.hub_shapes, strict=True):
            assert shapes[name] == shape, name
    started = dict(case.spec.initial_weights(case.config, seed=3))
    assert {name: tuple(tensor.shape) for name, tensor in started.items()} == {name: shapes[name] for name in covered}
    assert all(tensor.isfinite().all() for tensor in started.values())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.fast(but=[f"{name}-bf16" for name in VARIANTS])
def test_conversion_gives_back_names_keys_files_and_bits(case: FamilyCase, tmp_path: Path, dtype: torch.dtype) -> None:
    source = case.write(tmp_path / "hub", dtype)
    expected = tensors_of(source)
    for number, layout in enumerate(layouts(case.spec, case.config, every=dtype == torch.float32)):
        megatron, back = tmp_path / f"megatron{number}", tmp_path / f"back{number}"
        Bridge.from_hf(source, family=case.family_argument).to_megatron(megatron, layout)
        Bridge.from_megatron(megatron).to_hf(back)
        assert_same_bits(tensors_of(back), expected)
        for file in source.rglob("*"):
            if file.is_file() and file.suffix != ".safetensors":
                assert filecmp.cmp(file, back / file.relative_to(source), shallow=False), file.name


@pytest.mark.fast(but=VARIANTS)
def test_live_models_cross_the_bridge(case: FamilyCase, folder: Path, model: Any, ids: torch.Tensor) -> None:
    built = Bridge.from_hf(folder, family=case.family_argument).build_hf_model()
    with torch.no_grad():
        assert torch.equal(built(ids).logits, model(ids).logits)
    live, expected = Bridge.from_model(model), tensors_of(folder)
    assert_same_bits({name: live.read(name) for name in expected}, expected)


# ------------------------------------------------------------------------------------------------- training


@pytest.mark.fast(*few())
def test_labels_give_a_loss_that_trains_everything(case: FamilyCase, folder: Path, ids: torch.Tensor) -> None:
    model = case.load(folder).train()
    model.config.mask_token_id = 99
    labels = ids.clone()
    labels[:, : case.block or 6] = -100

    def loss(seed: int) -> torch.Tensor:
        return model(ids, labels=labels, generator=torch.Generator().manual_seed(seed)).loss

    first = loss(3)
    assert torch.equal(first, loss(3))
    assert torch.equal(first, loss(4)) == (case.spec.objective == "idlm")  # which masks everything
    assert first.isfinite()
    first.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().sum() > 0, name
    with refused(SettingError, "generator"):
        model(ids, labels=labels)


@pytest.mark.fast(*few())
def test_gradient_checkpointing_changes_no_gradient(case: FamilyCase, folder: Path, ids: torch.Tensor) -> None:
    gradients = []
    for checkpointed in (False, True):
        model = case.load(folder).train()
        model.config.mask_token_id = 99
        if checkpointed:
            model.activation_checkpointing_enable()
            assert model.is_activation_checkpointing
        model(ids, labels=ids, generator=torch.Generator().manual_seed(0)).loss.backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, msg=name)


def test_tensor_parallel_plan_covers_every_matrix(case: FamilyCase, model: Any) -> None:
    """Every matrix of the layers (the router aside) is cut over ranks by transformers' own plan."""
    plan = model.tp_plan
    cut = [pattern for pattern, style in plan.items() if "replicate" not in style]
    for name, parameter in model.model.named_parameters():
        if parameter.ndim < 2 or name.endswith(("embed_tokens.weight", "gate.weight")):
            continue
        candidates = (f"model.{name}", f"model.{name.removesuffix('.weight')}")
        assert any(fnmatch.fnmatch(each, pattern) for each in candidates for pattern in cut), name


def test_an_adapters_default_targets_are_linear_layers(case: FamilyCase, model: Any) -> None:
    assert set(case.spec.lora_targets) <= linear_layers(model)


@pytest.mark.parametrize("id", CUT)
def test_tensor_parallel_logits_and_samples_are_the_same(id: str, tensor_parallel: dict[str, list[str]]) -> None:
    """`from_pretrained` with transformers' tensor parallelism on two processes."""
    assert_ok(id, tensor_parallel)


@pytest.mark.slow
@pytest.mark.parametrize("id", [case.id for case in all_cases() if case.id not in CUT])
def test_tensor_parallel_logits_and_samples_of_the_others_are_the_same(
    id: str, other_tensor_parallel: dict[str, list[str]]
) -> None:
    assert_ok(id, other_tensor_parallel)


def test_the_command_draws_the_same_tokens_on_every_process(tensor_parallel: dict[str, list[str]]) -> None:
    """Of a Megatron checkpoint, without a seed."""
    first, second = map(json.loads, tensor_parallel["command"])
    assert first == second
    assert len(first[0]) == 16


# ------------------------------------------------------------------------------------------------- sampling


@pytest.mark.fast(*few(), "dreamon")
def test_the_familys_own_sampler_fills_every_mask(case: FamilyCase, folder: Path, ids: torch.Tensor) -> None:
    model = case.load(folder)
    model.config.mask_token_id = 99
    prompt = ids[:2, :7].clone()
    prompt[prompt == 99] = 98

    def drawn(seed: int) -> torch.Tensor:
        return model.generate(prompt, gen_length=32, eos_token_id=None, seed=seed)

    output = drawn(1)
    assert torch.equal(output[:, :7], prompt)
    chooses_length = SAMPLERS[model.sampler_defaults["algorithm"]].resizes
    assert output.shape == (2, 39) or (chooses_length and output.shape[1] <= 39)
    assert not (output == 99).any()
    assert torch.equal(output, drawn(1))


@pytest.mark.slow
def test_samples_are_the_same_with_weights_on_the_disk(
    case: FamilyCase, folder: Path, model: Any, ids: torch.Tensor, tmp_path: Path
) -> None:
    """accelerate brings each part in when it is needed: a device map, as for a model that memory does not hold."""
    names = [name for name, _ in model.named_children() if name != model.base_model_prefix]
    names += [f"model.{name}" for name, _ in model.model.named_children() if name != "layers"]
    places = dict.fromkeys(names, "cpu")
    for layer in range(model.config.num_hidden_layers):
        places[f"model.layers.{layer}"] = "disk" if layer % 2 else "cpu"
    offloaded = case.load(folder, device_map=places, offload_folder=tmp_path)
    assert any(parameter.device.type == "meta" for parameter in offloaded.parameters())
    assert torch.equal(sampled(offloaded, ids), sampled(model, ids))

"""LLaDA on the Hub side: loads as published, computes what the paper says, saves what it loaded."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dlm_bridge import Bridge
from dlm_bridge.errors import CheckpointError, DlmBridgeError, SettingError
from tests.checkpoints import LLADA_CONFIG, llada_config, llada_tensors, write_hub_folder, write_llada
from tests.reference import llada_logits
from tests.refusals import refused

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, DynamicCache  # isort: skip


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


@pytest.fixture(scope="module")
def model(llada: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(llada).eval()


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return torch.randint(0, 120, (3, 24), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"n_kv_heads": 2},
        {"n_kv_heads": 1, "weight_tying": True, "rope_theta": 1e4},
        {"vocab_size": 128, "embedding_size": 160, "d_model": 96, "n_heads": 6, "n_kv_heads": 3, "rms_norm_eps": 1e-2},
    ],
    ids=["heads", "groups", "tied", "padded-embedding"],
)
def test_logits_are_the_papers(tmp_path: Path, shape: dict[str, Any], attention: str, ids: torch.Tensor) -> None:
    folder = write_llada(tmp_path / "hub", **shape)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=attention)
    expected = llada_logits(tensors_of(folder), config_of(folder), ids)
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_never_seen(llada: Path, attention: str, side: str, ids: torch.Tensor) -> None:
    model = AutoModelForCausalLM.from_pretrained(llada, attn_implementation=attention)
    real = torch.ones_like(ids, dtype=torch.bool)
    real[0, : 7 if side == "left" else 0] = False
    real[1, 20 if side == "right" else 24 :] = False
    positions = (real.cumsum(-1) - 1).clamp(min=0)
    expected = llada_logits(tensors_of(llada), config_of(llada), ids, real, positions)
    garbled = torch.where(real, ids, 5)
    with torch.no_grad():
        logits = model(ids, attention_mask=real.long(), position_ids=positions).logits
        other = model(garbled, attention_mask=real.long(), position_ids=positions).logits
    torch.testing.assert_close(logits[real].double(), expected[real], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(logits[real], other[real], atol=1e-6, rtol=0)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_attention_looks_both_ways(llada: Path, attention: str, ids: torch.Tensor) -> None:
    model = AutoModelForCausalLM.from_pretrained(llada, attn_implementation=attention)
    changed = ids.clone()
    changed[:, -1] = (ids[:, -1] + 1) % 120
    with torch.no_grad():
        moved = (model(changed).logits - model(ids).logits).abs().amax(-1)
    assert (moved[:, 0] > 1e-3).all()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_four_dimensional_masks_are_honoured(llada: Path, attention: str, ids: torch.Tensor) -> None:
    model = AutoModelForCausalLM.from_pretrained(llada, attn_implementation=attention)
    real = torch.ones_like(ids, dtype=torch.bool)
    real[:, 18:] = False
    allowed = real[:, None, None, :].expand(-1, 1, 24, -1)
    bias = torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)
    with torch.no_grad():
        expected = model(ids, attention_mask=real).logits
        for arguments in ({"attention_mask": allowed}, {"attention_mask": bias}, {"attention_bias": allowed}):
            torch.testing.assert_close(model(ids, **arguments).logits, expected, atol=1e-5, rtol=0)
    with refused(SettingError, "attention_bias", "attention_mask"):
        model(ids, attention_mask=real, attention_bias=bias)
    with refused(SettingError, "attention_mask", "int64"):
        model(ids, attention_mask=allowed.long())


def test_a_cache_is_refused(model: Any, ids: torch.Tensor) -> None:
    for arguments in ({"use_cache": True}, {"cache": DynamicCache()}, {"past_key_values": DynamicCache()}):
        with refused(SettingError, "use_cache"):
            model(ids, **arguments)


def test_rotary_embedding_is_fp32_in_half_precision(llada: Path) -> None:
    """The published config asks for full precision; rounding angles to bf16 would move far positions."""
    model = AutoModelForCausalLM.from_pretrained(llada, dtype=torch.bfloat16)
    exact = AutoModelForCausalLM.from_pretrained(llada, dtype=torch.bfloat16, rope_full_precision=False)
    positions = torch.arange(200)[None]
    hidden = torch.zeros(1, 200, 64, dtype=torch.bfloat16)
    cos, _ = model.model.rotary_emb(hidden, positions)
    rounded, _ = exact.model.rotary_emb(hidden, positions)
    assert cos.dtype == torch.float32
    assert rounded.dtype == torch.bfloat16
    ids = torch.randint(0, 120, (1, 200), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert model(ids).logits.dtype == torch.bfloat16
        assert not torch.equal(model(ids).logits, exact(ids).logits)


def test_logits_to_keep(model: Any, ids: torch.Tensor) -> None:
    kept = torch.rand(ids.shape, generator=torch.Generator().manual_seed(0)) < 0.3
    with torch.no_grad():
        full = model(ids).logits
        torch.testing.assert_close(model(ids, logits_to_keep=kept).logits, full[kept])
        torch.testing.assert_close(model(ids, logits_to_keep=5).logits, full[:, -5:])


# ---------------------------------------------------------------------------------------------------- loss


def test_labels_give_the_diffusion_loss(model: Any, llada: Path, ids: torch.Tensor) -> None:
    """Against its definition: noise from the generator, cross-entropy over p at the masked positions, over B * L."""
    labels = ids.clone()
    labels[:, :6] = -100

    def seeded() -> torch.Generator:
        return torch.Generator().manual_seed(3)

    seen: list[torch.Tensor] = []
    hook = model.model.register_forward_pre_hook(lambda _, args, kw: seen.append(kw["input_ids"]), with_kwargs=True)
    with torch.no_grad():
        loss = model(ids, labels=labels, generator=seeded()).loss
        again = model(ids, labels=labels, generator=seeded()).loss
    hook.remove()
    assert torch.equal(loss, again)
    noisy = seen[0]
    masked = noisy != ids
    assert masked.any()
    assert (noisy[masked] == 127).all()
    assert not masked[:, :6].any()
    logits = llada_logits(tensors_of(llada), config_of(llada), noisy)
    p = _masking_probability(seeded(), *ids.shape)
    cross_entropy = -logits.log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    expected = (cross_entropy * masked / p[:, None]).sum() / (ids.shape[0] * 18)
    torch.testing.assert_close(loss.double(), expected, atol=1e-5, rtol=1e-5)


def _masking_probability(generator: torch.Generator, batch: int, length: int) -> torch.Tensor:
    t = torch.rand(batch, 3 + length, generator=generator)[:, 0]
    return ((1 - 1e-3) * t + 1e-3).double()


def test_labels_without_noise_are_refused(model: Any, ids: torch.Tensor) -> None:
    with refused(SettingError, "generator"):
        model(ids, labels=ids)


def test_gradient_checkpointing_changes_no_gradient(llada: Path, ids: torch.Tensor) -> None:
    gradients = []
    for checkpointed in (False, True):
        model = AutoModelForCausalLM.from_pretrained(llada).train()
        if checkpointed:
            model.activation_checkpointing_enable()
            assert model.is_activation_checkpointing
        model(ids, labels=ids, generator=torch.Generator().manual_seed(0)).loss.backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    assert all(gradient is not None for gradient in gradients[0].values())
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, msg=name)


def test_lora(llada: Path, tmp_path: Path, ids: torch.Tensor) -> None:
    from peft import LoraConfig, PeftModel, get_peft_model

    model = AutoModelForCausalLM.from_pretrained(llada)
    targets = list(type(model).family.lora_targets)
    adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", target_modules=targets, r=4))
    adapted(ids, labels=ids, generator=torch.Generator().manual_seed(0)).loss.backward()
    trained = [name for name, parameter in adapted.named_parameters() if parameter.grad is not None]
    assert len(trained) == 2 * 7 * 4  # A and B of seven projections in four layers
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(0))
        expected = adapted.eval()(ids).logits
    adapted.save_pretrained(tmp_path / "adapter")
    again = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(llada), tmp_path / "adapter").eval()
    with torch.no_grad():
        assert torch.equal(again(ids).logits, expected)
        again.merge_and_unload().save_pretrained(tmp_path / "merged")
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
        torch.testing.assert_close(merged(ids).logits, expected, atol=1e-4, rtol=0)
    assert tensors_of(tmp_path / "merged").keys() == tensors_of(llada).keys()


def test_device_map_and_disk_offload(llada: Path, tmp_path: Path, ids: torch.Tensor) -> None:
    expected = AutoModelForCausalLM.from_pretrained(llada)(ids).logits
    device_map: dict[str, str] = {"model.layers.3": "disk", "model.layers.2": "disk"}
    device_map |= dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
    device_map |= {f"model.layers.{layer}": "cpu" for layer in (0, 1)}
    model = AutoModelForCausalLM.from_pretrained(llada, device_map=device_map, offload_folder=tmp_path / "offload")
    assert model.hf_device_map["model.layers.3"] == "disk"
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, expected)


# ---------------------------------------------------------------------------------------------------- loading


def test_dispatch_goes_by_architecture(tmp_path: Path) -> None:
    folder = write_llada(tmp_path / "moe", architectures=["LLaDAMoEModelLM"])  # the model_type is the same
    assert type(AutoConfig.from_pretrained(folder)).__name__ == "LLaDAMoEConfig"
    with pytest.raises(DlmBridgeError, match=r"config\.json"):
        Bridge.from_hf(folder)
    folder = write_llada(tmp_path / "other", architectures=["LLaDAModelLMM"])
    with refused(CheckpointError, None, "LLaDAModelLMM", "LLaDAModelLM"):
        AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("key", ["alibi", "include_bias", "include_qkv_bias", "attention_layer_norm", "scale_logits"])
def test_what_the_body_cannot_do_is_refused(tmp_path: Path, key: str) -> None:
    folder = write_llada(tmp_path / "hub", **{key: True})
    with refused(CheckpointError, "config.json", key):
        AutoModelForCausalLM.from_pretrained(folder)


def altered(llada: Path, folder: Path, change: Any) -> Path:
    shutil.copytree(llada, folder)
    tensors = tensors_of(folder)
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_no_parameter_is_left_random(llada: Path, tmp_path: Path) -> None:
    name = "model.transformer.blocks.2.up_proj.weight"
    folder = altered(llada, tmp_path / "missing", lambda tensors: tensors.pop(name))
    with refused(CheckpointError, folder, "lacks model.layers.2.mlp.up_proj.weight"):
        AutoModelForCausalLM.from_pretrained(folder)
    folder = altered(
        llada, tmp_path / "extra", lambda tensors: tensors.update({"model.transformer.odd": torch.ones(2)})
    )
    with refused(CheckpointError, folder, "model.transformer.odd"):
        AutoModelForCausalLM.from_pretrained(folder)
    folder = altered(llada, tmp_path / "shape", lambda tensors: tensors.update({name: tensors[name][:-1].clone()}))
    with refused(CheckpointError, folder, "up_proj.weight", "(95, 64)", "(96, 64)"):
        AutoModelForCausalLM.from_pretrained(folder)


def test_loading_info_is_still_to_be_had(llada: Path) -> None:
    model, info = AutoModelForCausalLM.from_pretrained(llada, output_loading_info=True)
    assert type(model).__name__ == "LLaDAModelLM"
    assert not info["missing_keys"]


# ---------------------------------------------------------------------------------------------------- saving


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tied", [False, True])
def test_saving_gives_back_names_keys_and_bits(tmp_path: Path, dtype: torch.dtype, tied: bool) -> None:
    source = write_llada(tmp_path / "hub", dtype=dtype, weight_tying=tied)
    model = AutoModelForCausalLM.from_pretrained(source)
    assert model.dtype == dtype
    model.save_pretrained(tmp_path / "saved", max_shard_size="100KB")
    before, after = tensors_of(source), tensors_of(tmp_path / "saved")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert config_of(tmp_path / "saved") == config_of(source)
    assert len({file.stat().st_mode for file in (tmp_path / "saved").iterdir()}) == 1
    for file in ("configuration_llada.py", "modeling_llada.py"):
        assert (tmp_path / "saved" / file).read_bytes() == (source / file).read_bytes()


def test_saving_keeps_keys_that_nobody_knows_and_real_changes(tmp_path: Path) -> None:
    source = write_llada(tmp_path / "hub", some_future_key={"a": [1, None]}, temperature=0.3)
    model = AutoModelForCausalLM.from_pretrained(source)
    model.config.mask_token_id = 125
    model.to(torch.bfloat16).save_pretrained(tmp_path / "saved")
    expected = {**config_of(source), "mask_token_id": 125, "torch_dtype": "bfloat16"}
    assert config_of(tmp_path / "saved") == expected
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    again.save_pretrained(tmp_path / "again")
    assert config_of(tmp_path / "again") == expected


def test_saving_over_the_source_keeps_its_code(tmp_path: Path) -> None:
    source = write_llada(tmp_path / "hub", shards=1)
    code = (source / "modeling_llada.py").read_bytes()
    AutoModelForCausalLM.from_pretrained(source).save_pretrained(source)
    assert (source / "modeling_llada.py").read_bytes() == code


def test_resized_embeddings_come_back(tmp_path: Path, llada: Path, ids: torch.Tensor) -> None:
    model = AutoModelForCausalLM.from_pretrained(llada)
    model.resize_token_embeddings(144, mean_resizing=False)
    model.save_pretrained(tmp_path / "saved")
    config = config_of(tmp_path / "saved")
    assert (config["vocab_size"], config["embedding_size"]) == (144, 144)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    with torch.no_grad():
        assert again(ids).logits.shape[-1] == 144
        assert torch.equal(again(ids).logits, model(ids).logits)


def test_a_new_model_can_be_made_saved_and_loaded(tmp_path: Path, ids: torch.Tensor) -> None:
    keys = {key: value for key, value in llada_config().items() if key not in ("auto_map", "transformers_version")}
    config = AutoConfig.for_model(**keys)
    model = AutoModel.from_config(config)
    model.save_pretrained(tmp_path / "saved")
    again = AutoModel.from_pretrained(tmp_path / "saved")
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)
    assert config_of(tmp_path / "saved")["architectures"] == ["LLaDAModelLM"]


def test_the_public_config_loads_whole(tmp_path: Path) -> None:
    """The 8B config as published, no weights: sizes by transformers' names and by the Hub's."""
    (tmp_path / "config.json").write_text(json.dumps(LLADA_CONFIG))
    config = AutoConfig.from_pretrained(tmp_path)
    assert (config.hidden_size, config.num_key_value_heads, config.intermediate_size) == (4096, 32, 12288)
    assert (config.head_dim, config.vocab_size, config.mask_token_id) == (128, 126464, 126336)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == 8015581184
    config.save_pretrained(tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "config.json").read_text()) == LLADA_CONFIG


@pytest.mark.parametrize("key", ["rms_norm_eps", "rope_theta"])
def test_a_number_that_is_none_is_refused(key: str) -> None:
    with refused(CheckpointError, "config.json", key):
        AutoConfig.for_model(**llada_config(**{key: {}}))


def test_null_keys_mean_what_the_original_takes_them_for(tmp_path: Path, ids: torch.Tensor) -> None:
    config = llada_config(
        n_kv_heads=None, mlp_hidden_size=None, mlp_ratio=2, embedding_size=None, torch_dtype="float32"
    )
    sizes = {**config, "n_kv_heads": 4, "mlp_hidden_size": 128, "embedding_size": 128}
    folder = write_hub_folder(tmp_path / "hub", config, llada_tensors(sizes))
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        expected = llada_logits(tensors_of(folder), sizes, ids)
        torch.testing.assert_close(model(ids).logits.double(), expected, atol=1e-5, rtol=1e-5)
    model.save_pretrained(tmp_path / "saved")
    assert config_of(tmp_path / "saved") == config


def test_remote_code_is_never_run(llada: Path) -> None:
    """The checkpoint's .py files exit when run; trust_remote_code=True does not make us run them either."""
    assert "raise SystemExit" in (llada / "modeling_llada.py").read_text()
    model = AutoModelForCausalLM.from_pretrained(llada, trust_remote_code=True)
    assert type(model).__module__ == "dlm_bridge.models.modeling_llada"
    assert os.environ.get("HF_HUB_OFFLINE") == "1"

"""Adapters that act at mask tokens alone: all other tokens have the base's own hidden states, keys and values."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import DynamicCache, Qwen3Config, Qwen3ForCausalLM

from dlm_bridge.convert.lora.mask_only import KEY
from dlm_bridge.errors import CheckpointError, SettingError
from dlm_bridge.loading import load_model
from tests.checkpoints import write_tokenizer
from tests.convert.helpers import run_cli
from tests.families import idlm
from tests.refusals import refused
from tests.train.conftest import Run, without_speed

MASK = 99
OPTIONS: dict[str, Any] = {
    "data": ["mock"],
    "from_scratch": False,
    "steps": 4,
    "global_batch_size": 4,
    "seq_length": 24,
    "length_variation": 0.0,
    "warmup_steps": 0,
    "lr": 1e-2,
    "lr_schedule": "constant",
    "save_interval": 2,
    "eval_interval": 0,
    "lora_rank": 4,
    "lora_mask_only": True,
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = idlm.CASE.write(tmp_path_factory.mktemp("base") / "idlm", mask_token_id=MASK, torch_dtype="float32")
    write_tokenizer(folder, {"tokenizer_class": "PreTrainedTokenizerFast"})
    return folder


@pytest.fixture
def trained(base: Path, tmp_path: Path, run: Run) -> Path:
    """A checkpoint of an adapter, with factors that change much."""
    rows = run(tmp_path / "run", **OPTIONS, model=str(base))
    assert rows[-1]["loss"] < rows[0]["loss"]
    return tmp_path / "run/checkpoints/step-0000004"


def test_masks_alone_see_the_adapter(trained: Path, base: Path) -> None:
    """Against transformers' own class: the base over the text, then over masks with merged weights and that cache."""
    assert json.loads((trained / "adapter_config.json").read_text())[KEY] == MASK
    model: Any = load_model(trained, dtype="fp32").model
    text = torch.randint(0, 90, (2, 9), generator=torch.Generator().manual_seed(0))
    masks = torch.full((2, 3), MASK)
    plain, merged = (Qwen3ForCausalLM(Qwen3Config(**_sizes(base))).eval() for _ in range(2))
    tensors = load_model(base, dtype="fp32").model.state_dict()
    plain.load_state_dict(tensors)
    merged.load_state_dict(tensors | _changed(tensors, trained))
    with torch.no_grad():
        cache = DynamicCache()
        of_text = plain(text, past_key_values=cache).logits
        of_masks = merged(masks, past_key_values=cache).logits
        found = model(input_ids=torch.cat([text, masks], dim=1)).logits
        torch.testing.assert_close(found, torch.cat([of_text, of_masks], dim=1), atol=2e-5, rtol=1e-4)
        alone = load_model(base, dtype="fp32").model(input_ids=text).logits
        assert torch.equal(model(input_ids=text).logits, alone)
        everywhere = PeftModel.from_pretrained(load_model(base, dtype="fp32").model, str(trained)).eval()
        assert (everywhere(input_ids=text).logits - alone).abs().max() > 1e-2
        copied = copy.deepcopy(model)  # of what computes in half precision
        model(input_ids=masks)
        assert torch.equal(copied(input_ids=text).logits, alone)


def test_the_text_is_the_bases_own(trained: Path, base: Path) -> None:
    model, plain = (load_model(place, dtype="fp32").model for place in (trained, base))
    ids = torch.tensor([[3, 5, 7, 9], [0, 0, 11, 4]])
    real = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]])
    settings = {"gen_length": 16, "temperature": 0.0, "eos_token_id": None, "pad_token_id": 0}
    wanted = plain.generate(ids, attention_mask=real, **settings)
    for cache in ("none", "block"):
        for drafts in ({}, {"gen_block_size": 3, "mask_tails": True}):
            found = model.generate(ids, attention_mask=real, cache=cache, **drafts, **settings)
            assert torch.equal(found, wanted)


@pytest.mark.extension("kernels")
def test_fused_layers_add_the_adapter_at_masks(trained: Path, base: Path) -> None:
    """As PEFT's layers do, also after more training; other tokens have the base's logits, bit for bit."""
    from dlm_bridge.kernels.linear import fuse_linear_layers, fused_layers_installed, separate_weights

    model: Any = load_model(trained, dtype="fp32").model
    alone = load_model(base, dtype="fp32").model
    ids = torch.randint(0, 90, (2, 9), generator=torch.Generator().manual_seed(0))
    ids[:, 5:] = MASK
    layers = model.config.num_hidden_layers
    with torch.no_grad():
        groups = fuse_linear_layers(model)
        assert sorted(len(group.names) for group in groups) == [1] * 2 * layers + [2] * layers + [3] * layers
        for _ in range(2):
            expected = model(input_ids=ids).logits
            with fused_layers_installed(groups):
                found = model(input_ids=ids).logits
            torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)
            with fused_layers_installed(fuse_linear_layers(alone)):
                assert torch.equal(found[:, :5], alone(input_ids=ids).logits[:, :5])
            for name, weight in model.named_parameters():
                if ".lora_B." in name:
                    weight.mul_(1.5)
        separate_weights(groups)
        assert not torch.allclose(model(input_ids=ids).logits[:, 5:], expected[:, 5:])


@pytest.mark.slow
def test_a_resumed_run_and_a_continued_adapter_stay_so(trained: Path, base: Path, tmp_path: Path, run: Run) -> None:
    whole = load_file(trained / "adapter_model.safetensors")
    run(tmp_path / "cut", **{**OPTIONS, "steps": 2}, model=str(base))
    rows = run(tmp_path / "cut", resume=True, **OPTIONS, model=str(base))
    assert without_speed(rows)[-1]["step"] == 4
    again = load_file(tmp_path / "cut/checkpoints/step-0000004/adapter_model.safetensors")
    assert all(torch.equal(again[name], tensor) for name, tensor in whole.items())
    more = {**OPTIONS, "lora_rank": 0, "lora_mask_only": False, "adapter": str(trained), "precision": "bf16"}
    run(tmp_path / "more", **more, model=str(base))
    config = json.loads((tmp_path / "more/checkpoints/step-0000004/adapter_config.json").read_text())
    assert config[KEY] == MASK


def test_what_is_refused(
    trained: Path, base: Path, tmp_path: Path, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, said = run_cli(capsys, "adapter", "export", trained, tmp_path / "merged", "--base", base, "--merge")
    assert code == 2
    assert "mask tokens" in said
    for changes, named in (
        ({"lora_dora": True}, "`lora_dora`"),
        ({"lora_rank": 0}, "`lora_rank`"),
        ({"engine": "megatron"}, "`engine=accelerate`"),
        ({"objective": "causal"}, "`objective=idlm`"),
    ):
        with refused(SettingError, "lora_mask_only", named):
            run(tmp_path / "refused", **{**OPTIONS, **changes}, model=str(base))
    config = json.loads((trained / "adapter_config.json").read_text())
    for token in (True, -1, "x", 128):
        (trained / "adapter_config.json").write_text(json.dumps({**config, KEY: token}))
        with refused(CheckpointError, None, KEY):
            load_model(trained)


def _sizes(folder: Path) -> dict[str, Any]:
    config = json.loads((folder / "config.json").read_text())
    return {name: value for name, value in config.items() if name not in ("architectures", "auto_map", "model_type")}


def _changed(tensors: dict[str, torch.Tensor], adapter: Path) -> dict[str, torch.Tensor]:
    """The weights with the adapter everywhere; its scale is 2."""
    factors = load_file(adapter / "adapter_model.safetensors")
    found = {}
    for name, a in factors.items():
        if ".lora_A." in name:
            weight = name.removeprefix("base_model.model.").replace(".lora_A", "")
            found[weight] = tensors[weight] + 2 * factors[name.replace("lora_A", "lora_B")] @ a
    return found

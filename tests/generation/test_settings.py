"""Settings: which source wins, what is saved with a checkpoint, and what is refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationConfig

from dlm_bridge.errors import CheckpointError, DlmBridgeError, RowError, SettingError
from dlm_bridge.generation import DiffusionGenerationConfig, generate
from dlm_bridge.generation.settings import resolve_settings
from tests.checkpoints import write_llada
from tests.generation.conftest import EOS, MASK, load, prompts
from tests.refusals import refused


def settings(model: Any, config: GenerationConfig | None = None, **keywords: Any) -> Any:
    return resolve_settings(model, config, keywords, prompt_width=4)


def with_stored(model: Any, **stored: Any) -> Any:
    changed = copy.copy(model)
    changed.generation_config = DiffusionGenerationConfig(**stored)
    return changed


def test_the_family_s_defaults(model: Any) -> None:
    found = settings(model)
    assert (found.sampler.gen_length, found.sampler.block_length, found.sampler.steps) == (128, 128, None)
    assert (found.sampler.temperature, found.sampler.cfg_scale, found.sampler.remasking) == (
        0.0,
        0.0,
        "low_confidence",
    )
    assert (found.eos_token_ids, found.pad_token_id, found.limits.mask_token_id) == ((EOS,), EOS, MASK)


def test_short_lengths_shrink_the_family_s_block_but_not_a_named_one(model: Any) -> None:
    found = settings(model, gen_length=48)
    assert (found.sampler.gen_length, found.sampler.block_length) == (48, 48)
    assert settings(model, max_new_tokens=48, block_length=16).sampler.block_length == 16
    with refused(SettingError, "gen_length", "block_length=128"):
        model.generate(prompts(1, 4), gen_length=48, block_length=128)


def test_keyword_over_given_over_stored_over_family(model: Any) -> None:
    model = with_stored(model, steps=8, gen_length=64, temperature=0.5, eos_token_id=3)
    given = DiffusionGenerationConfig(steps=16, cfg_scale=1.0)
    found = settings(model, given, steps=32)
    assert (
        found.sampler.steps,
        found.sampler.gen_length,
        found.sampler.cfg_scale,
        found.sampler.temperature,
    ) == (32, 64, 1.0, 0.5)
    assert found.eos_token_ids == (3,)
    assert settings(model, given).sampler.steps == 16
    assert settings(model).sampler.steps == 8
    assert settings(model, max_new_tokens=32).sampler.gen_length == 32  # the other name of what is stored
    assert settings(model, temperature=0.0).sampler.temperature == 0.0
    assert settings(model, steps=None, temperature=None).sampler.temperature == 0.5  # None: not given


def test_a_config_that_nobody_set_a_temperature_in_is_greedy(model: Any) -> None:
    assert settings(model, GenerationConfig(max_new_tokens=32)).sampler.temperature == 0.0
    assert settings(model, GenerationConfig(temperature=1.0)).sampler.temperature == 1.0


def test_a_keyword_of_none_or_an_explicit_none_turns_stopping_off(model: Any) -> None:
    assert settings(model, eos_token_id=None).eos_token_ids == ()
    assert settings(model, eos_token_id=[]).eos_token_ids == ()
    assert settings(model, DiffusionGenerationConfig(eos_token_id=None)).eos_token_ids == ()
    assert settings(model, DiffusionGenerationConfig()).eos_token_ids == (EOS,)
    assert settings(model, GenerationConfig()).eos_token_ids == (EOS,)
    stored = with_stored(model)
    assert settings(stored).eos_token_ids == (EOS,)  # the model's config still names it
    stored.generation_config.eos_token_id = None
    assert settings(stored).eos_token_ids == ()
    assert settings(stored, eos_token_id=torch.tensor([5, 6])).eos_token_ids == (5, 6)


def test_transformers_own_words(model: Any) -> None:
    assert settings(model, max_length=36).sampler.gen_length == 32
    assert settings(model, max_length=36, max_new_tokens=16).sampler.gen_length == 16
    assert settings(model, do_sample=True).sampler.temperature == 1.0
    assert settings(model, do_sample=True, temperature=0.3).sampler.temperature == 0.3
    hot = with_stored(model, temperature=0.6)
    assert settings(hot, do_sample=True).sampler.temperature == 0.6
    assert settings(hot, do_sample=False).sampler.temperature == 0.0
    harmless = {"use_cache": True, "num_beams": 1, "typical_p": 1.0, "logits_processor": [], "min_p": 0.1}
    assert settings(model, **harmless) == settings(model)
    assert settings(with_stored(model, do_sample=True, top_p=0.9), top_p=None).sampler.temperature == 1.0


@pytest.mark.parametrize(
    ("keywords", "field", "named"),
    [
        ({"gen_length": 100, "block_length": 32}, "gen_length", "use 96 or 128, or `block_length=25`"),
        ({"gen_length": 200, "block_length": 128}, "gen_length", "128 or 256"),
        ({"gen_length": 96, "block_length": 32, "steps": 100}, "steps", "99 or 102"),
        ({"gen_length": 96, "block_length": 32, "steps": 2}, "steps", "3 or more"),
        ({"gen_length": 32, "max_new_tokens": 64}, "gen_length", "max_new_tokens=64"),
        ({"gen_length": 0}, "gen_length", "0"),
        ({"steps": 2.5}, "steps", "2.5"),
        ({"block_length": True}, "block_length", "True"),
        ({"temperature": -0.1}, "temperature", "-0.1"),
        ({"temperature": float("nan")}, "temperature", "nan"),
        ({"temperature": 10**400}, "temperature", "number"),
        ({"cfg_scale": -1}, "cfg_scale", "-1"),
        ({"remasking": "entropy"}, "remasking", "low_confidence, random"),
        ({"algorithm": "sdar"}, "algorithm", "use one of llada"),
        ({"algorithm": "nemotron"}, "algorithm", "nemotron_labs_diffusion"),
        ({"algorithm": "ddpm"}, "algorithm", "llada, "),
        ({"algorithm": "lada"}, "algorithm", "the nearest is llada;"),
        ({"alg": "entropy"}, "alg", "it has gen_length"),
        ({"algorithm": "dream", "block_length": 8}, "block_length", "dream"),
        ({"threshold": 0.9, "factor": 1.0}, "threshold", "factor"),
        ({"threshold": -1}, "threshold", "-1"),
        ({"top_p": 0}, "top_p", "(0, 1]"),
        ({"eps": 1.0}, "eps", "(0, 1)"),
        ({"greedy": 1}, "greedy", "True or False"),
        ({"eos_token_id": "x"}, "eos_token_id", "'x'"),
        ({"eos_token_id": -1}, "eos_token_id", "-1"),
        ({"eos_token_id": 10**39}, "eos_token_id", ""),
        ({"pad_token_id": 10**39}, "pad_token_id", ""),
        ({"seed": 10**39}, "seed", ""),
        ({"seed": "x"}, "seed", "'x'"),
        ({"mask_token_id": 128}, "mask_token_id", "128"),
        ({"suppress_tokens": [True]}, "suppress_tokens", "True"),
        ({"pad_token_id": MASK}, "pad_token_id", "127"),
        ({"pad_token_id": MASK, "eos_token_id": None, "stop_strings": "x"}, "pad_token_id", "127"),
        ({"eos_token_id": [3, MASK]}, "eos_token_id", "127"),
        ({"output_history": True}, "output_history", "return_dict_in_generate"),
        ({"inputs_embeds": 1}, "inputs_embeds", "input_ids"),
        ({"past_key_values": 1}, "past_key_values", "`cache`"),
        ({"stepz": 3}, "stepz", "`steps`"),
        ({"zzz": 3}, "zzz", "the llada sampler has gen_length, temperature, top_k"),
        ({"zzz": 3, "algorithm": "dream"}, "zzz", "alg_temp"),
        ({"logits_to_keep": 1}, "logits_to_keep", ""),
        ({"num_beams": 4}, "num_beams", "4"),
        ({"guidance_scale": 1.5}, "guidance_scale", "`cfg_scale`"),
        ({"stopping_criteria": [max]}, "stopping_criteria", "`stop_strings`"),
        ({"output_scores": True}, "output_scores", "output_history"),
        ({"assistant_tokenizer": 1}, "assistant_tokenizer", ""),
        ({"min_p": 0.9, "temperature": 1.0}, "min_p", ""),
        ({"repetition_penalty": 0}, "repetition_penalty", "0"),
        ({"do_sample": False, "temperature": 0.7}, "do_sample", "temperature=0.7"),
        ({"max_length": 4}, "max_length", "4"),
    ],
)
def test_refused_settings(model: Any, keywords: dict[str, Any], field: str, named: str) -> None:
    with refused(SettingError, field, named) as error:
        model.generate(prompts(1, 4), **keywords)
    assert "\n" not in str(error.value)


def test_a_refused_object_is_named_by_its_class(model: Any) -> None:
    with refused(SettingError, "assistant_model", "LLaDAModelLM") as error:
        model.generate(prompts(1, 4), assistant_model=model)
    assert "\n" not in str(error.value)


def test_what_a_checkpoint_inherited_is_passed_over_with_a_warning(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr("dlm_bridge.generation.settings.logger.warning_once", said.append)
    settings(with_stored(model, repetition_penalty=1.05, num_beams=4))
    assert len(said) == 2
    assert all(name in text for name, text in zip(("num_beams 4", "repetition_penalty 1.05"), said, strict=True))
    settings(with_stored(model, repetition_penalty=1.0, num_beams=1))
    assert len(said) == 2


def test_numpy_s_numbers_are_numbers(model: Any) -> None:
    numbers = {"gen_length": 8, "temperature": 0.5, "seed": 3}
    arrays = {"gen_length": np.int64(8), "temperature": np.float64(0.5), "seed": np.int32(3)}
    assert torch.equal(model.generate(prompts(1, 4), **arrays), model.generate(prompts(1, 4), **numbers))
    assert DiffusionGenerationConfig(**arrays) == DiffusionGenerationConfig(**numbers)


def test_refused_sources(model: Any) -> None:
    with refused(SettingError, "stepz", "generation_config"):
        settings(model, GenerationConfig(stepz=3))
    with refused(SettingError, "generation_config", "dict"):
        settings(model, {"steps": 3})  # type: ignore[arg-type]
    assert settings(with_stored(model, min_p=0.9), temperature=1.0) == settings(model, temperature=1.0)  # inherited
    assert settings(with_stored(model, top_p=0.9)).sampler.temperature == 0.0  # greedy: of no account
    mistyped = with_stored(model)
    mistyped.generation_config.steps = "4"
    with refused(SettingError, "steps", "'4'", "the model's generation_config"):
        settings(mistyped)
    inherited = with_stored(model, repetition_penalty=1.05)  # as in checkpoints made of Qwen2.5
    assert settings(inherited) == settings(model)
    assert settings(inherited, repetition_penalty=1.2).constraints == {"repetition_penalty": 1.2}
    with refused(SettingError, "model", "Linear"):
        generate(torch.nn.Linear(1, 1), prompts(1, 4))
    maskless = copy.copy(model)
    maskless.config = copy.copy(model.config)
    maskless.config.mask_token_id = None
    assert settings(with_stored(maskless), mask_token_id=5).limits.mask_token_id == 5


ONES = torch.ones(1, 4).long()


@pytest.mark.parametrize(
    ("arguments", "kind", "field", "named"),
    [
        ({}, SettingError, "input_ids", ""),
        ({"inputs": [1, 2]}, SettingError, "input_ids", "list"),
        ({"inputs": torch.zeros(1, 2, device="meta").long()}, SettingError, "input_ids", "meta"),
        ({"inputs": torch.tensor([1, 2])}, SettingError, "input_ids", "input_ids[None]"),
        ({"inputs": torch.zeros(1, 1, 1).long()}, SettingError, "input_ids", "(1, 1, 1)"),
        ({"inputs": torch.zeros(0, 4).long()}, SettingError, "input_ids", "rows"),
        ({"inputs": torch.ones(1, 4)}, SettingError, "input_ids", "torch.float32"),
        ({"inputs": ONES, "input_ids": ONES}, SettingError, "input_ids", "inputs"),
        ({"inputs": torch.tensor([[1, 2], [3, MASK]])}, RowError, "row 1", "127"),
        ({"inputs": torch.tensor([[1, 128]])}, RowError, "row 0", "128"),
        ({"inputs": torch.tensor([[-1, 2]])}, RowError, "row 0", "-1"),
        ({"inputs": ONES, "attention_mask": torch.ones(1, 3)}, SettingError, "attention_mask", "(1, 3)"),
        ({"inputs": ONES, "attention_mask": [1]}, SettingError, "attention_mask", "list"),
        ({"inputs": ONES, "attention_mask": ONES.numpy()}, SettingError, "attention_mask", "ndarray"),
        (
            {"inputs": ONES[:, :3], "attention_mask": torch.tensor([[1, 0, 1]])},
            SettingError,
            "attention_mask",
            "row 0",
        ),
        ({"inputs": ONES[:, :2], "attention_mask": torch.tensor([[1, 2]])}, SettingError, "attention_mask", "row 0"),
        ({"inputs": torch.ones(1, 200).long(), "gen_length": 128}, RowError, "row 0", "gen_length=56"),
        ({"inputs": torch.ones(1, 256).long()}, RowError, "row 0", "at least 1"),
    ],
)
def test_refused_inputs(
    model: Any, arguments: dict[str, Any], kind: type[DlmBridgeError], field: str, named: str
) -> None:
    with refused(kind, field, named) as error:
        model.generate(**arguments)
    assert "\n" not in str(error.value)


def test_padding_does_not_count_towards_the_context(model: Any) -> None:
    ids, mask = torch.ones(1, 300).long(), torch.zeros(1, 300)
    mask[:, -4:] = 1
    assert model.generate(ids, attention_mask=mask, gen_length=8, eos_token_id=None).shape == (1, 308)
    assert model.generate(torch.ones(1, 248).long(), gen_length=8, eos_token_id=None).shape == (1, 256)
    assert model.generate(ids, attention_mask=mask, eos_token_id=None).shape == (1, 300 + 128)


def test_defaults_that_do_not_fit_are_shortened(model: Any) -> None:
    """To the context, and to what the call says; what the call itself says is refused where it does not fit."""
    assert model.generate(torch.ones(1, 200).long(), eos_token_id=None).shape == (1, 256)
    assert settings(model, gen_length=200).sampler.block_length == 128
    assert model.generate(torch.ones(1, 4).long(), gen_length=131, eos_token_id=None).shape == (1, 135)
    stored = with_stored(model, gen_length=256, block_length=32, steps=256, threshold=0.9)
    assert settings(stored, gen_length=90, threshold=None).sampler.steps == 255
    assert settings(stored, factor=1.0).sampler.threshold is None
    assert settings(stored, block_length=48).sampler.gen_length == 252


@pytest.mark.parametrize("bad", [{"temperature": -1}, {"gen_length": 9, "max_new_tokens": 2}, {"remasking": "x"}])
def test_a_config_is_checked_when_it_is_made(bad: dict[str, Any]) -> None:
    with pytest.raises(SettingError):
        DiffusionGenerationConfig(**bad)


def test_a_config_survives_its_file(tmp_path: Path) -> None:
    config = DiffusionGenerationConfig(
        steps=16, gen_length=32, block_length=8, temperature=0.7, cfg_scale=0.5, remasking="random",
        eos_token_id=[3, 4], pad_token_id=5, mask_token_id=6, seed=7,
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "generation_config.json").read_text())
    assert stored["max_new_tokens"] == 32
    loaded = DiffusionGenerationConfig.from_pretrained(tmp_path)
    assert loaded == config
    assert (loaded.gen_length, loaded.temperature, loaded.seed) == (32, 0.7, 7)
    for name in ("gen_length", "max_new_tokens"):
        changed = DiffusionGenerationConfig.from_pretrained(tmp_path, steps=4, **{name: 16})
        assert (changed.gen_length, changed.steps, changed.block_length) == (16, 4, 8)
    plain = GenerationConfig.from_pretrained(tmp_path)  # what transformers itself reads
    assert DiffusionGenerationConfig.from_config(plain) == config

    off = DiffusionGenerationConfig(eos_token_id=None)
    off.save_pretrained(tmp_path)
    assert DiffusionGenerationConfig.from_pretrained(tmp_path).eos_token_id == []
    DiffusionGenerationConfig().save_pretrained(tmp_path)
    assert set(json.loads((tmp_path / "generation_config.json").read_text())) == {"transformers_version"}


def test_settings_travel_with_the_model(folder: Path, tmp_path: Path) -> None:
    model = load(folder)
    assert isinstance(model.generation_config, DiffusionGenerationConfig)
    assert model.generation_config.eos_token_id == EOS  # from the Hub's generation_config.json
    model.generation_config.gen_length = 16
    model.generation_config.update(steps=8, temperature=0.5, remasking="random")
    model.save_pretrained(tmp_path / "changed")
    changed = type(model).from_pretrained(tmp_path / "changed")
    assert changed.generation_config == model.generation_config
    found = settings(changed)
    assert (
        found.sampler.gen_length,
        found.sampler.steps,
        found.sampler.temperature,
        found.sampler.remasking,
    ) == (16, 8, 0.5, "random")
    given = type(model).from_pretrained(folder, generation_config=GenerationConfig(max_new_tokens=8))
    assert settings(given).sampler.gen_length == 8
    assert settings(given).eos_token_ids == (EOS,)


def test_the_hub_s_own_settings_are_respected_and_kept(tmp_path: Path) -> None:
    folder = write_llada(tmp_path / "hub", n_layers=1)
    hub = {"eos_token_id": [7, 8], "pad_token_id": 9, "temperature": 0.2, "gen_length": 64, "some_tool": "x"}
    (folder / "generation_config.json").write_text(json.dumps(hub))
    model = load(folder)
    found = settings(model)
    assert (found.eos_token_ids, found.pad_token_id, found.sampler.temperature, found.sampler.gen_length) == (
        (7, 8),
        9,
        0.2,
        64,
    )
    model.save_pretrained(tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "generation_config.json").read_text())
    del saved["transformers_version"]
    assert saved == {
        "eos_token_id": [7, 8],
        "pad_token_id": 9,
        "temperature": 0.2,
        "max_new_tokens": 64,
        "some_tool": "x",
    }
    (folder / "generation_config.json").unlink()
    assert settings(load(folder)).eos_token_ids == (EOS,)  # config.json's


def test_a_file_that_comes_of_config_json_keeps_a_sampler_s_parameters(tmp_path: Path) -> None:
    """As Dream's own class writes it: transformers drops what it does not know from a file with this mark."""
    folder = write_llada(tmp_path / "hub", n_layers=1)
    hub = {"_from_model_config": True, "algorithm": "dream", "steps": 16, "alg": "entropy", "mask_token_id": None}
    (folder / "generation_config.json").write_text(json.dumps(hub))
    model = load(folder)
    found = settings(model).sampler
    assert (found.name, found.steps, found.alg) == ("dream", 16, "entropy")
    model.save_pretrained(tmp_path / "saved")
    assert settings(load(tmp_path / "saved")).sampler == found


def test_custom_generate_is_never_run(tmp_path: Path) -> None:
    folder = write_llada(tmp_path / "hub", n_layers=1)
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate" / "generate.py").write_text("raise SystemExit('remote code was executed')\n")
    model = load(folder, trust_remote_code=True)
    assert model.generate(prompts(1, 4), gen_length=8, eos_token_id=None).shape == (1, 12)


def test_a_damaged_file_is_not_passed_over(folder: Path, tmp_path: Path) -> None:
    load(folder).save_pretrained(tmp_path)
    for content in (b"{", b"\xff\xfe"):
        (tmp_path / "generation_config.json").write_bytes(content)
        with pytest.raises(CheckpointError) as error:
            load(tmp_path)
        assert "\n" not in str(error.value)
    (tmp_path / "generation_config.json").unlink()
    assert load(tmp_path).generation_config.max_new_tokens is None


@pytest.mark.parametrize("name", ["mask_token_id", "pad_token_id"])
def test_a_token_of_the_config_is_a_number(name: str, model: Any) -> None:
    """JSON's true and false are numbers to Python, and no tokens to an embedding."""
    stored = with_stored(copy.copy(model))
    stored.config = copy.copy(model.config)
    setattr(stored.config, name, False)
    with refused(SettingError, name, "False"):
        settings(stored)


def test_block_length_and_block_size_are_one_setting(model: Any) -> None:
    """Under either name, from every source, for samplers that call it one or the other."""
    assert settings(model, gen_length=16, block_size=8).sampler.block_length == 8
    assert settings(model, gen_length=16, block_length=8, algorithm="mdlm").sampler.block_length == 8
    stored = with_stored(model, block_size=4)
    assert settings(stored, gen_length=16).sampler.block_length == 4
    assert settings(stored, gen_length=16, block_length=8).sampler.block_length == 8
    assert settings(model, gen_length=16, block_length=8, block_size=8).sampler.block_length == 8
    with refused(SettingError, "block_size", "block_length=8"):
        settings(model, gen_length=16, block_length=8, block_size=4)
    with refused(SettingError, "block_size", "block_length=8"):
        DiffusionGenerationConfig(block_length=8, block_size=4)

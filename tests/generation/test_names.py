"""Names of settings: one for each idea in all samplers, with the published ones as aliases of their sampler."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from dlm_bridge.errors import SettingError
from dlm_bridge.generation import SAMPLERS, DiffusionGenerationConfig, generate
from dlm_bridge.generation.config import published_generation_config
from dlm_bridge.generation.settings import combine_settings, resolve_settings
from dlm_bridge.train.accelerate.checkpoints import _write_configs
from tests.families import rnd1
from tests.generation.standin import StandIn, family
from tests.generation.test_samplers import CASES, build
from tests.refusals import refused

FIRST = {facts.sampler["algorithm"]: name for name, (facts, _, _) in reversed(CASES.items())}
FIRST = {algorithm: name for algorithm, name in FIRST.items() if algorithm in SAMPLERS}
ALIASES = [(algorithm, *pair) for algorithm in FIRST for pair in SAMPLERS[algorithm].names().items()]
# A value that is neither a default nor what the sampler's case has, and one that differs from it.
VALUES: dict[str, tuple[Any, Any]] = {
    "block_length": (2, 3), "steps": (3, 4), "threshold": (0.3, 0.2), "entropy_threshold": (2.0, 2.5),
    "temperature": (0.4, 0.6), "top_p": (0.7, 0.6), "block_add_threshold": (0.3, 0.2),
}  # fmt: skip
OF_A_BLOCK = ("illada", "llada2", "llada2.2", "sdar")  # whose `steps` are those of each block


def settings(model: Any, **keywords: Any) -> Any:
    return resolve_settings(model, None, keywords, prompt_width=4).sampler


@pytest.mark.parametrize(("algorithm", "alias", "name"), ALIASES)
def test_both_names_of_a_setting_give_the_same_tokens(algorithm: str, alias: str, name: str) -> None:
    model, case = build(FIRST[algorithm])
    case = {**{one: value for one, value in case.items() if one not in (alias, name)}, "eos_token_id": None, "seed": 1}
    value, other = VALUES[name]
    under = {one: {**case, one: value} for one in (alias, name)}
    assert getattr(settings(model, **under[name]), name) == value
    assert settings(model, **under[alias]) == settings(model, **under[name])
    assert settings(model, **under[alias], **{name: value}) == settings(model, **under[name])
    tokens = [generate(model, torch.tensor([[1, 2, 3, 4]]), **arguments) for arguments in under.values()]
    assert torch.equal(*tokens)
    with refused(SettingError, alias, f"{name}={other}") as error:
        settings(model, **under[alias], **{name: other})
    assert "\n" not in str(error.value)
    with refused(SettingError, alias, f"{name}={other}"):
        DiffusionGenerationConfig(**{alias: value, name: other})


def test_one_idea_has_one_name() -> None:
    """A published name of one sampler is no parameter of another, but for d3LLM's name of an entropy."""
    aliases = {alias for _, alias, name in ALIASES if (alias, name) != ("threshold", "entropy_threshold")}
    assert {"confidence_threshold", "denoising_steps", "diffusion_steps", "num_diffusion_steps"} <= aliases
    assert {"block_size", "gen_block_size"} <= aliases
    for kind in SAMPLERS.values():
        assert not aliases & kind.parameters().keys()


@pytest.mark.parametrize(
    ("algorithm", "alias"),
    [
        ("llada", "confidence_threshold"),
        ("llada", "logits_temp"),
        ("dream", "block_size"),
        ("idlm", "block_size"),  # the model's, which is one less than the sampler's block
        ("rnd1", "diffusion_steps"),
        ("wedlm", "threshold"),
    ],
)
def test_an_alias_is_valid_in_its_samplers_only(algorithm: str, alias: str) -> None:
    model, _ = build(FIRST[algorithm])
    with refused(SettingError, alias, "it has gen_length") as error:
        settings(model, **{alias: 2})
    assert "\n" not in str(error.value)


def test_the_wrong_value_of_an_alias_is_named_as_it_was_given() -> None:
    model, _ = build("sdar")
    with refused(SettingError, "denoising_steps", "0"):
        settings(model, denoising_steps=0)


def test_a_file_keeps_the_name_that_it_has(tmp_path: Path) -> None:
    """Files of earlier versions, and of the authors, are read; what is saved has their names for other programs."""
    model = StandIn(family("block_causal", algorithm="sdar"), block_size=4)
    old = {"denoising_steps": 2, "confidence_threshold": 0.6, "max_new_tokens": 8, "block_size": 4}
    (tmp_path / "generation_config.json").write_text(json.dumps(old))
    stored = DiffusionGenerationConfig.from_pretrained(tmp_path)
    model.generation_config = stored
    found = settings(model)
    assert (found.steps, found.threshold, found.gen_length, found.block_length) == (2, 0.6, 8, 4)
    assert settings(model, steps=3, threshold=0.7) == settings(model, denoising_steps=3, confidence_threshold=0.7)
    assert settings(model, denoising_steps=None).steps is None  # None is a value of it: the default

    stored.save_pretrained(tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "generation_config.json").read_text())
    assert {name: value for name, value in saved.items() if name != "transformers_version"} == old
    plain = GenerationConfig.from_pretrained(tmp_path / "saved")
    assert (plain.denoising_steps, plain.max_new_tokens) == (2, 8)
    assert DiffusionGenerationConfig.from_config(plain) == stored
    changed = DiffusionGenerationConfig.from_pretrained(tmp_path, steps=3, block_length=2)
    model.generation_config = changed
    assert (settings(model).steps, settings(model).block_length, settings(model).threshold) == (3, 2, 0.6)
    twice = copy.copy(stored)
    twice.steps = 3
    model.generation_config = twice
    with refused(SettingError, "denoising_steps", "steps=3"):
        settings(model)


@pytest.mark.parametrize(
    ("name", "given", "saved"),
    [
        ("rnd1", {"steps": 8, "temperature": 0.5}, {"num_diffusion_steps": 8, "temperature": 0.5}),
        (
            "diffullama",
            {"steps": 8, "temperature": 0.5, "top_p": 0.7},
            {"diffusion_steps": 8, "logits_temp": 0.5, "topp_temp": 0.7},
        ),
        ("sdar", {"steps": 8}, {"steps": 8}),
    ],
)
def test_a_file_has_the_names_that_the_authors_code_reads(
    name: str, given: dict[str, Any], saved: dict[str, Any], tmp_path: Path
) -> None:
    model, _ = build(name)
    model.generation_config = config = DiffusionGenerationConfig(**given)
    published_generation_config(model).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "generation_config.json").read_text())
    assert {key: value for key, value in written.items() if key != "transformers_version"} == saved
    model.generation_config = DiffusionGenerationConfig.from_pretrained(tmp_path)
    assert all(getattr(settings(model), key) == value for key, value in given.items())
    assert config == DiffusionGenerationConfig(**given)


@pytest.mark.parametrize(
    "save",
    [lambda model, folder: model.save_pretrained(folder), lambda model, folder: _write_configs(folder, model)],
    ids=["save_pretrained", "training"],
)
def test_a_saved_model_and_a_checkpoint_of_training_have_these_names(
    save: Callable[[Any, Path], None], tmp_path: Path
) -> None:
    spec = rnd1.CASE.spec
    model = spec.load("model_class")(spec.load("config_class").from_dict(rnd1.CASE.config))
    model.generation_config.steps = 8
    save(model, tmp_path)
    written = json.loads((tmp_path / "generation_config.json").read_text())
    assert (written["num_diffusion_steps"], "steps" in written) == (8, False)
    assert (model.generation_config.steps, model.generation_config.num_diffusion_steps) == (8, None)


def test_settings_over_defaults_of_another_name() -> None:
    """As a request's over the server's, and a caller's over a task's."""
    model, _ = build("sdar")
    defaults = {"denoising_steps": 2, "gen_length": 64, "block_size": 4}
    combined = combine_settings(model, defaults, {"steps": 3, "max_new_tokens": 8})
    found = settings(model, **combined)
    assert (found.steps, found.gen_length, found.block_length) == (3, 8, 4)
    assert combine_settings(torch.nn.Linear(1, 1), {"gen_length": 4}, {"max_new_tokens": 8}) == {"max_new_tokens": 8}
    with refused(SettingError, "algorithm", "'x'"):
        combine_settings(model, {}, {"algorithm": "x"})


WITH_STEPS = [algorithm for algorithm in FIRST if "steps" in SAMPLERS[algorithm].parameters()]


@pytest.mark.parametrize("algorithm", WITH_STEPS)
def test_a_sampler_says_what_its_steps_count(algorithm: str) -> None:
    text = SAMPLERS[algorithm].options()["steps"].help
    assert ("per block" in text, "in total" in text) == (algorithm in OF_A_BLOCK, algorithm not in OF_A_BLOCK)
    assert text in (SAMPLERS[algorithm].__doc__ or "")
    # Eight steps and 4 blocks of 4 tokens: 2 steps a block, or one for each token.
    model, case = build(FIRST[algorithm])
    case |= {"steps": 8, "gen_length": 16, "temperature": 0.0, "eos_token_id": None}
    case |= {"threshold": 1.0} if "threshold" in case else {}
    case |= {"block_length": 4} if "block_length" in SAMPLERS[algorithm].parameters() else {}
    case |= {"alg": "entropy"} if algorithm == "dream_block" else {}
    case |= {"remasking_strategy": "low_confidence_static"} if algorithm == "sdar" else {}
    calls: list[None] = []
    model.register_forward_pre_hook(lambda *_: calls.append(None))
    generate(model, torch.tensor([[1, 2, 3, 4]]), **case)
    assert (len(calls) >= 16) == (algorithm in OF_A_BLOCK)

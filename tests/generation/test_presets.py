"""The setting `preset`: values of the sampler for what nobody else sets."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dlm_bridge.errors import SettingError
from dlm_bridge.generation import SAMPLERS
from dlm_bridge.generation.api import generate
from dlm_bridge.generation.config import DiffusionGenerationConfig
from dlm_bridge.generation.options import GENERAL
from dlm_bridge.generation.samplers import SpecialTokens
from dlm_bridge.generation.settings import resolve_settings
from tests.generation.test_defaults import CONTEXT, FAMILIES, RUNS, build, prompt
from tests.refusals import refused

PRESETS = [(run, preset) for run in RUNS for preset in SAMPLERS[run[0]].presets]


def resolved(model: Any, config: Any = None, **settings: Any) -> Any:
    return resolve_settings(model, config, settings, prompt_width=4).sampler


@pytest.mark.parametrize(("run", "preset"), PRESETS, ids=str)
def test_a_preset_suits_its_sampler_at_any_length(run: Any, preset: str) -> None:
    kind, model = SAMPLERS[run[0]], build(RUNS[run])
    assert preset in GENERAL["preset"].choices
    assert {*kind.presets[preset]} <= {*kind.parameters()}
    for length in (None, 1, 7, 13, CONTEXT - 6):
        given = {"algorithm": run[0], "preset": preset, **({} if length is None else {"gen_length": length})}
        found = resolve_settings(model, None, given, prompt_width=6)
        found.sampler.spec(SpecialTokens.of(found))


@pytest.mark.parametrize("run", [run for run in RUNS if len(SAMPLERS[run[0]].presets) == 2], ids=str)
@pytest.mark.fast("*sdar*", "*dream*", "*wedlm*", "*llada2*")
def test_fast_has_fewer_forward_passes_than_careful(run: Any) -> None:
    model, forwards = build(RUNS[run], peak=100.0), []  # sure of its tokens
    for preset in ("fast", "careful"):
        given = {"algorithm": run[0], "preset": preset, "gen_length": 16, "seed": 0, "eos_token_id": None}
        ids = torch.tensor([prompt(6)])
        forwards.append(generate(model, ids, return_dict_in_generate=True, **given).forwards)
    assert forwards[0] < forwards[1]


def test_who_sets_a_value_first() -> None:
    """Keywords and a given config over the preset, the preset over the checkpoint and the family."""
    model = build(next(family for family in FAMILIES if family.name == "llada"))
    fast = SAMPLERS["llada"].presets["fast"]
    stored = model.generation_config = DiffusionGenerationConfig(threshold=0.5, temperature=0.3)
    assert resolved(model).threshold == resolved(model, preset="published").threshold == 0.5
    assert resolved(model, preset="fast").threshold == fast["threshold"]
    assert resolved(model, preset="fast").temperature == 0.3  # which the preset does not set
    assert resolved(model, preset="careful").threshold is None
    assert resolved(model, preset="fast", threshold=0.7).threshold == 0.7
    assert resolved(model, DiffusionGenerationConfig(threshold=0.6), preset="fast").threshold == 0.6
    assert resolved(model, preset="fast", factor=1.0).threshold is None  # the other parallel rule
    stored.preset = "fast"
    assert resolved(model).threshold == fast["threshold"]


def test_a_preset_that_a_sampler_lacks() -> None:
    model = build(RUNS[next(run for run in RUNS if run[0] == "mdlm")])
    with refused(SettingError, "preset", "mdlm", "careful"):
        resolved(model, algorithm="mdlm", preset="fast")
    with refused(SettingError, "preset", "fast", "quick"):
        resolved(model, algorithm="mdlm", preset="quick")

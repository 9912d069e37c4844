"""Defaults fit each other: every sampler on every kind of model, in small contexts and at odd lengths."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dlm_bridge.generation import SAMPLERS
from dlm_bridge.generation.api import generate
from dlm_bridge.generation.engine import SamplingEngine
from dlm_bridge.generation.request import Ended, Request
from dlm_bridge.generation.samplers import SpecialTokens
from dlm_bridge.generation.settings import fitting_samplers, resolve_settings
from dlm_bridge.models.families import FamilySpec, families
from tests.generation.standin import VOCABULARY, StandIn

CONTEXT = 37
PROMPTS = (1, 6, CONTEXT - 1)  # tokens
LENGTHS = (1, 7, 13)
FAMILIES = [family for family in families() if family.kind == "diffusion" and family.sampler]
# Those that one sampler runs on in one way.
RUNS = {
    (name, family.attention_pattern, family.shift): family for family in FAMILIES for name in fitting_samplers(family)
}


def build(family: FamilySpec, **config: Any) -> StandIn:
    blocks = {"block_size": 6} if family.attention_pattern == "block_causal" else {}
    tokens = {"expand_token_id": VOCABULARY - 3, "eos_token_id": VOCABULARY - 4}
    return StandIn(family, max_position_embeddings=CONTEXT, **blocks, **tokens, **config)


def prompt(length: int) -> list[int]:
    return [1 + number % 40 for number in range(length)]


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, id=family.name, marks=[pytest.mark.slow] * (family not in RUNS.values()))
        for family in FAMILIES
    ],
)
def test_no_default_refuses_another(family: FamilySpec) -> None:
    model = build(family)
    for name in fitting_samplers(family):
        for length in (None, *range(1, CONTEXT)):
            given = {"algorithm": name, **({} if length is None else {"gen_length": length})}
            for width in PROMPTS:
                found = resolve_settings(model, None, given, prompt_width=width)
                found.sampler.spec(SpecialTokens.of(found))
                if length is None:
                    assert found.limits.gen_length <= CONTEXT - width


@pytest.mark.parametrize(
    ("name", "choices"),
    [
        ("dream", {"alg": ("origin", "entropy", "confidence_threshold")}),
        ("dream_block", {"alg": ("entropy", "confidence_threshold")}),
        ("sdar", {"remasking_strategy": ("sequential", "entropy_bounded", "low_confidence_static")}),
        ("llada", {"factor": (1.0,), "threshold": (0.5,)}),
        ("mdlm", {"block_size": (5,)}),
        ("fast_dllm_v2", {"block_size": (6, 10)}),
    ],
)
def test_a_choice_is_not_refused_by_a_default(name: str, choices: dict[str, tuple[Any, ...]]) -> None:
    model = build(next(family for (own, _, _), family in RUNS.items() if own == name))
    for setting, values in choices.items():
        for value in values:
            for length in LENGTHS:
                given = {"algorithm": name, "gen_length": length, setting: value}
                assert generate(model, torch.tensor([prompt(6)]), **given, eos_token_id=None).shape == (1, 6 + length)


@pytest.mark.parametrize(("name", "pattern", "shift"), RUNS)
@pytest.mark.fast(
    "llada-*",
    "dream-*",
    "sdar-*",
    "idlm-*-True",
    "wedlm-*",
    "rnd1-*-True",
    "uniform-*-True",
    "credit-block*-True",
    "llada2.1-*-True",
    "fast_dllm_v2-*-True",
)
def test_samplers_write_as_much_as_there_is_room_for(name: str, pattern: str, shift: bool) -> None:
    model = build(RUNS[name, pattern, shift])
    never = {"eos_token_id": None, **({"steps": 9} if name == "uniform" else {})}  # ended
    usual = SAMPLERS[name].parameters()["gen_length"]
    batch = SamplingEngine(model, {"algorithm": name, **never}, max_rows=4, max_length=CONTEXT)
    for width in PROMPTS:
        room = min(CONTEXT - width, usual)
        tokens = generate(model, torch.tensor([prompt(width)]), algorithm=name, **never)
        assert tokens.shape[1] - width == room or SAMPLERS[name].resizes
        batch.submit(Request(width, prompt(width), seed=1))
    for length in LENGTHS:
        tokens = generate(model, torch.tensor([prompt(6)]), algorithm=name, gen_length=length, **never)
        assert tokens.shape[1] - 6 == length or SAMPLERS[name].resizes
        batch.submit(Request(100 + length, prompt(6), length, seed=1))
    ended = {}
    while not batch.idle:
        ended |= {event.name: event for event in batch.step() if isinstance(event, Ended)}
    batch.close()
    assert len(ended) == len(PROMPTS) + len(LENGTHS)
    for length in LENGTHS:
        alone = generate(model, torch.tensor([prompt(6)]), algorithm=name, gen_length=length, seed=[1], **never)
        assert list(ended[100 + length].tokens) == alone[0, 6:].tolist()

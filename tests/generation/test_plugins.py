"""Rules and samplers of the caller's own: used as they are, and held to what they promise."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch

from dlm_bridge.attention.masks import AttentionPattern
from dlm_bridge.errors import SettingError
from dlm_bridge.generation import (
    SAMPLERS,
    BlockLayout,
    CommitRule,
    DiffusionGenerationConfig,
    Sampler,
    SamplerSpec,
    SpecialTokens,
    Step,
    generate,
    parameter,
    register_sampler,
)
from dlm_bridge.generation.commit_rules import best
from dlm_bridge.generation.config import diffusion_fields
from dlm_bridge.generation.samplers.sdar import SequentialRule
from dlm_bridge.generation.token_sampling import Noise
from tests.generation.published_samplers import bidirectional
from tests.generation.standin import MASK, StandIn, family, ragged
from tests.refusals import refused


class LeastSureFirst(CommitRule):
    def begin(self, masks: list[int], noise: Noise) -> list[list[int]]:
        return [[1] * count for count in masks]

    def select(self, step: Step) -> torch.Tensor:
        return best((-step.probabilities()).masked_fill(~step.masked, -torch.inf))


def least_sure_first(model: Any, row: list[int], new: int) -> list[int]:
    """The same, one row, one position at a time."""
    logits, tokens = bidirectional(model), row + [MASK] * new
    while MASK in tokens:
        probabilities, choices = logits(tokens).softmax(-1).max(-1)
        position = min((i for i, token in enumerate(tokens) if token == MASK), key=lambda i: float(probabilities[i]))
        tokens[position] = int(choices[position])
    return tokens


def test_a_rule_of_ones_own_replaces_the_sampler_s() -> None:
    model = StandIn(family(algorithm="llada"))
    rows, ids, mask = ragged((5, 9, 2))
    output = generate(model, ids, attention_mask=mask, gen_length=8, eos_token_id=None, commit_rule=LeastSureFirst())
    for row, line in zip(rows, output.tolist(), strict=True):
        assert line[9 - len(row) :] == least_sure_first(model, row, 8)
    usual = generate(model, ids, attention_mask=mask, gen_length=8, eos_token_id=None)
    assert not torch.equal(output, usual)


OLDER = DiffusionGenerationConfig(gen_length=6, temperature=0.0)  # than any sampler that is registered here


@pytest.fixture
def left_to_right() -> Iterator[type[Sampler]]:
    @register_sampler
    @dataclass(frozen=True, kw_only=True)
    class LeftToRight(Sampler):
        name: ClassVar[str] = "left_to_right"
        attention_patterns: ClassVar[tuple[AttentionPattern, ...]] = ("bidirectional",)
        aliases: ClassVar[Mapping[str, str]] = {"tokens_per_step": "per_step"}
        per_step: int = parameter(2, minimum=1)

        def spec(self, tokens: SpecialTokens) -> SamplerSpec:
            schedule = [self.per_step] * self.gen_length
            return SamplerSpec(BlockLayout(self.gen_length), SequentialRule(schedule), self.sampling())

    assert "per_step" in diffusion_fields()
    yield LeftToRight
    SAMPLERS.remove("left_to_right")
    assert "per_step" not in diffusion_fields()


def test_a_registered_sampler_is_known_by_its_name(left_to_right: type[Sampler], tmp_path: Any) -> None:
    model = StandIn(family(algorithm="llada"))
    ids = torch.tensor([[1, 2, 3]])
    arguments = {"gen_length": 6, "eos_token_id": None, "return_dict_in_generate": True, "output_history": True}
    found = generate(model, ids, algorithm="left_to_right", **arguments)
    order = [step.committed[0].nonzero()[:, 0].tolist() for step in found.history]
    assert order == [[3, 4], [5, 6], [7, 8]]
    found = generate(model, ids, algorithm="left_to_right", per_step=3, **arguments)
    assert found.forwards == 2
    assert generate(model, ids, algorithm="left_to_right", tokens_per_step=3, **arguments).forwards == 2
    config = DiffusionGenerationConfig(algorithm="left_to_right", per_step=6)
    config.save_pretrained(tmp_path)
    loaded = DiffusionGenerationConfig.from_pretrained(tmp_path)
    assert generate(model, ids, generation_config=loaded, **arguments).forwards == 1
    # As that of a model which was loaded before the sampler was registered.
    older = copy.deepcopy(OLDER)
    assert generate(model, ids, generation_config=older, algorithm="left_to_right", **arguments).forwards == 3
    older.per_step, older.algorithm = 6, "left_to_right"
    assert generate(model, ids, generation_config=older, **arguments).forwards == 1
    with refused(SettingError, "steps", "left_to_right"):
        generate(model, ids, algorithm="left_to_right", steps=4, **arguments)


def test_a_checkpoint_names_a_sampler_that_is_not_registered(tmp_path: Any) -> None:
    (tmp_path / "generation_config.json").write_text('{"algorithm": "left_to_right", "per_step": 6}')
    with refused(SettingError, "algorithm", "'left_to_right'", "register_sampler"):
        DiffusionGenerationConfig.from_pretrained(tmp_path)


def test_what_cannot_be_registered(left_to_right: type[Sampler]) -> None:
    def register(field: str, named: str, **body: Any) -> None:
        kind = dataclass(frozen=True, kw_only=True)(type("Mine", (Sampler,), body))
        with refused(SettingError, field, named):
            register_sampler(kind)

    everywhere = {"attention_patterns": ("bidirectional",)}
    register("algorithm", "Mine has no name")
    register("algorithm", "LLaDASampler", name="llada", **everywhere)
    register("algorithm", "LeftToRight", name="left_to_right", **everywhere)
    register("algorithm", "bidirectional, block_causal, causal", name="mine", attention_patterns=("round",))
    register("seed", "Mine", name="mine", __annotations__={"seed": int}, seed=1, **everywhere)
    register("num_beams", "Mine", name="mine", __annotations__={"num_beams": int}, num_beams=1, **everywhere)
    register("seed", "Mine", name="mine", aliases={"seed": "top_k"}, **everywhere)
    with refused(SettingError, "algorithm", "LeastSureFirst"):
        register_sampler(LeastSureFirst)  # type: ignore[type-var]


class _Bad(LeastSureFirst):
    def __init__(self, **body: Any) -> None:
        for name, value in body.items():
            setattr(self, name, value)


@pytest.mark.parametrize(
    ("rule", "named"),
    [
        (LeastSureFirst, "CommitRule"),
        (_Bad(begin=lambda masks, noise: []), "_Bad.begin"),
        (_Bad(begin=lambda masks, noise: [[]]), "6 masks"),
        (_Bad(begin=lambda masks, noise: [[1] * 5]), "last step, 4"),
        (_Bad(begin=lambda masks, noise: [[2, 2]], exact=True), "commit 4 tokens"),
        (_Bad(begin=lambda masks, noise: [[2] * 3], exact=True), "[1], not [2]"),
        (_Bad(select=lambda step: step.tokens), "_Bad.select"),
        (_Bad(select=lambda step: step.masked | True, continues=lambda step, left: left | True), "edits"),
        (_Bad(continues=lambda step, left: left & False), "_Bad.continues"),
    ],
)
def test_a_rule_is_held_to_its_promise(rule: Any, named: str) -> None:
    model = StandIn(family(algorithm="llada"))
    with refused(SettingError, "commit_rule", named) as error:
        generate(model, torch.tensor([[1, 2]]), gen_length=6, eos_token_id=None, commit_rule=rule)
    assert "\n" not in str(error.value)

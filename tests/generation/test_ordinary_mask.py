"""A mask token that texts contain, as DiffuLLaMA's: prompted and written as any other; masks are known by position."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dlm_bridge.errors import RowError, SettingError
from dlm_bridge.generation import generate
from dlm_bridge.generation.engine import SamplingEngine
from dlm_bridge.generation.request import MASK as HOLE
from dlm_bridge.generation.request import Committed, Request
from dlm_bridge.generation.settings import fitting_samplers
from dlm_bridge.models.diffullama import SPEC
from dlm_bridge.models.dream import SPEC as DREAM
from tests.generation.standin import MASK, VOCABULARY, StandIn
from tests.generation.test_non_finite import ends_of
from tests.refusals import refused

PROMPT = [3, MASK, 4, MASK, MASK, 5]
SETTINGS: dict[str, Any] = {"gen_length": 24, "temperature": 1.0, "seed": 3, "eos_token_id": None}


def ordinary() -> StandIn:
    """Likes to write its mask token."""
    model = StandIn(SPEC)
    model.head[:, MASK] = 2 * model.head[:, 40]
    return model


def special() -> StandIn:
    """The same model with a mask token of its own, which reads as the other's."""
    model = ordinary()
    model.family, model.config.vocab_size, model.config.mask_token_id = DREAM, VOCABULARY + 1, VOCABULARY
    model.embed = torch.cat([model.embed, model.embed[MASK:]])
    model.head = torch.nn.functional.pad(model.head, (0, 1))
    return model


@pytest.mark.parametrize("algorithm", [name for name in fitting_samplers(SPEC) if name in fitting_samplers(DREAM)])
@pytest.mark.parametrize(
    "more", [{}, {"temperature": 0.0}, {"repetition_penalty": 1.2}], ids=["drawn", "greedy", "penalty"]
)
@pytest.mark.fast("*-llada", "*-dream", "drawn-uniform", "penalty-multi_block")
def test_texts_are_those_of_a_mask_token_of_its_own(algorithm: str, more: dict[str, Any]) -> None:
    if algorithm == "uniform" and "repetition_penalty" in more:
        more = {}  # refused: it has no committed text
    settings = {**SETTINGS, **more, "algorithm": algorithm}
    found = generate(ordinary(), torch.tensor([PROMPT]), **settings)
    assert torch.equal(found, generate(special(), torch.tensor([PROMPT]), **settings))
    assert more.get("temperature") == 0 or MASK in found[0, len(PROMPT) :].tolist()


def test_an_engine_reports_it_as_committed() -> None:
    settings = {**SETTINGS, "seed": None}
    engine = SamplingEngine(ordinary(), settings, max_rows=2, max_length=64, record=True)
    events = ends_of(engine, Request("a", PROMPT, seed=1), Request("b", [MASK], seed=2))
    for name in ("a", "b"):
        *steps, ended = events[name]
        assert MASK in ended.tokens
        assert all(ended.steps)  # each position was committed in some step, also those with that token
        committed = [place for event in steps if isinstance(event, Committed) for place in event.positions]
        assert sorted(committed) == [*range(24)]


@pytest.mark.parametrize("more", [{}, {"span_lengths": (2, 5)}], ids=["given", "lengths"])
def test_positions_to_fill_are_marked(more: dict[str, Any]) -> None:
    """By -1; the token itself is text."""
    settings = {"infill": True, "temperature": 1.0, "seed": [3], **more}
    prompt = [3, MASK, HOLE, HOLE, 4, MASK]
    found = generate(ordinary(), torch.tensor([prompt]), **settings)
    assert torch.equal(found, generate(special(), torch.tensor([prompt]), **settings))
    assert (found[0, :2].tolist(), found[0, -2:].tolist()) == ([3, MASK], [4, MASK])
    with refused(SettingError, "infill", "-1", "47"):
        generate(ordinary(), torch.tensor([[3, MASK, 4]]), **settings)


def test_it_may_end_a_text_and_pad() -> None:
    model = ordinary()
    found = generate(model, torch.tensor([PROMPT]), **{**SETTINGS, "eos_token_id": MASK}, return_dict_in_generate=True)
    text = found.sequences[0, len(PROMPT) :].tolist()
    assert text.index(MASK) == len(text) - 1 == found.row_ends.item() - len(PROMPT) - 1


def test_noise_of_masks_and_random_tokens_is_refused() -> None:
    with refused(SettingError, "p_uniform"):
        generate(ordinary(), torch.tensor([PROMPT]), algorithm="uniform", p_uniform=0.2)


def test_a_mask_token_of_its_own_is_refused_in_a_prompt() -> None:
    with refused(RowError, "row 0", str(VOCABULARY)):
        generate(special(), torch.tensor([[1, VOCABULARY]]), gen_length=8)

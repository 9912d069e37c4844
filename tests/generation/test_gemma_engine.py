"""DiffusionGemma in a batch that rows enter and leave: each text is that of transformers' own generate, alone, if that
draws the same random numbers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dlm_bridge.generation import gemma
from dlm_bridge.generation.gemma import GemmaEngine, supports_drafts
from dlm_bridge.generation.request import Ended, Request
from tests.canvas_models import CANVAS, canvas_model, has_class, keyed_draws

pytestmark = has_class
LENGTHS = (3, 9, 1, 14, 6, 22, 7)  # of prompts; the window of the sliding layers is 6
SEEDS = range(11, 11 + len(LENGTHS))


@pytest.fixture(scope="module")
def model() -> Any:
    """In fp64, so that rows that run together round as a row alone does."""
    model = canvas_model(0).double()
    model.set_experts_implementation("eager")  # the others are for lower precisions
    return model


def _prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, 250, (length,), generator=generator).tolist() for length in LENGTHS]


def _alone(model: Any, given: dict[str, Any], ends: list[int]) -> list[list[int]]:
    """By transformers, a row at a time."""
    found = []
    for prompt, seed in zip(_prompts(), SEEDS, strict=True):
        ids = torch.tensor([prompt])
        with keyed_draws(seed):
            new = gemma._generate(model, ids, torch.ones_like(ids), given)[0, len(prompt) :].tolist()
        end = next((place for place, token in enumerate(new) if token in ends), len(new))
        found.append(new[: end + 1])
    return found


def _batched(model: Any, settings: dict[str, Any], rows: int) -> tuple[GemmaEngine, dict[int, Ended]]:
    engine = GemmaEngine(model, None, settings, max_rows=rows)
    for number, (prompt, seed) in enumerate(zip(_prompts(), SEEDS, strict=True)):
        engine.submit(Request(number, prompt, seed=seed))
    found: dict[int, Ended] = {}
    while not engine.idle:
        found |= {event.name: event for event in engine.step() if isinstance(event, Ended)}
    return engine, found


@pytest.mark.parametrize(
    ("settings", "ends"),
    [
        ({"stability_threshold": 0, "confidence_threshold": 2.0, "t_min": 0.1}, []),  # canvases end early
        ({"stability_threshold": 2, "confidence_threshold": 5.0, "entropy_bound": 9.0}, list(range(12))),
        ({"entropy_bound": 60.0, "t_max": 0.02, "t_min": 0.01, "confidence_threshold": 9.0}, []),  # nearly greedy
        ({"block_length": 5, "steps": 3}, []),
    ],
    ids=["early", "ends", "stable", "length"],
)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.fast("eager-early", "sdpa-stable", "eager-ends")
def test_texts_are_those_of_transformers_alone(
    model: Any, settings: dict[str, Any], ends: list[int], attention: str
) -> None:
    model.set_attn_implementation(attention)
    settings = {"max_new_tokens": 27, "steps": 6, **settings, "eos_token_id": ends or None}
    given = gemma.gemma_keywords(model, settings)
    assert supports_drafts(model, given)
    wanted = _alone(model, given, ends)
    passes = []
    # Eager attention has its softmax in fp32, where rows that run together round otherwise.
    for rows in (1, 3, len(LENGTHS)) if attention == "sdpa" else (1, 2):
        batch, found = _batched(model, settings, rows)
        assert [list(found[number].tokens) for number in range(len(LENGTHS))] == wanted
        passes.append(batch.forwards)
        total = sum(text.forwards for text in found.values())
        assert total / rows <= batch.forwards <= total
    assert passes == sorted(set(passes), reverse=True)
    if not ends:
        assert {len(tokens) for tokens in wanted} == {27}
    else:
        assert len({len(tokens) for tokens in wanted}) > 3


def test_a_row_that_is_done_makes_room(model: Any) -> None:
    """Passes are those of the rows over how many run together, not of the slowest row of each batch."""
    model.set_attn_implementation("sdpa")
    batch, found = _batched(model, {"max_new_tokens": 4 * CANVAS, "steps": 6, "eos_token_id": list(range(30))}, 2)
    own = [text.forwards for text in found.values()]
    slowest = sum(
        max(found[number].forwards for number in range(start, min(start + 2, len(LENGTHS))))
        for start in range(0, len(LENGTHS), 2)
    )
    assert len(set(own)) > 1
    assert batch.forwards < slowest


def test_what_transformers_own_loop_has_to_sample(model: Any) -> None:
    assert not supports_drafts(model, {"cache_implementation": "static"})
    assert not supports_drafts(SimpleNamespace(config=SimpleNamespace()), {})  # an autoregressive one

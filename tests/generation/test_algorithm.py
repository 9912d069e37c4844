"""Greedy and random-order output equals the published algorithm's, token for token."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from dlm_bridge.generation import generate
from dlm_bridge.generation.commit_rules import even_schedule
from dlm_bridge.generation.token_sampling import Noise
from tests.generation import published
from tests.generation.conftest import MASK, load, prompts
from tests.generation.scripted import Scripted

# batch, prompt, gen_length, block_length, steps
SHAPES = [
    (1, 5, 16, 16, 16),
    (1, 7, 32, 8, 16),  # two tokens a step
    (3, 3, 24, 8, 9),  # a remainder: 3, 3, 2
    (2, 1, 12, 4, 15),  # more steps than tokens
    (2, 9, 32, 32, 5),
    (4, 6, 40, 10, 28),
    (1, 0, 16, 8, 8),  # no prompt
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("cfg_scale", [0.0, 1.5])
def test_low_confidence(model: Any, shape: tuple[int, ...], cfg_scale: float) -> None:
    batch, length, gen_length, block_length, steps = shape
    ids = prompts(batch, length, seed=steps)
    arguments = {"gen_length": gen_length, "block_length": block_length, "steps": steps, "cfg_scale": cfg_scale}
    expected = published.sample(model, ids, mask=MASK, **arguments)
    assert not (expected == MASK).any()  # else the comparison would not be fair
    assert torch.equal(model.generate(ids, eos_token_id=None, **arguments), expected)


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape[4] <= shape[2]])
def test_random_remasking_is_the_published_one_by_the_rows_numbers(model: Any, shape: tuple[int, ...]) -> None:
    batch, length, gen_length, block_length, steps = shape
    ids = prompts(batch, length)
    arguments = {"gen_length": gen_length, "block_length": block_length, "steps": steps}
    seeds = list(range(batch))
    noise = Noise(seeds, torch.device("cpu"))

    def draw(rows: int, width: int) -> torch.Tensor:
        return noise.uniform(range(rows), torch.arange(width).expand(rows, -1))

    expected = published.sample(model, ids, mask=MASK, draw=draw, **arguments)
    arguments |= {"remasking": "random", "eos_token_id": None}
    assert torch.equal(model.generate(ids, seed=seeds, **arguments), expected)
    assert not torch.equal(model.generate(ids, seed=[seed + 9 for seed in seeds], **arguments), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(folder: Path, dtype: torch.dtype) -> None:
    model, ids = load(folder, dtype=dtype), prompts(3, 8)
    for cfg_scale in (0.0, 0.5):
        arguments = {"gen_length": 32, "block_length": 16, "steps": 16, "cfg_scale": cfg_scale}
        expected = published.sample(model, ids, mask=MASK, **arguments)
        assert torch.equal(model.generate(ids, eos_token_id=None, **arguments), expected)


def test_the_defaults_are_the_published_ones(model: Any) -> None:
    ids = prompts(1, 4)
    output = model.generate(ids, eos_token_id=None, return_dict_in_generate=True)
    assert output.forwards == 128
    expected = published.sample(model, ids, mask=MASK, gen_length=128, block_length=128, steps=128)
    assert torch.equal(output.sequences, expected)


def test_schedule_puts_the_remainder_first_and_leaves_out_empty_steps() -> None:
    assert even_schedule(8, 3) == [3, 3, 2]
    assert even_schedule(8, 8) == [1] * 8
    assert even_schedule(4, 7) == [1] * 4
    assert even_schedule(5, 1) == [5]


def test_a_step_that_commits_nothing_costs_no_forward(model: Any) -> None:
    arguments = {"gen_length": 8, "block_length": 4, "eos_token_id": None, "return_dict_in_generate": True}
    many = model.generate(prompts(2, 3), steps=40, **arguments)
    assert many.forwards == 8
    assert torch.equal(many.sequences, model.generate(prompts(2, 3), steps=8, **arguments).sequences)


def test_the_mask_token_is_never_emitted(folder: Path) -> None:
    model, ids = load(folder), prompts(2, 5)
    with torch.no_grad():
        # Twice the most likely token's logit, wherever that is positive.
        model.lm_head.weight[MASK] = 2 * model.lm_head.weight[7]
    arguments = {"gen_length": 32, "block_length": 8, "steps": 32}
    assert (published.sample(model, ids, mask=MASK, **arguments) == MASK).any()
    for more in ({}, {"temperature": 1.0}, {"remasking": "random"}, {"cfg_scale": 2.0}):
        output = model.generate(ids, eos_token_id=None, **arguments, **more)
        assert output.shape == (2, 37)
        assert not (output == MASK).any()


def test_confidence_is_the_raw_softmax_even_where_the_mask_token_leads() -> None:
    # Column 0: mask 0.90, token 0 0.09. Column 1: token 1 0.50. Without the mask token column 0 would lead.
    table = torch.tensor([[0.09, 0.01, 0.90], [0.30, 0.50, 0.20]]).log()
    model = Scripted(table)
    output = _generate(model, gen_length=2, steps=2)
    assert output.tolist() == [[0, 1]]
    assert model.calls[1]["input_ids"].tolist() == [[2, 1]]


def test_random_order_does_not_look_at_the_logits() -> None:
    table = torch.zeros(16, 3)
    table[:, 0] = torch.linspace(9, 1, 16)  # by confidence: strictly from left to right
    model = Scripted(table)
    _generate(model, gen_length=16, steps=16, remasking="random", seed=0)
    canvases = [call["input_ids"][0] for call in model.calls]
    order = [int((before != after).nonzero()) for before, after in pairwise(canvases)]
    assert len(order) == 15
    assert order != sorted(order)


def _generate(model: Any, **arguments: Any) -> torch.Tensor:
    output = generate(model, torch.empty(1, 0, dtype=torch.long), eos_token_id=None, **arguments)
    assert isinstance(output, torch.Tensor)
    return output

"""Stopping at the end-of-sequence token: nothing before it changes, what follows it is padding, rows leave early."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dlm_bridge.generation import generate
from tests.generation.conftest import prompts
from tests.generation.scripted import Scripted

PAD = 99
ARGUMENTS = {"gen_length": 48, "block_length": 8, "steps": 48}


def stopped(full: torch.Tensor, prompt: int, ends: tuple[int, ...]) -> torch.Tensor:
    """What the complete rows become: padded after the first end, cut to the longest row."""
    rows = []
    for row in full.tolist():
        first = next((i for i in range(prompt, len(row)) if row[i] in ends), len(row) - 1)
        rows.append(row[: first + 1])
    width = max(map(len, rows))
    return torch.tensor([row + [PAD] * (width - len(row)) for row in rows])


@pytest.mark.parametrize("side", ["none", "left"])
@pytest.mark.parametrize("more", [{}, {"cfg_scale": 0.7}, {"temperature": 1.0, "seed": 5}])
@pytest.mark.fast("more2-left", "more1-none", "more0-left")
def test_stopping_changes_nothing_before_the_end(model: Any, side: str, more: dict[str, Any]) -> None:
    ids = prompts(4, 6)
    mask = torch.ones_like(ids)
    if side == "left":
        mask[1, :4] = 0
    arguments = {**ARGUMENTS, **more, "attention_mask": mask}
    full = model.generate(ids, eos_token_id=None, return_dict_in_generate=True, **arguments)
    assert full.sequences.shape == (4, 54)
    assert full.forwards == 48
    # Tokens that end rows 0 and 1 in their second block and row 2 in its fourth, or earlier.
    ends = tuple(full.sequences[[0, 1, 2], [17, 16, 36]].tolist())
    expected = stopped(full.sequences, 6, ends)
    output = model.generate(ids, eos_token_id=list(ends), pad_token_id=PAD, return_dict_in_generate=True, **arguments)
    assert torch.equal(output.sequences, expected)


def test_rows_that_have_ended_leave_the_batch() -> None:
    # Row and column decide nothing: every row writes 0, except that token 1 wins in column 3 for short rows.
    table = torch.zeros(12, 4)
    table[:, 0] = 1.0
    table[5, 1] = 2.0
    model = Scripted(table)
    output = generate(
        model,
        torch.zeros(3, 0, dtype=torch.long),
        gen_length=12,
        block_length=2,
        eos_token_id=1,
        pad_token_id=2,
        return_dict_in_generate=True,
    )
    assert output.sequences.tolist() == [[0, 0, 0, 0, 0, 1]] * 3
    assert output.forwards == 6  # three blocks of two steps, not six


def test_finished_rows_are_not_computed_and_the_others_go_on(model: Any) -> None:
    ids = prompts(3, 6)
    full = model.generate(ids, eos_token_id=None, **ARGUMENTS)
    end = int(full[0, 8])
    expected = stopped(full, 6, (end,))
    sizes: list[int] = []
    handle = model.register_forward_pre_hook(
        lambda _, args, kwargs: sizes.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    try:
        output = model.generate(ids, eos_token_id=end, pad_token_id=PAD, **ARGUMENTS)
    finally:
        handle.remove()
    assert torch.equal(output, expected)
    assert sizes[:8] == [3] * 8
    assert max(sizes[8:], default=0) < 3


def test_the_prompt_may_hold_the_end_token(model: Any) -> None:
    ids = prompts(2, 6)
    full = model.generate(ids, eos_token_id=None, **ARGUMENTS)
    inside = next(token for token in range(100) if not (full[:, 6:] == token).any())
    ids[:, 2] = inside
    full = model.generate(ids, eos_token_id=None, **ARGUMENTS)
    output = model.generate(ids, eos_token_id=inside, pad_token_id=PAD, **ARGUMENTS)
    assert torch.equal(output, stopped(full, 6, (inside,)))


def test_without_a_padding_token_the_end_token_fills_up() -> None:
    table = torch.zeros(5, 5)
    table[:, 1] = 1.0
    table[1, 3] = 2.0
    model = Scripted(table)
    ids = torch.zeros(2, 1, dtype=torch.long)
    output = generate(model, ids, gen_length=4, eos_token_id=[2, 3])
    assert output.tolist() == [[0, 3], [0, 3]]
    output = generate(model, ids, gen_length=4, eos_token_id=None)
    assert output.tolist() == [[0, 3, 1, 1, 1]] * 2
    only_row_0_ends = {"prefix_allowed_tokens_fn": lambda row, text: [1] if row else [3]}
    output = generate(model, ids, gen_length=4, eos_token_id=[2, 3], **only_row_0_ends)
    assert output.tolist() == [[0, 3, 2, 2, 2], [0, 1, 1, 1, 1]]

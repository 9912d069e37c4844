"""LLaDA's and iLLaDA's end-of-thought bias, against the published loop written down again for one row."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dlm_bridge.errors import SettingError
from dlm_bridge.generation import DiffusionGenerationConfig, generate
from tests.generation.standin import MASK, StandIn, family, ragged
from tests.refusals import refused

GEN, BLOCK, STEPS = 18, 6, 3
BOOSTS = [(0.0, 2.0), (2.0, 1.0), (30.0, 2.0), (30.0, 0.0)]


def published(
    model: StandIn, prompt: list[int], closing: list[int], boost: float, power: float, *, grows: bool
) -> list[int]:
    """Greedy: the first mask of the block leans towards the closing token that goes on with what stands before it."""
    row = prompt + [MASK] * GEN
    for begin in range(len(prompt), len(row), BLOCK):
        end = begin + BLOCK
        for _ in range(STEPS):
            seen = row[:end] if grows else row
            logits = model(torch.tensor([seen])).logits[0]
            place = row.index(MASK, begin)
            new = row[len(prompt) :]
            if not any(new[i : i + len(closing)] == closing for i in range(GEN)):
                known = next(
                    count
                    for count in range(len(closing) - 1, -1, -1)
                    if place - count >= len(prompt) and row[place - count : place] == closing[:count]
                )
                logits[place, closing[known]] += boost * ((place - len(prompt) + 1) / GEN) ** power
            masks = [i for i in range(begin, end) if row[i] == MASK]
            masks.sort(key=lambda i: -float(logits[i].softmax(-1).max()))
            for i in masks[: BLOCK // STEPS]:
                row[i] = int(logits[i].argmax())
    return row


@pytest.mark.parametrize("closing", [[3], [3, 4], [5, 5, 6], [7, 8, 7, 9]])
@pytest.mark.parametrize(("boost", "power"), BOOSTS)
@pytest.mark.parametrize("algorithm", ["llada", "illada"])
@pytest.mark.fast("llada-*-closing0", "illada-2.0-1.0-*")
def test_it_is_the_published_urge(algorithm: str, closing: list[int], boost: float, power: float) -> None:
    """Of ragged rows, one of which ends with a part of the closing tokens, and one with all of them."""
    model = StandIn(family(algorithm=algorithm))
    rows, ids, mask = ragged((5, 9, 1, 8))
    for row, tail in ((rows[0], closing[:1]), (rows[1], closing)):
        row[-len(tail) :] = tail
    ids[0, -1], ids[1, -len(closing) :] = closing[0], torch.tensor(closing)
    steps = STEPS if algorithm == "illada" else STEPS * (GEN // BLOCK)
    output = generate(
        model, ids, attention_mask=mask, gen_length=GEN, block_length=BLOCK, steps=steps, temperature=0.0,
        eos_token_id=None, end_think_token_ids=closing, end_think_logit_boost=boost, end_think_boost_power=power,
    )  # fmt: skip
    for row, found in zip(rows, output.tolist(), strict=True):
        expected = published(model, row, closing, boost, power, grows=algorithm == "illada")
        assert found[ids.shape[1] - len(row) :] == expected


def test_a_strong_urge_writes_the_closing_tokens_once() -> None:
    model = StandIn(family(algorithm="illada"))
    closing = [7, 8, 9]
    output = generate(
        model, torch.tensor([[1, 2]]), gen_length=32, block_length=4, eos_token_id=None,
        end_think_token_ids=closing, end_think_logit_boost=500.0,
    )[0].tolist()  # fmt: skip
    assert sum(output[i : i + 3] == closing for i in range(len(output))) == 1


def test_logits_in_half_precision_are_urged() -> None:
    """Logits in bfloat16 are urged, too."""
    model = StandIn(family(algorithm="illada"))
    whole = model.forward

    def halved(*args: Any, **kwargs: Any) -> Any:
        output = whole(*args, **kwargs)
        output.logits = output.logits.bfloat16()
        return output

    model.forward = halved  # type: ignore[method-assign]
    given = {"gen_length": GEN, "block_length": BLOCK, "eos_token_id": None}
    bias = {"end_think_token_ids": [3], "end_think_logit_boost": 500.0}
    plain = generate(model, torch.tensor([[1, 2]]), **given)
    assert 3 in generate(model, torch.tensor([[1, 2]]), **given, **bias)[0].tolist()
    assert 3 not in plain[0].tolist()


@pytest.mark.parametrize(
    ("settings", "field", "named"),
    [
        ({"end_think_logit_boost": 1.0}, "end_think_logit_boost", "`end_think_token_ids`"),
        ({"end_think_logit_boost": 1.0, "end_think_token_ids": []}, "end_think_logit_boost", "`end_think_token_ids`"),
        ({"end_think_logit_boost": -1.0}, "end_think_logit_boost", "-1.0"),
        ({"end_think_token_ids": 3}, "end_think_token_ids", "3"),
        ({"end_think_token_ids": [3, -1]}, "end_think_token_ids", "[3, -1]"),
        ({"end_think_logit_boost": 1.0, "end_think_token_ids": [99]}, "end_think_token_ids", "[99]"),
    ],
)
def test_bad_settings_are_named(settings: dict[str, Any], field: str, named: str) -> None:
    with refused(SettingError, field, named):
        generate(StandIn(family(algorithm="illada")), torch.tensor([[1, 2]]), gen_length=8, **settings)


def test_it_is_saved_with_the_checkpoint(tmp_path: Any) -> None:
    DiffusionGenerationConfig(end_think_token_ids=[3, 4], end_think_logit_boost=100.0).save_pretrained(tmp_path)
    model = StandIn(family(algorithm="illada"))
    model.generation_config = DiffusionGenerationConfig.from_pretrained(tmp_path)
    given = {"gen_length": 12, "block_length": 6, "eos_token_id": None}
    stored = generate(model, torch.tensor([[1, 2]]), **given)
    model.generation_config = DiffusionGenerationConfig()
    asked = generate(model, torch.tensor([[1, 2]]), **given, end_think_token_ids=[3, 4], end_think_logit_boost=100.0)
    assert torch.equal(stored, asked)
    assert not torch.equal(stored, generate(model, torch.tensor([[1, 2]]), **given))

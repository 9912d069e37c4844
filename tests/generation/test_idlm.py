"""I-DLM's strided decoding: drafts that the next forward pass checks."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from dlm_bridge.attention.masks import causal_mask
from dlm_bridge.generation import generate
from dlm_bridge.generation.settings import fitting_samplers
from dlm_bridge.models.families import family_by_name
from dlm_bridge.objectives.base import mean_loss
from dlm_bridge.objectives.batches import IGNORE_INDEX
from dlm_bridge.objectives.noise import Uniforms
from dlm_bridge.objectives.registry import build_objective
from tests.families.idlm import CASE
from tests.generation import published_samplers as published
from tests.generation.standin import MASK, StandIn, family, keep_tokens, ragged

GEN = 13


def build(seed: int, likely: int = 4) -> StandIn:
    """With so many likely tokens, so that drafts are right now and then."""
    model = StandIn(family("causal", shift=True, name="idlm", algorithm="idlm"), seed=seed)
    model.head[:, likely:MASK] *= 0.02
    return model


@pytest.mark.parametrize("tails", [False, True])
@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.fast("3-True", "3-False", "5-True")
def test_greedy_text_is_the_causal_models_in_as_many_forwards(size: int, tails: bool) -> None:
    saved = 0
    for seed in range(3):
        model = build(seed)
        rows, ids, mask = ragged((5, 9, 1, 8))
        arguments = {"gen_length": GEN, "gen_block_size": size, "temperature": 0.0, "eos_token_id": None}
        arguments |= {"mask_tails": tails}
        together = generate(model, ids, attention_mask=mask, **arguments)
        for row, line in zip(rows, together.tolist(), strict=True):
            expected, forwards = published.idlm(model, row, GEN, MASK, count=size - 1, tails=tails)
            assert line[9 - len(row) :] == expected
            alone = generate(model, torch.tensor([row]), return_dict_in_generate=True, **arguments)
            assert alone.forwards == forwards
            saved += GEN - forwards
            text = list(row)
            while len(text) < len(row) + GEN:
                seen = causal_mask(torch.ones(1, len(text)))
                logits = model(torch.tensor([text]), seen).logits[0, -1].clone()
                logits[MASK] = -torch.inf
                text.append(int(logits.argmax()))
            assert text == expected
    assert saved > 0


@pytest.mark.parametrize(
    "filters",
    [
        {"top_k": None, "top_p": None},
        pytest.param({"top_k": 2, "top_p": None}, marks=pytest.mark.slow),
        {"top_k": None, "top_p": None, "mask_tails": True},
    ],
)
def test_what_is_drawn_has_the_causal_models_distribution(filters: dict[str, Any]) -> None:
    """The frequencies of all texts of three tokens, against their exact probabilities."""
    model, prompt, copies = build(1), [7, 11], 2000
    keep_tokens(model, 3)
    settings = {"gen_length": 3, "temperature": 2.5, "seed": 3, "num_return_sequences": copies, "eos_token_id": None}
    found = generate(model, torch.tensor([prompt]), return_dict_in_generate=True, **settings, **filters)
    counts = Counter(map(tuple, found.sequences[:, 2:].tolist()))
    assert found.tokens_per_forward > 0.8  # 3 / 4, were no draft ever accepted
    for text in itertools.product(range(3), repeat=3):
        expected = 1.0
        for place, token in enumerate(text):
            tokens = [*prompt, *text[:place]]
            logits = model(torch.tensor([tokens]), causal_mask(torch.ones(1, len(tokens)))).logits[0, -1]
            expected *= float(published.shaped(logits / 2.5, top_k=filters["top_k"])[token])
        error = (expected * (1 - expected) / copies) ** 0.5
        assert abs(counts[text] / copies - expected) <= 4 * error


def test_a_tail_is_a_draft_after_every_rejection() -> None:
    """Fewer forwards for the same greedy text: a rejection is followed by a draft."""
    settings = {"gen_length": 40, "temperature": 0.0, "eos_token_id": None, "return_dict_in_generate": True}
    strided, tails = (
        generate(build(2), torch.tensor([[3, 5], [9, 4]]), gen_block_size=4, mask_tails=tails, **settings)
        for tails in (False, True)
    )
    assert torch.equal(strided.sequences, tails.sequences)
    assert tails.forwards < strided.forwards


def test_an_easier_check_accepts_more() -> None:
    counts = []
    for alpha in (1.0, 0.2):
        settings = {
            "gen_length": 24,
            "seed": 5,
            "num_return_sequences": 8,
            "eos_token_id": None,
            "verify_alpha": alpha,
        }
        output = generate(build(2), torch.tensor([[3, 5]]), return_dict_in_generate=True, **settings)
        counts.append(output.tokens_per_forward)
    assert counts[1] > counts[0]


def test_the_cache_changes_no_token(tmp_path: Any) -> None:
    model = CASE.load(CASE.write(tmp_path), dtype=torch.float64)
    _, ids, mask = ragged((5, 9, 1))
    settings = {"gen_length": 20, "mask_token_id": 99, "eos_token_id": None, "seed": 2, "pad_token_id": 0}
    for temperature, tails in ((0.0, False), (0.7, False), (0.0, True), (0.7, True)):
        settings |= {"temperature": temperature, "gen_block_size": 4, "mask_tails": tails}
        found = [
            model.generate(ids, attention_mask=mask, cache=cache, return_dict_in_generate=True, **settings)
            for cache in ("none", "block")
        ]
        assert torch.equal(found[0].sequences, found[1].sequences)
        assert found[0].forwards == found[1].forwards


def test_the_loss_is_that_of_both_streams(tmp_path: Any) -> None:
    """NeMo Automodel's formula (IDLMLoss), by one pass for each masked block behind its clean prefix."""
    model = CASE.load(CASE.write(tmp_path), dtype=torch.float64).requires_grad_(False)
    model.config.mask_token_id, length = 99, 11
    ids = torch.randint(0, 99, (2, length), generator=torch.Generator().manual_seed(1))
    for block in (1, 3):
        model.config.block_size = block
        labels = ids.clone()
        labels[0, :4] = IGNORE_INDEX
        labels[1, 9:] = IGNORE_INDEX
        counted = labels != IGNORE_INDEX
        noisy = ids.masked_fill(counted, 99)
        clean = -model(ids).logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        costs = torch.zeros_like(clean)
        for first in range(0, length, block):
            stop = min(first + block, length)
            logits = model(torch.cat([ids[:, :first], noisy[:, first:stop]], dim=1)).logits.log_softmax(-1)
            for place in range(first, min(stop, length - 1)):
                costs[:, place] = -logits[:, place].gather(-1, ids[:, place + 1, None])[:, 0]
        wanted = counted[:, 1:]
        expected = (costs[wanted].sum() + 0.2 * clean[wanted].sum()) / wanted.sum()
        loss = model(ids, labels=labels, generator=torch.Generator().manual_seed(0)).loss
        assert loss.item() == pytest.approx(expected.item(), rel=1e-5)


def test_the_clean_loss_of_a_row_is_balanced_without_a_gradient_of_the_factor(tmp_path: Any) -> None:
    """Rows of other ratios: each row's gradient is that of noisy + clean x (noisy / clean) with a constant factor."""
    model = CASE.load(CASE.write(tmp_path, block_size=3, mask_token_id=99), dtype=torch.float64)
    ids = torch.randint(0, 99, (3, 11), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, :4] = IGNORE_INDEX
    labels[2, :] = IGNORE_INDEX  # nothing to predict
    uniforms = Uniforms.keyed(0, 1, [0, 1, 2], 11)
    objective = build_objective("idlm", 99, config=model.config, auto_balance=True)
    noisy = objective.noise(ids, uniforms, labels)
    losses = F.cross_entropy(noisy.logits(model), noisy.targets, reduction="none")
    rows, is_clean = noisy.mask.nonzero()[:, 0], noisy.terms == 1
    expected = torch.zeros((), dtype=torch.float64)
    for row in (0, 1):
        noise, clean = (losses[(rows == row) & (is_clean == which)].sum() for which in (False, True))
        expected = expected + noise + (noise / clean).detach() * clean
    weight = model.get_input_embeddings().weight
    wanted = torch.autograd.grad(expected / noisy.normaliser[0], weight)[0]
    loss = mean_loss(objective.loss_sum(noisy.logits(model), noisy), noisy)
    assert loss.item() == pytest.approx((expected / noisy.normaliser[0]).item(), rel=1e-5)
    torch.testing.assert_close(torch.autograd.grad(loss, weight)[0], wanted, rtol=1e-4, atol=1e-7)
    fixed = build_objective("idlm", 99, config=model.config)
    other = mean_loss(fixed.loss_sum(noisy.logits(model), fixed.noise(ids, uniforms, labels)), noisy)
    assert other.item() != pytest.approx(loss.item(), rel=1e-2)


def test_samplers_that_predict_a_position_by_itself_are_not_for_it() -> None:
    assert fitting_samplers(family_by_name("idlm")) == ["idlm"]
    assert fitting_samplers(family_by_name("wedlm")) == ["wedlm"]

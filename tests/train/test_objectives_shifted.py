"""The shifted objectives against independent maths, and through Dream."""

from __future__ import annotations

import dataclasses
import itertools
import math
from pathlib import Path

import pytest
import torch

from dlm_bridge.objectives.batches import IGNORE_INDEX
from dlm_bridge.objectives.noise import Uniforms
from dlm_bridge.objectives.registry import build_objective
from dlm_bridge.objectives.single_stream import ShiftedDiffusion, cart_weights
from tests.families import dream

MASK = 7
VOCAB = 8


def _logits(input_ids: torch.Tensor) -> torch.Tensor:
    """A toy denoiser whose prediction at a position depends on every token: [B, L, VOCAB]."""
    table = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(3)).double()
    context = table[input_ids].mean(1, keepdim=True)
    positions = torch.arange(input_ids.shape[1]).double()[None, :, None]
    return torch.sin(table[input_ids] + 2 * context + positions)


def _costs(tokens: torch.Tensor, masked: list[bool], weights: list[float]) -> float:
    """The weighted cross-entropy of one row's masks, token i predicted by the logits at i - 1."""
    seen = torch.where(torch.tensor([masked]), MASK, tokens)
    log_probabilities = _logits(seen)[0].log_softmax(-1)
    return -sum(
        weights[i] * log_probabilities[i - 1, tokens[0, i]].item() for i in range(tokens.shape[1]) if masked[i]
    )


@pytest.mark.parametrize(("name", "floor"), [("shifted", 0.0), ("shifted_floor", 1e-3), ("shifted_cart", 0.0)])
def test_expected_loss_equals_exact_enumeration_of_all_masks(name: str, floor: float) -> None:
    """With t given: the expected sum over the expected number of masks, over every mask that leaves position 0."""
    tokens = torch.tensor([[1, 5, 2, 6]])
    t = (1 - floor) * 0.4 + floor
    cost = count = 0.0
    for rest in itertools.product([False, True], repeat=3):
        masked = [False, *rest]
        weights = [1 / t] * 4
        if name == "shifted_cart":
            weights = [
                sum(0.5 * 0.3 * 0.7 ** (abs(n - i) - 1) for i in range(4) if i != n and not masked[i])
                for n in range(4)
            ]
        chance = math.prod(t if m else 1 - t for m in rest)
        cost += chance * _costs(tokens, masked, weights)
        count += chance * sum(masked)
    draws = 20_000
    uniforms = dataclasses.replace(
        Uniforms.drawn(torch.Generator().manual_seed(0), draws, 4), level=torch.full((draws,), 0.4)
    )
    objective = build_objective(name, MASK)
    noisy = objective.noise(tokens.expand(draws, 4), uniforms)
    loss = objective.loss_sum(_logits(noisy.input_ids)[noisy.mask], noisy) / noisy.normaliser
    assert loss.item() == pytest.approx(cost / count, rel=0.02)
    assert (noisy.input_ids[:, 0] == 1).all()


def test_cart_weights_equal_the_double_sum() -> None:
    visible = torch.rand(3, 90, generator=torch.Generator().manual_seed(0)) < 0.3
    for p in (0.1, 0.3, 0.8):
        expected = torch.zeros(3, 90, dtype=torch.float64)
        for n in range(90):
            for i in range(90):
                if i != n:
                    expected[:, n] += 0.5 * p * (1 - p) ** (abs(n - i) - 1) * visible[:, i]
        torch.testing.assert_close(cart_weights(visible, p).double(), expected, rtol=1e-5, atol=1e-7)


def test_there_is_no_floor_under_t() -> None:
    """A mask that is drawn at a tiny t weighs 1/t in full."""
    drawn = Uniforms.keyed(0, 1, [0], 4)
    uniforms = dataclasses.replace(drawn, level=torch.tensor([1e-5]), token=torch.tensor([[0.5, 0.5, 1e-6, 0.5]]))
    noisy = ShiftedDiffusion(MASK).noise(torch.tensor([[1, 2, 3, 4]]), uniforms)
    assert noisy.input_ids.tolist() == [[1, 2, MASK, 4]]
    assert noisy.mask.tolist() == [[False, True, False, False]]
    assert noisy.targets.tolist() == [3]
    assert noisy.weights.item() == pytest.approx(1e5)
    assert noisy.normaliser.tolist() == [1]


def test_nothing_unpreceded_is_masked_and_prompts_stay() -> None:
    tokens = torch.randint(0, MASK, (64, 10), generator=torch.Generator().manual_seed(0))
    attention_mask = torch.ones_like(tokens)
    attention_mask[:, :3] = 0  # padding on the left: position 3 is the first that is real
    labels = tokens.clone()
    labels[32:, :6] = IGNORE_INDEX
    noisy = ShiftedDiffusion(MASK).noise(tokens, Uniforms.keyed(0, 1, range(64), 10), labels, attention_mask)
    masked = noisy.input_ids == MASK
    assert not masked[:, :4].any()
    assert not masked[32:, :6].any()
    assert masked[:32, 4:].any(0).all()
    assert torch.equal(noisy.mask[:, :-1], masked[:, 1:])
    assert not noisy.mask[:, -1].any()
    assert torch.equal(noisy.targets, tokens[masked])
    assert noisy.normaliser.item() == masked.sum()


def test_dreams_loss_is_its_shifted_logits_written_out(tmp_path: Path) -> None:
    model = dream.CASE.load(dream.CASE.write(tmp_path))
    model.config.mask_token_id = 99
    ids = torch.randint(0, 99, (3, 12), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[:, :3] = IGNORE_INDEX
    with torch.no_grad():
        loss = model(ids, labels=labels, generator=torch.Generator().manual_seed(5)).loss
        drawn = Uniforms.drawn(torch.Generator().manual_seed(5), 3, 12)
        masked = (drawn.token < drawn.level[:, None]) & (labels != IGNORE_INDEX)
        logits = model(torch.where(masked, 99, ids)).logits
        shifted = torch.cat([logits[:, :1], logits[:, :-1]], dim=1).log_softmax(-1)
    cost = 0.0
    for row, column in masked.nonzero().tolist():
        cost -= shifted[row, column, ids[row, column]].item() / drawn.level[row].item()
    assert 3 < masked.sum() < 27
    assert loss.item() == pytest.approx(cost / masked.sum().item(), rel=1e-5)

"""The masked diffusion objective against independent maths, and its noise against every way to cut a batch."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.train.keyed import Purpose, stream
from dlm_bridge.train.objectives import (
    IGNORE,
    MaskedDiffusion,
    Uniforms,
    build_objective,
    masked_diffusion_loss,
)

MASK = 7
VOCAB = 8


def _logits(input_ids: torch.Tensor) -> torch.Tensor:
    """A toy denoiser whose prediction at a position depends on every token: [B, L, VOCAB]."""
    table = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(3)).double()
    context = table[input_ids].mean(1, keepdim=True)
    positions = torch.arange(input_ids.shape[1]).double()[None, :, None]
    return torch.sin(table[input_ids] + 2 * context + positions)


def test_loss_equals_the_published_formula_written_out() -> None:
    tokens = torch.randint(0, MASK, (3, 5), generator=torch.Generator().manual_seed(0))
    uniforms = Uniforms.keyed(seed=1, step=2, samples=[4, 5, 6], length=5)
    objective = MaskedDiffusion(MASK)
    noisy = objective.noise(tokens, uniforms)
    loss = objective.loss_sum(_logits(noisy.input_ids)[noisy.mask], noisy) / noisy.normaliser

    expected = 0.0
    for row in range(3):
        p = (1 - 1e-3) * uniforms.level[row].item() + 1e-3
        masked = [uniforms.token[row, i].item() < p for i in range(5)]
        seen = torch.tensor([[MASK if masked[i] else tokens[row, i].item() for i in range(5)]])
        log_probabilities = _logits(seen)[0].log_softmax(-1)
        expected -= sum(log_probabilities[i, tokens[row, i]].item() / p for i in range(5) if masked[i])
    assert 0 < noisy.mask.sum() < 15
    assert loss.item() == pytest.approx(expected / 15, rel=1e-5)


def test_expected_loss_equals_exact_enumeration_of_all_masks() -> None:
    """With t given, the mean over every possible mask, weighted by its probability, is what sampling converges to."""
    tokens = torch.tensor([[1, 5, 2]])
    objective = MaskedDiffusion(MASK)
    p = (1 - 1e-3) * 0.4 + 1e-3
    exact = 0.0
    for masked in itertools.product([False, True], repeat=3):
        seen = torch.where(torch.tensor([masked]), MASK, tokens)
        log_probabilities = _logits(seen)[0].log_softmax(-1)
        chance = math.prod(p if m else 1 - p for m in masked)
        exact -= chance * sum(log_probabilities[i, tokens[0, i]].item() / p for i in range(3) if masked[i]) / 3
    draws = 20_000
    drawn = Uniforms.drawn(torch.Generator().manual_seed(0), draws, 3)
    uniforms = Uniforms(torch.full((draws,), 0.4), drawn.token, drawn.cut, drawn.cut_length)
    noisy = objective.noise(tokens.expand(draws, 3), uniforms)
    sampled = objective.loss_sum(_logits(noisy.input_ids)[noisy.mask], noisy) / noisy.normaliser
    assert sampled.item() == pytest.approx(exact, rel=0.02)


def test_uniform_predictions_cost_log_vocabulary_on_average() -> None:
    """The 1/p weighting makes the estimate unbiased: a model that knows nothing costs log V at any noise level."""
    tokens = torch.zeros(4096, 32, dtype=torch.long)
    objective = MaskedDiffusion(MASK)
    noisy = objective.noise(tokens, Uniforms.keyed(0, 1, range(4096), 32))
    loss = objective.loss_sum(torch.zeros(int(noisy.mask.sum()), VOCAB), noisy) / noisy.normaliser
    assert loss.item() == pytest.approx(math.log(VOCAB), rel=0.02)


def test_noise_is_keyed_by_sample_not_by_layout() -> None:
    tokens = torch.randint(0, MASK, (8, 16), generator=torch.Generator().manual_seed(0))
    objective = MaskedDiffusion(MASK, length_variation=0.5)
    whole = objective.noise(tokens, Uniforms.keyed(5, 3, range(100, 108), 16))
    assert whole.attention_mask is not None
    for size in (1, 2, 4):
        parts = [
            objective.noise(tokens[i : i + size], Uniforms.keyed(5, 3, range(100 + i, 100 + i + size), 16))
            for i in range(0, 8, size)
        ]
        assert torch.equal(torch.cat([part.input_ids for part in parts]), whole.input_ids)
        assert torch.equal(torch.cat([part.weights for part in parts]), whole.weights)
        assert torch.equal(torch.cat([part.targets for part in parts]), whole.targets)
        assert sum(int(part.normaliser) for part in parts) == int(whole.normaliser)


@pytest.mark.parametrize("other", [(6, 3, 100), (5, 4, 100), (5, 3, 101)])
def test_noise_differs_by_seed_step_and_sample(other: tuple[int, int, int]) -> None:
    base = Uniforms.keyed(5, 3, [100], 64)
    changed = Uniforms.keyed(other[0], other[1], [other[2]], 64)
    assert not torch.equal(base.token, changed.token)
    assert base.level != changed.level


def test_streams_of_different_purposes_differ() -> None:
    values = {stream(0, purpose).random() for purpose in Purpose}
    assert len(values) == len(Purpose)


def test_prompts_and_padding_are_never_masked_nor_counted() -> None:
    tokens = torch.randint(0, MASK, (64, 12), generator=torch.Generator().manual_seed(0))
    labels = tokens.clone()
    labels[:, :4] = IGNORE
    attention_mask = torch.ones_like(tokens)
    attention_mask[:, 9:] = 0
    noisy = MaskedDiffusion(MASK).noise(tokens, Uniforms.keyed(0, 1, range(64), 12), labels, attention_mask)
    assert torch.equal(noisy.input_ids[:, :4], tokens[:, :4])
    assert torch.equal(noisy.input_ids[:, 9:], tokens[:, 9:])
    assert noisy.mask[:, 4:9].any()
    assert int(noisy.normaliser) == 64 * 5
    assert noisy.attention_mask is not None
    assert torch.equal(noisy.attention_mask, attention_mask.bool())


def test_length_variation_cuts_the_right_share_to_uniform_lengths() -> None:
    count, length = 4000, 50
    tokens = torch.ones(count, length, dtype=torch.long)
    objective = MaskedDiffusion(MASK, length_variation=0.25)
    noisy = objective.noise(tokens, Uniforms.keyed(0, 1, range(count), length))
    assert noisy.attention_mask is not None
    lengths = noisy.attention_mask.sum(1)
    cut = lengths[lengths < length]
    assert len(cut) / count == pytest.approx(0.25 * (length - 1) / length, abs=0.03)
    assert cut.min() == 1
    assert cut.float().mean().item() == pytest.approx(length / 2, rel=0.06)
    assert not noisy.mask[~noisy.attention_mask].any()


def test_batch_without_a_masked_position_gives_zero_with_a_graph() -> None:
    uniforms = Uniforms(torch.zeros(1), torch.ones(1, 4), torch.ones(1), torch.zeros(1))
    objective = MaskedDiffusion(MASK)
    noisy = objective.noise(torch.ones(1, 4, dtype=torch.long), uniforms)
    assert not noisy.mask.any()
    weight = torch.randn(VOCAB, VOCAB, requires_grad=True)
    loss = objective.loss_sum(weight[noisy.input_ids][noisy.mask], noisy) / noisy.normaliser
    loss.backward()
    assert loss.item() == 0.0
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.zeros_like(weight))


def test_loss_from_an_explicit_generator_repeats_and_normalises() -> None:
    tokens = torch.randint(0, MASK, (4, 6), generator=torch.Generator().manual_seed(0))

    def forward(input_ids: torch.Tensor, attention_mask: object, logits_to_keep: torch.Tensor) -> torch.Tensor:
        return torch.zeros(int(logits_to_keep.sum()), VOCAB)

    losses = [
        masked_diffusion_loss(forward, tokens, tokens, torch.Generator().manual_seed(seed), MASK).item()
        for seed in (1, 1, 2)
    ]
    assert losses[0] == losses[1] != losses[2]
    drawn = Uniforms.drawn(torch.Generator().manual_seed(1), 4, 6)
    p = (1 - 1e-3) * drawn.level[:, None] + 1e-3
    expected = ((drawn.token < p) / p).sum().item() * math.log(VOCAB) / 24
    assert losses[0] == pytest.approx(expected, rel=1e-5)


def test_unknown_objective_names_the_known_ones() -> None:
    with pytest.raises(DlmBridgeError, match="unknown objective 'maskd': known are masked"):
        build_objective("maskd", MASK)

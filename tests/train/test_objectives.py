"""The masked diffusion objectives against independent maths, and its noise against every way to cut a batch."""

from __future__ import annotations

import dataclasses
import itertools
import math
from types import SimpleNamespace

import pytest
import torch

from dlm_bridge.errors import SettingError
from dlm_bridge.models.families import families, family_by_name
from dlm_bridge.objectives.base import diffusion_loss
from dlm_bridge.objectives.batches import IGNORE_INDEX
from dlm_bridge.objectives.noise import Purpose, Uniforms, keyed_generator
from dlm_bridge.objectives.registry import OBJECTIVES, build_objective, check_objective
from dlm_bridge.objectives.single_stream import MaskedDiffusion
from tests.refusals import refused

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
    uniforms = dataclasses.replace(drawn, level=torch.full((draws,), 0.4))
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


def test_noise_does_not_depend_on_padding() -> None:
    short, long = (Uniforms.keyed(5, 3, [100, 101], length) for length in (6, 9))
    for name, numbers in vars(long).items():
        assert torch.equal(numbers[:, :6] if numbers.dim() == 2 else numbers, getattr(short, name)), name


@pytest.mark.parametrize("other", [(6, 3, 100), (5, 4, 100), (5, 3, 101)])
def test_noise_differs_by_seed_step_and_sample(other: tuple[int, int, int]) -> None:
    base = Uniforms.keyed(5, 3, [100], 64)
    changed = Uniforms.keyed(other[0], other[1], [other[2]], 64)
    assert not torch.equal(base.token, changed.token)
    assert base.level != changed.level


def test_streams_of_different_purposes_differ() -> None:
    values = {keyed_generator(0, purpose).random() for purpose in Purpose}
    assert len(values) == len(Purpose)


def test_prompts_and_padding_are_never_masked_nor_counted() -> None:
    tokens = torch.randint(0, MASK, (64, 12), generator=torch.Generator().manual_seed(0))
    labels = tokens.clone()
    labels[:, :4] = IGNORE_INDEX
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
    uniforms = Uniforms(torch.zeros(1), torch.ones(1, 4), torch.ones(1), torch.zeros(1), torch.zeros(1, 4))
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

    def forward(logits_to_keep: torch.Tensor, **_: object) -> torch.Tensor:
        return torch.zeros(int(logits_to_keep.sum()), VOCAB)

    losses = [
        diffusion_loss(forward, MaskedDiffusion(MASK), tokens, tokens, torch.Generator().manual_seed(seed)).item()
        for seed in (1, 1, 2)
    ]
    assert losses[0] == losses[1] != losses[2]
    drawn = Uniforms.drawn(torch.Generator().manual_seed(1), 4, 6)
    p = (1 - 1e-3) * drawn.level[:, None] + 1e-3
    expected = ((drawn.token < p) / p).sum().item() * math.log(VOCAB) / 24
    assert losses[0] == pytest.approx(expected, rel=1e-5)


def test_unknown_objective_names_the_known_ones() -> None:
    with refused(SettingError, "objective", "maskd", "masked_fraction"):
        build_objective("maskd", MASK)


def test_fraction_weights_make_every_sequence_cost_its_mean_cross_entropy() -> None:
    """MegaDLMs: at least one mask, over the exact masked share, so that rows weigh as many tokens as they have."""
    objective = build_objective("masked_fraction", MASK)
    tokens = torch.randint(0, MASK, (64, 6), generator=torch.Generator().manual_seed(0))
    labels = tokens.clone()
    labels[:, :2] = IGNORE_INDEX
    drawn = Uniforms.keyed(0, 1, range(64), 6)
    uniforms = dataclasses.replace(drawn, level=drawn.level * 0.3)  # many rows without a mask, but for the rule
    noisy = objective.noise(tokens, uniforms, labels)
    assert (uniforms.token[:, 2:] >= uniforms.level[:, None]).all(1).any()
    assert noisy.mask.any(1).all()
    assert not noisy.mask[:, :2].any()
    logits = _logits(noisy.input_ids)
    losses = -logits.log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
    expected = sum(4 * losses[row][noisy.mask[row]].mean().item() for row in range(64)) / (64 * 4)
    loss = objective.loss_sum(logits[noisy.mask], noisy) / noisy.normaliser
    assert loss.item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", [name for name, spec in OBJECTIVES.items() if not spec.kind.answer_blocks])
def test_no_objective_depends_on_how_the_batch_is_cut(name: str) -> None:
    """Sums and normalisers of the parts add up to the whole batch's, with prompts and shortened rows."""
    config = SimpleNamespace(
        block_size=4,
        vocab_size=MASK + 1,
        dlm_loss_weight=None,
        ar_loss_weight=1.0,
        expand_token_id=1,
        eos_token_id=0,
    )
    objective = build_objective(name, MASK, length_variation=0.5, config=config)
    tokens = torch.randint(0, MASK, (8, 10), generator=torch.Generator().manual_seed(0))
    labels = tokens.clone()
    labels[::2, :3] = IGNORE_INDEX

    def sums(first: int, last: int) -> torch.Tensor:
        uniforms = Uniforms.keyed(5, 3, range(100 + first, 100 + last), 10)
        steps = tokens[first:last] // 3 if objective.trajectories else None
        noisy = objective.noise(tokens[first:last], uniforms, labels[first:last], commit_steps=steps)
        assert len(noisy.normaliser) == objective.terms
        logits = _logits(noisy.input_ids)[noisy.mask]
        return torch.stack([objective.loss_sum(logits, noisy).double(), noisy.normaliser])

    whole = sums(0, 8)
    assert (whole > 0).all()
    for size in (1, 2, 4):
        parts = torch.stack([sums(first, first + size) for first in range(0, 8, size)])
        torch.testing.assert_close(parts.sum(0), whole, rtol=1e-5, atol=0)


def test_every_family_has_an_objective_of_its_own_kind() -> None:
    for family in families():
        if family.kind == "diffusion":
            check_objective(family.objective, family)


@pytest.mark.parametrize(
    ("name", "family", "named"),
    [
        ("masked", "dream", "bidirectional and shifted"),
        ("shifted", "llada", "masked, masked_fraction"),
        ("masked", "sdar", "block, block_levels"),
        ("block", "fast_dllm_v2", "block_complementary"),
        ("masked", "wedlm", "wedlm"),
        ("block", "nemotron_labs_diffusion", "masked, masked_fraction, nemotron"),
        ("nemotron", "llada", "LLaDA-8B"),
        ("diffusion", "sdar", "'diffusion'"),
    ],
)
def test_no_family_trains_with_another_familys_loss(name: str, family: str, named: str) -> None:
    with refused(SettingError, "objective", named):
        check_objective(name, family_by_name(family))

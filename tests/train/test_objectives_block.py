"""The block objectives: their mask by perturbation, and their loss from passes over one block at a time."""

from __future__ import annotations

import dataclasses
import itertools
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dlm_bridge.attention.masks import StreamPattern
from dlm_bridge.errors import DlmBridgeError, SettingError
from dlm_bridge.objectives.base import mean_loss
from dlm_bridge.objectives.batches import IGNORE_INDEX, NoisyBatch
from dlm_bridge.objectives.noise import Uniforms
from dlm_bridge.objectives.registry import build_objective, family_objective
from dlm_bridge.objectives.single_stream import MaskedDiffusion
from dlm_bridge.objectives.two_streams import BlockDiffusion, ComplementaryBlockDiffusion
from tests.families import a2d, fast_dllm_v2, sdar
from tests.reference import two_stream_mask
from tests.refusals import refused

MASK = 99
LENGTH = 14  # three blocks of 4 and a part of one
BLOCK = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    case = sdar.CASES[0]
    model = case.load(case.write(tmp_path_factory.mktemp("sdar")))
    model.config.mask_token_id = MASK
    model.config.block_size = BLOCK
    return model.requires_grad_(False)


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(0, MASK, (3, LENGTH), generator=torch.Generator().manual_seed(1))


def _loss(model: Any, objective: Any, noisy: NoisyBatch) -> float:
    logits = model(
        noisy.input_ids,
        attention_mask=noisy.model_mask(),
        position_ids=noisy.position_ids,
        logits_to_keep=noisy.mask,
    ).logits
    return mean_loss(objective.loss_sum(logits, noisy), noisy).item()


def _by_definition(noisy: StreamPattern, clean: StreamPattern) -> list[list[bool]]:
    allowed = [[False] * (2 * LENGTH) for _ in range(2 * LENGTH)]
    for q, k in itertools.product(range(LENGTH), repeat=2):
        same, before, until = q // BLOCK == k // BLOCK, k // BLOCK < q // BLOCK, k <= q
        allowed[q][k] = same and (noisy == "block" or until)
        allowed[q][LENGTH + k] = before
        allowed[LENGTH + q][LENGTH + k] = until if clean == "causal" else same or before
    return allowed


@pytest.mark.parametrize(("noisy", "clean"), [("block", "block"), ("block", "causal"), ("causal", "causal")])
def test_two_stream_mask_by_perturbation(
    model: Any, ids: torch.Tensor, noisy: StreamPattern, clean: StreamPattern
) -> None:
    """Which logits move when one token changes, in a real model with several layers."""
    positions = torch.arange(LENGTH)[None]
    mask = two_stream_mask(positions, BLOCK, None, noisy, clean)
    tokens = torch.cat([ids[:1], ids[1:2]], dim=1)
    changed = tokens.repeat(2 * LENGTH, 1)
    changed.fill_diagonal_(98)
    tokens[tokens == 98] = 97

    def logits(batch: torch.Tensor) -> torch.Tensor:
        return model(batch, attention_mask=mask, position_ids=positions.repeat(1, 2)).logits

    moved = (logits(changed) - logits(tokens)).abs().amax(-1) > 0  # [changed key, query]
    assert moved.T.tolist() == _by_definition(noisy, clean)


def test_padding_is_never_looked_at_and_no_row_is_empty() -> None:
    real = torch.ones(2, 2 * LENGTH, dtype=torch.bool)
    real[1, 9:LENGTH] = real[1, LENGTH + 9 :] = False
    mask = two_stream_mask(torch.arange(LENGTH)[None], BLOCK, real)
    assert mask[0, 0].tolist() == _by_definition("block", "block")
    own = torch.eye(2 * LENGTH, dtype=torch.bool)
    assert not (mask[1, 0] & ~own)[:, ~real[1]].any()
    assert mask.any(-1).all()


def test_loss_equals_passes_over_the_clean_prefix_and_one_noisy_block(model: Any, ids: torch.Tensor) -> None:
    """What decoding sees: the clean blocks before, then the noisy block, in SDAR's own one-stream pass."""
    labels = ids.clone()
    labels[:, :3] = IGNORE_INDEX
    loss = model(ids, labels=labels, generator=torch.Generator().manual_seed(7)).loss
    drawn = Uniforms.drawn(torch.Generator().manual_seed(7), 3, LENGTH)
    p = (1 - 1e-3) * drawn.level + 1e-3
    masked = (drawn.token < p[:, None]) & (labels != IGNORE_INDEX)
    cost = 0.0
    for start in range(0, LENGTH, BLOCK):
        block = slice(start, min(start + BLOCK, LENGTH))
        seen = torch.cat([ids[:, :start], torch.where(masked, MASK, ids)[:, block]], dim=1)
        costs = -model(seen).logits.log_softmax(-1)[:, block].gather(-1, ids[:, block, None])[..., 0]
        cost += (costs * masked[:, block] / p[:, None]).sum().item()
    assert 5 < masked.sum() < 28
    assert loss.item() == pytest.approx(cost / (3 * (LENGTH - 3)), rel=1e-5)


def test_a_noise_range_with_unweighted_cross_entropy_is_dfactorys_fine_tuning(model: Any, ids: torch.Tensor) -> None:
    """One masking probability per row, uniform on (0.3, 0.8); the mean cross-entropy of the masked answer tokens."""
    labels = ids.clone()
    labels[:, :3] = IGNORE_INDEX
    names = {"loss_weighting": "uniform", "loss_normalisation": "predicted", "noise_range": (0.3, 0.8)}
    objective = build_objective("block", MASK, config=model.config, **names)
    uniforms = Uniforms.keyed(0, 1, range(3), LENGTH)
    masked = (uniforms.token < 0.3 + 0.5 * uniforms.level[:, None]) & (labels != IGNORE_INDEX)
    noisy = objective.noise(ids, uniforms, labels)
    assert torch.equal(noisy.input_ids[:, :LENGTH], torch.where(masked, MASK, ids))
    costs = []
    for row, column in masked.nonzero().tolist():
        start = column // BLOCK * BLOCK
        seen = torch.cat([ids[row, :start], noisy.input_ids[row, start : min(start + BLOCK, LENGTH)]])[None]
        costs.append(-model(seen).logits[0, column].log_softmax(-1)[ids[row, column]].item())
    assert len(costs) > 8
    assert _loss(model, objective, noisy) == pytest.approx(sum(costs) / len(costs), rel=1e-5)


@pytest.mark.parametrize(
    ("name", "kind"), [("block_levels", BlockDiffusion), ("block_complementary", ComplementaryBlockDiffusion)]
)
def test_a_noise_range_is_of_blocks_that_have_their_own_level(ids: torch.Tensor, name: str, kind: type) -> None:
    config = SimpleNamespace(block_size=BLOCK)
    objective = build_objective(name, MASK, config=config, noise_range=(0.6, 0.9))
    assert type(objective) is kind
    uniforms = Uniforms.keyed(0, 1, range(3), LENGTH)
    p = 0.6 + 0.3 * uniforms.block[:, torch.arange(LENGTH) // BLOCK]
    found = objective.noise(ids, uniforms).input_ids[:3, 1:LENGTH] == MASK
    assert torch.equal(found, (uniforms.token < p)[:, 1:])


def test_editing_predicts_masks_and_every_visible_token_of_the_answer(model: Any, ids: torch.Tensor) -> None:
    """LLaDA2.1's two terms: masks over their probability, and the mean over tokens that were replaced or kept."""
    labels = ids.clone()
    labels[:, :3] = IGNORE_INDEX
    options = {"edit_probability": 0.5}
    objective = dataclasses.replace(build_objective("block_editing", MASK, config=model.config, **options), eps=0.2)
    uniforms = Uniforms.keyed(0, 1, range(3), LENGTH)
    noisy = objective.noise(ids, uniforms, labels)
    given = noisy.input_ids[:, :LENGTH]
    answer = labels != IGNORE_INDEX
    p = 0.8 * uniforms.level[:, None] + 0.2
    masked = (uniforms.token < p) & answer
    assert torch.equal(given == MASK, masked)
    assert torch.equal(given[~answer], ids[~answer])
    assert torch.equal(noisy.input_ids[:, LENGTH:], ids)
    changed = (given != ids) & ~masked
    assert torch.equal(changed & ~((uniforms.token - p) / (1 - p) < 0.5), torch.zeros_like(changed))
    assert 2 < changed.sum() < (answer & ~masked).sum()
    cost = [0.0, 0.0]
    for row, column in answer.nonzero().tolist():
        start = column // BLOCK * BLOCK
        seen = torch.cat([ids[row, :start], given[row, start : min(start + BLOCK, LENGTH)]])[None]
        loss = -model(seen).logits[0, column].log_softmax(-1)[ids[row, column]].item()
        cost[0 if masked[row, column] else 1] += loss / p[row].item() if masked[row, column] else loss
    expected = cost[0] / answer.sum().item() + cost[1] / (answer & ~masked).sum().item()
    assert _loss(model, objective, noisy) == pytest.approx(expected, rel=1e-5)


def test_random_tokens_are_all_but_the_mask_token() -> None:
    config = SimpleNamespace(block_size=BLOCK, vocab_size=5)
    objective = build_objective("block_editing", 2, config=config, edit_probability=1.0, noise_range=(0.0, 0.1))
    ids = torch.zeros(1, 4000, dtype=torch.long)
    given = objective.noise(ids, Uniforms.keyed(0, 1, [0], 4000)).input_ids[0, :4000]
    counts = given[given != 2].bincount(minlength=5).tolist()
    assert counts[2] == 0
    assert all(850 < count < 1150 for count in (counts[0], counts[1], counts[3], counts[4]))


@pytest.mark.parametrize("name", ["wedlm", "causal"])
def test_objectives_with_levels_of_their_own_take_no_noise_range(name: str) -> None:
    with refused(SettingError, "noise_range"):
        build_objective(name, MASK, noise_range=(0.3, 0.8))


def test_one_block_is_masked_diffusion(model: Any, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block as long as the sequence has nothing before it: the noisy stream alone, bidirectional."""
    monkeypatch.setattr(model.config, "block_size", LENGTH)
    uniforms = Uniforms.keyed(0, 1, range(3), LENGTH)
    two, one = BlockDiffusion(MASK, block_size=LENGTH), MaskedDiffusion(MASK)
    expected = _loss(model, one, one.noise(ids, uniforms))
    assert _loss(model, two, two.noise(ids, uniforms)) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_row_costs_what_it_costs_alone(model: Any, ids: torch.Tensor, side: str) -> None:
    objective = BlockDiffusion(MASK, block_size=BLOCK)
    alone = Uniforms.keyed(0, 1, [5], 9)
    expected = _loss(model, objective, objective.noise(ids[:1, :9], alone))
    columns = slice(5, None) if side == "left" else slice(0, 9)
    padded, real = torch.zeros(1, LENGTH, dtype=torch.long), torch.zeros(1, LENGTH, dtype=torch.long)
    padded[:, columns], real[:, columns] = ids[:1, :9], 1
    token = torch.zeros(1, LENGTH)
    token[:, columns] = alone.token
    uniforms = dataclasses.replace(alone, token=token, block=torch.zeros(1, LENGTH))
    noisy = objective.noise(padded, uniforms, attention_mask=real)
    assert int(noisy.mask.sum()) > 2
    assert _loss(model, objective, noisy) == pytest.approx(expected, rel=1e-5)


def test_expected_loss_equals_exact_enumeration_with_a_level_per_block() -> None:
    """Two blocks of two tokens with their own p: the mean over all 16 masks is what sampling converges to."""
    tokens = torch.tensor([[1, 5, 2, 6]])
    levels = torch.tensor([0.3, 0.3, 0.7, 0.7])
    p = ((1 - 1e-3) * levels + 1e-3).tolist()
    table = torch.randn(8, 8, generator=torch.Generator().manual_seed(3)).double()

    def logits(seen: torch.Tensor) -> torch.Tensor:  # of [noisy | clean]
        return torch.sin(table[seen] + 2 * table[seen].mean(1, keepdim=True))

    exact = 0.0
    for masked in itertools.product([False, True], repeat=4):
        seen = torch.cat([torch.where(torch.tensor([masked]), 7, tokens), tokens], dim=1)
        log_probabilities = logits(seen)[0].log_softmax(-1)
        chance = math.prod(p[i] if masked[i] else 1 - p[i] for i in range(4))
        exact -= chance * sum(log_probabilities[i, tokens[0, i]].item() / p[i] for i in range(4) if masked[i]) / 4
    draws = 20_000
    drawn = Uniforms.drawn(torch.Generator().manual_seed(0), draws, 4)
    uniforms = dataclasses.replace(drawn, block=torch.tensor([[0.3, 0.7, 0.0, 0.0]]).expand(draws, 4))
    objective = BlockDiffusion(7, block_size=2, level="block")
    noisy = objective.noise(tokens.expand(draws, 4), uniforms)
    sampled = objective.loss_sum(logits(noisy.input_ids)[noisy.mask], noisy) / noisy.normaliser
    assert sampled.item() == pytest.approx(exact, rel=0.02)


def test_complementary_rows_mask_every_token_once(ids: torch.Tensor) -> None:
    labels = ids.clone()
    labels[0, :6] = IGNORE_INDEX
    objective = ComplementaryBlockDiffusion(MASK, block_size=BLOCK)
    uniforms = Uniforms.keyed(0, 1, range(3), LENGTH)
    noisy = objective.noise(ids, uniforms, labels)
    assert noisy.input_ids.shape == (6, 2 * LENGTH)
    assert torch.equal(noisy.input_ids[:, LENGTH:], torch.cat([ids, ids]))
    first, second = (noisy.input_ids[:, :LENGTH] == MASK).split(3)
    answer = labels != IGNORE_INDEX
    answer[:, 0] = False
    assert torch.equal(first ^ second, answer)
    assert not (first & second).any()
    assert first.any(1).all()
    assert second.any(1).all()
    p = (1 - 1e-3) * uniforms.block[:, torch.arange(LENGTH) // BLOCK] + 1e-3
    assert torch.equal(first, (uniforms.token < p) & answer)
    assert noisy.normaliser.item() == answer.sum()


def test_fast_dllms_loss_is_the_mean_of_its_shifted_noisy_half(tmp_path: Path, ids: torch.Tensor) -> None:
    case = fast_dllm_v2.CASES[0]
    model = case.load(case.write(tmp_path)).requires_grad_(False)
    model.config.mask_token_id, model.config.block_size = MASK, BLOCK
    loss = model(ids, labels=ids, generator=torch.Generator().manual_seed(4)).loss
    drawn = Uniforms.drawn(torch.Generator().manual_seed(4), 3, LENGTH)
    p = (1 - 1e-3) * drawn.block[:, torch.arange(LENGTH) // BLOCK] + 1e-3
    allowed = torch.tensor(_by_definition("block", "block"))[None, None]
    costs = []
    for masked in (drawn.token < p, drawn.token >= p):
        masked[:, 0] = False
        seen = torch.cat([torch.where(masked, MASK, ids), ids], dim=1)
        positions = torch.arange(LENGTH).repeat(2)[None]
        log_probabilities = model(seen, attention_mask=allowed, position_ids=positions).logits.log_softmax(-1)
        for row, column in masked.nonzero().tolist():
            costs.append(-log_probabilities[row, column - 1, ids[row, column]].item())
    assert len(costs) == 3 * (LENGTH - 1)
    assert loss.item() == pytest.approx(sum(costs) / len(costs), rel=1e-5)


def test_a2d_trains_in_blocks_where_it_is_asked_to(tmp_path: Path, ids: torch.Tensor) -> None:
    case = a2d.CASES[0]
    with pytest.raises(DlmBridgeError, match="block_size"):
        family_objective(case.load(case.write(tmp_path / "without", mask_token_id=MASK)), "block")
    blocks = case.load(case.write(tmp_path / "with", block_size=BLOCK, mask_token_id=MASK)).requires_grad_(False)
    assert isinstance(family_objective(blocks), MaskedDiffusion)
    objective = family_objective(blocks, "block")
    uniforms = Uniforms.keyed(0, 1, range(3), LENGTH)
    noisy = objective.noise(ids, uniforms)
    assert noisy.input_ids.shape == (3, 2 * LENGTH)
    assert _loss(blocks, objective, noisy) > 0


def test_own_masks_and_positions_are_refused(model: Any, ids: torch.Tensor) -> None:
    whole = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool)
    for changes in ({"attention_mask": whole}, {"position_ids": torch.arange(LENGTH)[None]}):
        with refused(SettingError, "attention_mask"):
            model(ids, labels=ids, generator=torch.Generator().manual_seed(0), **changes)

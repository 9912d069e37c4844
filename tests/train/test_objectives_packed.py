"""Packed rows cost what their documents cost alone, and what weighs a loss and divides it, for every objective."""

from __future__ import annotations

import dataclasses
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dlm_bridge.attention.masks import causal_mask
from dlm_bridge.errors import SettingError
from dlm_bridge.objectives.base import Objective
from dlm_bridge.objectives.batches import IGNORE_INDEX, NoisyBatch, document_level
from dlm_bridge.objectives.noise import Uniforms
from dlm_bridge.objectives.registry import OBJECTIVES, build_objective
from dlm_bridge.objectives.single_stream import MaskedDiffusion, ShiftedDiffusion, cart_weights
from tests.refusals import refused

MASK = 7
VOCAB = 8
LENGTHS = ((6, 9, 1, 5), (3, 13, 2, 1))  # of the documents of two rows; what is left is padding
LENGTH = 24
CONFIG = SimpleNamespace(block_size=4, vocab_size=MASK + 1, dlm_loss_weight=None, ar_loss_weight=0.7)
COMBINATIONS = [
    (name, weighting, normalisation)
    for name, preset in OBJECTIVES.items()
    for weighting, normalisation in itertools.product(preset.kind.weightings, preset.kind.normalisations)
    if (name, weighting) != ("block_levels", "fraction") and not (preset.kind.answer_blocks or preset.kind.resizes)
]


def _logits(noisy: NoisyBatch, causal: bool) -> torch.Tensor:
    """Logits [M, VOCAB] of a toy model: what a position sees, from where, decides them."""
    ids = noisy.input_ids
    allowed = noisy.model_mask()
    if allowed is None or allowed.dim() == 2:
        real = torch.ones_like(ids, dtype=torch.bool) if allowed is None else allowed
        allowed = causal_mask(real) if causal else (real[:, None] | torch.eye(ids.shape[1]).bool())[:, None]
    positions = torch.arange(ids.shape[1])[None] if noisy.position_ids is None else noisy.position_ids
    generator = torch.Generator().manual_seed(3)
    table, turn = torch.randn(2, VOCAB, VOCAB, generator=generator, dtype=torch.float64)
    values = torch.sin(table[ids] + positions[..., None] * turn[0])
    shares = allowed[:, 0].double() / allowed[:, 0].sum(-1, keepdim=True)
    return (values + 3 * torch.sin(2 * shares @ values) @ turn)[noisy.mask]


def _objective(name: str, weighting: str, normalisation: str) -> Objective:
    return build_objective(name, MASK, 0.0, CONFIG, weighting, normalisation)


def _sums(objective: Objective, noisy: NoisyBatch) -> torch.Tensor:
    """[2, K] loss sums and normalisers."""
    logits = _logits(noisy, causal=objective.attention_patterns == ("causal",))
    return torch.stack([objective.loss_sum(logits, noisy).double(), noisy.normaliser])


def _packed() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, Uniforms]:
    """Tokens, labels (a prompt before each answer), padding, documents and random numbers of the two rows."""
    ids = torch.randint(0, MASK, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    labels, documents = ids.clone(), torch.zeros_like(ids)
    real = torch.zeros_like(ids)
    for row, lengths in enumerate(LENGTHS):
        start = 0
        for number, length in enumerate(lengths):
            documents[row, start : start + length] = 5 - number  # any numbers do
            labels[row, start : start + length // 3] = IGNORE_INDEX
            start += length
        real[row, :start] = 1
    return ids, labels, real, documents, Uniforms.keyed(2, 1, [10, 11], LENGTH)


def _commit_steps(objective: Objective) -> torch.Tensor | None:
    """Those of the two rows, where the objective has trajectories."""
    if not objective.trajectories:
        return None
    return torch.randint(0, 6, (2, LENGTH), generator=torch.Generator().manual_seed(1))


def _alone(uniforms: Uniforms, row: int, number: int, start: int, length: int, first_block: int) -> Uniforms:
    """The numbers that a document of a packed row drew."""
    block = torch.zeros(1, length)
    replacement = uniforms.replacement
    assert replacement is not None
    taken = uniforms.block[row, first_block : first_block + length]
    block[0, : len(taken)] = taken
    return Uniforms(
        level=document_level(uniforms.level[row : row + 1], number),
        token=uniforms.token[row : row + 1, start : start + length],
        cut=uniforms.cut[row : row + 1],
        cut_length=uniforms.cut_length[row : row + 1],
        block=block,
        replacement=replacement[row : row + 1, start : start + length],
    )


@pytest.mark.parametrize(("name", "weighting", "normalisation"), COMBINATIONS)
def test_a_packed_row_costs_what_its_documents_cost_alone(name: str, weighting: str, normalisation: str) -> None:
    """Loss sums and normalisers, of a toy model whose logits depend on what a position sees and where it stands."""
    objective = _objective(name, weighting, normalisation)
    ids, labels, real, documents, uniforms = _packed()
    steps = _commit_steps(objective)
    packed = _sums(objective, objective.noise(ids, uniforms, labels, real, documents, steps))
    alone = torch.zeros_like(packed)
    for row, lengths in enumerate(LENGTHS):
        start = first_block = 0
        for number, length in enumerate(lengths):
            columns = slice(start, start + length)
            own = _alone(uniforms, row, number, start, length, first_block)
            noisy = objective.noise(
                ids[row : row + 1, columns],
                own,
                labels[row : row + 1, columns],
                commit_steps=None if steps is None else steps[row : row + 1, columns],
            )
            alone += _sums(objective, noisy)
            start += length
            first_block += -(-length // CONFIG.block_size)
    assert (alone > 0).all()
    torch.testing.assert_close(packed, alone, rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", {name: None for name, *_ in COMBINATIONS})
def test_one_document_a_row_is_no_packing(name: str) -> None:
    objective = build_objective(name, MASK, config=CONFIG, length_variation=0.5)
    ids, labels, real, _, uniforms = _packed()
    steps = _commit_steps(objective)
    plain = objective.noise(ids, uniforms, labels, real, commit_steps=steps)
    one = objective.noise(ids, uniforms, labels, real, torch.full_like(ids, 9), steps)
    for field in ("input_ids", "mask", "counted", "targets", "weights", "normaliser"):
        assert torch.equal(getattr(one, field), getattr(plain, field)), field
    torch.testing.assert_close(_sums(objective, one), _sums(objective, plain))


def test_levels_of_a_rows_documents_differ_and_are_uniform() -> None:
    levels = document_level(torch.rand(20_000, 1, generator=torch.Generator().manual_seed(0)), torch.arange(4)[None])
    for column in levels.T:
        assert column.mean().item() == pytest.approx(0.5, abs=0.01)
        assert column.var().item() == pytest.approx(1 / 12, abs=0.005)
    assert (levels.sort(dim=1).values.diff(dim=1) > 0.1).all()
    assert levels.max() < 1


def test_cart_weights_of_packed_documents_are_those_of_each_alone() -> None:
    visible = torch.rand(2, 90, generator=torch.Generator().manual_seed(0)) < 0.3
    documents = torch.zeros(2, 90, dtype=torch.long)
    documents[0, 30:], documents[0, 31:], documents[1, 80:] = 1, 2, 1
    found = cart_weights(visible, 0.3, documents)
    for row, columns in ((0, slice(0, 30)), (0, slice(30, 31)), (0, slice(31, 90)), (1, slice(0, 80))):
        torch.testing.assert_close(found[row : row + 1, columns], cart_weights(visible[row : row + 1, columns], 0.3))


@pytest.mark.parametrize(
    ("name", "weighting", "normalisation"),
    [row for row in COMBINATIONS if row[0] in ("masked", "shifted", "block", "block_levels") and row[1] != "cart"],
)
def test_weights_and_divisors_written_out(name: str, weighting: str, normalisation: str) -> None:
    """From the masks and the noise levels alone, row by row."""
    objective = _objective(name, weighting, normalisation)
    ids = torch.randint(0, MASK, (16, 10), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[::2, :4] = IGNORE_INDEX
    uniforms = Uniforms.keyed(0, 1, range(16), 10)
    noisy = objective.noise(ids, uniforms, labels)
    masked = noisy.input_ids[:, :10] == MASK
    weights, divisor = [], 0
    for row in range(16):
        answer = [i for i in range(10) if labels[row, i] != IGNORE_INDEX and not (name == "shifted" and i == 0)]
        masks = [i for i in answer if masked[row, i]]
        divisor += {"tokens": len(answer), "sequences": 1, "predicted": len(masks)}[normalisation]
        for i in masks:
            level = uniforms.block[row, i // 4] if name == "block_levels" else uniforms.level[row]
            p = (1 - objective.eps) * level.item() + objective.eps
            weight = {"level": 1 / p, "fraction": len(answer) / len(masks), "uniform": 1.0}[weighting]
            weights.append(weight / (len(answer) if normalisation == "sequences" else 1))
    torch.testing.assert_close(noisy.weights, torch.tensor(weights), rtol=1e-5, atol=0)
    assert noisy.normaliser.tolist() == [divisor]
    if normalisation != "sequences":
        assert int(noisy.counted.sum()) == divisor
    assert (noisy.counted | ~noisy.mask).all()


def test_answers_weigh_the_same_however_long_they_are() -> None:
    """LLaDA's fine-tuning loss: the sum of CE / p over an answer's length, and the mean over answers."""
    objective = build_objective("masked", MASK, loss_normalisation="sequences")
    ids, labels, real, documents, uniforms = _packed()
    noisy = objective.noise(ids, uniforms, labels, real, documents)
    assert int(noisy.normaliser) == 8
    logits = _logits(noisy, causal=False)
    losses = torch.zeros(ids.shape, dtype=torch.float64)
    losses[noisy.mask] = torch.nn.functional.cross_entropy(logits, noisy.targets, reduction="none")
    means = []
    for row, lengths in enumerate(LENGTHS):
        start = 0
        for number, length in enumerate(lengths):
            p = (1 - 1e-3) * document_level(uniforms.level[row], number).item() + 1e-3
            means.append((losses[row, start : start + length].sum() / p / (length - length // 3)).item())
            start += length
    loss = objective.loss_sum(logits, noisy) / noisy.normaliser
    assert loss.item() == pytest.approx(sum(means) / 8, rel=1e-5)


@pytest.mark.parametrize(
    ("name", "settings", "named"),
    [
        ("masked", {"loss_weighting": "cart"}, "level, fraction"),
        ("block_levels", {"loss_weighting": "fraction"}, "`objective=block`"),
        ("block_complementary", {"loss_weighting": "level"}, "uniform"),
        ("nemotron", {"loss_normalisation": "tokens"}, "predicted"),
        ("wedlm", {"loss_normalisation": "sequences"}, "predicted"),
        ("causal", {"loss_weighting": "level"}, "uniform"),
    ],
)
def test_what_an_objective_has_not_is_refused(name: str, settings: dict[str, Any], named: str) -> None:
    with refused(SettingError, next(iter(settings)), named):
        build_objective(name, MASK, config=CONFIG, **settings)


def test_no_document_is_seen_from_another() -> None:
    """One token changes: only logits of its own document do."""
    ids, _, real, documents, uniforms = _packed()
    for objective in (MaskedDiffusion(MASK), ShiftedDiffusion(MASK), build_objective("block", MASK, config=CONFIG)):
        noisy = objective.noise(ids, uniforms, None, real, documents)
        changed = noisy.input_ids.clone()
        changed[0, 7] = (changed[0, 7] + 1) % VOCAB  # in the row's second document, of columns 6 to 14
        everywhere = torch.ones_like(noisy.mask)
        before, after = (
            _logits(dataclasses.replace(noisy, input_ids=tokens, mask=everywhere), causal=False)
            for tokens in (noisy.input_ids, changed)
        )
        moved = (before != after).any(-1).reshape(noisy.input_ids.shape).nonzero()
        assert moved[:, 0].unique().tolist() == [0]
        assert {column % LENGTH for column in moved[:, 1].tolist()} <= set(range(6, 15))

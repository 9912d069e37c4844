"""Certainty-forcing: dParallel's and LLaDA2's loss by hand, its gradient in the fused output layer, runs with it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from dlm_bridge.errors import SettingError
from dlm_bridge.objectives import linear_cross_entropy as output_layer
from dlm_bridge.objectives.linear_cross_entropy import LossPositions, VocabShard, linear_cross_entropy
from dlm_bridge.objectives.losses import Certainty
from dlm_bridge.objectives.noise import Uniforms
from dlm_bridge.objectives.registry import build_objective
from tests.refusals import refused
from tests.train.conftest import Run

MASK, VOCAB = 11, 12
CONFIG = SimpleNamespace(block_size=4, vocab_size=VOCAB, dlm_loss_weight=None, ar_loss_weight=1.0)
SETTINGS = [Certainty(2.0, 0.5), Certainty(2.0), Certainty(0.3, 3.0)]  # dParallel's, dFactory's, another


def _entropy_of_right_predictions(logits_MV: torch.Tensor, targets_M: torch.Tensor, temperature: float) -> float:
    """The mean over right predictions, as written in czg1225/dParallel 2ca4d14 and inclusionAI/dFactory 92b6890."""
    found = []
    for logits, target in zip(logits_MV, targets_M, strict=True):
        if int(logits.argmax()) == int(target):
            p = (logits.double() / temperature).softmax(0)
            found.append(-float((p * (p + 1e-12).log()).sum()))
    assert 2 < len(found) < len(targets_M)
    return sum(found) / len(found)


@pytest.mark.parametrize("certainty", SETTINGS)
@pytest.mark.parametrize("name", ["masked", "shifted", "block"])
def test_the_loss_is_the_published_one_but_for_the_divisor(name: str, certainty: Certainty) -> None:
    """Published is a mean over the right predictions; here they are divided by all that are predicted."""
    objective = build_objective(
        name, MASK, config=CONFIG, loss_weighting="uniform", loss_normalisation="predicted", certainty=certainty
    )
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, MASK, (6, 16), generator=generator)
    noisy = objective.noise(tokens, Uniforms.keyed(seed=1, step=2, samples=range(6), length=16))
    logits = 2 * torch.randn(len(noisy.targets), VOCAB, generator=generator)
    logits += 2 * F.one_hot(noisy.targets, VOCAB)
    loss = (objective.loss_sum(logits, noisy) / noisy.normaliser).item()
    right = float((logits.argmax(1) == noisy.targets).double().mean())
    entropy = _entropy_of_right_predictions(logits, noisy.targets, certainty.temperature)
    assert loss == pytest.approx(F.cross_entropy(logits, noisy.targets).item() + certainty.weight * right * entropy)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("certainty", SETTINGS)
@pytest.mark.parametrize("rows", [20, 100])  # more than it keeps gradients of logits for
def test_the_fused_output_layer_has_the_same_loss_and_gradients(
    rows: int, certainty: Certainty, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_layer, "CHUNK_BYTES", 4 * VOCAB * 9)  # nine rows at a time
    generator = torch.Generator().manual_seed(0)
    objective = build_objective("masked", MASK, certainty=certainty)
    noisy = objective.noise(
        torch.randint(0, MASK, (2, rows), generator=generator), Uniforms.keyed(0, 1, [0, 1], rows)
    ).to(torch.device(device))
    count = len(noisy.targets)
    values = [torch.randn(size, 8, generator=generator).to(device) for size in (count, VOCAB)]
    positions = LossPositions(
        torch.arange(count, device=device), noisy.targets, noisy.weights, certainty=noisy.certainty
    )
    found = []
    for fused in (True, False):
        hidden, weight = (value.clone().requires_grad_() for value in values)
        if fused:
            loss, _ = linear_cross_entropy(hidden, weight, positions, VocabShard(0, VOCAB))
        else:
            loss = objective.loss_sum(hidden.double() @ weight.double().T, noisy)[0]
        loss.backward()
        found.append((loss.detach().double(), hidden.grad, weight.grad))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        alone = linear_cross_entropy(*values, positions, VocabShard(0, VOCAB))[0]
        plain = linear_cross_entropy(*values, replace(positions, certainty=None), VocabShard(0, VOCAB))[0]
    torch.testing.assert_close(alone.double(), found[0][0])
    assert alone > plain


def test_ranks_that_share_the_vocabulary_have_the_same_loss_and_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks, as threads: what each has found is exchanged through a list."""
    generator = torch.Generator().manual_seed(1)
    hidden, weight = torch.randn(30, 8, generator=generator), torch.randn(VOCAB, 8, generator=generator)
    others = torch.randint(0, MASK, (30,), generator=generator)
    targets = torch.where(torch.arange(30) % 2 == 0, (hidden @ weight.T).argmax(1), others)
    weights = torch.rand(30, generator=generator)
    positions = LossPositions(torch.arange(30), targets, weights, certainty=Certainty(2.0, 0.5), z_weights=weights / 3)
    places, barrier, own = [torch.empty(0)] * 2, threading.Barrier(2), threading.local()

    def gathered(found: torch.Tensor, shard: VocabShard) -> torch.Tensor:
        places[own.rank] = found
        barrier.wait(timeout=300)
        together = torch.stack(places)
        barrier.wait(timeout=300)
        return together

    def part(rank: int, first: int, last: int) -> tuple[torch.Tensor, ...]:
        own.rank = rank
        mine, rows = hidden.clone().requires_grad_(), weight[first:last].clone().requires_grad_()
        loss, _ = linear_cross_entropy(mine, rows, positions, VocabShard(first, last - first))
        loss.backward()
        assert mine.grad is not None
        assert rows.grad is not None
        return loss.detach(), mine.grad, rows.grad

    loss, grad_hidden, grad_weight = part(0, 0, VOCAB)
    monkeypatch.setattr(output_layer, "_gathered", gathered)
    with ThreadPoolExecutor(2) as ranks:
        one, two = ranks.map(lambda cut: part(*cut), [(0, 0, 7), (1, 7, VOCAB)])
    torch.testing.assert_close(torch.stack([one[0], two[0]]), loss.expand(2))
    torch.testing.assert_close(one[1] + two[1], grad_hidden)
    torch.testing.assert_close(torch.cat([one[2], two[2]]), grad_weight)


@pytest.mark.parametrize("name", ["uniform", "nemotron", "wedlm", "block_editing"])
def test_objectives_with_other_losses_are_refused(name: str) -> None:
    with refused(SettingError, "certainty_weight"):
        build_objective(name, MASK, config=CONFIG, certainty=Certainty(1.0))


def test_a_run_with_it_does_not_depend_on_how_the_batch_is_cut(tmp_path: Path, run: Run) -> None:
    options = {"certainty_weight": 2.0, "certainty_temperature": 0.5, "steps": 8}
    whole = run(tmp_path / "whole", **options)
    cut = run(tmp_path / "cut", micro_batch_size=2, **options)
    plain = run(tmp_path / "plain", steps=8)
    for key in ("loss", "grad_norm"):
        assert [row[key] for row in cut] == pytest.approx([row[key] for row in whole], rel=1e-4)
    assert whole[-1]["loss"] != pytest.approx(plain[-1]["loss"], rel=1e-3)
    with refused(SettingError, "certainty_temperature", "`certainty_weight`"):
        run(tmp_path / "without", certainty_temperature=0.5)

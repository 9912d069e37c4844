"""The loss of distillation and its gradients are those of a computation by hand, in fp64, with the same noise."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from dlm_bridge.data.blocks import LabelledTokens
from dlm_bridge.objectives.base import divisors
from dlm_bridge.objectives.noise import Uniforms
from dlm_bridge.objectives.single_stream import MaskedDiffusion
from dlm_bridge.train.distill.losses import distill_batch, divergences
from dlm_bridge.train.distill.trainer import DistillTrainer
from tests.distill.conftest import Settings, opened

MASK = 1  # of the tokenizer of letters
CASES = [
    ("bidirectional", {}),
    ("bidirectional", {"divergence": "reverse"}),
    ("bidirectional", {"objective": "masked", "mask_annealing_steps": 3}),
    ("shifted", {"divergence": "js"}),
    ("block-causal", {}),
    ("block-causal", {"packing": True}),
    ("block-causal", {"lora_rank": 0, "parent": True, "divergence": "reverse"}),
    ("block-causal", {"lora_rank": 0, "parent": True, "packing": True}),
    ("block-causal", {"parent": True, "micro_batch_size": 2}),
    ("block-causal-shifted", {}),
    ("idlm", {}),
    ("idlm", {"lora_mask_only": True}),
    ("idlm", {"auto_balance": True}),
    ("nemotron", {}),
]


@pytest.mark.parametrize(("form", "changes"), CASES, ids=str)
def test_loss_and_gradients_equal_a_hand_computation(
    form: str, changes: dict[str, Any], settings: Settings, parent: Path
) -> None:
    if "parent" in changes:
        changes = {**changes, "parent": str(parent)}
    with opened(settings(form, **changes)) as trainer:
        in_fp64(trainer)
        reference = LlamaForCausalLM.from_pretrained(parent, dtype=torch.float64)
        inputs, normaliser_K = trainer.produce(1)
        sums_K = trainer.forward_backward(inputs, divisors(normaliser_K))
        weights = [weight for weight in trainer.plain_model.parameters() if weight.requires_grad]
        found = [weight.grad.clone() for weight in weights]
        for weight in weights:
            weight.grad = None
        expected_K = torch.zeros(len(normaliser_K), dtype=torch.float64)
        for samples, (batch, _) in zip(trainer.rank_samples(1), inputs, strict=True):
            rows = trainer.train.rows(samples)
            expected_K = expected_K + by_hand(trainer, reference, rows, samples, batch)
        expected_K = expected_K / divisors(normaliser_K)
        expected_K.sum().backward()
        torch.testing.assert_close(sums_K, expected_K.detach(), rtol=1e-9, atol=1e-12)
        assert expected_K.sum() > 0.01
        assert any(grad.abs().max() > 1e-4 for grad in found)
        for weight, grad in zip(weights, found, strict=True):
            torch.testing.assert_close(grad, weight.grad, rtol=1e-6, atol=1e-9)


def in_fp64(trainer: DistillTrainer) -> None:
    """All weights in fp64, and an adapter, if there is one, that changes the model."""
    torch.manual_seed(3)
    trainer.plain_model.double()
    if trainer.parent is not None:
        trainer.parent.double()
    with torch.no_grad():
        for weight in trainer.plain_model.parameters():
            if weight.requires_grad:
                weight.add_(0.3 * torch.randn_like(weight))


def by_hand(
    trainer: DistillTrainer, reference: Any, rows: LabelledTokens, samples: list[int], batch: Any
) -> torch.Tensor:
    """[K] sums of the batch's weighted divergences, position by position. The parent is another model class, which
    reads each text alone and without padding."""
    objective, length = trainer.objective, rows.input_ids.shape[1]
    uniforms = Uniforms.keyed(trainer.config.data.seed, 1, samples, length)
    noisy = objective.noise(uniforms=uniforms, **vars(rows))
    assert torch.equal(noisy.input_ids, batch.input_ids)  # the noise is the objective's own
    model = trainer.plain_model
    mask = batch.model_mask()  # with annealed attention
    logits = model(input_ids=noisy.input_ids, attention_mask=mask, position_ids=noisy.position_ids).logits
    parents = [next_logits(reference, rows, row) for row in range(len(rows.input_ids))]
    losses = []
    for row, column in noisy.mask.nonzero().tolist():
        stream, place = divmod(column, length)
        shifted = objective.shift or (stream == 1)
        token = place + 1 if shifted else place
        p = distribution(parents[row % len(parents)][token - 1])  # complements: each text has two rows
        q = distribution(logits[row, column])
        losses.append(distance(p, q, trainer.config.distill.divergence))
    losses_M = torch.stack(losses)
    terms_M = torch.zeros(len(losses), dtype=torch.long) if noisy.terms is None else noisy.terms
    weights_M = noisy.weights.double()
    if noisy.rows is not None:  # balanced: each row's clean sum has the weight of its noisy sum
        for row in noisy.rows.unique():
            masks, clean = ((noisy.rows == row) & (terms_M == term) for term in (0, 1))
            weights_M[clean] *= (losses_M[masks].sum() / losses_M[clean].sum()).detach()
    return torch.stack([(losses_M * weights_M)[terms_M == term].sum() for term in range(len(noisy.normaliser))])


def next_logits(reference: Any, rows: LabelledTokens, row: int) -> dict[int, torch.Tensor]:
    """The reference's logits after each position of a row, by position."""
    real = torch.ones(rows.input_ids.shape[1], dtype=torch.bool)
    if rows.attention_mask is not None:
        real = rows.attention_mask[row].bool()
    documents = torch.zeros(len(real)) if rows.documents is None else rows.documents[row]
    found = {}
    for document in documents[real].unique():
        places = (real & (documents == document)).nonzero()[:, 0]
        with torch.no_grad():
            logits = reference(input_ids=rows.input_ids[row, places][None]).logits[0]
        found |= dict(zip(places.tolist(), logits, strict=True))
    return found


def distribution(logits: torch.Tensor) -> torch.Tensor:
    """Probabilities without the mask token's."""
    keep = [token for token in range(len(logits)) if token != MASK]
    weights = (logits[keep] - logits[keep].max().detach()).exp()
    return weights / weights.sum()


def distance(p: torch.Tensor, q: torch.Tensor, divergence: str) -> torch.Tensor:
    def kl(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (a * (a / b).log()).sum()

    middle = (p + q) / 2
    return {
        "forward": kl(p, q),
        "reverse": kl(q, p),
        "js": 0.5 * kl(p, middle) + 0.5 * kl(q, middle),
    }[divergence]


def test_divergences_of_two_tokens() -> None:
    """p = (3/4, 1/4), q = (1/2, 1/2), and a mask token and further rows of the model that count for nothing."""
    parent = torch.tensor([[3.0, 1.0, 7.0]]).log()
    model = torch.tensor([[1.0, 1.0, 5.0, 9.0]], dtype=torch.float64).log()
    found = {name: float(divergences(model, parent, name, 2)) for name in ("forward", "reverse", "js")}
    forward = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    reverse = 0.5 * math.log(2 / 3) + 0.5 * math.log(2)
    middle = (0.625, 0.375)
    js = sum(
        0.5 * sum(a * math.log(a / m) for a, m in zip(one, middle, strict=True)) for one in ((0.75, 0.25), (0.5, 0.5))
    )
    assert found == pytest.approx({"forward": forward, "reverse": reverse, "js": js}, abs=1e-6)


def test_divergence_is_zero_and_finite_where_a_model_agrees_or_excludes_tokens() -> None:
    logits = torch.tensor([[0.0, -1e4, 50.0], [1.0, 2.0, 3.0]])
    for name in ("forward", "reverse", "js"):
        assert divergences(logits, logits, name).abs().max() == 0
        changed = logits.flip(1).requires_grad_()
        loss = divergences(changed, logits, name, 0).sum()
        loss.backward()
        assert changed.grad is not None
        assert torch.isfinite(loss)
        assert torch.isfinite(changed.grad).all()


def test_first_tokens_of_texts_are_never_masked() -> None:
    """A parent has no distribution of them, with and without padding and packed documents."""
    tokens = torch.arange(2, 10).repeat(2, 1)
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 2, 2], [0] * 8])
    real = torch.tensor([[True] * 7 + [False], [False] * 2 + [True] * 6])
    everywhere = MaskedDiffusion(MASK, noise_range=(0.999999, 1.0))
    uniforms = Uniforms.keyed(0, 1, [0, 1], 8)
    noisy = distill_batch(everywhere, uniforms, LabelledTokens(tokens, attention_mask=real, documents=documents))
    assert noisy.mask.tolist() == [
        [False, True, True, False, True, True, False, False],
        [False, False, False, True, True, True, True, True],
    ]
    assert noisy.parent is not None
    assert noisy.index is not None
    assert torch.equal(noisy.targets, tokens[noisy.mask])
    assert torch.equal(noisy.parent.mask[:, :-1], noisy.mask[:, 1:])  # the position before


def test_a_random_adapter_loses_its_divergence(settings: Settings, run: Callable[..., Any]) -> None:
    found = run(settings("block-causal", steps=30, lora_rank=8, lr=3e-2))
    assert sum(row["loss"] for row in found[-5:]) < 0.7 * sum(row["loss"] for row in found[:5])

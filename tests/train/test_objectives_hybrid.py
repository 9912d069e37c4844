"""The objectives that add an autoregressive loss: each of their two parts from passes of one stream."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dlm_bridge.attention.masks import causal_mask
from dlm_bridge.objectives.base import mean_loss
from dlm_bridge.objectives.batches import IGNORE_INDEX
from dlm_bridge.objectives.noise import Uniforms
from dlm_bridge.objectives.registry import family_objective
from dlm_bridge.objectives.two_streams import WeDLMDiffusion
from dlm_bridge.train.collator import DiffusionCollator
from tests.families import nemotron_labs_diffusion, wedlm

MASK = 99
LENGTH = 14
BLOCK = 4


def _model(module: Any, folder: Path) -> Any:
    case = module.CASES[0]
    model = case.load(case.write(folder)).requires_grad_(False)
    model.config.mask_token_id, model.config.block_size = MASK, BLOCK
    return model


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(0, MASK, (3, LENGTH), generator=torch.Generator().manual_seed(1))


def _next_token_costs(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return -logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]


@pytest.mark.parametrize("weights", [(None, 1.0), (0.5, 0.7)], ids=["published", "own-weights"])
@pytest.mark.parametrize("prompt", [0, 5], ids=["rows", "prompts"])
def test_nemotrons_three_published_losses(
    tmp_path: Path, ids: torch.Tensor, weights: tuple[float | None, float], prompt: int
) -> None:
    """Diffusion over a causal prefix plus autoregression, of one noise and one set of logits, with the weights and the
    divisors of the modeling file, of Megatron-Bridge's recipe and of NeMo Automodel's fine-tuning."""
    model = _model(nemotron_labs_diffusion, tmp_path)
    model.config.dlm_loss_weight, model.config.ar_loss_weight = weights
    labels = ids.clone()
    labels[0, :prompt] = IGNORE_INDEX
    drawn = Uniforms.drawn(torch.Generator().manual_seed(4), 3, LENGTH)
    p = ((1 - 1e-3) * drawn.level + 1e-3)[:, None]
    masked = (drawn.token < p) & (labels != IGNORE_INDEX)
    denoised = 0.0
    for start in range(0, LENGTH, BLOCK):
        block = slice(start, min(start + BLOCK, LENGTH))
        seen = torch.cat([ids[:, :start], torch.where(masked, MASK, ids)[:, block]], dim=1)
        mask = causal_mask(torch.ones_like(seen), draft_start=start)
        logits = model(seen, attention_mask=mask).logits[:, block]
        costs = -logits.log_softmax(-1).gather(-1, ids[:, block, None])[..., 0]
        denoised += (costs * masked[:, block] / p).sum().item()
    autoregressive = _next_token_costs(model(ids, attention_mask=causal_mask(torch.ones_like(ids))).logits, ids)
    following = labels[:, 1:] != IGNORE_INDEX
    predicted = autoregressive[following].sum().item()
    masks, lengths = masked.sum().item(), (labels != IGNORE_INDEX).sum(1).tolist()
    dlm, ar = weights
    file = (1.0 if dlm is None else dlm) * denoised + ar * predicted
    expected = {
        "nemotron": file / (masks + sum(int(ar * length) for length in lengths)),
        "nemotron_bridge": (0.3 * denoised + predicted) / (masks + following.sum().item()),
        "nemotron_sft": 0.3 * denoised / masks + predicted / sum(lengths),
    }
    for name, value in expected.items():
        objective = family_objective(model, name)
        noisy = objective.noise(ids, drawn, labels)
        loss = mean_loss(objective.loss_sum(noisy.logits(model), noisy), noisy)
        assert loss.item() == pytest.approx(value, rel=1e-5), name
    own = model(ids, labels=labels, generator=torch.Generator().manual_seed(4)).loss
    assert own.item() == pytest.approx(expected["nemotron"], rel=1e-5)


@pytest.mark.parametrize("name", ["nemotron", "nemotron_bridge", "nemotron_sft"])
def test_trainers_divide_nemotrons_loss_by_its_own_divisor(tmp_path: Path, ids: torch.Tensor, name: str) -> None:
    """The collator's labels are as many as the divisor of the modeling file's loss: a Trainer that divides by their
    number over all micro-batches of a step computes it. Of another form a micro-batch has its own divisors."""
    model = _model(nemotron_labs_diffusion, tmp_path)
    collator = DiffusionCollator.of(model, name)
    rows = [{"input_ids": row.tolist(), "sample_index": number} for number, row in enumerate(ids)]
    batch = collator(rows)
    noisy = collator.objective.noise(ids, Uniforms.keyed(0, 0, range(3), LENGTH))
    expected = mean_loss(collator.objective.loss_sum(noisy.logits(model), noisy), noisy)
    assert model(**batch).loss.item() == pytest.approx(expected.item(), rel=1e-5)
    if name == "nemotron":
        parts = [collator([row]) for row in rows]
        count = sum(part["labels"].ne(IGNORE_INDEX).sum() for part in parts)
        summed = sum(model(**part, num_items_in_batch=count).loss.item() for part in parts)
        assert summed == pytest.approx(expected.item(), rel=1e-5)


def test_wedlms_loss_is_the_reordered_blocks_plus_autoregression(tmp_path: Path, ids: torch.Tensor) -> None:
    model = _model(wedlm, tmp_path)
    labels = ids.clone()
    labels[0, :5] = IGNORE_INDEX
    loss = model(ids, labels=labels, generator=torch.Generator().manual_seed(4)).loss
    drawn = Uniforms.drawn(torch.Generator().manual_seed(4), 3, LENGTH)
    cost = weight = 0.0
    masks = 0
    for row in range(3):
        for number, start in enumerate(range(0, LENGTH, BLOCK)):
            block = range(start, min(start + BLOCK, LENGTH))
            p = drawn.block[row, number].item()
            answer = sorted(
                (i for i in block if labels[row, i] != IGNORE_INDEX), key=lambda i: drawn.token[row, i].item()
            )
            masked = sorted(answer[: round(len(answer) * p)])
            order = [i for i in block if i not in masked] + masked
            seen = [*ids[row, :start].tolist(), *(MASK if i in masked else int(ids[row, i]) for i in order)]
            logits = model(torch.tensor([seen]), position_ids=torch.tensor([[*range(start), *order]])).logits[0]
            log_probabilities = logits.log_softmax(-1)
            for i in masked:
                cost -= log_probabilities[start + order.index(i), ids[row, i]].item() / p
                weight += 1 / p
            masks += len(masked)
    autoregressive = _next_token_costs(model(ids).logits, ids)[labels[:, 1:] != IGNORE_INDEX]
    assert 8 < masks < 30
    assert loss.item() == pytest.approx((cost / weight + autoregressive.mean().item()) / 2, rel=1e-5)


def test_wedlm_masks_exact_counts_and_keeps_prompt_and_padding() -> None:
    """Of the n answer tokens in a block round(n p) are masked; padding comes last and is nobody's target."""
    count, block = 200, 8
    tokens = torch.randint(0, MASK, (count, 20), generator=torch.Generator().manual_seed(0))
    labels, real = tokens.clone(), torch.ones_like(tokens)
    labels[:, :3] = IGNORE_INDEX
    real[:, 17:] = 0
    uniforms = Uniforms.keyed(0, 1, range(count), 20)
    noisy = WeDLMDiffusion(MASK, block_size=block).noise(tokens, uniforms, labels, real)
    masked = noisy.input_ids[:, :20] == MASK
    for number, (columns, answer) in enumerate(((slice(0, 8), 5), (slice(8, 16), 8), (slice(16, 20), 1))):
        wanted = (answer * uniforms.block[:, number]).round()
        assert torch.equal(masked[:, columns].sum(1).float(), wanted)
    assert noisy.position_ids is not None
    assert torch.equal(noisy.position_ids[:, :20].sort(dim=1).values[:, :16], torch.arange(16).expand(count, 16))
    assert torch.equal(noisy.input_ids[:, 20:], tokens)
    assert torch.equal(masked, noisy.mask[:, :20])
    assert int(noisy.mask[:, 20:].sum()) == count * 14  # the tokens 3 to 16, each predicted by the one before
    allowed = noisy.model_mask()
    assert allowed is not None
    own = torch.eye(40, dtype=torch.bool)
    assert not (allowed[:, 0] & ~own)[:, :, 37:].any()

"""The objectives that add an autoregressive loss: each of their two parts from passes of one stream."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dlm_bridge.attention_mask import causal_mask
from dlm_bridge.objectives.batches import IGNORE_INDEX
from dlm_bridge.objectives.noise import Uniforms
from dlm_bridge.objectives.two_streams import WeDLMDiffusion
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


def test_nemotrons_loss_is_diffusion_over_a_causal_prefix_plus_autoregression(
    tmp_path: Path, ids: torch.Tensor
) -> None:
    model = _model(nemotron_labs_diffusion, tmp_path)
    labels = ids.clone()
    labels[0, :5] = IGNORE_INDEX
    loss = model(ids, labels=labels, generator=torch.Generator().manual_seed(4)).loss
    drawn = Uniforms.drawn(torch.Generator().manual_seed(4), 3, LENGTH)
    p = ((1 - 1e-3) * drawn.level + 1e-3)[:, None]
    masked = (drawn.token < p) & (labels != IGNORE_INDEX)
    cost = 0.0
    for start in range(0, LENGTH, BLOCK):
        block = slice(start, min(start + BLOCK, LENGTH))
        seen = torch.cat([ids[:, :start], torch.where(masked, MASK, ids)[:, block]], dim=1)
        mask = causal_mask(torch.ones_like(seen), draft_start=start)
        logits = model(seen, attention_mask=mask).logits[:, block]
        costs = -logits.log_softmax(-1).gather(-1, ids[:, block, None])[..., 0]
        cost += 0.3 * (costs * masked[:, block] / p).sum().item()
    autoregressive = _next_token_costs(model(ids, attention_mask=causal_mask(torch.ones_like(ids))).logits, ids)
    following = labels[:, 1:] != IGNORE_INDEX
    cost += autoregressive[following].sum().item()
    assert loss.item() == pytest.approx(cost / (masked.sum() + following.sum()).item(), rel=1e-5)


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

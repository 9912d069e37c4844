"""MultiTF: groups, levels, mask and loss by their definitions, and the states that the sampler `multi_bd` sees."""

from __future__ import annotations

import hashlib
import itertools
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dlm_bridge.errors import SettingError
from dlm_bridge.extra_samplers.multi_bd import BlockBufferRule
from dlm_bridge.generation import generate
from dlm_bridge.generation.commit_rules import Step
from dlm_bridge.objectives.base import mean_loss
from dlm_bridge.objectives.batches import IGNORE_INDEX, CleanBatch, NoisyBatch
from dlm_bridge.objectives.noise import Uniforms
from dlm_bridge.objectives.registry import build_objective
from tests.families import llada2_moe, sdar
from tests.families.case import FamilyCase
from tests.generation.test_caches import load_case
from tests.refusals import refused

BLOCK, LENGTH, MASK, BUFFER = 4, 30, 99, 3
LAYOUTS = [(2, 0), (2, 1), (3, 0), (3, 1), (3, 2)]  # of buffers of up to 3 blocks
CONFIG = SimpleNamespace(block_size=BLOCK)


def objective(**settings: Any) -> Any:
    return build_objective("multi_bd", MASK, config=CONFIG, **{"buffer_size": BUFFER, **settings})


def groups_of(size: int, shift: int, first: int, count: int) -> list[list[int]]:
    """Groups of a document's `count` blocks by hand, from the answer's `first` block on; blocks before are alone."""
    groups = [[block] for block in range(first)]
    begin = first
    for length in itertools.chain([shift] if shift else [], itertools.repeat(size)):
        if begin >= count:
            return groups
        groups.append([block for block in range(begin, begin + length) if block < count])
        begin += length
    raise AssertionError


def rows(prompts: tuple[int, ...], seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens, and labels of rows with prompts of these lengths."""
    ids = torch.randint(4, 60, (len(prompts), LENGTH), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    for row, length in enumerate(prompts):
        labels[row, :length] = IGNORE_INDEX
    return ids, labels


def with_layouts(uniforms: Uniforms, layouts: list[int]) -> Uniforms:
    levels = torch.tensor([(layout + 0.5) / len(LAYOUTS) for layout in layouts])
    return Uniforms(**{**vars(uniforms), "level": levels})


PROMPTS = (0, 6, 9, 4, 13)  # tokens; of row r, whose layout is number r


@pytest.fixture
def batch() -> tuple[torch.Tensor, NoisyBatch]:
    ids, labels = rows(PROMPTS)
    uniforms = with_layouts(Uniforms.keyed(0, 1, range(len(PROMPTS)), LENGTH), [0, 1, 2, 3, 4])
    return ids, objective().noise(ids, uniforms, labels)


def test_mask_by_definition(batch: tuple[torch.Tensor, NoisyBatch]) -> None:
    """Noisy queries of the answer: their group's noisy blocks up to their own, and the clean blocks before the group;
    clean queries: clean blocks up to their own."""
    mask = batch[1].mask_descriptor.dense()[:, 0]
    assert batch[1].position_ids.tolist() == [[*range(LENGTH), *range(LENGTH)]]
    for row, (prompt, (size, shift)) in enumerate(zip(PROMPTS, LAYOUTS, strict=True)):
        first = prompt // BLOCK
        group = {block: members for members in groups_of(size, shift, first, -(-LENGTH // BLOCK)) for block in members}
        for q, k in itertools.product(range(LENGTH), repeat=2):
            own, other = q // BLOCK, k // BLOCK
            assert mask[row, LENGTH + q, LENGTH + k] == (other <= own)
            assert not mask[row, LENGTH + q, k]
            if own >= first and other >= first:
                assert mask[row, q, k] == (other in group[own] and other <= own)
                assert mask[row, q, LENGTH + k] == (other < group[own][0])
            if own >= first > other:  # the prompt's blocks, which are not noisy, are seen once: clean, or in the group
                assert mask[row, q, k] != mask[row, q, LENGTH + k]


def test_the_mask_is_the_public_code_s() -> None:
    """Digest of `multi_bd_attn_mask_student` (SJTU-DENG-Lab/mbd-lms f20911d, utils/multi_bd_mask.py) for the nine
    layouts of `generate_coverage_active_buffer_sizes` for 8 blocks of 4 and a buffer of 4."""
    ids = torch.zeros(9, 32, dtype=torch.long)
    uniforms = Uniforms.keyed(0, 1, range(9), 32)
    uniforms = Uniforms(**{**vars(uniforms), "level": (torch.arange(9) + 0.5) / 9})
    mask = objective(buffer_size=4).noise(ids, uniforms).mask_descriptor.dense()[:, 0]
    digest = hashlib.sha256(np.packbits(mask.numpy()).tobytes()).hexdigest()
    assert digest == "f5ce3291ae9ae65d7012cfc61349e2aa6cdc03a63635ef44e188f2e2775c0372"


def test_the_chain_of_levels_by_hand() -> None:
    """The masking probability of each block, from the block's and its group's numbers."""
    ids, labels = rows(PROMPTS)
    uniforms = with_layouts(Uniforms.keyed(0, 1, range(len(PROMPTS)), LENGTH), [0, 1, 2, 3, 4])
    own = objective(noise_range=(0.2, 0.7))
    clean = CleanBatch(ids, labels, labels != IGNORE_INDEX, None, None)
    p = own.group_levels(clean, uniforms, *own.groups(clean, uniforms))
    for row, (prompt, (size, shift)) in enumerate(zip(PROMPTS, LAYOUTS, strict=True)):
        first = prompt // BLOCK
        for group in groups_of(size, shift, first, -(-LENGTH // BLOCK))[first:]:
            high, low = divmod(uniforms.block[row, group[0]].item() * 4096, 1)
            level = 0.7 - 0.5 * low  # the group's floor
            for block in group:
                number = high if block == group[0] else uniforms.block[row, block].item() * 4096 // 1
                level = 0.7 - (0.7 - level) * number / 4096
                found = p[row, block * BLOCK : (block + 1) * BLOCK]
                assert found.tolist() == pytest.approx([level] * len(found), rel=1e-5)


def test_levels_are_distributed_as_published() -> None:
    """Against the chain drawn as the public code does (chain_uniform): a floor, then each block's level above the one
    before. Layouts are equally frequent."""
    draws, low, high = 20_000, 0.001, 0.99001
    ids = torch.zeros(draws, 3 * BLOCK, dtype=torch.long)
    own, uniforms = objective(), Uniforms.drawn(torch.Generator().manual_seed(2), draws, 3 * BLOCK)
    clean = CleanBatch(ids, ids, torch.ones_like(ids, dtype=torch.bool), None, None)
    before, answer = own.groups(clean, uniforms)
    p = own.group_levels(clean, uniforms, before, answer)[:, ::BLOCK]
    whole = (before[:, ::BLOCK] == torch.arange(3)).all(dim=1)  # layout (3, 0)
    assert whole.float().mean().item() == pytest.approx(1 / len(LAYOUTS), abs=0.01)
    chance = random.Random(0)
    expected = []
    for _ in range(draws):
        level, chain = chance.uniform(low, high), []
        for _ in range(3):
            level = chance.uniform(level, high)
            chain.append(level)
        expected.append(chain)
    quantiles = torch.tensor([0.1, 0.25, 0.5, 0.75, 0.9], dtype=torch.float64)
    wanted = torch.tensor(expected, dtype=torch.float64).quantile(quantiles, dim=0)
    assert (p[whole].double().quantile(quantiles, dim=0) - wanted).abs().max() < 0.03
    assert (p[whole].diff(dim=1) >= 0).all()


def test_packed_documents_and_padding() -> None:
    """A document has the groups, levels and mask that it has alone; padding is seen by nothing."""
    lengths = (9, 13, 5)
    numbers = torch.tensor([[0] * 9 + [1] * 13 + [2] * 5 + [9] * 3])
    real = numbers != 9
    ids = torch.randint(4, 60, (1, LENGTH), generator=torch.Generator().manual_seed(1))
    labels = torch.where(real, ids, IGNORE_INDEX)
    uniforms = Uniforms.keyed(0, 1, [0], LENGTH)
    packed = objective().noise(ids, uniforms, labels, real, numbers).mask_descriptor.dense()[0, 0]
    clean = CleanBatch(ids, labels, real, real, numbers)
    begin = 0
    for document, length in enumerate(lengths):
        part = slice(begin, begin + length)
        level = clean.noise_levels(uniforms.level)[:, begin]
        drawn = Uniforms(**{**vars(uniforms), "level": level, "token": uniforms.token[:, part]})
        alone = objective().noise(ids[:, part], drawn, ids[:, part])
        both = torch.cat([torch.arange(begin, begin + length), LENGTH + torch.arange(begin, begin + length)])
        assert torch.equal(packed[both][:, both], alone.mask_descriptor.dense()[0, 0]), document
        others = torch.ones(2 * LENGTH, dtype=torch.bool)
        others[both] = False
        assert not packed[both][:, others].any()
        begin += length


def one_stream(model: Any, ids: torch.Tensor, noisy: NoisyBatch) -> list[tuple[int, int, torch.Tensor]]:
    """(row, position, logits) of each mask, from block-causal passes over the clean text before a group, followed by
    the group's noisy blocks."""
    found = []
    for row, (prompt, (size, shift)) in enumerate(zip(PROMPTS, LAYOUTS, strict=True)):
        for group in groups_of(size, shift, prompt // BLOCK, -(-LENGTH // BLOCK))[prompt // BLOCK :]:
            begin, end = group[0] * BLOCK, min((group[-1] + 1) * BLOCK, LENGTH)
            text = torch.cat([ids[row, :begin], noisy.input_ids[row, begin:end]])
            logits = model(text[None]).logits[0]
            found += [(row, place, logits[place]) for place in range(begin, end) if text[place] == MASK]
    return found


def test_loss_and_gradients_by_hand(batch: tuple[torch.Tensor, NoisyBatch], tmp_path: Path) -> None:
    """Float64 model: the weighted mean of the masks' cross-entropy, with weights 1 / p, in passes of one stream."""
    ids, noisy = batch
    model = sdar.CASES[0].load(sdar.CASES[0].write(tmp_path), dtype=torch.float64)
    model.config.block_size = BLOCK
    loss = mean_loss(objective().loss_sum(noisy.logits(model), noisy), noisy)
    loss.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    weights, costs = noisy.weights.double(), []
    assert weights.min() < 0.8 * weights.max()
    for row, place, logits in one_stream(model, ids, noisy):
        costs.append(-logits.log_softmax(-1)[ids[row, place]])
    assert len(costs) == len(noisy.targets) == noisy.mask.sum()
    expected = (torch.stack(costs) * weights).sum() / weights.sum()
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)  # the loss is in fp32
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-5, atol=1e-7)


SEEN = [sdar.CASES[0], llada2_moe.CASES[0]]


@pytest.mark.parametrize("cache", ["none", "block"])
@pytest.mark.parametrize("case", SEEN, ids=lambda case: case.id)
def test_the_sampler_sees_the_states_of_training(
    case: FamilyCase,
    cache: str,
    batch: tuple[torch.Tensor, NoisyBatch],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The sampler's own passes over a drawn state: prompt and clean text before a group, then the group in the buffer,
    with its masks. The logits of every mask equal those of the training pass."""
    ids, noisy = batch
    model, _ = load_case(case, tmp_path)
    model.config.block_size = BLOCK
    model.config.mask_token_id = MASK
    trained = torch.zeros(*noisy.input_ids.shape, model.config.vocab_size, dtype=torch.float64)
    trained[noisy.mask] = noisy.logits(model)
    seen: list[torch.Tensor] = []
    state: dict[str, torch.Tensor] = {}

    def write(rule: Any, step: Step) -> torch.Tensor:
        """Commit the tokens that the drawn state shows; then, the rest."""
        seen.append(step.logits.clone())
        left = step.masked & (state["noisy"][step.places] == MASK) if len(seen) == 1 else torch.zeros_like(step.masked)
        return torch.where(left, step.before, torch.where(step.masked, state["clean"][step.places], step.before))

    monkeypatch.setattr(BlockBufferRule, "write", write)
    compared = several = 0
    for row, (prompt, (size, shift)) in enumerate(zip(PROMPTS, LAYOUTS, strict=True)):
        for group in groups_of(size, shift, prompt // BLOCK, -(-LENGTH // BLOCK))[prompt // BLOCK :]:
            begin, end = group[0] * BLOCK, min((group[-1] + 1) * BLOCK, LENGTH)
            before = max(begin, prompt)
            state = {"noisy": noisy.input_ids[row, :LENGTH].clone(), "clean": ids[row]}
            masks = (state["noisy"][before:end] == MASK).nonzero()[:, 0] + before
            if before == 0 or not len(masks) or end % BLOCK:
                continue  # prompts are not empty, and the sampler's last block is whole
            state["noisy"], state["clean"] = (torch.cat([one, one.new_full((64,), 5)]) for one in state.values())
            seen.clear()
            if len(masks) == end - before:
                seen.append(torch.empty(0))  # the state of the sampler's first pass
            generate(
                model, ids[row : row + 1, :before], algorithm="multi_bd", buffer_size=len(group), cache=cache,
                gen_length=end - before, block_add_threshold=0.0, temperature=0.0, eos_token_id=None, pad_token_id=0,
                mask_token_id=MASK,
            )  # fmt: skip
            found, other = seen[1][0][masks - begin], trained[row, masks].clone()
            for logits in (found, other):
                logits[:, MASK] = 0  # never proposed
            torch.testing.assert_close(found, other, rtol=1e-9, atol=1e-9)
            compared += len(masks)
            several += int(any((masks // BLOCK).diff() > 0))
    assert compared > 20
    assert several > 3  # groups with masks in several blocks


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"buffer_size": 1}, "buffer_size"),
        ({"loss_weighting": "fraction"}, "loss_weighting"),
        ({"loss_normalisation": "tokens"}, "loss_normalisation"),
    ],
)
def test_what_it_refuses(settings: dict[str, Any], field: str) -> None:
    with refused(SettingError, field):
        objective(**settings)

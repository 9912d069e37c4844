"""LLaDA2.2's labels of deletion and insertion: the report's rule by hand and by search, and how drafts end."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dlm_bridge.errors import SettingError
from dlm_bridge.objectives.base import mean_loss
from dlm_bridge.objectives.batches import IGNORE_INDEX
from dlm_bridge.objectives.editing import Edit, EditingBlockDiffusion, edit_labels
from dlm_bridge.objectives.noise import Uniforms
from dlm_bridge.objectives.registry import build_objective
from tests.families import sdar
from tests.refusals import refused

MASK, DELETE, INSERT = 99, 97, 98
BLOCK, LENGTH = 8, 30  # three blocks and a part of one
CONFIG = SimpleNamespace(block_size=BLOCK, vocab_size=100, delete_token_id=DELETE, split_token_id=INSERT)
K, S, D, I = Edit.KEEP, Edit.SUBSTITUTE, Edit.DELETE, Edit.INSERT  # noqa: E741
Labels = list[tuple[Edit, int | None]]


def labels_of(draft: list[int], target: list[int], width: int | None = None) -> Labels:
    """Each position's edit, and the target token of one that is kept or substituted; `width` with padding."""
    width = width or len(draft)
    rows = torch.full((2, 1, width), 7)
    rows[0, 0, : len(draft)], rows[1, 0, : len(target)] = torch.tensor(draft), torch.tensor(target)
    edits, places = edit_labels(rows[0], rows[0] == MASK, rows[1], torch.arange(width)[None] < len(draft))
    found = zip(map(Edit, edits[0].tolist()), places[0].tolist(), strict=True)
    return [(edit, target[place] if edit in (K, S) else None) for edit, place in list(found)[: len(draft)]]


@pytest.mark.parametrize(
    ("draft", "target", "edits"),
    [
        ([1, 2, 3, 4], [1, 2, 3, 4], [(K, 1), (K, 2), (K, 3), (K, 4)]),
        ([1, 9, 3, 4], [1, 2, 3, 4], [(K, 1), (S, 2), (K, 3), (K, 4)]),
        # "in the river twice the" is to be "in the same river twice": a token is missing, and one is left over
        ([1, 2, 3, 4, 2], [1, 2, 5, 3, 4], [(K, 1), (K, 2), (I, None), (K, 4), (D, None)]),
        ([1, 1, 2, 3], [1, 2, 3, 4], [(D, None), (K, 1), (K, 2), (K, 3)]),
        ([5, 1, 1], [2, 5, 1], [(I, None), (D, None), (K, 1)]),
        # between two anchors as many positions are substituted as the target has, the rest is deleted
        ([1, 8, 9, 2], [1, 5, 2, 3], [(K, 1), (S, 5), (D, None), (K, 2)]),
        # one insertion before an anchor, however many tokens are missing
        ([4, 9, 9, 9], [1, 2, 3, 4], [(I, None), (D, None), (D, None), (D, None)]),
        ([8, 8, 8], [1, 2, 3], [(D, None)] * 3),
        ([MASK, 2, MASK, MASK], [1, 2, 3, 4], [(K, 1), (K, 2), (K, 3), (K, 4)]),
        # the mask takes the place nearest to its own
        ([MASK, 4, 9, 9], [1, 2, 3, 4], [(K, 1), (I, None), (D, None), (D, None)]),
        # a token that is there is kept, though a mask could stand for it
        ([1, 3, 4, MASK], [1, 2, 3, 4], [(K, 1), (I, None), (K, 4), (D, None)]),
    ],
)
def test_labels_by_hand(draft: list[int], target: list[int], edits: Labels) -> None:
    assert labels_of(draft, target) == labels_of(draft, target, width=7) == edits


def anchors_by_search(draft: list[int], target: list[int]) -> int:
    """The size of a longest common subsequence, and of such ones the most tokens that are no masks."""
    best = 0
    for count in range(len(draft) + 1):
        for ours in itertools.combinations(range(len(draft)), count):
            for theirs in itertools.combinations(range(len(target)), count):
                pairs = [(draft[i], target[j]) for i, j in zip(ours, theirs, strict=True)]
                if all(a in (b, MASK) for a, b in pairs):
                    best = max(best, count * 100 + sum(a == b for a, b in pairs))
    return best


def test_labels_follow_a_longest_common_subsequence() -> None:
    choice = random.Random(0)
    for _ in range(60):
        length = choice.randint(1, 5)
        target = [choice.randint(1, 3) for _ in range(length)]
        draft = [choice.choice([1, 2, 3, 9, MASK]) for _ in range(length)]
        rows = [torch.tensor([row]) for row in (draft, target)]
        edits, places = edit_labels(rows[0], rows[0] == MASK, rows[1], torch.ones(1, length, dtype=torch.bool))
        anchors = [i for i, edit in enumerate(edits[0].tolist()) if edit in (K, I)]
        found = [places[0, i].item() for i in anchors]
        assert found == sorted(set(found))
        assert all(draft[i] in (MASK, target[j]) for i, j in zip(anchors, found, strict=True))
        exact = sum(draft[i] == target[j] for i, j in zip(anchors, found, strict=True))
        assert len(anchors) * 100 + exact == anchors_by_search(draft, target)


def repaired(draft: list[int], labels: Labels) -> list[int]:
    """A draft after the edits, at its length, as the sampler carries them out."""
    made: list[int] = []
    for token, (edit, new) in zip(draft, labels, strict=True):
        made += {K: [new], S: [new], D: [], I: [MASK, token]}[edit]  # type: ignore[list-item]
    return (made + [MASK] * len(draft))[: len(draft)]


def test_who_follows_the_labels_arrives_at_the_target() -> None:
    choice, rounds = random.Random(1), []
    for _ in range(200):
        target = [choice.randint(1, 6) for _ in range(BLOCK)]
        draft = [choice.choice([*target, MASK, 9]) for _ in range(BLOCK)]
        for number in itertools.count():
            if draft == target:
                break
            assert number < 2 * BLOCK, (draft, target)
            draft = repaired(draft, labels_of(draft, target))
        rounds.append(number)
    assert max(rounds) > 1


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(0, DELETE, (6, LENGTH), generator=torch.Generator().manual_seed(1))


def objective(**options: Any) -> EditingBlockDiffusion:
    built = build_objective("block_editing", MASK, config=CONFIG, **options)
    assert isinstance(built, EditingBlockDiffusion)
    return built


def test_drafts_lack_tokens_and_have_too_many(ids: torch.Tensor) -> None:
    """Only of the answer, each block of it by itself; the clean stream and the prompt stay."""
    labels = ids.clone()
    labels[:, :3] = IGNORE_INDEX
    answer = labels != IGNORE_INDEX
    uniforms = Uniforms.keyed(0, 1, range(6), LENGTH)
    noisy = objective(indel_probability=0.4, edit_probability=0.0, noise_range=(0.0, 0.3)).noise(ids, uniforms, labels)
    given, clean = noisy.input_ids.chunk(2, dim=1)
    assert torch.equal(clean, ids)
    assert torch.equal(given[~answer], ids[~answer])
    assert torch.equal(noisy.mask[:, :LENGTH], answer)
    targets = torch.full_like(ids, -1)
    targets[answer] = noisy.targets
    assert {DELETE, INSERT} <= set(noisy.targets.tolist())
    for row in range(len(ids)):
        for begin in (3, *range(BLOCK, LENGTH, BLOCK)):
            end = min(begin // BLOCK * BLOCK + BLOCK, LENGTH)
            draft, target = given[row, begin:end].tolist(), ids[row, begin:end].tolist()
            wanted = [{D: DELETE, I: INSERT}.get(edit, new) for edit, new in labels_of(draft, target)]
            assert targets[row, begin:end].tolist() == wanted
    # What noise has masked is one term; all else, masks at a draft's end among it, the other.
    masked = uniforms.token[answer] < (0.3 * uniforms.level[:, None]).expand_as(ids)[answer]
    assert torch.equal(noisy.terms == 0, masked)
    assert ((given == MASK)[answer] & ~masked).any()
    again = objective(indel_probability=0.4, edit_probability=0.0, noise_range=(0.0, 0.3))
    alone = again.noise(ids[2:3], Uniforms.keyed(0, 1, [2], LENGTH), labels[2:3])
    assert torch.equal(alone.input_ids, noisy.input_ids[2:3])


def test_packed_documents_are_drafted_alone(ids: torch.Tensor) -> None:
    cut = 11  # not where a block ends
    documents = (torch.arange(LENGTH) >= cut).long().expand_as(ids)
    uniforms = Uniforms.keyed(0, 1, range(6), LENGTH)
    packed = objective(indel_probability=0.5).noise(ids, uniforms, documents=documents)
    padding = torch.arange(LENGTH) < cut
    alone = objective(indel_probability=0.5).noise(ids, uniforms, attention_mask=padding.expand_as(ids))
    assert torch.equal(packed.input_ids[:, :cut], alone.input_ids[:, :cut])


def test_the_loss_is_the_masks_over_p_and_the_mean_of_the_edits(ids: torch.Tensor, tmp_path: Path) -> None:
    case = sdar.CASES[0]
    model = case.load(case.write(tmp_path / "sdar")).requires_grad_(False)
    model.config.block_size = BLOCK
    uniforms = Uniforms.keyed(0, 1, range(6), LENGTH)
    built = objective(indel_probability=0.4, noise_range=(0.2, 1.0))
    noisy = built.noise(ids, uniforms)
    given, sums, p = noisy.input_ids[:, :LENGTH], [0.0, 0.0], 0.8 * uniforms.level + 0.2
    masked = uniforms.token < p[:, None]
    for place, (row, column) in enumerate(itertools.product(range(6), range(LENGTH))):
        start = column // BLOCK * BLOCK
        seen = torch.cat([ids[row, :start], given[row, start : min(start + BLOCK, LENGTH)]])[None]
        cost = -model(seen).logits[0, column].log_softmax(-1)[noisy.targets[place]].item()
        sums[0 if masked[row, column] else 1] += cost / p[row].item() if masked[row, column] else cost
    expected = sums[0] / masked.numel() + sums[1] / (~masked).sum().item()
    found = mean_loss(built.loss_sum(noisy.logits(model), noisy), noisy).item()
    assert found == pytest.approx(expected, rel=1e-5)


def test_without_structure_the_labels_are_the_tokens(ids: torch.Tensor) -> None:
    """As in LLaDA2.1, of which it is a setting; and a model without edit tokens has no other."""
    uniforms = Uniforms.keyed(0, 1, range(6), LENGTH)
    noisy = objective().noise(ids, uniforms)
    assert torch.equal(noisy.targets, ids.flatten())
    bare = SimpleNamespace(block_size=BLOCK, vocab_size=100)
    assert torch.equal(build_objective("block_editing", MASK, config=bare).noise(ids, uniforms).targets, noisy.targets)
    with refused(SettingError, "indel_probability"):
        build_objective("block_editing", MASK, config=bare, indel_probability=0.1)
    with refused(SettingError, "indel_probability"):
        objective(indel_probability=1.5)

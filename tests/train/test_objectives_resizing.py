"""DreamOn's objective: rows, loss and gradients against plain steps on the same noise, and what it teaches."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModel

from dlm_bridge.errors import DlmBridgeError, SettingError
from dlm_bridge.objectives.batches import IGNORE_INDEX
from dlm_bridge.objectives.noise import Uniforms
from dlm_bridge.objectives.registry import build_objective
from dlm_bridge.objectives.resizing import DreamOnDiffusion
from dlm_bridge.train.collator import DiffusionCollator
from dlm_bridge.train.config import TrainConfig
from dlm_bridge.train.setup import resolve_objective
from tests.families import dreamon
from tests.refusals import refused

MASK, EXPAND, DELETE, PAD = 31, 30, 29, 0
LENGTH = 24
ROWS, FEW = 48, 8  # FEW of them go through a model
OBJECTIVE = DreamOnDiffusion(MASK, expand_token_id=EXPAND, delete_token_id=DELETE, max_deletions=7)
Masks = list[tuple[int, int, float]]  # column, label, weight


def ends(row: int) -> int:
    return LENGTH - row % 18


def begins(row: int) -> int:
    return min(row % 7, ends(row) - 2)


def batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Prompts of 0 to 6 tokens, texts of 1 to 24 with an end at some, and padding."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(1, DELETE, (ROWS, LENGTH), generator=generator)
    labels, real = ids.clone(), torch.ones(ROWS, LENGTH, dtype=torch.bool)
    for row in range(ROWS):
        end = ends(row)
        ids[row, end - 1] = labels[row, end - 1] = DELETE if row % 3 else 5
        labels[row, : begins(row)], labels[row, end:], real[row, end:] = IGNORE_INDEX, IGNORE_INDEX, False
    return ids, labels, real


def by_hand(ids: list[int], first: int, end: int, u: Uniforms, row: int) -> tuple[list[int], Masks, float]:
    """Tokens of one row whose text is first..end, its masks, and how many tokens they count as."""
    t = float(u.level[row])
    text = [place for place in range(max(first, 1), end) if ids[place] != DELETE]
    span = [float(number) for number in u.span[row]]
    begin = 1 + int(span[0] * (len(text) - 1)) if len(text) > 1 else 0
    middle = text[begin : begin + 1 + int(span[1] * (len(text) - begin))]
    deletions = min(int(span[2] * 7), LENGTH - 1 - middle[-1])
    is_mask = {place: float(u.token[row, place]) < t for place in middle}
    q = 0.5 if span[3] < 0.5 else 0.5 * (1 - sum(is_mask.values()) / len(middle))
    line: list[tuple[int, int, float]] = []  # token, label or -1, number of the merge
    for place in range(end):
        masked = is_mask.get(place, False)
        line.append((MASK if masked else ids[place], ids[place] if masked else -1, float(u.block[row, place])))
        if place == middle[-1]:
            line += [(MASK, DELETE, 2.0)] * deletions
    tokens: list[int] = []
    found: list[tuple[int, int]] = []
    taken = False
    for place, (token, label, number) in enumerate(line):
        following = place + 1 < len(line) and line[place + 1][1] >= 0
        merges = label >= 0 and following and number < q
        if not taken:
            if label >= 0:
                found.append((len(tokens), EXPAND if merges else label))
            tokens.append(token)
        taken = merges
    deleted = sum(label == DELETE for _, label in found)
    masks = [(at, label, (1 - t) / (deleted if label == DELETE else 1)) for at, label in found]
    return tokens[:LENGTH], masks, len(found) - deleted + (deleted > 0)


def test_rows_and_loss_are_those_of_plain_steps(tmp_path: Path) -> None:
    ids, labels, real = batch()
    uniforms = Uniforms.keyed(3, 1, range(ROWS), LENGTH)
    noisy = OBJECTIVE.noise(ids, uniforms, labels, real)
    few = OBJECTIVE.noise(ids[:FEW], Uniforms.keyed(3, 1, range(FEW), LENGTH), labels[:FEW], real[:FEW])
    case = dataclasses.replace(dreamon.CASE, config={**dreamon.CASE.config, "vocab_size": 32, "pad_token_id": PAD})
    model = case.load(case.write(tmp_path)).float()
    loss = (OBJECTIVE.loss_sum(few.logits(model), few) / few.normaliser).sum()
    loss.backward()
    gradient = model.get_output_embeddings().weight.grad.clone()
    model.zero_grad()
    targets = iter(noisy.targets.tolist())
    seen = {"expand": 0, "delete": 0, "token": 0, "cut": 0, "chains": 0}
    total, counted, few_counted = torch.zeros(()), 0.0, 0.0
    for row in range(ROWS):
        end = ends(row)
        tokens, masks, count = by_hand(ids[row].tolist(), begins(row), end, uniforms, row)
        length = len(tokens)
        assert noisy.input_ids[row, :length].tolist() == tokens
        assert noisy.attention_mask[row].tolist() == [True] * length + [False] * (LENGTH - length)
        assert (noisy.mask[row].nonzero()[:, 0] + 1).tolist() == [at for at, _, _ in masks]
        assert [next(targets) for _ in masks] == [label for _, label, _ in masks]
        counted += count
        if row < FEW:
            logs = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
            total = total - sum(weight * logs[at - 1, label] for at, label, weight in masks)
            few_counted += count
        for _, label, _ in masks:
            seen[{EXPAND: "expand", DELETE: "delete"}.get(label, "token")] += 1
        seen["cut"] += length == LENGTH and tokens[-1] != ids[row, end - 1]
        seen["chains"] += end + sum(label == DELETE for _, label, _ in masks) - length > sum(
            label == EXPAND for _, label, _ in masks
        )
    assert min(seen.values()) > 0
    assert noisy.normaliser.item() == counted
    assert loss.item() == pytest.approx((total / few_counted).item(), rel=1e-5)
    (total / few_counted).backward()
    torch.testing.assert_close(gradient, model.get_output_embeddings().weight.grad, rtol=1e-4, atol=1e-7)


def test_padding_changes_no_row_that_has_room() -> None:
    ids, labels, real = (values[:, :12] for values in batch())
    ids, labels = torch.where(real, ids, PAD), torch.where(real, labels, IGNORE_INDEX)

    def noised(length: int) -> Any:
        more = (0, length - 12)
        padded = [torch.nn.functional.pad(values, more, value=value) for values, value in ((ids, PAD), (real, False))]
        given = torch.nn.functional.pad(labels, more, value=IGNORE_INDEX)
        return OBJECTIVE.noise(padded[0], Uniforms.keyed(3, 1, range(ROWS), length), given, padded[1])

    short, long = noised(20), noised(30)
    assert torch.equal(short.input_ids, long.input_ids[:, :20])
    assert torch.equal(short.attention_mask, long.attention_mask[:, :20])
    assert torch.equal(short.targets, long.targets)
    assert torch.equal(short.weights, long.weights)


def test_the_models_own_loss_and_the_collator_draw_spans(tmp_path: Path) -> None:
    case = dataclasses.replace(dreamon.CASE, config={**dreamon.CASE.config, "mask_token_id": 127, "pad_token_id": 3})
    model = case.load(case.write(tmp_path))
    ids = torch.arange(4, 28)[None].expand(4, -1)
    loss = model(ids, labels=ids, generator=torch.Generator().manual_seed(1)).loss
    assert torch.isfinite(loss)
    collator = DiffusionCollator.of(model, generator=torch.Generator().manual_seed(1))
    batch = collator([{"input_ids": row} for row in ids])
    assert {125, 126} <= set(batch["labels"].flatten().tolist())
    torch.testing.assert_close(model(**batch).loss, loss)
    with refused(SettingError, "attention_mask"):
        model(ids, labels=ids, generator=torch.Generator().manual_seed(1), position_ids=torch.arange(24)[None])


@pytest.mark.extension("train.rl")
def test_preference_training_bounds_the_likelihood_of_tokens_where_they_are(tmp_path: Path) -> None:
    from dlm_bridge.train.rl.likelihood import bound_query

    case = dataclasses.replace(dreamon.CASE, config={**dreamon.CASE.config, "mask_token_id": 127, "pad_token_id": 3})
    model = case.load(case.write(tmp_path))
    ids = torch.arange(4, 28)[None].expand(4, -1)
    answer = ids >= 10
    noisy = bound_query(model, ids, answer, torch.ones_like(answer), Uniforms.keyed(0, 1, range(4), 24))
    masked = noisy.input_ids == 127
    assert torch.equal(noisy.input_ids[~masked], ids[~masked])
    assert torch.equal(noisy.targets, ids[masked])
    assert masked.any()
    assert not masked[~answer].any()


@pytest.mark.parametrize("key", ["expand_token_id", "eos_token_id"])
@pytest.mark.parametrize("value", [None, 32])
def test_a_config_without_its_tokens_is_refused(key: str, value: int | None) -> None:
    config = SimpleNamespace(**{"vocab_size": 32, "expand_token_id": EXPAND, "eos_token_id": DELETE, key: value})
    with pytest.raises(DlmBridgeError, match=key):
        build_objective("dreamon", MASK, config=config)


def test_packed_rows_are_refused() -> None:
    ids = torch.arange(1, 13)[None]
    with pytest.raises(DlmBridgeError, match="packing"):
        OBJECTIVE.noise(ids, Uniforms.keyed(0, 1, [0], 12), documents=torch.arange(12)[None] // 6)


def options(folder: Path) -> dict[str, Any]:
    """Of a run on mock data."""
    case = dataclasses.replace(dreamon.CASE, config={**dreamon.CASE.config, "mask_token_id": 99})
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(case.config))
    return {"model": str(folder), "data": ["mock"], "seq_length": 16, "global_batch_size": 4, "steps": 3, "lr": 1e-3}


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("packing", {"packing": True, "task": "sft"}),
        ("document_attention", {"document_attention": True}),
        ("eos_padding", {"eos_padding": "row", "task": "sft"}),
        ("loss_weighting", {"loss_weighting": "level"}),
        ("certainty_weight", {"certainty_weight": 1.0}),
    ],
)
def test_what_does_not_fit_is_refused(field: str, changes: dict[str, Any], tmp_path: Path) -> None:
    given = {**options(tmp_path / "model"), "from_scratch": True, "output": str(tmp_path / "run"), **changes}
    model = AutoModel.from_config(AutoConfig.from_pretrained(given["model"]))
    with refused(SettingError, field):
        resolve_objective(TrainConfig.from_flags(**given), model)


TEXT = [*range(2, 12), DELETE]


def trained(folder: Path, objective: str, steps: int, **settings: Any) -> Any:
    """A tiny model that has learned TEXT."""
    config = {**dreamon.CASE.config, "vocab_size": 32, "num_hidden_layers": 2, "hidden_size": 32}
    config |= {"expand_token_id": EXPAND, "eos_token_id": DELETE, "mask_token_id": MASK, "pad_token_id": PAD}
    case = dataclasses.replace(dreamon.CASE, config=config)
    model = case.load(case.write(folder)).float().train()
    learned = build_objective(objective, MASK, config=model.config, **settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    ids = torch.tensor([[*TEXT, *[PAD] * 5]]).expand(16, -1)
    for step in range(steps):
        noisy = learned.noise(ids, Uniforms.keyed(0, step, range(16), 16), attention_mask=ids != PAD)
        loss = (learned.loss_sum(noisy.logits(model), noisy) / noisy.normaliser).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


def filled(model: Any, start: int, stop: int, masks: int) -> list[int]:
    """What becomes of masks in place of TEXT[start:stop]."""
    row = torch.tensor([[*TEXT[:start], *[MASK] * masks, *TEXT[stop:]]])
    output = model.generate(row, infill=True, gen_length=8, temperature=0.0, return_dict_in_generate=True)
    return output.sequences[0, : output.row_ends[0]].tolist()


@pytest.mark.slow
def test_training_teaches_the_model_to_choose_a_length(tmp_path: Path) -> None:
    """Of too few and too many masks the text becomes what it was, which Dream's objective does not teach."""
    spans = [(4, 7, 1), (4, 7, 2), (4, 7, 3), (4, 7, 5), (6, 7, 3)]
    model = trained(tmp_path / "dreamon", "dreamon", 300, merge_probability=0.7, max_deletions=4)
    assert [filled(model, *span) for span in spans] == [TEXT] * len(spans)
    other = trained(tmp_path / "shifted", "shifted", 150)
    right = [filled(other, *span) == TEXT for span in spans]
    assert right == [masks == stop - start for start, stop, masks in spans]

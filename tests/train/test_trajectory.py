"""Trajectory distillation: states and losses of small recorded trajectories by hand, rows of files, and runs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from transformers import PreTrainedTokenizerFast

from dlm_bridge.data.conversations import ConversationSettings, load_conversation_blocks
from dlm_bridge.errors import DlmBridgeError, SettingError
from dlm_bridge.objectives.base import Objective
from dlm_bridge.objectives.batches import IGNORE_INDEX, NoisyBatch
from dlm_bridge.objectives.noise import Uniforms
from dlm_bridge.objectives.registry import build_objective
from tests.data.chats import conversation, write_rows
from tests.refusals import refused
from tests.train.conftest import Run

MASK, VOCAB = 11, 12
CONFIG = SimpleNamespace(block_size=4)
# A prompt of two tokens, eight of the answer, two of padding. Steps 3, 4, 7, 9 and 12 committed tokens.
TOKENS = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 0, 0]
STEPS = [-1, -1, 4, 3, 4, 7, 9, 12, 9, 12, -1, -1]


def _noise(objective: Objective, level: float, drawn: float) -> NoisyBatch:
    tokens, steps = torch.tensor([TOKENS]), torch.tensor([STEPS])
    length = len(TOKENS)
    uniforms = Uniforms(
        level=torch.tensor([level]),
        token=torch.full((1, length), drawn),
        cut=torch.ones(1),
        cut_length=torch.zeros(1),
        block=torch.full((1, length), level),
    )
    labels = torch.where(steps >= 0, tokens, IGNORE_INDEX)
    real = torch.arange(length)[None] < 10
    return objective.noise(tokens, uniforms, labels, real, commit_steps=steps)


@pytest.mark.parametrize(
    ("level", "drawn", "settings", "committed", "predicted"),
    [
        (0.99, 0.99, {}, [], [3, 4, 7, 9, 12]),  # nothing is committed, all five steps at once
        (0.99, 0.0, {}, [], [3]),  # the first step alone
        (0.45, 0.5, {}, [3, 4], [7, 9]),  # the last three steps are masked, two of them asked for
        (0.0, 0.7, {}, [3, 4, 7, 9], [12]),
        (0.45, 0.99, {"trajectory_steps": 1}, [3, 4], [7]),
        (0.1, 0.0, {"trajectory_steps": 4}, [3, 4, 7, 9], [12]),
        (0.99, 0.0, {"noise_range": (0.0, 0.5)}, [3, 4], [7]),
        (0.0, 0.99, {"noise_range": (0.5, 0.5)}, [3, 4], [7, 9, 12]),
    ],
)
@pytest.mark.parametrize("name", ["trajectory", "trajectory_shifted"])
def test_the_masks_are_what_the_trajectory_has_not_committed(
    name: str, level: float, drawn: float, settings: dict[str, Any], committed: list[int], predicted: list[int]
) -> None:
    noisy = _noise(build_objective(name, MASK, **settings), level, drawn)
    visible = [token if step in (-1, *committed) else MASK for token, step in zip(TOKENS, STEPS, strict=True)]
    assert noisy.input_ids[0].tolist() == visible
    places = [place for place, step in enumerate(STEPS) if step in predicted]
    assert noisy.targets.tolist() == [TOKENS[place] for place in places]
    shift = name == "trajectory_shifted"
    assert noisy.mask[0].nonzero()[:, 0].tolist() == [place - shift for place in places]
    assert noisy.weights.tolist() == [1.0] * len(places)
    assert noisy.normaliser.tolist() == [len(places)]


@pytest.mark.parametrize(
    ("level", "block", "committed", "places"),
    [
        (0.99, 4, [], [2, 3, 4, 5]),  # the first block of the answer
        (0.99, 6, [], [2, 3, 4, 5, 6, 7]),
        (0.5, 4, [3, 4], [5]),  # what is left of it
        (0.3, 4, [3, 4, 7], [6, 7, 8, 9]),
    ],
)
def test_the_masks_of_the_first_open_block_are_d3llms(
    level: float, block: int, committed: list[int], places: list[int]
) -> None:
    """Everything behind the block is masked without a loss (hao-ai-lab/d3LLM e5bfcac)."""
    noisy = _noise(build_objective("trajectory", MASK, trajectory_block=block), level, 0.0)
    visible = [token if step in (-1, *committed) else MASK for token, step in zip(TOKENS, STEPS, strict=True)]
    assert noisy.input_ids[0].tolist() == visible
    assert noisy.mask[0].nonzero()[:, 0].tolist() == places


@pytest.mark.parametrize(
    ("level", "block", "masked", "places"),
    [
        (0.5, None, [2, 3, 4], [2, 3, 4]),  # what the first two of five steps have committed
        (0.5, 4, [2, 3, 4, 6, 7, 8, 9], [2, 3, 4]),  # of the block; behind it the state stays
        (0.99, 4, [2, 3, 4, 5, 6, 7, 8, 9], [2, 3, 4, 5]),  # nothing is committed: no complement
    ],
)
def test_the_complement_masks_what_a_state_has_committed(
    level: float, block: int | None, masked: list[int], places: list[int]
) -> None:
    objective = build_objective("trajectory", MASK, trajectory_block=block, trajectory_complement=1.0)
    noisy = _noise(objective, level, 0.5)
    assert (noisy.input_ids[0] == MASK).nonzero()[:, 0].tolist() == masked
    assert noisy.mask[0].nonzero()[:, 0].tolist() == places
    rare = build_objective("trajectory", MASK, trajectory_block=block, trajectory_complement=0.4)
    plain = build_objective("trajectory", MASK, trajectory_block=block)
    assert torch.equal(_noise(rare, level, 0.5).input_ids, _noise(plain, level, 0.5).input_ids)


def test_each_block_of_a_block_model_has_its_own_trajectory() -> None:
    """Blocks of 4 from the row's first token: places 0 to 3, 4 to 7, 8 and 9."""
    noisy = _noise(build_objective("trajectory_block", MASK, config=CONFIG), 0.7, 0.99)
    # Of two steps (3, 4) both are left; of four (4, 7, 9, 12) the last three; of two (9, 12) both.
    assert noisy.input_ids[0].tolist() == [1, 2, MASK, MASK, 5, MASK, MASK, MASK, MASK, MASK, 0, 0, *TOKENS]
    assert noisy.mask[0].nonzero()[:, 0].tolist() == [2, 3, 5, 6, 7, 8, 9]
    first = _noise(build_objective("trajectory_block", MASK, config=CONFIG, trajectory_steps=1), 0.7, 0.0)
    assert first.mask[0].nonzero()[:, 0].tolist() == [3, 5, 8]
    with pytest.raises(DlmBridgeError, match=r"trajectory.block"):
        build_objective("trajectory_block", MASK, config=CONFIG, trajectory_block=4)


def test_the_loss_is_a_mean_and_states_are_uniform() -> None:
    """dFactory's formula: the cross-entropy of the tokens between two states, over all pairs of states alike."""
    objective = build_objective("trajectory", MASK)
    rows = 4000
    uniforms = Uniforms.keyed(0, 1, range(rows), len(TOKENS))
    tokens, steps = (torch.tensor([values]).repeat(rows, 1) for values in (TOKENS, STEPS))
    noisy = objective.noise(tokens, uniforms, torch.where(steps >= 0, tokens, IGNORE_INDEX), commit_steps=steps)
    masks = (noisy.input_ids == MASK).sum(dim=1)
    counts = torch.bincount(masks, minlength=9)
    assert counts.nonzero()[:, 0].tolist() == [2, 4, 5, 7, 8]  # of the five states that have masks
    assert counts[counts > 0].min() > 0.9 * rows / 5
    logits = torch.randn(len(noisy.targets), VOCAB, generator=torch.Generator().manual_seed(0))
    loss = objective.loss_sum(logits, noisy) / noisy.normaliser
    assert loss.item() == pytest.approx(F.cross_entropy(logits, noisy.targets).item(), rel=1e-5)


def test_an_objective_without_trajectories_is_refused_its_rows() -> None:
    with pytest.raises(DlmBridgeError, match=r"commit.steps"):
        build_objective("trajectory", MASK).noise(torch.tensor([TOKENS]), Uniforms.keyed(0, 1, [0], len(TOKENS)))
    with pytest.raises(DlmBridgeError, match=r"trajectory.steps"):
        build_objective("masked", MASK, trajectory_steps=2)


# ------------------------------------------------------------------------------------------------- rows of files


def _row(prompt: list[int], answer: list[int], steps: list[int]) -> dict[str, Any]:
    return {"prompt": "p", "text": "t", "prompt_token_ids": prompt, "token_ids": answer, "commit_steps": steps}


ROWS = [_row([5, 6], [7, 8, 9], [2, 1, 2]), _row([5], [9, 9, 8, 7, 0], [1, 1, 3, 2, 3]), _row([], [7], [1])]


@pytest.mark.parametrize("padding", ["none", "block", "row"])
def test_rows_have_the_steps_of_their_tokens(tokenizer: PreTrainedTokenizerFast, tmp_path: Path, padding: Any) -> None:
    """What fills a block or a row is part of the last token's step."""
    file = write_rows(tmp_path / "rows.jsonl", ROWS)
    settings = ConversationSettings(8, None, eos_padding=padding, block_size=4, trajectories=True)
    rows = load_conversation_blocks([file], tokenizer, settings).rows(range(3))
    assert rows.commit_steps is not None
    filled = {"none": [5, 6, 1], "block": [8, 8, 4], "row": [8, 8, 8]}[padding]
    for number, row in enumerate(ROWS):
        ids = [*row["prompt_token_ids"], *row["token_ids"]]
        steps = [*[-1] * len(row["prompt_token_ids"]), *row["commit_steps"]]
        steps += [steps[-1]] * (filled[number] - len(ids))
        assert rows.input_ids[number].tolist() == [*ids, *[tokenizer.eos_token_id] * (8 - len(ids))]
        assert rows.commit_steps[number].tolist() == [*steps, *[-1] * (8 - len(steps))]


def test_packed_and_cut_rows_keep_their_steps(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    file = write_rows(tmp_path / "rows.jsonl", ROWS)
    settings = ConversationSettings(5, None, packing=True, truncate=True, trajectories=True)
    rows = load_conversation_blocks([file], tokenizer, settings).rows(range(3))
    assert rows.commit_steps is not None
    assert sorted(rows.commit_steps.tolist()) == [[-1, -1, 2, 1, 2], [-1, 1, 1, 3, 2], [1, -1, -1, -1, -1]]


def test_recorded_rows_are_answers_for_other_objectives(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    file = write_rows(tmp_path / "rows.jsonl", [*ROWS, {"prompt": "def f", "completion": "(x)"}])
    rows = load_conversation_blocks([file], tokenizer, ConversationSettings(16, None)).rows(range(4))
    assert rows.commit_steps is None
    assert rows.labels is not None
    assert rows.labels[0, :6].tolist() == [IGNORE_INDEX, IGNORE_INDEX, 7, 8, 9, IGNORE_INDEX]


@pytest.mark.parametrize(
    ("row", "named"),
    [
        (_row([5], [7, 8], [1]), "'commit_steps'.*'token_ids'"),
        (_row([5], [7, 8], [1, -1]), "'commit_steps'"),
        (_row([5], [7, "a"], [1, 1]), "'token_ids'"),  # type: ignore[list-item]
        ({"token_ids": [7], "commit_steps": [1]}, "'prompt_token_ids'"),
        ({"prompt_token_ids": [7], "commit_steps": [1]}, "'token_ids'"),
        (_row([5], [], []), "answer"),
        (_row([5], [VOCAB], [1]), f"token {VOCAB}"),
        (_row([5], [MASK], [1]), f"id {MASK}"),
        (_row([5], [7], True), "'commit_steps'"),  # type: ignore[arg-type]
        ({"prompt": "p", "completion": "c"}, "no 'commit_steps'"),
        ({"prompt": "p", "token_ids": [7], "prompt_token_ids": [5]}, "no 'commit_steps'"),
        (conversation(1), "no 'commit_steps'"),
    ],
)
def test_bad_rows_are_named(tokenizer: PreTrainedTokenizerFast, tmp_path: Path, row: Any, named: str) -> None:
    file = write_rows(tmp_path / "rows.jsonl", [ROWS[0], row])
    settings = ConversationSettings(16, MASK, trajectories=True, vocabulary_size=VOCAB)
    with pytest.raises(DlmBridgeError, match=rf"rows\.jsonl.*2: .*{named}") as caught:
        load_conversation_blocks([file], tokenizer, settings)
    assert "\n" not in str(caught.value)


# ------------------------------------------------------------------------------------------------- runs


def test_a_run_trains_on_them_however_its_batch_is_cut(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, run: Run
) -> None:
    rows = [_row([20 + n], [30 + n, 31, 32 + n, 33], [1 + n % 2, 2, 1, 3]) for n in range(8)]
    file = write_rows(tmp_path / "rows.jsonl", rows)
    options = {
        "task": "sft", "data": [str(file)], "objective": "trajectory", "seq_length": 8, "eval_interval": 0,
        "global_batch_size": 8, "steps": 3, "warmup_steps": 0, "save_interval": 0, "split": "100,0,0",
    }  # fmt: skip
    whole = run(tmp_path / "whole", **options)
    cut = run(tmp_path / "cut", micro_batch_size=2, **options)
    for key in ("loss", "grad_norm"):
        assert [row[key] for row in cut] == pytest.approx([row[key] for row in whole], rel=1e-4)
    with refused(SettingError, "objective", "trajectory"):
        run(tmp_path / "pretrained", objective="trajectory", steps=1)

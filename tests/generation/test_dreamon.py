"""DreamOn's sampler: masks that become tokens, two masks or nothing, in rows that grow and shrink."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dlm_bridge.errors import RowError, SettingError
from dlm_bridge.generation import generate
from dlm_bridge.generation.engine import SamplingEngine
from dlm_bridge.generation.offline import write_texts
from dlm_bridge.generation.request import Ended, Extended, Request
from tests.generation import published_samplers as published
from tests.generation.published_samplers import bidirectional
from tests.generation.standin import MASK, StandIn, family
from tests.generation.test_callbacks import Watcher
from tests.refusals import refused

EXPAND, DELETE, PAD = 5, 17, 40
TOKENS = {"expand_token_id": EXPAND, "delete_token_id": DELETE, "pad_token_id": PAD, "eos_token_id": DELETE}
MOST = 9
# With the text's end behind some masks, several spans, nothing behind, nothing before, and masks alone.
ROWS = (
    [1, 8, MASK, MASK, 30, 2, DELETE],
    [MASK, MASK, MASK, 12, 3],
    [7, 9, 20, 33, MASK, 21, MASK, MASK, 6],
    [3, 4, MASK],
    [MASK, MASK],
)


def build(seed: int, boost: float = 2.0) -> StandIn:
    model = StandIn(family(name="dreamon", shift=True, algorithm="dreamon"), seed=seed)
    model.head[:, [EXPAND, DELETE]] *= boost
    return model


def padded(rows: Any) -> dict[str, torch.Tensor]:
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + list(row) for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return {"input_ids": ids, "attention_mask": mask}


def texts(output: Any, rows: Any) -> list[list[int]]:
    width = max(map(len, rows))
    lines = zip(output.sequences.tolist(), output.row_ends.tolist(), rows, strict=True)
    found = []
    for line, end, row in lines:
        found.append(line[width - len(row) : end])
        assert set(line[end:]) <= {PAD}
    assert output.sequences.shape[1] == int(output.row_ends.max())
    return found


def fill(model: Any, rows: Any = ROWS, **arguments: Any) -> Any:
    arguments = {"temperature": 0.0, "gen_length": MOST, "infill": True, **TOKENS, **arguments}
    return generate(model, **padded(rows), return_dict_in_generate=True, **arguments)


@pytest.mark.parametrize("alg", ["entropy", "maskgit_plus", "topk_margin"])
@pytest.mark.parametrize(("broadcast", "budget", "count"), [(False, None, 1), (True, None, 1), (False, 2, 3)])
def test_every_row_equals_the_published_steps(alg: str, broadcast: bool, budget: int | None, count: int) -> None:
    lengths = set()
    for seed in range(4):
        model = build(seed)
        edits = {"pad_delete_to_right": broadcast, "expand_budget": budget, "number_transfer_tokens": count}
        output = fill(model, alg=alg, **edits)
        wanted = [
            published.dreamon(
                bidirectional(model), row, MOST, MASK, alg=alg, expand=EXPAND, delete=DELETE, broadcast=broadcast,
                budget=budget, count=count,
            )
            for row in ROWS
        ]  # fmt: skip
        assert texts(output, ROWS) == [row for row, _ in wanted]
        assert output.forwards == max(forwards for _, forwards in wanted)
        lengths |= {len(row) - len(given) for (row, _), given in zip(wanted, ROWS, strict=True)}
    assert min(lengths) < 0 < max(lengths)


@pytest.mark.parametrize("masks", [1, 4, 20])
def test_new_tokens_behind_a_prompt_begin_with_a_few_masks(masks: int) -> None:
    prompts = [[1, 8, 30], [2], [9, 9, 4, 31]]
    for seed in (0, 1, 5):
        model = build(seed)
        output = fill(model, prompts, infill=False, number_of_mask=masks)
        for prompt, line in zip(prompts, texts(output, prompts), strict=True):
            row = prompt + [MASK] * min(masks, MOST)
            logits = bidirectional(model)
            assert line == published.dreamon(logits, row, MOST, MASK, alg="entropy", expand=EXPAND, delete=DELETE)[0]


def test_drawn_rows_are_the_same_alone_and_in_a_batch() -> None:
    model = build(3)
    for settings in ({"top_p": 0.9}, {"alg_temp": 0.5, "alg": "maskgit_plus"}):
        settings = {"temperature": 0.8, "seed": 4, **settings}
        together = texts(fill(model, **settings), ROWS)
        for row, line in zip(ROWS, together, strict=True):
            assert texts(fill(model, [row], **settings), [row]) == [line]
    assert texts(fill(model, temperature=0.8, seed=5), ROWS) != together


def test_a_continuous_batch_gives_each_row_its_length() -> None:
    model, prompts = build(1), [[1, 8, 30], [2], [9, 9, 4, 31], [6, 7]]
    settings = {"temperature": 0.0, "gen_length": MOST, **TOKENS}
    expected = texts(fill(model, prompts, infill=False), prompts)
    batch = SamplingEngine(model, settings, max_rows=3, max_length=16)
    for number, prompt in enumerate(prompts):
        batch.submit(Request(number, prompt))
    ended: dict[int, Ended] = {}
    streamed: dict[int, list[int]] = {number: [] for number in range(len(prompts))}
    while not batch.idle:
        for event in batch.step():
            if isinstance(event, Ended):
                ended[event.name] = event
            elif isinstance(event, Extended):
                streamed[event.name] += event.tokens
    for number, (prompt, line) in enumerate(zip(prompts, expected, strict=True)):
        assert list(ended[number].tokens) == streamed[number] == line[len(prompt) :]
        assert ended[number].finish_reason == ("length" if len(line) - len(prompt) == MOST else "stop")
    assert len({len(row.tokens) for row in ended.values()}) > 1


def test_steps_and_streamers_see_where_tokens_move() -> None:
    model, watcher = build(4), Watcher()
    output = fill(model, output_history=True, streamer=watcher)
    assert torch.equal(torch.cat(watcher.runs, dim=1), output.sequences)
    last = output.history[-1]
    assert torch.equal(last.tokens[:, : output.sequences.shape[1]], output.sequences)
    assert not (last.tokens == MASK).any()
    masks = torch.stack([(step.tokens == MASK).sum(dim=1) for step in output.history])
    assert (masks.diff(dim=0) > 0).any()  # an expansion
    assert (masks.diff(dim=0) < 0).any()
    for step in output.history:
        assert not (step.committed & (step.tokens == MASK)).any()
        assert (step.confidence[step.committed] >= 0).all()


class Words:
    """A tokenizer whose text is the token ids."""

    def decode(self, ids: Any, skip_special_tokens: bool = False) -> str:
        return " ".join(map(str, ids))


def test_texts_end_where_their_rows_do() -> None:
    model = build(0)
    model.generation_config = None  # type: ignore[assignment]
    model.generate = lambda *given, **more: generate(model, *given, **more)  # type: ignore[assignment]
    settings = {"temperature": 0.0, "gen_length": MOST, "infill": True, **TOKENS}
    found = write_texts(model, Words(), ROWS, settings)
    lines = texts(fill(model), ROWS)
    assert [list(ids) for ids in found.token_ids] == lines
    given = [sum(token != MASK for token in row) for row in ROWS]
    assert found.counts == tuple(len(line) - count for line, count in zip(lines, given, strict=True))


def test_what_cannot_be_filled_is_refused() -> None:
    model = build(0)
    with refused(RowError, "row 1", "gen_length=2"):
        fill(model, gen_length=2)
    with refused(SettingError, "infill"):
        fill(model, [[1, 2, 3]])
    with refused(SettingError, "expand_token_id", "151667"):
        fill(model, expand_token_id=151667)
    with refused(SettingError, "no_repeat_ngram_size"):
        fill(model, no_repeat_ngram_size=2)
    model.config.max_position_embeddings = 12
    assert fill(model, [[1, 2, 3, MASK]], gen_length=9)  # 3 given tokens and 9
    with refused(RowError, "row 0", "12"):
        fill(model, [[1, 2, 3, MASK]], gen_length=10)

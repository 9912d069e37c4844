"""Continuous batching: each row is what it is alone, whenever it enters and whoever else is there."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from dlm_bridge.generation import generate
from dlm_bridge.generation.batching import (
    ContinuousBatch,
    Event,
    RowCommits,
    RowEnded,
    RowRequest,
    RowTokens,
)
from dlm_bridge.generation.rolling_canvas import RollingCanvas
from tests.generation.test_samplers import CASES, build

WHOLE = ("dream", "diffullama", "rnd1", "uniform", "linear_spec", "wedlm")


def requests(
    count: int, lengths: list[int], vocabulary: int = 40, longest: int = 13, seed: int = 0
) -> list[RowRequest]:
    """Rows of random prompts, each with its seed and one of the lengths."""
    draw = random.Random(0)
    return [
        RowRequest(
            name=f"row {number}",
            prompt=[draw.randrange(4, vocabulary) for _ in range(draw.randint(1, longest))],
            gen_length=draw.choice(lengths),
            seed=draw.randrange(1000),
        )
        for number in range(count)
    ]


def alone(model: Any, row: RowRequest, settings: dict[str, Any]) -> list[int]:
    """The new tokens of `generate` with this row, up to its end."""
    output = generate(
        model,
        torch.tensor([row.prompt]),
        generator=[torch.Generator().manual_seed(row.seed or 0)],
        **settings | {"gen_length": row.gen_length},
    )
    assert isinstance(output, torch.Tensor)
    return output[0, len(row.prompt) :].tolist()


def run(
    batch: ContinuousBatch, rows: list[RowRequest], cancelled: set[Any] = frozenset(), seed: int = 0
) -> dict[Any, list[Event]]:
    """Submit the rows at random boundaries; each row's events."""
    draw, waiting, events = random.Random(seed), list(rows), {row.name: [] for row in rows}
    doomed = set(cancelled)
    for row in waiting[:2]:
        batch.submit(row)
    del waiting[:2]
    while waiting or not batch.idle:
        for event in batch.advance():
            events[event.name].append(event)
        while waiting and (batch.idle or draw.random() < 0.2):
            batch.submit(waiting.pop(0))
        for name in sorted(doomed):
            if draw.random() < 0.15 and batch.cancel(name):
                doomed.discard(name)
                events[name].append(None)  # no event may follow
    return events


def ended(events: list[Event]) -> RowEnded:
    """The end of a row, after a check that what was reported on the way agrees with it."""
    *before, end = events
    assert isinstance(end, RowEnded)
    texts = [event for event in before if isinstance(event, RowTokens)]
    assert [event.first for event in texts] == [sum(len(one.tokens) for one in texts[:n]) for n in range(len(texts))]
    if texts:
        assert tuple(token for event in texts for token in event.tokens) == end.tokens
    canvas: dict[int, int] = {}
    for event in before:
        if isinstance(event, RowCommits):
            canvas.update(zip(event.places, event.tokens, strict=True))
            assert 1 <= event.step <= end.forwards
    if canvas:
        assert tuple(canvas[place] for place in range(len(end.tokens))) == end.tokens
    return end


def check_rows(model: Any, settings: dict[str, Any], rows: list[RowRequest], **options: Any) -> list[RowEnded]:
    """Run the rows in a batch of three, and compare each with `generate`."""
    batch = ContinuousBatch(model, settings, max_rows=3, max_length=40, **options)
    cancelled = {rows[3].name, rows[-2].name}
    events = run(batch, rows, cancelled)
    found = []
    for row in rows:
        if events[row.name][-1] is None:
            continue
        end = ended(events[row.name])
        expected = alone(model, row, settings)
        assert list(end.tokens) == expected[: len(end.tokens)], row
        pad = settings.get("pad_token_id")
        assert all(token == pad for token in expected[len(end.tokens) :])
        assert end.finish_reason == "stop" or len(end.tokens) == row.gen_length
        found.append(end)
    assert batch.idle
    assert batch.rows_running == batch.rows_waiting == 0
    return found


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("name", CASES)
def test_each_row_is_what_it_is_alone(name: str, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    model, settings = build(name)
    settings |= {"temperature": temperature, "eos_token_id": None}
    lengths = [6, 12, 18] if name.startswith(("llada-", "difflm")) or name == "llada" else [8, 12, 20]
    rows = requests(9, lengths)
    entered: list[int] = []
    admit = RollingCanvas.admit

    def counting(self: RollingCanvas, entering: Any) -> None:
        entered.append(len(self.names))
        admit(self, entering)

    monkeypatch.setattr(RollingCanvas, "admit", counting)
    free = check_rows(model, settings, rows)
    assert len(free) >= 7
    if not name.startswith(WHOLE):
        assert any(entered)  # into a running batch
    stopping = sorted({free[0].tokens[len(free[0].tokens) // 2], free[2].tokens[1], free[4].tokens[0]})
    if not name.startswith("rnd1"):  # its end-of-sequence token is part of the canvas
        stopped = check_rows(model, settings | {"eos_token_id": stopping, "pad_token_id": 0}, rows, stream=False)
        assert {end.finish_reason for end in stopped} >= {"stop"}

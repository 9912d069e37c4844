"""Continuous batching: each row is what it is alone, whenever it enters and whoever else is there."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dlm_bridge.generation import batching, commit_rules, generate
from dlm_bridge.generation.batching import (
    ContinuousBatch,
    Event,
    RowCommits,
    RowEnded,
    RowRequest,
    RowTokens,
)
from dlm_bridge.generation.rolling_canvas import RollingCanvas
from tests.families.case import FamilyCase
from tests.generation.test_caches import REORDERED, WITH_BLOCK_CACHE, load_case
from tests.generation.test_families import DIFFUSION
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


def read_with_overlap(flags_A: torch.Tensor, overlap_with: Callable[[], None]) -> list[bool]:
    """`read_flags` as on a GPU: the speculative forward pass is launched first."""
    overlap_with()
    return list(flags_A.tolist())


# One family of each sampler.
CACHED = {case.spec.sampler["algorithm"]: case for case in WITH_BLOCK_CACHE + REORDERED}


@pytest.mark.parametrize("case", CACHED.values(), ids=lambda case: case.id)
def test_rows_enter_beside_cached_blocks(case: FamilyCase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, mask = load_case(case, tmp_path)
    settings: dict[str, Any] = {
        "mask_token_id": mask,
        "pad_token_id": 0,
        "eos_token_id": [5, 9, 21, 33],
        "cache": "block",
    }
    block = 4
    if case.spec.attention_pattern == "block_causal":
        block = model.config.block_size
    elif case.spec.attention_pattern == "bidirectional":
        settings["block_length"] = block
    if case.spec.name == "fast_dllm_v2":
        settings |= {"small_block_size": block // 4, "threshold": 0.3}
    rows = requests(8, [block, 2 * block, 3 * block], longest=2 * block + 3)
    caches = ("block", "dual") if case.spec.name == "fast_dllm_v2" else ("block",)
    for cache in caches:
        for speculative in (False, True):
            with monkeypatch.context() as patch:
                if speculative:
                    patch.setattr(batching, "read_flags", read_with_overlap)
                    patch.setattr(commit_rules, "read_flags", read_with_overlap)
                    rows = [RowRequest(row.name, row.prompt, row.gen_length, row.seed) for row in reversed(rows)]
                check_rows(model, settings | {"temperature": 0.7 * speculative, "cache": cache}, rows)


def test_rows_enter_beside_the_unconditional_ones_of_guidance(tmp_path: Path) -> None:
    case = next(case for case in DIFFUSION if case.spec.name == "a2d_qwen3")
    model, mask = load_case(case, tmp_path)
    settings = {"mask_token_id": mask, "eos_token_id": None, "block_size": 4, "cfg_scale": 0.7, "cache": "block"}
    check_rows(model, settings | {"algorithm": "bd3lm"}, requests(8, [6, 8, 12]))


@pytest.mark.parametrize("cache", ["none", "prefix", "dual"])
def test_rows_enter_a_canvas_that_is_attended_to_as_a_whole(model: Any, cache: str) -> None:
    settings = {"cache": cache, "block_length": 4, "threshold": 0.01, "eos_token_id": list(range(0, 128, 16))}
    ends = check_rows(model, settings | {"pad_token_id": 0}, requests(9, [4, 8, 12]))
    assert {end.finish_reason for end in ends} == {"stop", "length"}

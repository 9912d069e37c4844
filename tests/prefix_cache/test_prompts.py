"""Prefix cache and chunked prompts: texts are the ones without them, and less is computed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from dlm_bridge.errors import SettingError
from dlm_bridge.generation.engine import SamplingEngine
from dlm_bridge.generation.request import Committed, Ended, Request
from dlm_bridge.prefix_cache import pages
from dlm_bridge.prefix_cache.pages import PageTree
from dlm_bridge.prefix_cache.prompts import PromptCache
from tests.families.case import FamilyCase
from tests.generation.test_batching import alone, read_with_overlap, run
from tests.generation.test_caches import WITH_BLOCK_CACHE, load_case
from tests.generation.test_families import DIFFUSION
from tests.refusals import refused

# One family of each sampler.
CACHED = {case.spec.sampler["algorithm"]: case for case in reversed(WITH_BLOCK_CACHE)}
GIB = 2**-10  # a MiB


def load(case: FamilyCase, folder: Path) -> tuple[Any, dict[str, Any]]:
    """A tiny model in fp32, and its settings."""
    model, mask = load_case(case, folder)
    settings: dict[str, Any] = {"mask_token_id": mask, "pad_token_id": 0, "eos_token_id": None, "temperature": 0.0}
    if case.spec.attention_pattern == "bidirectional":
        settings["block_length"] = 8
    if case.spec.name == "fast_dllm_v2":
        settings["small_block_size"] = model.config.block_size // 4
    return model.float(), settings


def draw_tokens(count: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(4, 40) for _ in range(count)]


@contextmanager
def forward_passes(model: Any) -> Iterator[list[int]]:
    """The numbers of tokens of all forward passes."""
    seen: list[int] = []

    def count(module: Any, args: Any, kwargs: Any) -> None:
        seen.append(kwargs["input_ids"].numel())

    hook = model.model.register_forward_pre_hook(count, with_kwargs=True)
    try:
        yield seen
    finally:
        hook.remove()


def sample(engine: SamplingEngine, *rows: Request) -> list[list[int]]:
    """The texts of requests that enter together."""
    for row in rows:
        engine.submit(row)
    texts = {}
    while not engine.idle:
        texts |= {event.name: list(event.tokens) for event in engine.step() if isinstance(event, Ended)}
    return [texts[row.name] for row in rows]


# ---- Pages.


def test_the_least_recently_used_ends_of_texts_are_evicted() -> None:
    tree = PageTree(4)
    a, b, c, d, e = ((number,) for number in range(5))
    assert tree.add("k", [a, b, c]) == (0, [0, 1, 2])
    assert tree.add("k", [a, d]) == (1, [3])
    assert tree.find("k", [a, b, c, e]) == [0, 1, 2]  # d is the oldest
    assert tree.find("other", [a]) == []
    assert tree.add("k", [a, b, e]) == (2, [3])
    assert tree.find("k", [a, d]) == [0]
    assert tree.add("other", [a, b, c, d, e]) == (0, [2, 3, 1, 0])  # the last page has no room
    assert len(tree) == 4
    assert tree.evictions == 5
    assert tree.find("k", [a]) == []
    tree.clear()
    assert tree.find("other", [a]) == []
    assert len(tree.add("k", [a, b, c, d, e])[1]) == 4


# ---- Texts.


@pytest.mark.parametrize(
    ("name", "overlaps"),
    [
        pytest.param(name, overlaps, marks=[pytest.mark.slow] * (overlaps or name not in ("fast_dllm_v2", "nemotron")))
        for name in CACHED
        for overlaps in (False, True)
    ],
)
@pytest.mark.fast("nemotron-*")
def test_texts_are_those_without_a_cache(
    name: str, overlaps: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests with common beginnings enter at random boundaries."""
    model, settings = load(CACHED[name], tmp_path)
    if overlaps:
        monkeypatch.setattr("dlm_bridge.generation.canvas.read_flags", read_with_overlap)
    draw, common = random.Random(1), [draw_tokens(72, 2), draw_tokens(40, 3)]
    rows = [
        Request(number, [*common[number % 2], *draw_tokens(draw.randint(0, 20), number)], draw.choice([8, 16]), number)
        for number in range(8)
    ]
    prompts = PromptCache(model, settings, prefix_cache=GIB, prefill_chunk=24)
    with forward_passes(model) as without:
        run(SamplingEngine(model, settings, max_rows=3, max_length=128), list(rows))
    with forward_passes(model) as passes:
        events = run(SamplingEngine(model, settings, max_rows=3, max_length=128, prefill=prompts), list(rows))
    for row in rows:
        assert list(events[row.name][-1].tokens) == alone(model, row, settings), row.name
    found = prompts.statistics
    assert found.requests == 8
    assert found.prompt_tokens == sum(len(row.prompt) for row in rows)
    assert found.hits >= 3
    assert found.hit_tokens >= 32 * found.hits
    assert 0 < found.bytes <= found.capacity <= 2**20
    assert sum(passes) < sum(without)
    assert not any(hasattr(module, "kv_keys") for module in model.modules())


@pytest.mark.parametrize(
    "name",
    ["fast_dllm_v2", pytest.param("sdar", marks=pytest.mark.slow), pytest.param("nemotron", marks=pytest.mark.slow)],
)
def test_an_answer_is_the_beginning_of_the_next_prompt(name: str, tmp_path: Path) -> None:
    """Of an answer, the blocks are reused whose final keys and values were computed: all but the last one."""
    model, settings = load(CACHED[name], tmp_path)
    prompts = PromptCache(model, settings, prefix_cache=GIB)
    engine = SamplingEngine(model, settings, max_rows=2, max_length=256, prefill=prompts)
    first = Request("first", draw_tokens(40, 1), 64, 0)
    (text,) = sample(engine, first)
    assert prompts.statistics.hits == 0
    second = Request("second", [*first.prompt, *text, *draw_tokens(5, 2)], 16, 0)
    without = SamplingEngine(model, settings, max_rows=2, max_length=256)
    with forward_passes(model) as passes:
        expected = sample(without, second)
    with forward_passes(model) as fewer:
        assert sample(engine, second) == expected
    assert prompts.statistics.hit_tokens == 96  # of 104 tokens, the last block is not final
    assert len(fewer) == len(passes)
    assert sum(passes) - sum(fewer) == 96
    prompts.clear()
    with forward_passes(model) as again:
        assert sample(engine, second) == expected
    assert again == passes


def test_rows_without_a_hit_enter_with_rows_that_have_one(tmp_path: Path) -> None:
    """A row whose prompt is known does not wait in vain for another's: it is not run with that one's columns."""
    model, settings = load(CACHED["sdar"], tmp_path)
    prompts = PromptCache(model, settings, prefix_cache=GIB)
    engine = SamplingEngine(model, settings, max_rows=4, max_length=160, prefill=prompts)
    known = draw_tokens(96, 1)
    sample(engine, Request("known", known, 8, 0))
    rows = [Request(number, [*known, number + 5], 8, number) for number in range(3)]
    rows.insert(1, Request("new", draw_tokens(97, 2), 8, 3))
    expected = [alone(model, row, settings) for row in rows]
    with forward_passes(model) as passes:
        assert sample(engine, *rows) == expected
    assert prompts.statistics.hits == 3
    assert max(passes) == 96  # of the new row alone
    assert sum(passes) < 2 * 96 + 4 * 16 * 8


def test_a_small_cache_evicts(tmp_path: Path) -> None:
    model, settings = load(CACHED["sdar"], tmp_path)
    size = PromptCache(model, settings, prefix_cache=GIB).pool
    assert size is not None
    prompts = PromptCache(model, settings, prefix_cache=3.5 * size.page_bytes / 2**30)
    assert prompts.statistics.capacity == 3 * size.page_bytes
    engine = SamplingEngine(model, settings, max_rows=2, max_length=160, prefill=prompts)
    rows = [Request(number, draw_tokens(70 + number, number % 3), 8, 0) for number in range(6)]
    for row in rows:
        assert sample(engine, row) == [alone(model, row, settings)]
    assert prompts.statistics.evictions > 3
    again = Request("again", rows[-1].prompt, 8, 0)
    assert sample(engine, again) == [alone(model, again, settings)]
    assert prompts.statistics.hits >= 1


def test_a_row_with_nan_is_not_stored(tmp_path: Path) -> None:
    model, settings = load(CACHED["sdar"], tmp_path)
    prompts = PromptCache(model, settings, prefix_cache=GIB)
    engine = SamplingEngine(model, settings, max_rows=2, max_length=160, prefill=prompts)
    bad = 41
    with torch.no_grad():
        model.get_input_embeddings().weight[bad] = torch.nan
    good = Request("good", draw_tokens(64, 1), 16, 0)
    engine.submit(Request("bad", [bad, *draw_tokens(63, 1)], 16, 0))
    assert sample(engine, good) == [alone(model, good, settings)]
    assert prompts.tree is not None
    assert len(prompts.tree) == 2  # of the good row


# ---- Chunks.


@pytest.mark.parametrize(
    "name",
    ["sdar", pytest.param("fast_dllm_v2", marks=pytest.mark.slow), pytest.param("nemotron", marks=pytest.mark.slow)],
)
def test_running_rows_go_on_while_a_long_prompt_enters(name: str, tmp_path: Path) -> None:
    model, settings = load(CACHED[name], tmp_path)
    prompts = PromptCache(model, settings, prefill_chunk=32)
    engine = SamplingEngine(model, settings, max_rows=2, max_length=300, prefill=prompts)
    running, long, short = (
        Request("running", draw_tokens(5, 1), 64, 0),
        Request("long", draw_tokens(211, 2), 8, 0),
        Request("short", draw_tokens(6, 3), 8, 0),
    )
    expected = {row.name: alone(model, row, settings) for row in (running, long, short)}
    engine.submit(running)
    events = engine.step()
    with forward_passes(model) as passes:
        engine.submit(long)
        engine.submit(short)
        while not engine.idle:
            events += engine.step()
    assert max(passes) <= 2 * (32 + 2 * 8)  # the last chunk, in a pass of its own or with blocks of two rows
    assert {event.name: list(event.tokens) for event in events if isinstance(event, Ended)} == expected
    order = [event.name for event in events if isinstance(event, Ended)]
    assert order.index("short") < order.index("long")  # which waits for its chunks only
    first = next(number for number, event in enumerate(events) if event.name == "long")
    assert sum(isinstance(event, Committed) and event.name == "running" for event in events[:first]) >= 211 // 32
    assert prompts.chunked == []


def test_a_chunked_prompt_goes_on_when_no_row_runs(tmp_path: Path) -> None:
    """What is cached of a prompt is used by the next run; that of a cancelled request is dropped."""
    model, settings = load(CACHED["sdar"], tmp_path)
    prompts = PromptCache(model, settings, prefill_chunk=16)
    engine = SamplingEngine(model, settings, max_rows=2, max_length=300, prefill=prompts)
    engine.submit(Request("running", draw_tokens(5, 1), 8, 0))
    engine.step()
    long = Request("long", draw_tokens(200, 2), 8, 0)
    engine.submit(Request("gone", draw_tokens(150, 3), 8, 0))
    engine.submit(long)
    engine.step()
    assert [one.tokens for one in prompts.chunked] == [tuple(draw_tokens(150, 3))]
    assert engine.cancel("gone")
    engine.step()
    assert [one.tokens for one in prompts.chunked] == [tuple(long.prompt)]
    assert engine.cancel("running")
    with forward_passes(model) as passes:
        (event,) = [event for event in _all(engine) if isinstance(event, Ended)]
    assert list(event.tokens) == alone(model, long, settings)
    assert passes[0] < 200
    assert prompts.chunked == []


def _all(engine: SamplingEngine) -> Iterator[Any]:
    while not engine.idle:
        yield from engine.step()


# ---- Refusals.


def test_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, settings = load(CACHED["sdar"], tmp_path)

    def build(size: float = GIB, **more: Any) -> Callable[[], Any]:
        return lambda: PromptCache(model, settings | more, prefix_cache=size)

    monkeypatch.setattr(pages, "free_memory", lambda device: 2**20)
    assert build(GIB)()
    for wrong in (build(1.1 * GIB), build(1e-9), build(cache="none")):
        with refused(SettingError, "prefix_cache"):
            wrong()
    bidirectional = next(case for case in DIFFUSION if case.spec.name == "llada")
    other, mask = load_case(bidirectional, tmp_path / "other")
    with refused(SettingError, "prefix_cache"):
        PromptCache(other, {"mask_token_id": mask}, prefix_cache=GIB)

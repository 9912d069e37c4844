"""Continuous batching: each row is what it is alone, whenever it enters and whoever else is there."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dlm_bridge.errors import RowError, SettingError
from dlm_bridge.generation import batch_size, canvas, generate
from dlm_bridge.generation.canvas import Canvas, HostCopy
from dlm_bridge.generation.engine import SamplingEngine
from dlm_bridge.generation.kv_cache import StaticKVCache
from dlm_bridge.generation.request import Committed, Ended, Event, Extended, Failed, Request
from tests.families.case import FamilyCase
from tests.generation.recorded import stand_in
from tests.generation.test_batches import OperatorCount
from tests.generation.test_caches import REORDERED, WITH_BLOCK_CACHE, load_case
from tests.generation.test_families import DIFFUSION
from tests.generation.test_samplers import CASES, FAST, build
from tests.refusals import refused


def requests(count: int, lengths: list[int], vocabulary: int = 40, longest: int = 13, seed: int = 0) -> list[Request]:
    """Rows of random prompts, each with its seed and one of the lengths."""
    draw = random.Random(0)
    return [
        Request(
            name=f"row {number}",
            prompt=[draw.randrange(4, vocabulary) for _ in range(draw.randint(1, longest))],
            gen_length=draw.choice(lengths),
            seed=draw.randrange(1000),
        )
        for number in range(count)
    ]


def alone(model: Any, row: Request, settings: dict[str, Any]) -> list[int]:
    """The new tokens of `generate` with this row, up to its end."""
    output = generate(
        model,
        torch.tensor([row.prompt]),
        seed=[row.seed or 0],
        **settings | {"gen_length": row.gen_length},
    )
    assert isinstance(output, torch.Tensor)
    return output[0, len(row.prompt) :].tolist()


def run(
    batch: SamplingEngine, rows: list[Request], cancelled: set[Any] = frozenset(), seed: int = 0
) -> dict[Any, list[Event]]:
    """Submit the rows at random boundaries; each row's events."""
    draw, waiting, events = random.Random(seed), list(rows), {row.name: [] for row in rows}
    doomed = set(cancelled)
    for row in waiting[:2]:
        batch.submit(row)
    del waiting[:2]
    while waiting or not batch.idle:
        for event in batch.step():
            events[event.name].append(event)
        while waiting and (batch.idle or draw.random() < 0.5):
            batch.submit(waiting.pop(0))
        for name in sorted(doomed):
            if draw.random() < 0.15 and batch.cancel(name):
                doomed.discard(name)
                events[name].append(None)  # no event may follow
    return events


def ended(events: list[Event]) -> Ended:
    """The end of a row, after a check that what was reported on the way agrees with it."""
    *before, end = events
    assert isinstance(end, Ended)
    texts = [event for event in before if isinstance(event, Extended)]
    assert [event.first for event in texts] == [sum(len(one.tokens) for one in texts[:n]) for n in range(len(texts))]
    if texts:
        assert tuple(token for event in texts for token in event.tokens) == end.tokens
    canvas: dict[int, int] = {}
    for event in before:
        if isinstance(event, Committed):
            canvas.update(zip(event.positions, event.tokens, strict=True))
            assert 1 <= event.forwards <= end.forwards
    if canvas:
        assert tuple(canvas[place] for place in range(len(end.tokens))) == end.tokens
    return end


def check_rows(model: Any, settings: dict[str, Any], rows: list[Request], **options: Any) -> list[Ended]:
    """Run the rows in a batch of three, and compare each with `generate`."""
    batch = SamplingEngine(model, settings, max_rows=3, max_length=40, **options)
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
    assert batch.running == batch.waiting == 0
    return found


@pytest.mark.parametrize(
    ("name", "temperature"),
    [  # greedy and drawn by turns; make test-slow has the others
        pytest.param(name, temperature, marks=[pytest.mark.slow] * (bool(temperature) == bool(number % 2)))
        for number, name in enumerate(CASES)
        for temperature in (0.0, 0.8)
    ],
)
@pytest.mark.fast("dream-ranked-*", "dreamon-*", "idlm-*", "llada-0.8", "llada2.1-*", "multi_block-*", "sdar-0.8")
def test_each_row_is_what_it_is_alone(name: str, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    model, settings = build(name)
    for weights in ("embed", "query", "value", "head"):
        setattr(model, weights, getattr(model, weights).float())
    settings |= {"temperature": temperature, "eos_token_id": None}
    lengths = [6, 12, 18] if name.startswith(("llada-", "difflm")) or name == "llada" else [8, 12, 20]
    rows = requests(9, lengths)
    entered: list[bool] = []  # whether some other row was in the middle of its block
    admit = Canvas.admit

    def watching(self: Canvas, entering: Any, cached: Any) -> int:
        if entering:
            entered.append(any(self.steps(self.inside)))
        return admit(self, entering, cached)

    monkeypatch.setattr(Canvas, "admit", watching)
    free = check_rows(model, settings, rows)
    assert len(free) >= 7
    assert any(entered)
    stopping = sorted({free[0].tokens[len(free[0].tokens) // 2], free[2].tokens[1], free[4].tokens[0]})
    if not name.startswith("rnd1"):  # its end-of-sequence token is part of the canvas
        stopped = check_rows(model, settings | {"eos_token_id": stopping, "pad_token_id": 0}, rows, stream=False)
        assert {end.finish_reason for end in stopped} >= {"stop"}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.fast(*FAST)
def test_a_waiting_row_takes_part_in_the_next_step(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, settings = build(name)
    settings |= {"temperature": 0.0, "eos_token_id": None}
    sizes: list[int] = []
    forward = type(model).forward

    def counting(self: Any, **inputs: Any) -> Any:
        rows = len(inputs["inputs_embeds" if "inputs_embeds" in inputs else "input_ids"])
        sizes.append(rows // (2 if settings.get("cfg_scale") else 1))
        return forward(self, **inputs)

    first, second = requests(2, [24])
    expected = [alone(model, row, settings) for row in (first, second)]
    monkeypatch.setattr(type(model), "forward", counting)
    batch = SamplingEngine(model, settings, max_rows=2, max_length=40)
    batch.submit(first)
    events = batch.step()
    assert set(sizes) == {1}
    batch.submit(second)
    events += batch.step()
    assert sizes[-1] == 2
    while not batch.idle:
        events += batch.step()
    for row, tokens in zip((first, second), expected, strict=True):
        assert list(ended([event for event in events if event.name == row.name]).tokens) == tokens


def read_with_overlap(flags_A: torch.Tensor, overlap_with: Callable[[], None]) -> list[bool]:
    """`read_flags` as on a GPU: the speculative forward pass is launched first."""
    overlap_with()
    return list(flags_A.tolist())


# One family of each sampler.
CACHED = {case.spec.sampler["algorithm"]: case for case in reversed(WITH_BLOCK_CACHE + REORDERED)}


@pytest.mark.slow
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
                    patch.setattr(canvas, "read_flags", read_with_overlap)
                    rows = [Request(row.name, row.prompt, row.gen_length, row.seed) for row in reversed(rows)]
                check_rows(model, settings | {"temperature": 0.7 * speculative, "cache": cache}, rows)


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("dream", {"alg": "entropy", "steps": 8, "cache": "prefix"}),
        ("dream", {"alg": "origin", "steps": 8, "cache": "dual"}),
        ("rnd1", {"num_diffusion_steps": 6, "cache": "prefix", "eos_token_id": 5}),
        ("rnd1", {"num_diffusion_steps": 6, "cache": "dual", "eos_token_id": 5}),
        pytest.param(
            *("llada", {"algorithm": "multi_block", "block_length": 4, "threshold": 1.0, "cache": "dual"}),
            marks=pytest.mark.extension("extra_samplers"),
        ),
        pytest.param(
            *("sdar", {"algorithm": "multi_bd", "buffer_size": 2, "threshold": 0.2, "cache": "block"}),
            marks=pytest.mark.extension("extra_samplers"),
        ),
        ("llada", {"algorithm": "uniform", "steps": 6, "cache": "prefix"}),
        ("wedlm", {"wedlm_window_size": 5, "wedlm_entropy_threshold": 2.0, "cache": "block"}),
        ("idlm", {"gen_block_size": 4, "top_k": 8, "cache": "block"}),
        ("idlm", {"gen_block_size": 4, "top_k": 8, "cache": "block", "mask_tails": True}),
        pytest.param(
            *("nemotron_labs_diffusion", {"algorithm": "linear_spec", "block_length": 5, "cache": "block"}),
            marks=pytest.mark.extension("extra_samplers"),
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else value["cache"],
)
@pytest.mark.parametrize("execution", ["eager", pytest.param("compiled", marks=pytest.mark.slow)])
@pytest.mark.fast(
    "eager-dream-dual", "eager-llada-prefix", "eager-sdar-block", "eager-wedlm-block", "eager-idlm-block1"
)
def test_rows_enter_beside_rows_that_are_cached_in_columns_of_their_own(
    family: str, settings: dict[str, Any], execution: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if execution == "compiled":
        stand_in(monkeypatch)
    model, mask = load_case(next(case for case in DIFFUSION if case.spec.name == family), tmp_path)
    settings = {"mask_token_id": mask, "pad_token_id": 0, "eos_token_id": [5, 9, 21, 33], **settings}
    rows = requests(8, [8, 12, 20])
    for temperature in (0.0, 0.7):
        check_rows(model, settings | {"temperature": temperature, "execution": execution}, rows)


@pytest.mark.extension("extra_samplers")
def test_rows_enter_beside_the_unconditional_ones_of_guidance(tmp_path: Path) -> None:
    case = next(case for case in DIFFUSION if case.spec.name == "a2d_qwen3")
    model, mask = load_case(case, tmp_path)
    settings = {"mask_token_id": mask, "eos_token_id": None, "block_size": 4, "cfg_scale": 0.7, "cache": "block"}
    check_rows(model, settings | {"algorithm": "bd3lm"}, requests(8, [6, 8, 12]))


@pytest.mark.parametrize("speculative", [False, True])
@pytest.mark.fast("True")
def test_shared_columns_move_also_where_no_row_waits(
    speculative: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that enter late, one after the other, would reach beyond the columns of the KV cache."""
    model, mask = load_case(CACHED["sdar"], tmp_path)
    if speculative:
        monkeypatch.setattr(canvas, "read_flags", read_with_overlap)
    settings = {"mask_token_id": mask, "pad_token_id": 0, "eos_token_id": None, "temperature": 0.7, "cache": "block"}
    block = model.config.block_size
    lengths = [block * blocks for blocks in (4, 10, 10, 10)]
    rows = [Request(number, [5, 6, 7], length, seed=number) for number, length in enumerate(lengths)]
    batch = SamplingEngine(model, settings, max_rows=2, max_length=3 + 10 * block, stream=False)
    for row in rows:
        batch.submit(row)
    found: dict[Any, Event] = {}
    while not batch.idle:
        found |= {event.name: event for event in batch.step()}
    for row in rows:
        assert list(ended([found[row.name]]).tokens) == alone(model, row, settings)


@pytest.mark.parametrize("cache", ["none", "prefix", "dual"])
def test_rows_enter_a_canvas_that_is_attended_to_as_a_whole(model: Any, cache: str) -> None:
    settings = {"cache": cache, "block_length": 4, "threshold": 0.01, "eos_token_id": list(range(0, 128, 16))}
    ends = check_rows(model, settings | {"pad_token_id": 0}, requests(9, [4, 8, 12]))
    assert {end.finish_reason for end in ends} == {"stop", "length"}


def test_batches_of_one_model_take_turns() -> None:
    """The one that waits keeps the other from admitting rows, and then has its turn."""
    model, settings = build("llada2")
    settings |= {"temperature": 0.0, "eos_token_id": None}
    first = SamplingEngine(model, settings, max_rows=1, max_length=40)
    second = SamplingEngine(model, settings | {"threshold": 0.9}, max_rows=1, max_length=40)
    rows = requests(4, [8])
    for batch, own in ((first, rows[:3]), (second, rows[3:])):
        for row in own:
            batch.submit(row)
    order = []
    first.step()
    assert second.step() == []
    while not (first.idle and second.idle):
        for batch in (first, second):
            for event in batch.step():
                if isinstance(event, Ended):
                    order.append(event.name)
                    own = settings if batch is first else settings | {"threshold": 0.9}
                    row = next(row for row in rows if row.name == event.name)
                    assert list(event.tokens) == alone(model, row, own)
    assert order == ["row 0", "row 3", "row 1", "row 2"]


def test_a_batch_that_is_closed_or_forgotten_gives_its_turn_away() -> None:
    model, settings = build("sdar")
    rows = requests(3, [8])
    first, second, third = (SamplingEngine(model, settings, max_rows=1, max_length=40) for _ in rows)
    for batch, row in zip((first, second, third), rows, strict=True):
        batch.submit(row)
        batch.step()
    assert (first.running, second.running, third.running) == (1, 0, 0)
    del second, batch
    first.close()
    assert first.idle
    third.step()
    assert third.running == 1


@pytest.mark.extension("extra_samplers")
def test_an_error_of_a_step_fails_the_running_rows_alone() -> None:
    model, settings = build("llada")
    outside = [10**6]
    settings |= {"prefix_allowed_tokens_fn": lambda name, tokens: outside if name == "row 1" else [5, 6]}
    batch = SamplingEngine(model, settings, max_rows=2, max_length=40)
    for row in requests(3, [6]):
        batch.submit(row)
    ends = {}
    while not batch.idle:
        ends |= {event.name: type(event) for event in batch.step() if isinstance(event, (Ended, Failed))}
    assert ends == {"row 0": Failed, "row 1": Failed, "row 2": Ended}


@pytest.mark.parametrize(("setting", "value"), [("cache", "prefix"), ("execution", "graph")])
def test_rows_that_the_model_cannot_be_prepared_for_fail(setting: str, value: str) -> None:
    batch = SamplingEngine(build("llada2")[0], {setting: value}, max_rows=2, max_length=40)
    for row in (rows := requests(3, [8])):
        batch.submit(row)
    events = [event for _ in rows for event in batch.step()]
    assert [event.name for event in events] == [row.name for row in rows]
    assert all(isinstance(event, Failed) and event.error.field == setting for event in events)
    assert batch.idle


@pytest.mark.extension("extra_samplers")
def test_what_a_batch_cannot_run_is_refused() -> None:
    model, settings = build("llada")
    with refused(SettingError, "max_length"):
        SamplingEngine(model, settings, max_rows=1)
    for name, value in (("span_lengths", [2]), ("num_return_sequences", 2), ("nonsense", 1)):
        with refused(SettingError, name):
            SamplingEngine(model, settings | {name: value}, max_rows=1, max_length=40)
    batch = SamplingEngine(model, settings, max_rows=1, max_length=20)
    batch.submit(Request("a", [5, 6]))
    for request, words in (
        (Request("a", [5]), "name"),
        (Request("b", [5] * 9), "max_length=20"),
        (Request("c", [5, 999]), "999"),
    ):
        with refused(RowError, request.name, words):
            batch.submit(request)
    with refused(SettingError, "gen_length", "7"):
        batch.submit(Request("d", [5], gen_length=7))
    assert batch.waiting == 1
    assert batch.cancel("a")
    assert not batch.cancel("a")
    assert batch.idle
    speculative, settings = build("linear_spec")
    with refused(RowError, "e"):
        SamplingEngine(speculative, settings, max_rows=1, max_length=40).submit(Request("e", []))


@pytest.mark.parametrize(
    "name", ["dream-entropy", "wedlm", "linear_spec", "idlm", "llada", "sdar", "uniform", "multi_block", "dreamon"]
)
def test_a_cancelled_row_takes_part_in_no_further_step(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, settings = build(name)
    settings |= {"temperature": 0.0, "eos_token_id": None}
    batches: list[int] = []
    forward = type(model).forward

    def counting(self: Any, input_ids: torch.Tensor, **more: Any) -> Any:
        batches.append(len(input_ids))
        return forward(self, input_ids, **more)

    rows = requests(2, [12])
    expected = alone(model, rows[1], settings)
    monkeypatch.setattr(type(model), "forward", counting)
    batch = SamplingEngine(model, settings, max_rows=2, max_length=40)
    for row in rows:
        batch.submit(row)
    events = [event for event in batch.step() if event.name == "row 1"]
    assert batches[-1] == 2
    assert batch.cancel("row 0")
    seen = len(batches)
    while not batch.idle:
        events += batch.step()
    assert set(batches[seen:]) == {1}
    assert {event.name for event in events} == {"row 1"}
    assert list(ended(events).tokens) == expected


@pytest.mark.parametrize("cache", ["none", "dual"])
@pytest.mark.fast("dual")
def test_a_steps_operators_do_not_grow_with_the_rows(model: Any, cache: str) -> None:
    def operators(rows: int, gen_length: int) -> int:
        settings = {"gen_length": gen_length, "block_length": 16, "eos_token_id": None, "cache": cache}
        batch = SamplingEngine(model, settings, max_rows=rows, max_length=64, stream=False)
        for row in requests(rows, [gen_length]):
            batch.submit(row)
        with OperatorCount() as counted:
            while not batch.idle:
                batch.step()
        return counted.count

    few, many = ([operators(rows, length) for length in (16, 32)] for rows in (3, 9))
    assert many[1] - many[0] == few[1] - few[0]


def test_the_batch_size_follows_from_free_memory(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"gen_length": 32, "block_length": 8, "cache": "dual"}
    buffers = StaticKVCache.allocate(model, rows=1, width=56 + 4 * 8)  # 20 + 32 in whole blocks
    found = []
    for free in (1, 2**24, 2**26, 2**40):
        monkeypatch.setattr(batch_size, "free_memory", lambda device, free=free: free)
        plan = batch_size.plan_batch(model, [7, 20] * 400, settings, diffusion=True)
        assert plan.length == 52
        assert plan.cache == sum(one.nbytes for pair in buffers._buffers for one in pair)
        taken = plan.rows * (plan.cache + plan.activations + plan.logits)
        assert taken <= free or plan.rows == 1
        found.append(plan.rows)
    assert found[0] == 1
    assert found[1] < found[2] < found[3] == 800
    guided = batch_size.plan_batch(model, [20], settings | {"cfg_scale": 1.0}, diffusion=True)
    assert (guided.cache, guided.logits) == (2 * plan.cache, 2 * plan.logits)
    uncached = batch_size.plan_batch(model, [20], settings | {"cache": "none"}, diffusion=True)
    assert uncached.cache == 0


def steps_of_commits(events: list[Event], length: int) -> list[int]:
    steps = [0] * length
    for event in events:
        if isinstance(event, Committed):
            for place in event.positions:
                steps[place] = event.forwards
    return steps


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("name", ["llada-threshold", "llada2.1", "dreamon", "idlm"])
@pytest.mark.fast("llada2.1-True", "idlm-True", "dreamon-True", "llada-threshold-False")
def test_a_recorded_row_says_what_a_streamed_one_told(name: str, late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where changes arrive on the host a step later, as they may on a GPU, and of tokens behind the end."""
    model, settings = build(name)
    settings |= {"eos_token_id": [5, 9], "pad_token_id": 0, "gen_length": 12}
    rows = requests(5, [12])

    def run_all(**options: Any) -> dict[Any, list[Event]]:
        batch = SamplingEngine(model, settings, max_rows=3, max_length=40, **options)
        events: dict[Any, list[Event]] = {row.name: [] for row in rows}
        for row in rows:
            batch.submit(row)
        while not batch.idle:
            for event in batch.step():
                events[event.name].append(event)
        return events

    with monkeypatch.context() as patch:
        if late:
            patch.setattr(HostCopy, "arrived", False)
        told = run_all(stream=True)
    recorded = run_all(stream=False, record=True)
    for row in rows:
        end = ended(told[row.name])
        (record,) = recorded[row.name]
        assert isinstance(record, Ended)
        assert (record.tokens, record.finish_reason, record.forwards) == (end.tokens, end.finish_reason, end.forwards)
        assert record.canvas[: len(record.tokens)] == record.tokens
        assert list(record.steps) == steps_of_commits(told[row.name], 12)
        assert (end.canvas, end.steps) == ((), ())


def test_only_rows_that_are_live_are_reported_as_they_come() -> None:
    model, settings = build("llada")
    batch = SamplingEngine(model, settings | {"eos_token_id": None}, max_rows=2, max_length=40)
    quiet, live = requests(2, [12])
    batch.submit(Request(quiet.name, quiet.prompt, quiet.gen_length, quiet.seed, stream=False))
    batch.submit(live)
    events: dict[Any, list[Event]] = {quiet.name: [], live.name: []}
    while not batch.idle:
        for event in batch.step():
            events[event.name].append(event)
    assert [type(event) for event in events[quiet.name]] == [Ended]
    assert {type(event) for event in events[live.name]} == {Committed, Extended, Ended}

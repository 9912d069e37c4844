"""Logits that are NaN or infinite end a call, or a row of a continuous batch, with an error, whatever samples them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dlm_bridge.errors import NonFiniteError, RowError
from dlm_bridge.generation import SAMPLERS, CommitRule, generate
from dlm_bridge.generation.commit_rules import TopScoresRule
from dlm_bridge.generation.engine import SamplingEngine
from dlm_bridge.generation.request import Ended, Event, Failed, Request
from tests.generation.standin import MASK, StandIn, family
from tests.generation.test_caches import REORDERED, WITH_BLOCK_CACHE, load_case
from tests.generation.test_families import DIFFUSION
from tests.generation.test_samplers import CASES, FAST, build
from tests.refusals import refused

GOOD, BAD = [3, 1, 4, 1, 5, 9], [2, 7, 1, 8, 2, 8]
SETTINGS: dict[str, Any] = {"eos_token_id": None, "return_dict_in_generate": True}
Where = Callable[[torch.Tensor], torch.Tensor]


def everywhere(input_ids: torch.Tensor) -> torch.Tensor:
    return torch.ones(len(input_ids), dtype=torch.bool)


def in_row(prompt: list[int]) -> Where:
    """True at the rows that hold the prompt."""

    def found(input_ids: torch.Tensor) -> torch.Tensor:
        return (input_ids.unfold(1, len(prompt), 1) == torch.tensor(prompt)).all(dim=-1).any(dim=1)

    return found


def spoil(
    model: StandIn, where: Where = everywhere, passes: int = 0, value: float = torch.nan, token: int = 3
) -> StandIn:
    """Let a token's logit be `value` in some rows after so many forward passes."""
    forward, calls = model.forward, [0]

    def spoiled(input_ids: torch.Tensor | None = None, **more: Any) -> SimpleNamespace:
        output = forward(input_ids, **more)
        if input_ids is None:  # prompts have the embeddings of their tokens
            input_ids = (more["inputs_embeds"][..., None, :] - model.embed).abs().sum(-1).argmin(-1)
        calls[0] += 1
        if calls[0] > passes:
            output.logits[where(input_ids), ..., token] = value
        return output

    model.forward = spoiled  # type: ignore[method-assign, assignment]
    return model


def ends_of(batch: SamplingEngine, *rows: Request) -> dict[Any, list[Event]]:
    """Each row's events, the last of which is its end."""
    for row in rows:
        batch.submit(row)
    events: dict[Any, list[Event]] = {row.name: [] for row in rows}
    while not batch.idle:
        for event in batch.step():
            events[event.name].append(event)
    return events


@pytest.mark.parametrize("name", CASES)
@pytest.mark.fast(*FAST)
def test_generate_of_every_sampler(name: str) -> None:
    """From the first forward pass on, in the last one alone, and in one row alone, which is named."""
    model, settings = build(name)
    settings |= {**SETTINGS, "seed": 1}
    ids = torch.tensor([GOOD, BAD])
    passes = generate(model, ids, **settings).forwards
    for spoiled, after, rows in ((everywhere, 0, ()), (everywhere, passes - 1, ()), (in_row(BAD), 0, (1,))):
        model, _ = build(name)
        with pytest.raises(NonFiniteError, match="logits are NaN") as error:
            generate(spoil(model, spoiled, after), ids, **settings)
        assert set(error.value.rows) <= {0, 1}  # in the last pass, those that took part
        assert after or error.value.rows == rows


@pytest.mark.parametrize("name", CASES)
@pytest.mark.fast(*FAST)
def test_a_continuous_batch_of_every_sampler(name: str) -> None:
    """A row fails alone, before it shows a token; the others have the tokens that they have without it."""
    model, settings = build(name)
    settings |= {"eos_token_id": None}
    alone = generate(model, torch.tensor([GOOD]), seed=[0], **settings)[0, len(GOOD) :].tolist()
    passes = generate(model, torch.tensor([BAD]), seed=[1], **settings, return_dict_in_generate=True).forwards
    rows = Request("good", GOOD, seed=0), Request("bad", BAD, seed=1)
    for stream in (True, False):
        model, _ = build(name)
        batch = SamplingEngine(spoil(model, in_row(BAD)), settings, max_rows=2, max_length=40, stream=stream)
        events = ends_of(batch, *rows)
        assert [type(event) for event in events["bad"]] == [Failed]
        failed, ended = events["bad"][-1], events["good"][-1]
        assert isinstance(failed, Failed)
        assert isinstance(failed.error, NonFiniteError)
        assert failed.error.rows == ("bad",)
        assert isinstance(ended, Ended)
        assert list(ended.tokens) == alone
    model, _ = build(name)
    batch = SamplingEngine(spoil(model, passes=passes - 1), settings, max_rows=2, max_length=40)
    assert isinstance(ends_of(batch, rows[1])["bad"][-1], Failed)


class Shown:
    """A streamer and step callback that counts what it gets."""

    def __init__(self) -> None:
        self.puts, self.steps = 0, 0

    def put(self, value: torch.Tensor) -> None:
        self.puts += 1

    def on_step(self, step: Any) -> None:
        self.steps += 1

    def end(self) -> None:
        raise AssertionError("the text has not ended")


class FirstMasks(CommitRule):
    exact = True

    def begin(self, masks: list[int], noise: Any) -> list[list[int]]:
        return [[1] * count for count in masks]

    def select(self, step: Any) -> torch.Tensor:
        scores = step.probabilities().masked_fill(~step.masked, -torch.inf)
        return torch.zeros_like(step.masked).scatter(1, scores.argmax(dim=1, keepdim=True), True)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"output_history": True, "return_dict_in_generate": True},
        {"infill": True, "gen_length": None},
        {"infill": True, "gen_length": None, "span_lengths": [2, 3]},
        {"commit_rule": FirstMasks()},
        {"repetition_penalty": 1.3},
        {"suppress_tokens": [5, 6], "min_new_tokens": 3, "eos_token_id": 7},
        {"no_repeat_ngram_size": 2},
        {"prefix_allowed_tokens_fn": lambda row, text: [1, 2, 3]},
        {"logits_processor": [lambda ids, scores: scores]},
        {"eos_token_id": [1, 2, 3], "stop_strings": ["x"]},
        {"num_return_sequences": 2},
    ],
    ids="-".join,
)
def test_settings_of_generate(settings: dict[str, Any]) -> None:
    holes = [1, MASK, MASK] if settings.get("infill") else []
    tokenizer = SimpleNamespace(decode=lambda tokens: "")
    arguments = {"gen_length": 8, "seed": 1, "eos_token_id": None, "tokenizer": tokenizer, **settings}
    ids = torch.tensor([GOOD + holes, BAD + holes])
    for where, rows in ((everywhere, ()), (in_row(BAD), (1,))):
        with pytest.raises(NonFiniteError) as error:
            generate(spoil(StandIn(family(algorithm="llada")), where), ids, **arguments)
        assert error.value.rows == rows


@pytest.mark.parametrize("name", ["llada", "dream-origin", "sdar", "uniform", "dreamon", "wedlm"])
def test_nothing_is_shown_of_it(name: str) -> None:
    """Nor of an earlier step's block that ends later."""
    model, settings = build(name)
    shown = Shown()
    with pytest.raises(NonFiniteError):
        generate(spoil(model), torch.tensor([BAD]), eos_token_id=None, seed=1, streamer=shown, **settings)
    assert (shown.puts, shown.steps) == (1, 0)  # the prompt


@pytest.mark.parametrize("value", [torch.inf, -torch.inf])
def test_plus_infinity_is_refused_and_minus_infinity_suppresses_a_token(value: float) -> None:
    model = spoil(StandIn(family(algorithm="llada")), value=value)
    arguments: dict[str, Any] = {"gen_length": 8, "temperature": 1.0, "eos_token_id": None, "seed": 1}
    if value > 0:
        with pytest.raises(NonFiniteError):
            generate(model, torch.tensor([GOOD]), **arguments)
    else:
        assert 3 not in generate(model, torch.tensor([GOOD]), **arguments)[0, len(GOOD) :]


@pytest.mark.parametrize("name", ["llada", "sdar", "illada", "wedlm", "dreamon", "nemotron"])
def test_padding_may_be_anything(name: str) -> None:
    """Logits that no token is proposed from, of padding and of the prompt, are not looked at."""
    model, settings = build(name)
    settings |= {"eos_token_id": None, "seed": 1}
    ids = torch.tensor([[0, 0, 0, *GOOD[3:]], BAD])
    real = torch.tensor([[0, 0, 0, 1, 1, 1], [1] * 6])
    expected = generate(model, ids, attention_mask=real, **settings)
    forward = model.forward

    def spoiled(
        input_ids: torch.Tensor, attention_mask: Any = None, logits_to_keep: Any = slice(None), **more: Any
    ) -> Any:
        output = forward(input_ids, attention_mask=attention_mask, **more)
        if attention_mask is not None:
            seen = attention_mask if attention_mask.dim() == 2 else attention_mask[:, 0].sum(dim=1) > 1
            output.logits[~seen.bool()] = torch.nan
        if isinstance(logits_to_keep, torch.Tensor):
            return SimpleNamespace(logits=torch.take_along_dim(output.logits, logits_to_keep[..., None], dim=1))
        return SimpleNamespace(logits=output.logits[:, logits_to_keep])

    model.forward = spoiled  # type: ignore[method-assign, assignment]
    assert torch.equal(generate(model, ids, attention_mask=real, **settings), expected)


def test_rows_enter_behind_one_that_failed() -> None:
    """It makes room at its first step, and its name may be used again."""
    model = spoil(StandIn(family(algorithm="llada")), in_row(BAD))
    batch = SamplingEngine(
        model, {"gen_length": 8, "block_length": 8, "threshold": 0.9, "eos_token_id": 5}, max_rows=1, max_length=20
    )
    assert isinstance(ends_of(batch, Request("a", BAD))["a"][-1], Failed)
    assert batch.forwards == 1
    assert isinstance(ends_of(batch, Request("a", GOOD))["a"][-1], Ended)


# One family of each sampler with an exact cache, and approximate caches.
CACHED = {case.spec.sampler["algorithm"]: (case, "block") for case in reversed(WITH_BLOCK_CACHE + REORDERED)}
LLADA = next(case for case in DIFFUSION if case.spec.sampler["algorithm"] == "llada")
CACHED |= {f"llada-{cache}": (LLADA, cache) for cache in ("prefix", "dual")}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in ("sdar", "wedlm", "llada-prefix") else pytest.mark.slow)
        for name in CACHED
    ],
)
def test_rows_beside_and_behind_those_that_fail_with_a_cache(name: str, tmp_path: Path) -> None:
    """Rows with NaN in the keys and values of long prompts; shorter ones of different lengths take their places."""
    case, cache = CACHED[name]
    model, mask = load_case(case, tmp_path)
    nan = mask - 1
    with torch.no_grad():
        model.get_input_embeddings().weight[nan] = torch.nan
        if model.config.tie_word_embeddings:
            model.get_output_embeddings().weight = torch.nn.Parameter(
                model.get_output_embeddings().weight.nan_to_num()
            )
    settings: dict[str, Any] = {
        "mask_token_id": mask, "pad_token_id": 0, "eos_token_id": None, "temperature": 0.0, "cache": cache,
        "suppress_tokens": [nan],
    }  # fmt: skip
    block = 4 if "llada" in name or name == "wedlm" else model.config.block_size
    if "block_length" in SAMPLERS[case.spec.sampler["algorithm"]].parameters():
        settings["block_length"] = block
    bad = [Request(f"bad {n}", [5, nan, *range(7, 7 + 2 * block)], 2 * block) for n in range(3)]
    good = [Request(f"good {n}", list(range(n, n + 1 + 2 * n)), 2 * block) for n in (1, 3, 2)]
    alone = [model.generate(torch.tensor([row.prompt]), gen_length=2 * block, **settings) for row in good]
    for rows in (1, 2, 3):
        batch = SamplingEngine(model, settings, max_rows=rows, max_length=6 * block + 16)
        found = ends_of(batch, *bad[:rows], *good)
        assert all(isinstance(found[row.name][-1], Failed) for row in bad[:rows])
        for row, whole in zip(good, alone, strict=True):
            ended = found[row.name][-1]
            assert isinstance(ended, Ended), ended
            assert list(ended.tokens) == whole[0, len(row.prompt) :].tolist()


def test_a_rule_that_leaves_masks_is_another_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TopScoresRule, "begin", lambda self, masks, noise: [[1] * min(count, 2) for count in masks])
    model = StandIn(family(algorithm="llada"))
    settings = {"gen_length": 8, "eos_token_id": None}
    with refused(RowError, None, "masks"):
        generate(model, torch.tensor([GOOD]), **settings)
    failed = ends_of(SamplingEngine(model, settings, max_rows=1, max_length=20), Request("a", GOOD))["a"][-1]
    assert isinstance(failed, Failed)
    assert not isinstance(failed.error, NonFiniteError)

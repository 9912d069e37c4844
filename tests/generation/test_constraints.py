"""Penalties, bans, allowed prefixes, hooks, stop strings and several samples of a prompt."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation.logits_process import NoRepeatNGramLogitsProcessor

from dlm_bridge.errors import NonFiniteError, RowError, SettingError
from dlm_bridge.generation import BlockLayout, generate
from dlm_bridge.generation.canvas import Canvas, Entry
from dlm_bridge.generation.constraints import Constraints
from dlm_bridge.generation.engine import SamplingEngine
from dlm_bridge.generation.request import MASK as HOLE
from dlm_bridge.generation.request import Failed, Request
from dlm_bridge.generation.stopping import StopCondition
from tests.generation.published_samplers import bidirectional
from tests.generation.scripted import Scripted
from tests.generation.standin import MASK, VOCABULARY, StandIn, family, ragged
from tests.generation.test_non_finite import ends_of
from tests.generation.test_samplers import CASES, FAST, build
from tests.refusals import refused

Edit = Callable[[torch.Tensor, int, list[int]], torch.Tensor]  # logits [V], the position, the row -> logits


def llada(model: Any, row: list[int], new: int, edit: Edit, *, leftmost: bool = False) -> list[int]:
    """LLaDA's sampler, one row, one token a step, with `edit` on the logits of every position."""
    logits, tokens = bidirectional(model), row + [MASK] * new
    while MASK in tokens:
        masked = [position for position, token in enumerate(tokens) if token == MASK]
        found = logits(tokens)
        edited = {position: edit(found[position].clone(), position, tokens) for position in masked}
        choices = {position: int(edited[position][:MASK].argmax()) for position in masked}
        sure = {position: float(edited[position].softmax(-1)[choices[position]]) for position in masked}
        position = masked[0] if leftmost else max(masked, key=lambda p: sure[p])
        tokens[position] = choices[position]
    return tokens


def both(edit: Edit, *, leftmost: bool = False, rows: Any = (5, 9, 2), **arguments: Any) -> list[list[int]]:
    """The rows that `generate` samples with the arguments; checked against `llada`, and against no arguments."""
    model = StandIn(family(algorithm="llada"), peak=3.0)
    prompts, ids, mask = ragged(rows)
    output = generate(model, ids, attention_mask=mask, gen_length=10, eos_token_id=None, **arguments).tolist()
    width = ids.shape[1]
    for row, line in zip(prompts, output, strict=True):
        assert line[width - len(row) :] == llada(model, row, 10, edit, leftmost=leftmost)
    assert output != generate(model, ids, attention_mask=mask, gen_length=10, eos_token_id=None).tolist()
    return [line[width - len(row) :] for row, line in zip(prompts, output, strict=True)]


def test_a_repetition_penalty_looks_at_both_sides() -> None:
    def edit(logits: torch.Tensor, position: int, tokens: list[int]) -> torch.Tensor:
        for token in {*tokens} - {MASK}:
            logits[token] = logits[token] / 1.7 if logits[token] > 0 else logits[token] * 1.7
        return logits

    both(edit, repetition_penalty=1.7)


def test_what_is_suppressed_is_never_proposed() -> None:
    usual = llada(StandIn(family(algorithm="llada"), peak=3.0), ragged((5,))[0][0], 10, lambda logits, *_: logits)[5:]

    def edit(logits: torch.Tensor, position: int, tokens: list[int]) -> torch.Tensor:
        logits[usual] = -torch.inf
        return logits

    for setting in ({"suppress_tokens": usual}, {"bad_words_ids": [[token] for token in usual]}):
        found = both(edit, rows=(5,), **setting)
        assert not {*found[0][5:]} & {*usual}


def test_an_end_is_not_proposed_too_early() -> None:
    table = torch.zeros(12, 4)
    table[:, 1] = 1.0  # the end, everywhere
    ids, mask = torch.tensor([[2, 2], [0, 2]]), torch.tensor([[1, 1], [0, 1]])
    arguments = {"attention_mask": mask, "gen_length": 8, "eos_token_id": 1, "pad_token_id": 0}
    output = generate(Scripted(table), ids, min_new_tokens=3, **arguments)
    assert output[:, 2:].tolist() == [[0, 0, 0, 1]] * 2
    output = generate(Scripted(table), ids, min_length=4, **arguments)  # of the padded prompt and what follows
    assert output[:, 2:].tolist() == [[0, 0, 1]] * 2


def test_hooks_are_asked_for_every_position_with_what_stands_before_it() -> None:
    seen: list[torch.Tensor] = []

    class Hook(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            seen.append(input_ids)
            changed = scores.clone()
            changed[:, 7] += input_ids.shape[1] / 10 + (input_ids[:, -1] % 3).double() * 30
            return changed

    def edit(logits: torch.Tensor, position: int, tokens: list[int]) -> torch.Tensor:
        # Columns are those of the batch, as in transformers: this batch has one row.
        logits[7] += position / 10 + tokens[position - 1] % 3 * 30
        return logits

    both(edit, rows=(5,), logits_processor=LogitsProcessorList([Hook()]))
    assert [ids.shape for ids in seen[:10]] == [(1, column) for column in range(5, 15)]
    assert seen[4][0, 5:].tolist() == [MASK] * 4

    seen.clear()
    _, ids, mask = ragged((2, 5))
    model = StandIn(family(algorithm="llada"))
    generate(
        model, ids, attention_mask=mask, gen_length=2, eos_token_id=None, pad_token_id=9, logits_processor=[Hook()]
    )
    assert seen[0].shape == (2, 5)
    assert seen[0][0, :3].tolist() == [9] * 3


def test_an_allowed_prefix_is_followed_from_left_to_right() -> None:
    calls: list[tuple[int, list[int]]] = []

    def follow(row: int, text: torch.Tensor) -> list[int]:
        calls.append((row, text.tolist()))
        return [(int(text[-1]) + 1) % 40, (int(text[-1]) + 2) % 40]

    def edit(logits: torch.Tensor, position: int, tokens: list[int]) -> torch.Tensor:
        kept = [(tokens[position - 1] + 1) % 40, (tokens[position - 1] + 2) % 40]
        return torch.full_like(logits, -torch.inf).scatter(0, torch.tensor(kept), logits[kept])

    found = both(edit, leftmost=True, prefix_allowed_tokens_fn=follow)
    for line, start in zip(found, (5, 9, 2), strict=True):
        assert all((b - a) % 40 in (1, 2) for a, b in pairwise(line[start - 1 :]))
    assert {row for row, _ in calls} == {0, 1, 2}
    for row, text in calls:
        assert text == found[row][: len(text)]  # the text before the position, whatever the padding


def test_a_row_keeps_its_number_when_others_have_ended() -> None:
    _, ids, mask = ragged((5, 9, 2))
    arguments = {"gen_length": 8, "block_length": 4, "eos_token_id": 3, "pad_token_id": 0}
    output = generate(
        StandIn(family(algorithm="llada")),
        ids,
        attention_mask=mask,
        prefix_allowed_tokens_fn=lambda row, text: [10 + row] if row else [3],
        **arguments,
    )
    assert output[:, 9:].tolist() == [[3] + [0] * 7, [11] * 8, [12] * 8]


UNORDERED = ("rnd1", "uniform", "dreamon", "idlm", "dmax")  # these samplers commit no token after the text before it


@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith(UNORDERED)])
@pytest.mark.fast(*FAST)
def test_every_sampler_follows_an_allowed_prefix(name: str) -> None:
    model, arguments = build(name)
    _, ids, mask = ragged((5, 9, 2))

    def follow(row: int, text: torch.Tensor) -> list[int]:
        return [(int(text.sum()) + row) % 41, (int(text.sum()) + row + 1) % 41]

    arguments |= {"attention_mask": mask, "eos_token_id": None, "prefix_allowed_tokens_fn": follow}
    output = generate(model, ids, return_dict_in_generate=True, seed=1, **arguments)
    for row, (line, width) in enumerate(zip(output.sequences.tolist(), (5, 9, 2), strict=True)):
        line = line[9 - width :]
        for place in range(width, len(line)):
            assert (line[place] - sum(line[:place]) - row) % 41 in (0, 1)


def test_no_ngram_comes_twice_and_no_bad_words() -> None:
    def edit(logits: torch.Tensor, position: int, tokens: list[int]) -> torch.Tensor:
        return NoRepeatNGramLogitsProcessor(2)(torch.tensor([tokens[:position]]), logits[None])[0]

    def once(logits: torch.Tensor, position: int, tokens: list[int]) -> torch.Tensor:
        if tokens[position - 1] == pair[0]:
            logits[pair[1]] = -torch.inf
        return logits

    # Repetitive enough that a pair would come twice.
    model = StandIn(family(algorithm="llada"), peak=3.0)
    usual = llada(model, ragged((5,))[0][0], 10, lambda logits, *_: logits, leftmost=True)
    pair = (usual[6], usual[7])
    found = both(once, leftmost=True, rows=(5,), bad_words_ids=[list(pair)])
    assert pair not in [*pairwise(found[0][4:])]
    for line in both(edit, leftmost=True, no_repeat_ngram_size=2):
        assert len({*pairwise(line)}) == len([*pairwise(line)]) or len(line) < 12


class Letters:
    """Token n is the letter n; decoding joins them."""

    def decode(self, tokens: list[int], **kwargs: Any) -> str:
        return "".join(chr(97 + token % 26) for token in tokens)


@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith("rnd1")])
@pytest.mark.fast(*FAST)
def test_a_stop_string_ends_a_row(name: str) -> None:
    model, arguments = build(name)
    _, ids, mask = ragged((5, 9, 2, 8))
    arguments |= {"attention_mask": mask, "seed": 3}
    full = generate(model, ids, eos_token_id=None, **arguments)[:, 9:].tolist()
    texts = [Letters().decode(line) for line in full]
    stops = [texts[0][3:5], texts[1][6:9]]
    output = generate(
        model, ids, eos_token_id=None, pad_token_id=0, stop_strings=stops, tokenizer=Letters(), **arguments
    )
    expected = []
    for line, text in zip(full, texts, strict=True):
        ends = [text.index(stop) + len(stop) for stop in stops if stop in text]
        expected.append(line[: min(ends, default=len(line))])
    width = max(map(len, expected))
    assert output[:, 9:].tolist() == [line + [0] * (width - len(line)) for line in expected]


def test_a_stop_string_is_not_looked_for_behind_a_gap() -> None:
    tokens = torch.tensor([[0, HOLE, 2], [0, 2, HOLE], [HOLE, 0, 2]])
    ending = StopCondition((), tokens.device, ["ac"], Letters())
    texts = ending.texts(tokens, torch.ones_like(tokens, dtype=torch.bool)).tolist()
    assert [ending.string_end(text) for text in texts] == [-1, 1, -1]
    assert [ending.end_of(row) for row in tokens.tolist()] == [None, 2, None]


def test_a_stop_string_saves_forwards() -> None:
    table = torch.zeros(16, 27)
    table[:, :26] = torch.eye(26)[:16]
    arguments = {"gen_length": 16, "block_length": 4, "eos_token_id": None, "return_dict_in_generate": True}
    result = generate(Scripted(table), torch.empty(1, 0).long(), stop_strings="ef", tokenizer=Letters(), **arguments)
    assert (result.sequences.tolist(), result.forwards) == ([[0, 1, 2, 3, 4, 5]], 8)
    assert result.tokens_per_forward == 6 / 8


def test_several_samples_of_a_prompt_stand_together() -> None:
    model = StandIn(family(algorithm="llada"))
    _, ids, mask = ragged((5, 9))
    arguments = {"gen_length": 8, "eos_token_id": None, "temperature": 1.0, "seed": 4}
    output = generate(model, ids, attention_mask=mask, num_return_sequences=3, **arguments)
    repeated = generate(model, ids.repeat_interleave(3, 0), attention_mask=mask.repeat_interleave(3, 0), **arguments)
    assert torch.equal(output, repeated)
    assert output.shape == (6, 17)
    assert len({tuple(line) for line in output.tolist()}) == 6
    assert torch.equal(output[3:4], generate(model, ids[1:], **arguments))  # the first of a prompt is the only one


@pytest.mark.parametrize("rule", [{}, {"threshold": 0.4}, {"factor": 1.0}])
def test_ends_without_confidence_are_committed_last(rule: dict[str, float]) -> None:
    model = StandIn(family(algorithm="llada"), peak=3.0)
    row = ragged((5,))[0][0]
    arguments = {"gen_length": 12, "eos_token_id": None, "seed": 0, **rule}
    usual = generate(model, torch.tensor([row]), **arguments)[0, 5:].tolist()
    model.config.eos_token_id, eot = usual[0], usual[-1]
    found = generate(
        model, torch.tensor([row]), confidence_eos_eot_inf=True, eot_token_id=eot, return_dict_in_generate=True,
        output_history=True, **arguments,
    )  # fmt: skip
    ends = {usual[0], eot}
    order = [int(step.tokens[0, place]) for step in found.history for place in step.committed[0].nonzero()[:, 0]]
    if not rule:
        assert {*order} & ends
        first = min(i for i, token in enumerate(order) if token in ends)
        assert {*order[first:]} <= ends
    never = generate(model, torch.tensor([row]), logits_eos_inf=True, **arguments)[0, 5:].tolist()
    assert usual[0] not in never


@pytest.mark.extension("extra_samplers")
def test_a_penalty_s_text_is_the_row_s_own() -> None:
    model, arguments = build("llada2.1")  # committed tokens are proposed anew: their own column does not count
    rows, ids, mask = ragged((5, 9, 2))
    arguments |= {"eos_token_id": None, "seed": 1, "repetition_penalty": 1.5}
    together = generate(model, ids, attention_mask=mask, **arguments)
    for row, line in zip(rows, together, strict=True):
        assert torch.equal(line[9 - len(row) :], generate(model, torch.tensor([row]), **arguments)[0])


def test_a_penalty_counts_neither_a_position_s_own_token_nor_masks() -> None:
    device = torch.device("cpu")
    canvas = Canvas(BlockLayout(4), StopCondition((), device), device, mask_token_id=MASK, cache_width=12)
    canvas.admit([Entry(0, [7], 4), Entry(1, [5, 6, 7], 4)])
    canvas.open_block()
    begin = canvas.block.start
    canvas.tokens[:, begin + 1] = 9  # the second new token is committed
    logits = torch.ones(2, 4, VOCABULARY)
    penalised = Constraints(repetition_penalty=2.0)(logits, canvas, [0, 1], slice(begin, begin + 4))
    for row, text in enumerate(({7, 9}, {5, 6, 7, 9})):
        for place in range(4):
            expected = torch.ones(VOCABULARY)
            expected[[*(text - {9} if place == 1 else text)]] = 0.5
            assert torch.equal(penalised[row, place], expected), (row, place)
    assert (logits == 1).all()


def test_an_end_outside_the_vocabulary_is_never_proposed_anyway() -> None:
    """As where a checkpoint's tokenizer has grown beyond its model."""
    model, ids = StandIn(family(algorithm="llada")), torch.tensor([[1, 2, 3]])
    for given in ({"min_new_tokens": 4}, {"confidence_eos_eot_inf": True}, {"logits_eos_inf": True}):
        some, one = (
            generate(model, ids, gen_length=4, pad_token_id=0, eos_token_id=ends, **given) for ends in ([5, 99], 5)
        )
        assert torch.equal(some, one)


@pytest.mark.parametrize(
    ("arguments", "field", "named"),
    [
        ({"repetition_penalty": -1}, "repetition_penalty", "-1"),
        ({"repetition_penalty": 10**400}, "repetition_penalty", ""),
        ({"min_new_tokens": -1}, "min_new_tokens", "-1"),
        ({"min_new_tokens": 2**63}, "min_new_tokens", ""),
        ({"bad_words_ids": [[None]]}, "bad_words_ids", "None"),
        ({"no_repeat_ngram_size": 1.5}, "no_repeat_ngram_size", "1.5"),
        ({"bad_words_ids": [1, 2]}, "bad_words_ids", "[1, 2]"),
        ({"bad_words_ids": [[VOCABULARY]]}, "bad_words_ids", "48"),
        ({"suppress_tokens": ["a"]}, "suppress_tokens", "'a'"),
        ({"suppress_tokens": 5}, "suppress_tokens", "5"),
        ({"prefix_allowed_tokens_fn": 3}, "prefix_allowed_tokens_fn", "3"),
        ({"prefix_allowed_tokens_fn": lambda row, text: [99]}, "prefix_allowed_tokens_fn", "99"),
        ({"prefix_allowed_tokens_fn": lambda row, text: None}, "prefix_allowed_tokens_fn", "None"),
        ({"logits_processor": [lambda ids, scores: scores[0]]}, "logits_processor", "(1, 48)"),
        ({"logits_processor": ["x"]}, "logits_processor", "'x'"),
        ({"suppress_tokens": [*range(MASK)]}, "suppress_tokens", "48"),
        (
            {"suppress_tokens": [*range(2, MASK)], "bad_words_ids": [[0]], "min_new_tokens": 1, "eos_token_id": 1},
            "suppress_tokens",
            "`min_new_tokens`",
        ),
        ({"stop_strings": ["a"]}, "stop_strings", "tokenizer"),
        ({"stop_strings": [""]}, "stop_strings", ""),
        ({"stop_strings": 3}, "stop_strings", "3"),
        ({"num_return_sequences": 0}, "num_return_sequences", "0"),
        ({"eot_token_id": 48, "confidence_eos_eot_inf": True}, "eot_token_id", "48"),
        ({"logits_eos_inf": True}, "logits_eos_inf", "`eos_token_id`"),
        ({"guidance_scale": 2.0}, "guidance_scale", "llada"),
    ],
)
def test_what_is_refused(arguments: dict[str, Any], field: str, named: str) -> None:
    with refused(SettingError, field, named) as error:
        sample_three(arguments)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "kind", "field", "named"),
    [
        ({"prefix_allowed_tokens_fn": lambda row, text: []}, RowError, "row 0", "first 3"),
        ({"prefix_allowed_tokens_fn": lambda row, text: [MASK]}, RowError, "row 0", "first 3"),
        ({"logits_processor": [lambda ids, scores: scores - torch.inf]}, RowError, "row 0", "first 3"),
        ({"logits_processor": [lambda ids, scores: scores * torch.nan]}, NonFiniteError, None, "NaN"),
    ],
)
def test_rows_without_an_allowed_token(
    arguments: dict[str, Any], kind: type[RowError], field: str | None, named: str
) -> None:
    with refused(kind, field, named):
        sample_three(arguments)


def sample_three(arguments: dict[str, Any]) -> None:
    given = {"gen_length": 4, "eos_token_id": None, **arguments}
    generate(StandIn(family(algorithm="llada")), torch.tensor([[1, 2, 3]]), **given)


@pytest.mark.parametrize("hook", ["allowed", "processor"])
def test_a_row_that_is_left_no_token_fails_alone(hook: str) -> None:
    """In an engine, with the reason; the others have the tokens that they have alone."""
    good, bad = [1, 2, 3], [4, 5, 6]

    def allowed(row: Any, text: torch.Tensor) -> list[int]:
        return [] if text.tolist()[:3] == bad and len(text) > 4 else [7, 8, 9]

    def processor(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        fails = (ids[:, :3] == torch.tensor(bad)).all(dim=1) & (ids.shape[1] > 4)
        return scores.masked_fill(fails[:, None], -torch.inf)

    settings: dict[str, Any] = {"gen_length": 8, "block_length": 4, "steps": 8, "eos_token_id": None}
    settings |= {"prefix_allowed_tokens_fn": allowed} if hook == "allowed" else {"logits_processor": [processor]}
    model = StandIn(family(algorithm="llada"))
    alone = generate(model, torch.tensor([good]), seed=[0], **settings)[0, 3:].tolist()
    for stream in (True, False):
        engine = SamplingEngine(model, settings, max_rows=2, max_length=32, stream=stream)
        events = ends_of(engine, Request("good", good, seed=0), Request("bad", bad, seed=1))
        failed, ended = events["bad"][-1], events["good"][-1]
        assert isinstance(failed, Failed)
        assert type(failed.error) is RowError
        assert failed.error.rows == ("bad",)
        assert list(ended.tokens) == alone
    with refused(RowError, "row 1"):
        generate(model, torch.tensor([good, bad]), **settings)

"""Masks inside a prompt: filled by each sampler's own rule, everything else left as it was; spans of chosen length."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dlm_bridge.errors import RowError, SettingError
from dlm_bridge.generation import SAMPLERS, generate
from dlm_bridge.generation.prompts import spans as runs_of_masks
from dlm_bridge.generation.request import MASK as HOLE
from tests.generation import published_samplers as published
from tests.generation.published_samplers import Logits, bidirectional, block_causal
from tests.generation.scripted import Scripted
from tests.generation.standin import MASK, StandIn, family, ragged
from tests.generation.test_callbacks import Watcher
from tests.generation.test_samplers import CASES, FAST, build
from tests.refusals import refused

KINDS = {
    name: SAMPLERS[facts.sampler["algorithm"]]
    for name, (facts, _, _) in CASES.items()
    if facts.sampler["algorithm"] in SAMPLERS
}
FILLING = [name for name, kind in KINDS.items() if kind.infills and not kind.resizes]
MASK_OF_FOUR = 3  # of a scripted model with four tokens
# A row of several may begin with a hole, and the longest may be filled first.
HOLES = ((0, 2, 3), (0, 10), (1,), (1, 2, 3, 4, 5), ())


def with_holes(lengths: tuple[int, ...] = (5, 11, 2, 8, 4)) -> tuple[list[list[int]], torch.Tensor, torch.Tensor]:
    rows, ids, mask = ragged(lengths)
    width = ids.shape[1]
    for number, (row, holes) in enumerate(zip(rows, HOLES, strict=False)):
        for hole in holes:
            row[hole] = MASK
            ids[number, width - len(row) + hole] = MASK
    return rows, ids, mask


def fill(model: Any, new: int = 0, **arguments: Any) -> tuple[list[list[int]], list[list[int]]]:
    rows, ids, mask = with_holes()
    if new:
        arguments["gen_length"] = new
    arguments = {"temperature": 0.0, "eos_token_id": None, **arguments}
    output = generate(model, ids, attention_mask=mask, infill=True, **arguments).tolist()
    return rows, [line[11 - len(row) :] for row, line in zip(rows, output, strict=True)]


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("new", [0, 4])
def test_dream_fills_by_its_schedule(shift: bool, new: int) -> None:
    model = StandIn(family(shift=shift, algorithm="dream"))
    for alg in ("entropy", "maskgit_plus"):
        rows, found = fill(model, new, steps=3, alg=alg)
        for row, line in zip(rows, found, strict=True):
            assert line == published.dream(bidirectional(model), row, new, MASK, steps=3, alg=alg)


def llada(logits: Logits, row: list[int], new: int, block: int) -> list[int]:
    """One token a step, blocks counted from the prompt's end in both directions."""
    tokens, width = row + [MASK] * new, len(row)
    for begin in range(width % block - block, width + new, block):
        columns = range(
            max(begin, 0), min(begin + block, len(tokens)) if begin >= width else min(begin + block, width)
        )
        while any(tokens[column] == MASK for column in columns):
            probabilities = logits(tokens).softmax(-1)
            masked = [column for column in columns if tokens[column] == MASK]
            best = max(masked, key=lambda column: float(probabilities[column].max()))
            tokens[best] = int(probabilities[best].argmax())
    return tokens


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("block", [3, 4, 32])
def test_llada_fills_block_by_block_and_goes_on_behind_the_prompt(shift: bool, block: int) -> None:
    model = StandIn(family(shift=shift, algorithm="llada"))
    for new in (0, 5):
        rows, found = fill(model, new, block_length=block)
        for row, line in zip(rows, found, strict=True):
            assert line == llada(bidirectional(model), row, new, block)


@pytest.mark.parametrize("new", [0, 3])
def test_a_block_causal_model_fills_a_block_from_what_it_sees(new: int) -> None:
    model = StandIn(family("block_causal", algorithm="sdar"), block_size=4)
    rows, found = fill(model, new, remasking_strategy="low_confidence_static")
    for row, line in zip(rows, found, strict=True):
        tokens = row + [MASK] * (-(-(len(row) + new) // 4) * 4 - len(row))
        logits = block_causal(model, 4)
        for begin in range(0, len(tokens), 4):
            wanted = any(token == MASK for token in tokens[begin : min(begin + 4, len(row) + new)])
            while wanted and MASK in tokens[begin : begin + 4]:
                probabilities = logits(tokens).softmax(-1)
                masked = [column for column in range(begin, begin + 4) if tokens[column] == MASK]
                best = max(masked, key=lambda column: float(probabilities[column].max()))
                tokens[best] = int(probabilities[best].argmax())
        assert line == tokens[: len(row) + new]


@pytest.mark.parametrize("name", FILLING)
@pytest.mark.parametrize("new", [0, 4])
@pytest.mark.fast(*(f"4-{name}" for name in FAST))
def test_a_row_is_filled_alone_as_in_a_batch(name: str, new: int) -> None:
    model, arguments = build(name)
    del arguments["gen_length"]
    rows, ids, mask = with_holes()
    arguments |= {"gen_length": new} if new else {}
    arguments |= {"infill": True, "eos_token_id": None, "seed": 5}
    watcher = Watcher()
    together = generate(model, ids, attention_mask=mask, streamer=watcher, **arguments)
    assert torch.equal(torch.cat(watcher.runs, dim=1), together)
    assert watcher.runs[0].shape == (5, 0)  # the second row begins with a hole
    assert together.shape == (5, 11 + new)
    for row, line in zip(rows, together, strict=True):
        line = line[11 - len(row) :]
        if MASK in row or new:
            alone = generate(model, torch.tensor([row]), **arguments)[0]
            assert torch.equal(line, alone)
        assert MASK not in line
        assert all(a in (MASK, b) for a, b in zip(row, line.tolist(), strict=False))  # what was given is untouched


@pytest.mark.parametrize(
    "rule",
    [
        {"block_length": 32, "threshold": 0.9},
        {"block_length": 32, "factor": 0.1},
        {"block_length": 32, "factor": 1.3},
        {"block_length": 32, "steps": 6},
        {"algorithm": "rnd1", "num_diffusion_steps": 12, "eb_gamma": 0.1, "greedy": True},
    ],
)
def test_of_equally_sure_positions_a_row_takes_those_that_it_takes_alone(rule: dict[str, Any]) -> None:
    """Its first block is shorter alone than in a wider batch."""
    row, width = [MASK_OF_FOUR] * 20, 61
    arguments = {"infill": True, "return_dict_in_generate": True, "output_history": True, **rule}
    alone = generate(Scripted(torch.zeros(20, 4)), torch.tensor([row]), eos_token_id=None, **arguments)
    ids = torch.tensor([[0] * (width - 20) + row, [MASK_OF_FOUR] * width])
    mask = torch.tensor([[0] * (width - 20) + [1] * 20, [1] * width])
    together = generate(Scripted(torch.zeros(61, 4)), ids, attention_mask=mask, eos_token_id=None, **arguments)
    states = [step.tokens[0, width - 20 :].tolist() for step in together.history if step.committed[0].any()]
    assert states == [step.tokens[0].tolist() for step in alone.history]


def test_an_end_inside_a_span_does_not_end_the_row() -> None:
    model = StandIn(family(algorithm="llada"))
    rows, found = fill(model, 4)
    end = found[0][2]
    rows, stopped = fill(model, 4, eos_token_id=end, pad_token_id=0)
    for row, line, short in zip(rows, found, stopped, strict=True):
        ends = [place for place in range(len(row), len(line)) if line[place] == end]
        stop = min(ends, default=len(line)) + 1
        assert short[:stop] == line[:stop]
        assert not any(short[stop:])


def test_what_later_blocks_hold_matters_where_it_is_seen() -> None:
    for facts, config, sees in (
        (family(algorithm="llada"), {}, True),
        (family("causal", algorithm="wedlm"), {}, True),  # committed tokens come first, wherever they stand
        (family("block_causal", algorithm="sdar"), {"block_size": 4}, False),
    ):
        model = StandIn(facts, **config)
        model.value *= 20  # what is looked at weighs more than the position's own token
        outputs = []
        for last in range(0, 45, 4):
            ids = torch.tensor([[5, MASK, MASK, 7, 8, 9, 10, last]])
            result = generate(
                model, ids, infill=True, temperature=0.0, eos_token_id=None, return_dict_in_generate=True,
                output_history=True,
            )  # fmt: skip
            outputs.append(result.sequences[0, 1:3].tolist())
        assert any(output != outputs[0] for output in outputs) == sees


def test_a_span_gets_the_length_that_the_model_is_surest_of() -> None:
    model = StandIn(family(shift=True, algorithm="dream"), peak=3.0)
    rows = [[3, MASK, 5, 6, MASK, MASK, 8], [9, 9, MASK, 4], [1, 2, 3]]
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    lengths = (1, 2, 4, 7)

    def best(row: list[int]) -> list[int]:
        for number in range(len(spans(row))):
            begin, end = spans(row)[number]
            scores = {}
            for length in lengths:
                tried = row[:begin] + [MASK] * length + row[end:]
                probabilities = bidirectional(model)(tried)[begin : begin + length, :MASK].float().softmax(-1)
                scores[length] = float(probabilities.max(-1).values.mean())
            length = max(lengths, key=lambda length: scores[length])
            row = row[:begin] + [MASK] * length + row[end:]
        return row

    arguments = {"infill": True, "alg": "entropy", "steps": 20, "eos_token_id": None, "pad_token_id": 0}
    result = generate(model, ids, attention_mask=mask, span_lengths=lengths, return_dict_in_generate=True, **arguments)
    fitted = [best(row) for row in rows]
    assert len({len(row) for row in fitted}) > 1
    assert fitted[0] != rows[0]
    longest = max(map(len, fitted))
    assert result.sequences.shape == (3, longest)
    for row, line in zip(fitted, result.sequences.tolist(), strict=True):
        assert line[: longest - len(row)] == [0] * (longest - len(row))
        expected = generate(model, torch.tensor([row]), **arguments)[0] if MASK in row else torch.tensor(row)
        assert line[longest - len(row) :] == expected.tolist()
    as_fitted = torch.tensor([[0] * (longest - len(row)) + row for row in fitted])
    real = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in fitted])
    plain = generate(model, as_fitted, attention_mask=real, return_dict_in_generate=True, **arguments)
    assert torch.equal(plain.sequences, result.sequences)
    assert result.forwards == plain.forwards + 2 * len(lengths)  # the first span of all rows, and the second


def test_a_span_s_length_does_not_depend_on_the_mask_token_s_own_logit() -> None:
    table = torch.zeros(4, 3)
    table[1] = torch.tensor([2.0, 0.0, 10.0])  # without the mask token, 0.88 sure
    table[2] = torch.tensor([5.0, 0.0, 0.0])  # 0.99 sure
    model = Scripted(table)
    mask = table.shape[1] - 1
    output = generate(model, torch.tensor([[1, mask, 1]]), infill=True, span_lengths=(1, 2), eos_token_id=None)
    assert output.tolist() == [[1, 0, 0, 1]]


def test_forwards_that_chose_a_length_count_for_the_tokens_of_a_forward() -> None:
    model, arguments = build("llada")
    for unused in ("block_length", "gen_length", "steps"):
        arguments.pop(unused, None)
    arguments |= {"infill": True, "eos_token_id": None, "return_dict_in_generate": True, "steps": 2}
    for copies in (1, 3):
        settings = {**arguments, "num_return_sequences": copies, "span_lengths": (2,)}
        result = generate(model, torch.tensor([[1, MASK, 2]]), **settings)
        assert (result.forwards, result.tokens_per_forward) == (3, 2 / 3)  # one chose, two committed a token each


def test_a_seed_s_noise_is_that_of_the_prompt_as_it_was_given() -> None:
    """Two prompts may become the same when their spans get their lengths: each is still filled as it is alone."""
    model = StandIn(family(algorithm="llada"))
    arguments = {"infill": True, "span_lengths": (3,), "temperature": 2.0, "seed": 4, "eos_token_id": None}
    rows, mask = torch.tensor([[0, MASK, 5], [MASK, MASK, 5]]), torch.tensor([[0, 1, 1], [1, 1, 1]])
    together = generate(model, rows, attention_mask=mask, **arguments)
    assert torch.equal(together[0], generate(model, rows[:1, 1:], **arguments)[0])
    assert torch.equal(together[1], generate(model, rows[1:], **arguments)[0])
    assert not torch.equal(together[0], together[1])


def spans(row: list[int]) -> list[tuple[int, int]]:
    return runs_of_masks([HOLE if token == MASK else token for token in row])


def test_spans() -> None:
    assert spans([MASK, MASK, 1, MASK]) == [(0, 2), (3, 4)]
    assert spans([]) == []


@pytest.mark.parametrize(
    ("name", "arguments", "field", "named"),
    [
        ("llada", {"infill": False}, "row 0", "`infill`"),
        ("illada", {}, "infill", "llada, difflm, mdlm"),
        ("nemotron", {}, "infill", "nemotron"),
        ("bd3lm", {}, "infill", "bd3lm"),
        ("dream-origin", {"alg": "confidence_threshold"}, "alg", "`infill`"),
        ("llada", {"infill": 1}, "infill", "True or False"),
        ("llada", {"span_lengths": [0]}, "span_lengths", "[0]"),
        ("llada", {"infill": None, "span_lengths": [2]}, "span_lengths", "`infill`"),
        ("sdar", {"span_lengths": [2]}, "span_lengths", "block_causal"),
    ],
)
def test_what_cannot_be_filled(name: str, arguments: dict[str, Any], field: str, named: str) -> None:
    model, own = build(name)
    own.pop("block_length", own.pop("gen_length"))
    with refused(RowError if field == "row 0" else SettingError, field, named) as error:
        generate(model, torch.tensor([[1, MASK, 2]]), **{"infill": True, **own, **arguments})
    assert "\n" not in str(error.value)


def test_nothing_to_fill_and_too_long() -> None:
    model = StandIn(family(algorithm="llada"), max_position_embeddings=4)
    with refused(SettingError, "infill", "47"):
        generate(model, torch.tensor([[1, 2]]), infill=True)
    with refused(RowError, "row 0", "shorten it by 1"):
        generate(model, torch.tensor([[1, 2, MASK, 3, 4]]), infill=True)
    with refused(RowError, "row 0", "6"):
        generate(model, torch.tensor([[1, MASK, 3]]), infill=True, span_lengths=[4])

"""The operators of a step, counted by torch's dispatcher, are as many for 12 rows as for 6."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch

from dlm_bridge.generation import engine, generate
from dlm_bridge.generation.engine import SamplingEngine
from dlm_bridge.generation.request import Request
from tests.generation.standin import ragged
from tests.generation.test_batches import OperatorCount
from tests.generation.test_samplers import CASES, FAST, build

LENGTHS, SEEDS = (3, 7, 5), [1, 2, 3]  # of three rows, of each of which there are FEW or MANY
FEW, MANY = 2, 4  # not one: of a single row PyTorch copies less


class Letters:
    """Decodes token n as the letter n."""

    def decode(self, tokens: list[int], **kwargs: Any) -> str:
        return "".join(chr(97 + token % 26) for token in tokens)


class Steps:
    """A step callback."""

    def on_step(self, step: Any) -> None:
        assert step.confidence.shape == step.tokens.shape


class Texts:
    """A streamer of several rows."""

    def put(self, value: torch.Tensor) -> None: ...
    def end(self) -> None: ...


def counting(patch: pytest.MonkeyPatch) -> tuple[OperatorCount, list[int]]:
    """A count of operators, and the list of its values after each step of the runs that are started."""
    counter, after = OperatorCount(), []
    denoise_rows = engine.denoise_rows

    def denoise(*args: Any) -> Iterator[None]:
        after.append(counter.count)
        for _ in denoise_rows(*args):
            after.append(counter.count)
            yield

    patch.setattr(engine, "denoise_rows", denoise)
    return counter, after


def of_generate(model: Any, copies: int, **settings: Any) -> list[int]:
    """The operators of each step of `generate`."""
    _, ids, mask = ragged(LENGTHS)
    with pytest.MonkeyPatch.context() as patch:
        counter, after = counting(patch)
        with counter:
            generate(
                model,
                ids.repeat(copies, 1),
                attention_mask=mask.repeat(copies, 1),
                seed=SEEDS * copies,
                **{"eos_token_id": None, **settings},
            )
    return [after - before for before, after in pairwise(after)]


def of_a_batch(model: Any, copies: int, *, stream: bool, record: bool, **settings: Any) -> list[int]:
    """The operators of each step of a continuous batch."""
    rows, _, _ = ragged(LENGTHS)
    batch = SamplingEngine(model, settings, max_rows=3 * copies, max_length=64, stream=stream, record=record)
    for number, (row, seed) in enumerate(zip(rows * copies, SEEDS * copies, strict=True)):
        batch.submit(Request(number, row, seed=seed))
    with pytest.MonkeyPatch.context() as patch:
        counter, after = counting(patch)
        with counter:
            while not batch.idle:
                batch.step()
    return [after - before for before, after in pairwise(after)]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.fast(*FAST)
def test_steps_of_every_sampler(name: str) -> None:
    """Drawn tokens: noise, proposal, selection, and the rows that leave."""
    model, settings = build(name)
    assert of_generate(model, MANY, **settings) == of_generate(model, FEW, **settings)


@pytest.mark.parametrize(
    "more",
    [
        {"eos_token_id": [5, 9, 17], "pad_token_id": 0},
        {"stop_strings": ["bc", "z"], "tokenizer": Letters(), "pad_token_id": 0},
        {"return_dict_in_generate": True, "output_history": True},
        {"streamer": Steps()},
        {"streamer": Texts(), "stop_strings": ["bc"], "tokenizer": Letters(), "pad_token_id": 0},
        {"no_repeat_ngram_size": 2, "bad_words_ids": [[5, 6], [7, 8], [1, 2, 3]]},
        {"prefix_allowed_tokens_fn": lambda row, text: [1, 2, 3, 4]},
        {"repetition_penalty": 1.2, "suppress_tokens": [3], "eos_token_id": 5, "min_new_tokens": 4, "pad_token_id": 0},
    ],
    ids=["eos", "stop_strings", "history", "callback", "streamer", "ngrams", "allowed", "penalty"],
)
@pytest.mark.parametrize("name", ["llada-threshold", "sdar", "dream-entropy"])
@pytest.mark.fast("sdar-*", "llada-threshold-ngrams", "dream-entropy-history")
def test_what_a_call_asks_for(name: str, more: dict[str, Any]) -> None:
    model, settings = build(name)
    many, few = (of_generate(model, copies, **settings, **more) for copies in (MANY, FEW))
    # Rows that take the places of those that leave are moved, others are not.
    assert len(many) == len(few)
    assert all(abs(a - b) <= 2 for a, b in zip(many, few, strict=True))


@pytest.mark.parametrize(
    "name", ["llada", "llada-random", "llada-threshold", "dream-origin", "sdar", "llada2.1", "idlm"]
)
@pytest.mark.parametrize(("stream", "record"), [(True, False), (False, True), (False, False)])
@pytest.mark.fast("*-sdar", "False-True-llada2.1", "False-False-dream-origin")
def test_steps_of_a_continuous_batch(name: str, stream: bool, record: bool) -> None:
    model, settings = build(name)
    settings |= {"stop_strings": ["bc"], "tokenizer": Letters(), "eos_token_id": 5, "pad_token_id": 0}
    few, many = (of_a_batch(model, copies, stream=stream, record=record, **settings) for copies in (FEW, MANY))
    assert many == few

"""Pieces of text, and who is sampled next, without a model."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from transformers import AutoTokenizer

from dlm_bridge.generation.request import Ended, Extended, Failed, Request
from dlm_bridge.serving.choices import Choice, TextStream
from dlm_bridge.serving.scheduler import ClosedError, Job, QueueFullError, Scheduler
from tests.checkpoints import write_tokenizer
from tests.cli.conftest import TOKENIZER
from tests.serving.conftest import wait_until

TEXT = "naïve café, 漢字 and 🙂🙃 the end\n"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Tokens are bytes, so that most characters of TEXT have several."""
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder, TOKENIZER)
    return AutoTokenizer.from_pretrained(folder)


def decoder(tokenizer: Any) -> Any:
    return lambda tokens: tokenizer.decode(list(tokens), skip_special_tokens=True)


def portions(tokens: Sequence[int], chance: random.Random) -> list[list[int]]:
    """The tokens in portions of random lengths."""
    cut, found = 0, []
    while cut < len(tokens):
        count = chance.randint(1, 4)
        found.append(list(tokens[cut : cut + count]))
        cut += count
    return found


@pytest.mark.parametrize("seed", range(8))
def test_pieces_are_whole_characters_and_the_whole_text(tokenizer: Any, seed: int) -> None:
    chance = random.Random(seed)
    special = tokenizer.convert_tokens_to_ids("<mask>")
    tokens = [*tokenizer(TEXT * 3)["input_ids"], special, *tokenizer("漢")["input_ids"], special]
    stream = TextStream(decoder(tokenizer))
    pieces = [stream.add(portion) for portion in portions(tokens, chance)]
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join([*pieces, stream.end()]) == TEXT * 3 + "漢"
    assert len([piece for piece in pieces if piece]) > 10


@pytest.mark.parametrize("seed", range(8))
def test_bytes_that_are_no_text_come_through(tokenizer: Any, seed: int) -> None:
    chance = random.Random(seed)
    tokens = [chance.randrange(256) for _ in range(200)]
    stream = TextStream(decoder(tokenizer))
    pieces = [stream.add(portion) for portion in portions(tokens, chance)]
    assert "".join([*pieces, stream.end()]) == tokenizer.decode(tokens)


@pytest.mark.parametrize(
    ("stop", "wanted"),
    [
        (["字 and"], "naïve café, 漢"),
        (["no", "🙃", "🙂"], "naïve café, 漢字 and "),
        (["end\n!", "ddd"], TEXT),
        (["end\n"], "naïve café, 漢字 and 🙂🙃 the "),
    ],
)
def test_nothing_of_a_stop_string_is_sent(tokenizer: Any, stop: list[str], wanted: str) -> None:
    tokens = tokenizer(TEXT)["input_ids"]
    for seed in range(20):
        choice, sent = Choice(decoder(tokenizer), stop), ""
        for portion in portions(tokens, random.Random(seed)):
            sent += choice.add(Extended(0, 0, tuple(portion)))
            assert wanted.startswith(sent)
            if choice.finish_reason:
                break
        sent += choice.add(Ended(0, tuple(tokens), "length", 1))
        assert sent == choice.text == wanted
        assert choice.finish_reason == ("length" if wanted == TEXT else "stop")
        if wanted != TEXT:
            assert any(string in tokenizer.decode(choice.tokens) for string in stop)
            assert not any(string in tokenizer.decode(choice.tokens[:-1]) for string in stop)


class Recorder:
    """Engines that note the order in which requests end, one in each step."""

    forwards = 0

    def __init__(self) -> None:
        self.order: list[tuple[int, ...]] = []
        self._waiting: list[Request] = []

    def __call__(self, settings: Any, max_rows: int, deliver: Any) -> Recorder:
        return self

    def submit(self, request: Request) -> None:
        self._waiting.append(request)

    def step(self) -> list[Any]:
        request = self._waiting.pop(0)
        self.order.append(tuple(request.prompt))
        return [Ended(request.name, (1, 2), "stop", 1)]

    def cancel(self, name: Any) -> bool: ...
    def close(self) -> None: ...


def rows_of(groups: str, told: list[Any] | None = None) -> list[Job]:
    heard = [] if told is None else told
    return [Job((number,), {"gen_length": 2}, 0, group, heard.append) for number, group in enumerate(groups)]


def test_rows_of_other_settings_are_overtaken_by_a_batch_at_most() -> None:
    sampler, told = Recorder(), list[Any]()
    scheduler = Scheduler(sampler, batch_size=2, queue_size=20)
    scheduler.submit(rows_of("abaaaaa", told))
    scheduler.start()
    wait_until(lambda: len(told) == 7, "all are sampled")
    assert sampler.order == [(0,), (2,), (3,), (1,), (4,), (5,), (6,)]
    assert scheduler.tokens == 14
    scheduler.close(60)


def test_the_queue_takes_all_rows_of_a_request_or_none() -> None:
    scheduler = Scheduler(Recorder(), batch_size=2, queue_size=3)  # not started: nothing is sampled
    scheduler.submit(rows_of("aaaa"))
    with pytest.raises(QueueFullError):
        scheduler.submit(rows_of("aa"))
    assert scheduler.waiting == 4
    told: list[Any] = []
    fifth = rows_of("a", told)
    scheduler.cancel(scheduler.start_jobs("a", 2))
    scheduler.submit(fifth)
    scheduler.close()
    assert isinstance(told[0], Failed)
    assert isinstance(told[0].error, ClosedError)
    with pytest.raises(ClosedError):
        scheduler.submit(rows_of("a"))


def test_a_cancelled_row_hears_nothing_more() -> None:
    told: list[Any] = []
    scheduler = Scheduler(Recorder(), batch_size=1, queue_size=3)
    waiting, taken = rows_of("aa", told)
    scheduler.submit([taken, waiting])
    scheduler.start_jobs("a", 1)
    scheduler.cancel([taken, waiting])
    assert scheduler.waiting == 0
    scheduler.start()
    scheduler.close(60)
    assert told == []

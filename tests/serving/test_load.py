"""200 requests at once, ragged and of several settings, round after round: nothing lost, nothing mixed up, and nothing
left behind."""

from __future__ import annotations

import asyncio
import gc
import random
import resource
import time
from typing import Any

import pytest

from dlm_bridge.loading import LoadedModel
from dlm_bridge.serving.calls import Call
from dlm_bridge.serving.scheduler import Job
from tests.serving.conftest import PATIENCE_S, Running, openai, running

REQUESTS = 200
MINUTE_S, ROUNDS = 60, 3  # minimum duration and minimum number of rounds
SETTINGS: list[dict[str, Any]] = [
    {"max_tokens": 8},
    {"max_tokens": 16, "temperature": 0.8},
    {"max_tokens": 24, "extra_body": {"block_length": 8}},
    {"max_tokens": 16, "extra_body": {"block_length": 8, "steps": 4}},
]


def request_of(number: int) -> dict[str, Any]:
    """A request whose answer can only be its own: its prompt, length, settings and seed are of its number."""
    chance = random.Random(number)
    prompt = f"{number} " + "".join(chance.choice("abcdef ") for _ in range(chance.randrange(1, 60)))
    return {"prompt": prompt, "seed": number, "stream": number % 3 == 0, **SETTINGS[number % len(SETTINGS)]}


async def ask(client: Any, given: dict[str, Any], give_up: bool) -> str | None:
    """The answer's text; None where the client has left in the middle."""
    answer = await client.completions.create(model="any", **given)
    if not given["stream"]:
        return str(answer.choices[0].text)
    pieces = []
    async for chunk in answer:
        pieces.append(chunk.choices[0].text)
        if give_up:
            await answer.close()
            return None
    return "".join(pieces)


async def ask_all(server: Running, first: int) -> list[str | None]:
    """The texts of 200 requests that are sent at once; a few streams are given up."""
    client = openai.AsyncOpenAI(base_url=f"{server.address}/v1", api_key="none", timeout=PATIENCE_S * 2, max_retries=0)
    async with client:
        calls = [ask(client, request_of(first + number), number % 30 == 0) for number in range(REQUESTS)]
        return await asyncio.gather(*calls)


def alone(server: Running, number: int) -> str:
    """The text of `generate` for a request alone."""
    given = request_of(number)
    settings = {"gen_length": given["max_tokens"], "seed": given["seed"], **given.get("extra_body", {})}
    if "temperature" in given:
        settings["temperature"] = given["temperature"]
    return server.alone(given["prompt"], **settings)


def resident_mb() -> float:
    """Memory of this process now."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 2**20


@pytest.mark.slow
def test_two_hundred_requests_at_once_for_a_minute(diffusion: LoadedModel) -> None:
    with running(diffusion, batch_size=32, queue_size=REQUESTS) as server:
        rounds, memory, began = [], [], time.monotonic()
        while len(rounds) < ROUNDS or time.monotonic() - began < MINUTE_S:
            rounds.append(asyncio.run(ask_all(server, REQUESTS * len(rounds))))
            gc.collect()
            memory.append(resident_mb())
        server.wait(lambda: not server.scheduler.running, "rows without a client leave")
        assert server.scheduler.waiting == 0
        gc.collect()
        assert not [one for one in gc.get_objects() if isinstance(one, (Job, Call))]
        for number, text in enumerate(text for answers in rounds for text in answers):
            if text is not None:
                assert text == alone(server, number), request_of(number)
        given_up = [text is None for answers in rounds for text in answers]
        assert 0 < sum(given_up) < len(given_up) / 20
    assert memory[-1] < memory[0] + 64, memory  # MB, after the first round
